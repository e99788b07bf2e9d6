"""Sweeps of one setting, from runs whose metrics are set here."""

from typing import Any

import pytest
from run_folders import HtmlTables, build_run, write_run

from fclmodels.report.charts.axes import BOTTOM, LEFT, RIGHT, TOP
from fclmodels.report.page import render_page
from fclmodels.report.read_runs import group_runs
from fclmodels.report.sections.sweeps import draw_sweeps, find_sweeps


def of_lambda(value: float | str, participants: int = 8) -> dict[str, Any]:
    return {"methods": {"special": {"lambda": value}}, "federation": {"clients_per_round": participants}}


def test_a_sweep_is_of_runs_that_differ_in_one_setting_only() -> None:
    """Five values with 8 clients a round, and one of them with 2 and 4 too, which make a sweep of their own."""
    values = (0.25, 1, "auto", 0.05, 10)
    runs = [build_run("special", of_lambda(value), seed) for value in values for seed in (0, 1)]
    runs += [build_run("special", of_lambda(0.25, participants)) for participants in (4, 2)]
    runs += [build_run("fedavg", {"federation": {"clients_per_round": n}}) for n in (2, 4)]
    swept = list(find_sweeps(group_runs(runs)))
    assert [(sweep.setting, list(sweep.groups), sweep.others) for sweep in swept] == [
        ("federation.clients_per_round", ["2", "4", "8"], "methods.special.lambda: 0.25"),
        ("methods.special.lambda", ["0.05", "0.25", "1", "10", "auto"], "federation.clients_per_round: 8"),
    ]
    assert [len(group.runs) for group in swept[1].groups.values()] == [2] * 5


def test_what_differs_in_seeds_or_in_two_settings_at_once_is_no_sweep() -> None:
    runs = [build_run("special", of_lambda(value, n)) for value, n in ((0, 2), (1, 4), (2, 8))]
    assert not list(find_sweeps(group_runs(runs)))
    seeds = [build_run("special", {"partition": {"seed": seed}}, seed) for seed in range(3)]
    assert not list(find_sweeps(group_runs(seeds)))


def test_a_curve_has_bwt_across_and_acc_up_and_is_shaded_by_its_values() -> None:
    of = {0: (0.30, -0.4), 0.5: (0.50, -0.2), 2: (0.40, 0.0), "auto": (0.45, -0.1)}
    runs = [build_run("special", of_lambda(value), acc=acc, bwt=bwt) for value, (acc, bwt) in of.items()]
    ((_, (chart,)),) = draw_sweeps(group_runs(runs))
    middle, height, width = (TOP + BOTTOM) / 2, BOTTOM - TOP, RIGHT - LEFT
    assert [(dot.label, dot.shade) for dot in chart.dots] == [("0", 1 / 3), ("0.5", 2 / 3), ("2", 1), ("auto", None)]
    assert [dot.x for dot in chart.dots] == pytest.approx([LEFT, LEFT + width / 2, RIGHT, LEFT + 0.75 * width], abs=0.1)
    assert [dot.y for dot in chart.dots] == pytest.approx([BOTTOM, TOP, middle, TOP + height / 4], abs=0.1)
    assert chart.path.count("L") == 2  # through the numbers, not to "auto"
    assert chart.dots[0].text == "0: ACC, % 30.0, BWT, points −40.0"
    assert [text for _, text in chart.x_ticks] == ["−40", "−30", "−20", "−10", "0"]


def test_a_run_without_backward_transfer_makes_no_chart() -> None:
    runs = [build_run("special", of_lambda(value), acc=0.5, bwt=None if value else 0.0) for value in (0, 1, 2)]
    assert draw_sweeps(group_runs(runs)) == []


def test_runs_that_differ_in_one_setting_make_a_curve(tmp_path, text):
    mus = (0.01, 0.1, 1.0)
    of_mu = [
        write_run(tmp_path / str(mu), "fedprox", tasks=3, settings={"methods": {"fedprox": {"mu": mu}}}) for mu in mus
    ]
    html = render_page(of_mu)
    HtmlTables(html)
    assert html.count('<g class="dot">') == 2 * 3  # in each reading
    assert 'fedprox, by <span class="mono">methods.fedprox.mu</span>' in html
    assert 'class="dot"' not in text.replace('<span class="dot"', "")
    assert "by one setting" not in render_page(of_mu[:2])
