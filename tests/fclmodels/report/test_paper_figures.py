"""Papers' figures beside the measured ones."""

from run_folders import HtmlTables, write_run

from fclmodels.report.page import render_page


def test_the_papers_figures_are_rows_below_the_measured_ones(tmp_path):
    table = {"table": "Table 1", "reading": "task_aware", "columns": ["acc", "acc_std", "fgt"]}
    preset = {"name": "one", "figures": [table | {"rows": {"fot": [90.0, 0.06, 1.75], "ewc": [1, 1, 1]}}]}
    parsed = HtmlTables(render_page([write_run(tmp_path / "fot", "fot", 0, tasks=2, preset=preset)]))
    accuracy, forgetting = parsed.headed("Avg ↑")[0], parsed.headed("FT ↓")[0]
    for rows, heads in (
        (accuracy, {"ACC ↑": "90.00 ± 0.06"}),
        (forgetting, {"ACC ↑": "90.00 ± 0.06", "FGT ↓": "1.75"}),
    ):
        assert [row[0] for row in rows[:5]] == [
            "Method",
            "Task-aware",
            "fot",
            "paper: fot, Table 1(one)",
            "Task-agnostic",
        ]
        expected = ["paper: fot, Table 1(one)", *([""] if rows is accuracy else ["", ""])]
        assert rows[3] == expected + [heads.get(name, "–") for name in rows[0][len(expected) :]]
