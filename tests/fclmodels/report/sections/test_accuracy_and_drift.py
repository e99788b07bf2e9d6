"""Monitors `accuracy` and `drift` on the page, from runs whose values are set here."""

import math
from typing import Any

import pytest
from run_folders import HtmlTables, build_run, write_monitored_run

from fclmodels.federation.monitors.rows import make_row
from fclmodels.report.page import render_page
from fclmodels.report.read_runs import Group
from fclmodels.report.sections.accuracy_and_drift import draw_boundaries, draw_drift

PLAIN = {"optimizer": {"kind": "sgd", "momentum": 0.0, "weight_decay": 0.0}}


def accuracies(of: dict[tuple[int, int], list[float]]) -> list[dict[str, Any]]:
    """{(task, round): accuracy on each task up to it}, as the monitor notes them."""
    rows = []
    for (task, round), values in of.items():
        rows += [make_row("accuracy", task, value, round, about) for about, value in enumerate(values)]
        rows.append(make_row("accuracy", task, sum(values) / len(values), round))
    return rows


def test_round_by_round_around_each_boundary() -> None:
    of = {(0, 1): [0.5], (0, 3): [0.8], (1, 1): [0.6, 0.2], (1, 3): [0.4, 0.6], (2, 1): [0.2, 0.4, 0.9]}
    group = Group("special", (build_run("special", {}, rows=accuracies(of)),))
    (second, (old, new, joint)), (third, (old_of_third, *_)) = draw_boundaries(
        [Group("x", (build_run("x", {}),)), group]
    )
    assert (second, third) == (2, 3)
    assert [m.text for m in old.curves[0].marks] == ["special, 0: 80.0", "special, 2: 60.0", "special, 4: 40.0"]
    assert [m.text for m in new.curves[0].marks] == ["special, 2: 20.0", "special, 4: 60.0"]
    assert [m.text for m in joint.curves[0].marks] == ["special, 2: 40.0", "special, 4: 50.0"]
    assert [m.text for m in old_of_third.curves[0].marks] == ["special, 0: 50.0", "special, 2: 30.0"]
    assert len(old.curves) == 1  # the other had no monitor on
    assert old.curves[0].index == 1


def test_seeds_are_averaged_at_each_round_and_nothing_else_is() -> None:
    runs = [
        build_run("special", {}, seed, accuracies({(0, 1): [level], (1, 1): [level, 0.5]}))
        for seed, level in enumerate((0.2, 0.6))
    ]
    ((_, (old, new, _)),) = draw_boundaries([Group("special", tuple(runs))])
    assert [m.text for m in old.curves[0].marks] == ["special, 0: 40.0 ± 28.3", "special, 2: 40.0 ± 28.3"]
    assert [m.text for m in new.curves[0].marks] == ["special, 2: 50.0 ± 0.0"]


def test_drift_begins_anew_with_each_task() -> None:
    rows = [make_row("drift", 1, 2.0, 1), make_row("drift", 1, 3.0, 3), make_row("drift", 2, 1.0, 3)]
    section = draw_drift([Group("fedavg", (build_run("fedavg", PLAIN, rows=rows),))])
    assert section is not None
    (curve,) = section["chart"].curves
    assert curve.path.count("M") == 2
    assert [mark.text for mark in curve.marks] == [
        *("fedavg, 4: 0.0", "fedavg, 6: 2.0", "fedavg, 8: 3.0"),
        *("fedavg, 8: 0.0", "fedavg, 12: 1.0"),
    ]
    assert section["bounds"] == []


def test_the_largest_drift_stands_beside_the_largest_bound_of_its_task() -> None:
    def drift_rows(scale: float) -> list[dict[str, Any]]:
        drifts = [
            make_row("drift", task, scale * value, round) for task, round, value in ((1, 1, 2), (1, 3, 1), (2, 3, 4))
        ]
        return [
            *drifts,
            make_row("drift_bound", 1, 5, 1),
            make_row("drift_bound", 1, 7, 3),
            make_row("drift_bound", 2, 6 * scale, 3),
        ]

    settings = PLAIN | {"optimizer": {"kind": "sgd", "momentum": 0.9, "weight_decay": 0.0}}
    runs = tuple(build_run("special", settings, seed, drift_rows(scale)) for seed, scale in enumerate((1, 3)))
    section = draw_drift([Group("fedavg", (build_run("fedavg", {}),)), Group("special", runs)])
    assert section is not None
    ((index, bounds),) = section["bounds"]
    assert (index, bounds["uncovered"]) == (1, ["optimizer.momentum: 0.9"])
    root = math.sqrt(2)
    assert bounds["rows"] == [
        (2, pytest.approx((4, 2 * root)), (7, 0)),
        (3, pytest.approx((8, 4 * root)), pytest.approx((12, 6 * root))),
    ]


def test_without_these_monitors_there_is_nothing_to_draw() -> None:
    groups = [Group("fedavg", (build_run("fedavg", {}, rows=[make_row("rho", 1, 0.5, 0)]),))]
    assert draw_boundaries(groups) == []
    assert draw_drift(groups) is None


def test_what_was_seen_round_by_round_is_shown_with_its_bound(tmp_path, folders):
    rows = [make_row("accuracy", task, 0.5, 5, about) for task in range(3) for about in (*range(task + 1), None)]
    rows += [make_row("drift", task, task / 2, 5) for task in (1, 2)] + [make_row("drift_bound", 2, 8, 5)]
    text = render_page([*folders[3:6], write_monitored_run(tmp_path / "fot-0", "fot", 0, rows)])
    parsed = HtmlTables(text)
    assert parsed.headed("Its bound") == [[["Task", "Largest drift", "Its bound"], ["3", "1", "8"]]]
    assert text.index("While task 2 is learned") < text.index("<summary>Later tasks") < text.index("While task 3")
    assert text.count("</details>") == text.count("<details")
    assert "<title>fot, 6: 50.0</title>" in text
    assert "nothing was tuned or stopped by it" in text
