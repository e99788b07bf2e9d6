"""Facts on the page: remarks, caveats, the privacy ledger, settings."""

from run_folders import HtmlTables, write_run

from fclmodels.report.page import render_page


def test_page_tells_what_a_method_remarks(tmp_path):
    with_remark = write_run(tmp_path / "fot-0", "fot", tasks=2, remarks=["the bases fill 3 of 4 protected layers"])
    silent = write_run(tmp_path / "fedavg-0", "fedavg", tasks=2)
    assert render_page([with_remark, silent]).count("fot: the bases fill 3 of 4 protected layers.") == 1
    assert "bases fill" not in render_page([silent])


def test_what_is_not_comparable_is_said(tmp_path):
    folders = [
        write_run(tmp_path / "a", "fedavg", 0, tasks=2),
        write_run(tmp_path / "b", "fedprox", 1, tasks=2, splits="00" * 32, versions={"torch": "3.0"}),
    ]
    text = render_page(folders)
    assert "Made on 2 different data splits" in text
    assert "not run with the same seeds" in text
    assert "different versions of" in text
    assert "Made on" not in render_page(folders[:1])


def test_privacy_ledger_says_who_needs_single_replies(text):
    headings = [row[0] for row in HtmlTables(text).headed("The method needs")[0] if len(row) == 1]
    assert headings == [
        "fedavg: needs nothing but sums over clients",
        "fedprotip: needs each client's own basis, reference",
        "joint: the ledger has no message to a server",
    ]


def test_privacy_ledger_tells_the_largest_epsilon_of_the_seeds(tmp_path, text):
    folders = [
        write_run(tmp_path / str(epsilon), "fot", seed, tasks=2, privacy=of | {"clip": 1.0})
        for seed, epsilon in enumerate((2.5, 7.25))
        for of in [{"epsilon": epsilon, "delta": 1e-5, "covers": "sketches. Not covered: updates"}]
    ]
    section = render_page(folders).partition('id="ledger"')[2].partition("</section>")[0]
    assert "epsilon 7.25 at delta 1e-05, for sketches. Not covered: updates." in section
    assert section.count("epsilon") == 1
    assert "epsilon" not in text


def test_settings_that_differ_are_told_from_common_ones(tmp_path):
    folders = [
        write_run(tmp_path / str(mu), "fedprox", 0, tasks=2, settings={"methods": {"fedprox": {"mu": mu}}})
        for mu in (0.5, 2)
    ]
    differing = HtmlTables(render_page(folders)).headed("Setting")[0]
    assert differing == [["Setting", "fedprox (mu=0.5)", "fedprox (mu=2)"], ["methods.fedprox.mu", "0.5", "2"]]
