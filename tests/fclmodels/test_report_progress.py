"""What the page draws round by round and by one setting, from runs whose figures are known."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fclmodels.federation.monitors.rows import row, table
from fclmodels.report.charts import BOTTOM, LEFT, RIGHT, TOP, Point, scatter, ticks_around
from fclmodels.report.progress import boundaries, drift
from fclmodels.report.runs import TABLES, Group, Result, Run, grouped
from fclmodels.report.sweeps import charts, sweeps

PLAIN = {"optimizer": {"kind": "sgd", "momentum": 0.0, "weight_decay": 0.0}}


def run_of(
    method: str,
    settings: dict[str, Any],
    seed: int = 0,
    rows: Sequence[dict[str, Any]] = (),
    rounds: int = 4,
    **of: Any,
) -> Run:
    """A run of tasks that have this many rounds each; `of`: metrics of the task-agnostic reading."""
    content = {"format": 1, "method": method, "seed": seed, "metrics": {"task_agnostic": of}, "settings": settings}
    content |= {"digests": {}, "versions": {}, "seconds": 0, "bytes_up": 0, "bytes_down": 0}
    tables = {name: pl.DataFrame(schema=schema) for name, schema in TABLES.items()}
    facts = [
        {"task": task, "round": round, "step": task * rounds + round, "loss": 0.0, "seconds": 1.0}
        for task in range(3)
        for round in range(rounds)
    ]
    tables |= {"monitors": table(rows), "rounds": pl.DataFrame(facts, schema=TABLES["rounds"])}
    return Run(Path(f"{method}-{seed}"), Result.model_validate(content), **tables)


def of_lambda(value: float | str, participants: int = 8) -> dict[str, Any]:
    return {"methods": {"special": {"lambda": value}}, "federation": {"clients_per_round": participants}}


# by one setting


def test_a_sweep_is_of_runs_that_differ_in_one_setting_only() -> None:
    """Five values with 8 clients a round, and one of them with 2 and 4 too, which make a sweep of their own."""
    values = (0.25, 1, "auto", 0.05, 10)
    runs = [run_of("special", of_lambda(value), seed) for value in values for seed in (0, 1)]
    runs += [run_of("special", of_lambda(0.25, participants)) for participants in (4, 2)]
    runs += [run_of("fedavg", {"federation": {"clients_per_round": n}}) for n in (2, 4)]
    found = list(sweeps(grouped(runs)))
    assert [(sweep.setting, list(sweep.groups), sweep.others) for sweep in found] == [
        ("federation.clients_per_round", ["2", "4", "8"], "methods.special.lambda: 0.25"),
        ("methods.special.lambda", ["0.05", "0.25", "1", "10", "auto"], "federation.clients_per_round: 8"),
    ]
    assert [len(group.runs) for group in found[1].groups.values()] == [2] * 5


def test_what_differs_in_seeds_or_in_two_settings_at_once_is_no_sweep() -> None:
    runs = [run_of("special", of_lambda(value, n)) for value, n in ((0, 2), (1, 4), (2, 8))]
    assert not list(sweeps(grouped(runs)))
    seeds = [run_of("special", {"partition": {"seed": seed}}, seed) for seed in range(3)]
    assert not list(sweeps(grouped(seeds)))


def test_a_curve_has_bwt_across_and_acc_up_and_is_shaded_by_its_values() -> None:
    of = {0: (0.30, -0.4), 0.5: (0.50, -0.2), 2: (0.40, 0.0), "auto": (0.45, -0.1)}
    runs = [run_of("special", of_lambda(value), acc=acc, bwt=bwt) for value, (acc, bwt) in of.items()]
    ((_, (chart,)),) = charts(grouped(runs))
    middle, height, width = (TOP + BOTTOM) / 2, BOTTOM - TOP, RIGHT - LEFT
    assert [(dot.label, dot.shade) for dot in chart.dots] == [("0", 1 / 3), ("0.5", 2 / 3), ("2", 1), ("auto", None)]
    assert [dot.x for dot in chart.dots] == pytest.approx([LEFT, LEFT + width / 2, RIGHT, LEFT + 0.75 * width], abs=0.1)
    assert [dot.y for dot in chart.dots] == pytest.approx([BOTTOM, TOP, middle, TOP + height / 4], abs=0.1)
    assert chart.path.count("L") == 2  # through the numbers, not to "auto"
    assert chart.dots[0].text == "0: ACC, % 30.0, BWT, points −40.0"
    assert [text for _, text in chart.x_ticks] == ["−40", "−30", "−20", "−10", "0"]


def test_a_run_without_backward_transfer_makes_no_chart() -> None:
    runs = [run_of("special", of_lambda(value), acc=0.5, bwt=None if value else 0.0) for value in (0, 1, 2)]
    assert charts(grouped(runs)) == []


def test_deviations_are_a_cross_inside_the_plot() -> None:
    points = [Point("1", 1.0, (0.0, 10.0), (50.0, 5.0)), Point("2", 0.5, (20.0, None), (60.0, None))]
    first, second = scatter("t", points, "x", "y").dots
    assert second.cross == ""
    across, up = first.cross.split(" M")
    left, right = (float(number) for number in across.removeprefix("M").replace(f",{first.y}", "").split(" H"))
    assert LEFT <= left < first.x < right <= RIGHT
    assert first.x - left == pytest.approx(right - first.x, abs=0.2)
    bottom, top = (float(number) for number in up.removeprefix(f"{first.x},").split(" V"))
    assert TOP <= top < first.y < bottom <= BOTTOM


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.none() | st.floats(0, 1e3)), min_size=1))
def test_ticks_around_hold_all_values_with_their_deviations(values: list[tuple[float, float | None]]) -> None:
    found = ticks_around(values)
    low, high = min(m - (s or 0) for m, s in values), max(m + (s or 0) for m, s in values)
    assert 2 <= len(found) <= 7
    steps = [b - a for a, b in itertools.pairwise(found)]
    assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-3)
    assert found[0] <= low + 1e-6 * steps[0]
    assert found[-1] >= high - 1e-6 * steps[0]


# round by round


def accuracies(of: dict[tuple[int, int], list[float]]) -> list[dict[str, Any]]:
    """{(task, round): accuracy on each task up to it}, as the monitor notes them."""
    rows = []
    for (task, round), values in of.items():
        rows += [row("accuracy", task, value, round, about) for about, value in enumerate(values)]
        rows.append(row("accuracy", task, sum(values) / len(values), round))
    return rows


def test_round_by_round_around_each_boundary() -> None:
    of = {(0, 1): [0.5], (0, 3): [0.8], (1, 1): [0.6, 0.2], (1, 3): [0.4, 0.6], (2, 1): [0.2, 0.4, 0.9]}
    group = Group("special", (run_of("special", {}, rows=accuracies(of)),))
    (second, (old, new, joint)), (third, (old_of_third, *_)) = boundaries([Group("x", (run_of("x", {}),)), group])
    assert (second, third) == (2, 3)
    assert [m.text for m in old.curves[0].marks] == ["special, 0: 80.0", "special, 2: 60.0", "special, 4: 40.0"]
    assert [m.text for m in new.curves[0].marks] == ["special, 2: 20.0", "special, 4: 60.0"]
    assert [m.text for m in joint.curves[0].marks] == ["special, 2: 40.0", "special, 4: 50.0"]
    assert [m.text for m in old_of_third.curves[0].marks] == ["special, 0: 50.0", "special, 2: 30.0"]
    assert len(old.curves) == 1  # the other had no monitor on
    assert old.curves[0].index == 1


def test_seeds_are_averaged_at_each_round_and_nothing_else_is() -> None:
    runs = [
        run_of("special", {}, seed, accuracies({(0, 1): [level], (1, 1): [level, 0.5]}))
        for seed, level in enumerate((0.2, 0.6))
    ]
    ((_, (old, new, _)),) = boundaries([Group("special", tuple(runs))])
    assert [m.text for m in old.curves[0].marks] == ["special, 0: 40.0 ± 28.3", "special, 2: 40.0 ± 28.3"]
    assert [m.text for m in new.curves[0].marks] == ["special, 2: 50.0 ± 0.0"]


def test_drift_begins_anew_with_each_task() -> None:
    rows = [row("drift", 1, 2.0, 1), row("drift", 1, 3.0, 3), row("drift", 2, 1.0, 3)]
    found = drift([Group("fedavg", (run_of("fedavg", PLAIN, rows=rows),))])
    assert found is not None
    (curve,) = found["chart"].curves
    assert curve.path.count("M") == 2
    assert [mark.text for mark in curve.marks] == [
        *("fedavg, 4: 0.0", "fedavg, 6: 2.0", "fedavg, 8: 3.0"),
        *("fedavg, 8: 0.0", "fedavg, 12: 1.0"),
    ]
    assert found["bounds"] == []


def test_the_largest_drift_stands_beside_the_largest_bound_of_its_task() -> None:
    def seen(scale: float) -> list[dict[str, Any]]:
        drifts = [row("drift", task, scale * value, round) for task, round, value in ((1, 1, 2), (1, 3, 1), (2, 3, 4))]
        return [*drifts, row("drift_bound", 1, 5, 1), row("drift_bound", 1, 7, 3), row("drift_bound", 2, 6 * scale, 3)]

    settings = PLAIN | {"optimizer": {"kind": "sgd", "momentum": 0.9, "weight_decay": 0.0}}
    runs = tuple(run_of("special", settings, seed, seen(scale)) for seed, scale in enumerate((1, 3)))
    found = drift([Group("fedavg", (run_of("fedavg", {}),)), Group("special", runs)])
    assert found is not None
    ((index, bounds),) = found["bounds"]
    assert (index, bounds["uncovered"]) == (1, ["optimizer.momentum: 0.9"])
    root = math.sqrt(2)
    assert bounds["rows"] == [
        (2, pytest.approx((4, 2 * root)), (7, 0)),
        (3, pytest.approx((8, 4 * root)), pytest.approx((12, 6 * root))),
    ]


def test_without_these_monitors_there_is_nothing_to_draw() -> None:
    groups = [Group("fedavg", (run_of("fedavg", {}, rows=[row("rho", 1, 0.5, 0)]),))]
    assert boundaries(groups) == []
    assert drift(groups) is None
