"""Accuracy against epsilon: all that clients send clipped and with noise (federation.privacy), on the embedded digits.

    fcl pretrain --out data/pretrained/letters
    python bench/privacy.py [--seeds 3] [--curves NAME ...] [--out tries/privacy] [--figure docs/privacy.svg]

A hundred clients with like shares of five tasks of two digits, about 13 images each, and a small MLP: many clients and
few weights, as noise wants it. Each curve is one method at five noise multipliers, and without noise. Prints a table
(accuracy after the last task over the seeds, epsilon at delta 1e-3 over all releases) and draws the figure. Test rows
are read once, in the evaluation. Runs that are complete under --out are not run again.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rcParams
from matplotlib.figure import Figure

from fclmodels.data.splits.make_splits import make_splits
from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.settings import load as reading

DEFAULTS = Path(__file__).parents[1] / "params.yaml"
SHARED = [
    *("partition.kind=iid", "partition.clients=100", "federation.weighting=uniform", "model.loss_over=task"),
    *("federation.executor=serial", "federation.threads=1"),
]
TRAINED = [
    *("model.backbone=mlp", "model.hidden=32", "model.dropout=[0,0]", "optimizer.lr=0.3", "federation.rounds=4"),
    *("federation.local_epochs=5", "federation.batch_size=8"),
]
FROZEN = [
    *("model.backbone=vit", "model.patch=2", "model.width=64", "model.depth=4", "model.attention_heads=4"),
    *("model.mlp_width=128", "model.weights=data/pretrained/letters/weights.safetensors", "federation.rounds=1"),
]
NOISE = ["federation.privacy.clip=0.5", "federation.privacy.features=8.0", "federation.privacy.delta=1e-3"]
TICKS = (1, 3, 10, 30, 100, 300)
READINGS = {"task_aware": "task given", "task_agnostic": "task not given"}


class Curve(NamedTuple):
    """A method with its settings, at several noise multipliers."""

    method: str
    settings: list[str]
    noise: list[str]
    multipliers: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0, 8.0)


CURVES = {
    "fedavg": Curve("fedavg", TRAINED, []),
    "special": Curve("special", TRAINED, []),
    "fot": Curve("fot", TRAINED, []),
    "nearest-prototype": Curve("nearest-prototype", FROZEN, [], (0.25, 0.5, 1.0, 2.0, 4.0)),
    "fedavg, q = 0.5": Curve("fedavg", TRAINED, ["federation.privacy.sample_rate=0.5"]),
    "fedavg, local": Curve("fedavg", TRAINED, ["federation.privacy.kind=local"], (0.5, 2.0)),
}


class Point(NamedTuple):
    """One curve at one noise multiplier."""

    curve: str
    multiplier: float | None  # None: no noise
    releases: int
    epsilon: float | None
    readings: dict[str, tuple[float, float]]  # mean and deviation over seeds, in percent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--curves", nargs="+", default=list(CURVES), choices=list(CURVES))
    parser.add_argument("--out", type=Path, default=Path("tries/privacy"))
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    splits = Splits.open(make_splits(reading.load_params(DEFAULTS, SHARED), options.out))
    print("| | z | releases | epsilon | " + " | ".join(READINGS.values()) + " |\n|---|---|---|---|---|---|")
    points = []
    for name in options.curves:
        for multiplier in (None, *CURVES[name].multipliers):
            points.append(measure(name, multiplier, range(options.seeds), splits, options.out))
            print(format_row(points[-1]), flush=True)
    if options.figure:
        draw_figure(points, options.figure)


def measure(name: str, multiplier: float | None, seeds: range, splits: Splits, out: Path) -> Point:
    curve = CURVES[name]
    noise = [*NOISE, *curve.noise, f"federation.privacy.noise_multiplier={multiplier}"] if multiplier else []
    results: list[dict[str, Any]] = []
    for seed in seeds:
        params = reading.load_params(DEFAULTS, [*SHARED, *curve.settings, *noise])
        with Experiment(params, curve.method, seed, splits, out / "home") as experiment:
            results.append(experiment.run(out / f"{name.replace(', ', '-').replace(' = ', '')}-{multiplier}-{seed}"))
    privacy = results[0].get("privacy", {})
    readings = {}
    for reading_name in READINGS:
        accuracies = [100 * result["metrics"][reading_name]["acc"] for result in results]
        readings[reading_name] = (
            statistics.mean(accuracies),
            statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
        )
    return Point(name, multiplier, privacy.get("releases", 0), privacy.get("epsilon"), readings)


def format_row(point: Point) -> str:
    noise = (
        ("none", "", "") if point.epsilon is None else (f"{point.multiplier:g}", point.releases, f"{point.epsilon:.3g}")
    )
    cells = [f"{mean:.1f} ± {spread:.1f}" for mean, spread in point.readings.values()]
    return "| " + " | ".join(map(str, [point.curve, *noise, *cells])) + " |"


def draw_figure(points: list[Point], file: Path) -> None:
    """Draw a panel a reading: accuracy over epsilon; dotted lines are the accuracies without noise."""
    rcParams.update({"svg.hashsalt": "fclflow", "svg.fonttype": "none"})  # the same small file for the same figures
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, (reading_name, title) in zip(figure.subplots(1, 2), READINGS.items(), strict=True):
        for number, name in enumerate(dict.fromkeys(point.curve for point in points)):
            mine = [point for point in points if point.curve == name]
            noisy = [point for point in mine if point.epsilon is not None]
            x = [point.epsilon * 1.04**number for point in noisy]  # side by side where they would hide each other
            y, spread = zip(*(point.readings[reading_name] for point in noisy), strict=True)
            axes.errorbar(x, y, spread, marker="osD^vP"[number], capsize=2, color=f"C{number}", label=name)
            for point in mine:
                if point.epsilon is None:
                    axes.axhline(point.readings[reading_name][0], color=f"C{number}", linestyle=":", linewidth=1)
        axes.set(xscale="log", xlabel="epsilon at delta 0.001", ylabel="accuracy, %", title=title)
        axes.set_xticks(TICKS, map(str, TICKS))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    main()
