"""Monitors on the page, from runs whose values are set here."""

import re

from run_folders import HtmlTables, write_monitored_run

from fclmodels.federation.monitors.rows import make_row
from fclmodels.report.page import render_page


def test_monitors_are_shown_where_a_run_has_them(tmp_path, folders):
    rows = [
        [make_row("used_share", task, share, layer=name) for task in range(3) for name in ("fc1", "fc2", None)]
        + [make_row("rho", 2, rho, round) for round, rho in enumerate((0.2, 0.4))]
        + [
            make_row("beta", 1, 0.5, 0, 0),
            make_row("beta", 2, 0.125, 0, 0),
            make_row("beta", 2, beta, 0, 1),
        ]
        + [make_row("loss_increase", 2, -0.25, about=0), make_row("loss_increase", 2, 1.5, about=1)]
        + [make_row("theorem_bound", 2, 8, about=0), make_row("theorem_bound", 2, bound, about=1)]
        for share, beta, bound in ((0.25, 0.75, 4), (0.75, 0.25, 6))
    ]
    momentum = {"optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.0}}
    watched = [
        write_monitored_run(tmp_path / f"fot-{seed}", "fot", seed, of_seed, monitors={"every": seed + 1}, **momentum)
        for seed, of_seed in enumerate(rows)
    ]
    text = render_page([*folders[3:6], *watched])
    parsed = HtmlTables(text)
    assert parsed.headed("Bound") == [
        [["Old task", "Loss increase", "Bound"], ["1", "−0.25± 0", "8± 0"], ["2", "1.5± 0", "5± 1.41"]]
    ]
    assert ["3", "12", "50"] in [row for rows in parsed.tables for row in rows]  # beta after task 3, in percent
    for point in ("fot, 1: 50.0 ± 35.4", "fot, 3: 30.0 ± 0.0", "fot, 2: 50.0 ± 0.0"):  # used share, rho, beta
        assert f"<title>{point}</title>" in text
    assert text.index("<summary>Each layer") < text.index('aria-label="fc1:') < text.index('aria-label="fc2:')
    assert "Outside of the theorem’s setting: optimizer.momentum: 0.9." in text
    assert "An oracle of the simulation" in text
    assert "fedavg, 1: 50.0" not in text
    legend = text.partition('id="monitors"')[2].partition("</ul>")[0]
    assert re.findall(r"<span>(\w+)</span></a> <span class=\"muted\">\((n = \d)\)", legend) == [("fot", "n = 2")]


def test_clients_models_have_a_chart_of_each_accuracy(tmp_path, folders):
    rows = [make_row("local_accuracy", 1, 0.75, 9), make_row("global_accuracy", 1, 0.5, 9)]
    text = render_page([*folders[3:6], write_monitored_run(tmp_path / "fot-0", "fot", 0, rows)])
    HtmlTables(text)
    assert "The clients’ own models" in text
    for point in ("fot, 2: 75.0", "fot, 2: 50.0"):
        assert point in text
    assert "The clients’ own models" not in render_page(folders[3:6])


def test_moved_features_have_a_chart(tmp_path, folders):
    rows = [make_row("feature_drift", 1, 0.375), make_row("feature_drift", 2, 1.5)]
    text = render_page([*folders[3:6], write_monitored_run(tmp_path / "fedprotip-0", "fedprotip", 0, rows)])
    HtmlTables(text)
    for point in ("How far features moved", "fedprotip, 2: 0.4", "fedprotip, 3: 1.5"):
        assert point in text


def test_conflicts_between_gradients_are_shown_below_zero_and_above_one(tmp_path, folders):
    of_seeds = [
        [make_row("cosine_clients", 1, cosine, round) for round, cosine in ((0, -0.5), (5, 0.1))]
        + [
            make_row("negative_clients", 1, share, 0),
            make_row("divergence", 1, 2.5, 0),
            make_row("divergence", 2, 4.5, 0),
        ]
        for share in (0.25, 0.75)
    ]
    watched = [write_monitored_run(tmp_path / f"fot-{seed}", "fot", seed, rows) for seed, rows in enumerate(of_seeds)]
    text = render_page([*folders[3:6], *watched])
    HtmlTables(text)
    # Each run's mean over its rounds; cosines and shares in percent, divergence in lengths of the mean.
    for point in ("fot, 2: −20.0 ± 0.0", "fot, 2: 50.0 ± 35.4", "fot, 2: 2.5 ± 0.0", "fot, 3: 4.5 ± 0.0"):
        assert f"<title>{point}</title>" in text
    shown = text.partition("<h3>Conflicts between gradients</h3>")[2].partition("</div>")[0]
    assert "An oracle of the simulation" in shown
    assert re.findall(r'aria-label="([^"]+): [^"]+ against task"', shown) == [
        "Between clients, mean",
        "Between clients, in conflict",
        "Between clients, divergence",
    ]  # nothing was seen of tasks
    cosine, share, divergence = (re.findall(r'text-anchor="end">([^<]+)<', part) for part in shown.split("<svg")[1:])
    assert (cosine[0], cosine[-1]) == ("−20", "0")
    assert (share[0], share[-1]) == ("0", "100")
    assert (divergence[0], divergence[-1]) == ("0", "5")


def test_without_monitors_the_page_does_not_speak_of_them(text):
    assert "onitor" not in text
    assert "oracle" not in text
