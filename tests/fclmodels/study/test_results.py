"""The table of a study against SciPy and by hand."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fclmodels.study.page import format_markdown, render_page, write_results
from fclmodels.study.plan import Study, StudyRow
from fclmodels.study.results import Judged, build_table, estimate_mean, find_sign, rank_rows, subtract
from fclmodels.study.trial import TriedPoint

ROOT = Path(__file__).parents[3]
COSTS = {"seconds": 3.0, "seconds_per_round": 0.5, "rounds_to_best": None, "bytes_up": 2e6, "bytes_down": 1e6}


def make_run(seed: int, acc: float, splits: str = "a") -> Any:
    """Return a run folder as far as the table reads it."""
    result = SimpleNamespace(seed=seed, digests={"splits": splits}, metrics={"task_agnostic": {"acc": acc}})
    matrix = np.array([[0.1, 0.1], [2 * acc, 0.1], [acc, acc]])
    return SimpleNamespace(result=result, costs=COSTS | {"bytes_kept": 0}, matrices={"task_agnostic": matrix})


def make_study(**changes: Any) -> Study:
    rows = {"A": StudyRow(method="fedavg"), "B & <C>": StudyRow(method="fot", set=("methods.fot.threshold=0.9",))}
    return Study(params=str(ROOT / "params.yaml"), seeds=(0, 1, 2), after_each=("acc",), rows=rows, **changes)


def make_judged() -> dict[str, Judged]:
    a = Judged([make_run(0, 0.4), make_run(1, 0.5), make_run(2, 0.3)], [], (), ())
    trials = [
        TriedPoint(("optimizer.lr=0.1",), (0.3, 0.4), 6.0),
        TriedPoint(("optimizer.lr=9",), (0.3, None), 2.0, "NaN"),
    ]
    b = Judged([make_run(0, 0.45), make_run(1, 0.52), make_run(2, 0.4)], [], trials, ("optimizer.lr=0.1",))
    return {"A": a, "B & <C>": b}


def test_the_paired_interval_is_scipys() -> None:
    random = np.random.default_rng(0)
    for n in (2, 3, 10):
        own, reference = random.random(n), random.random(n)
        draws = [(seed, "a") for seed in range(n)]
        differences = subtract(dict(zip(draws, own, strict=True)), dict(zip(draws, reference, strict=True)))
        estimate = estimate_mean(list(differences.values()))
        interval = stats.ttest_rel(own, reference).confidence_interval(0.95)
        assert estimate.half is not None
        bounds = (estimate.mean - estimate.half, estimate.mean + estimate.half)
        assert bounds == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert estimate_mean([0.5]) == (0.5, None, 1)


def test_only_the_same_draw_is_subtracted() -> None:
    own = {(0, "a"): 0.5, (1, "a"): 0.7, (2, "a"): 0.9}
    assert subtract(own, {(0, "a"): 0.25, (1, "b"): 0.1, (3, "a"): 0.2}) == {(0, "a"): 0.25}


def test_ranks_are_means_over_the_draws_of_all_rows_and_equals_share_theirs() -> None:
    draws = [(seed, "a") for seed in range(3)]
    values = {
        "x": dict(zip(draws, (0.9, 0.5, 0.1), strict=True)),
        "y": dict(zip(draws, (0.8, 0.5, 0.9), strict=True)),
        "z": dict(zip(draws[:2], (0.1, 0.6), strict=True)),
        "none": {},
    }
    assert rank_rows(values) == {"x": (1 + 2.5) / 2, "y": (2 + 2.5) / 2, "z": 2.0, "none": None}
    assert rank_rows({"x": {draws[0]: 0.1}, "y": {draws[1]: 0.2}}) == {"x": None, "y": None}
    forgetting = {"x": {draws[0]: 0.1}, "y": {draws[0]: 0.7}}
    assert rank_rows(forgetting, find_sign("task_aware.fgt")) == {"x": 1.0, "y": 2.0}
    assert [find_sign(name) for name in ("acc", "fgt", "ft", "af", "pd")] == [1, -1, -1, -1, -1]


def test_the_table_by_hand() -> None:
    a, b = build_table(make_study(), make_judged())
    assert a.difference is None
    assert b.difference is not None
    assert b.difference.mean == pytest.approx((0.05 + 0.02 + 0.1) / 3)
    assert (a.rank, b.rank) == (2.0, 1.0)
    assert (b.tried, b.tuning_seconds, b.settings) == (2, 8.0, ("optimizer.lr=0.1", "methods.fot.threshold=0.9"))
    first, last = b.after_each["acc"]
    assert first is not None
    assert last is not None
    assert (first.mean, last.mean) == pytest.approx((2 * last.mean, (0.45 + 0.52 + 0.4) / 3))
    text = format_markdown(make_study(), "s", [a, b])
    half = stats.t.ppf(0.975, 2) * np.std([0.05, 0.02, 0.1], ddof=1) / np.sqrt(3)
    assert f"| +5.7 ± {100 * half:.1f} | 1.0 | 2 | 8.0 s | 3.0 s | 0.5 s |" in text


def test_the_page_says_what_its_figures_are_not(tmp_path: Path) -> None:
    judged = make_judged()
    judged["A"] = Judged(judged["A"].runs[:2], ["lr: it diverged"], (), ())
    study = make_study(scale=0.1)
    table = build_table(study, judged)
    page = render_page(study, "s", table)
    assert "Not at full scale: 0.1 of the rounds" in page
    assert "Fewer than three draws: no claim rests on A." in page
    assert "One partition" not in page
    assert "A: 1 of 3 runs ended early: lr: it diverged" in page
    assert "B &amp; &lt;C&gt;" in page
    assert "A (2 of 3)" in page
    assert re.search(r"\+3\.5 ± [\d.]+ \(of 2\)", page)  # (0.05 + 0.02) / 2, the draws that both have
    assert write_results(study, "s", table, tmp_path).read_text() == page
    few = build_table(make_study(), {label: Judged(of.runs[:1], [], (), ()) for label, of in judged.items()})
    text = format_markdown(make_study(), "s", few)
    assert "Fewer than three draws: no claim rests on this." in text
    fixed = make_study(set=("partition.seed=3", "federation.rounds_scale=0.5"))
    of_fixed = format_markdown(fixed, "s", few)
    assert "One partition of the samples for all seeds (partition.seed)" in of_fixed
    assert "Not at full scale: 0.5 of the rounds" in of_fixed
    assert "Not at full scale" not in text
    assert "| B & <C> | 45.0 | +5.0 | 1.0 |" in text
