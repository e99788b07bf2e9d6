"""Papers' figures beside the measured ones."""

from pathlib import Path

import pytest
from run_folders import HtmlTables, write_run

from fclmodels.errors import UserError
from fclmodels.report.page import render_page
from fclmodels.report.paper_figures import collect_figures, describe_changes, describe_other_figures
from fclmodels.report.read_runs import group_runs, read_runs
from fclmodels.settings.load import collect_settings, load_params, note_changes

PRESETS = Path(__file__).parents[3] / "presets"


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


def list_tables(folder: Path, preset: str, method: str, *overrides: str) -> tuple[list[str], list[str]]:
    """Return the titles of the figures that stand beside a run of a preset after overrides, and what it differs in."""
    file = PRESETS / f"{preset}.yaml"
    params = note_changes(load_params(file, overrides, method, seed=1), method, file)
    content = params.preset.model_dump(mode="json", exclude={"only"})
    run = write_run(folder / "run", method, 1, tasks=2, preset=content, settings=collect_settings(params, method))
    groups = group_runs(read_runs([run]))
    titles = [figure.title for figures in collect_figures(groups).values() for figure in figures]
    return titles, describe_changes(groups)


def test_a_paper_s_figures_stand_beside_its_own_setting_only(tmp_path):
    titles, changes = list_tables(tmp_path / "0", "fot-pmnist-iid", "fot")
    assert "fot, Table 1" in titles
    assert changes == []
    for number, (preset, method, *overrides) in enumerate(
        [
            ("fot-pmnist-iid", "fot", "partition.kind=shards"),
            ("fot-pmnist-iid", "fot", "methods.fot.threshold=0.5"),
            ("fot-pmnist-iid", "fot", "federation.rounds=1"),
            ("fot-pmnist-iid", "fot", "federation.rounds_scale=0.5"),
            ("fedprotip-cifar100-a05", "fedprotip", "partition.alpha=0.1"),
        ],
        start=1,
    ):
        titles, changes = list_tables(tmp_path / str(number), preset, method, *overrides)
        assert titles == []
        assert overrides[0].partition("=")[0] in changes[0]


def test_seeds_monitors_and_executors_are_no_differences(tmp_path):
    settings = ("partition.seed=9", "stream.seed=9", "monitors.drift=true", "federation.executor=serial", "device=cpu")
    titles, changes = list_tables(tmp_path, "fot-pmnist-iid", "fot", *settings)
    assert changes == []
    assert "fot, Table 1" in titles


def test_a_table_of_another_setting_stands_beside_runs_with_just_that(tmp_path):
    where = ("partition.task_share=0.6", "partition.clients=208")
    assert list_tables(tmp_path / "0", "fot-pmnist-iid", "fot", *where)[0] == [
        "fot, Table 10, task_share=0.6, clients=208"
    ]
    assert list_tables(tmp_path / "1", "fot-pmnist-iid", "fot", where[0])[0] == []
    assert list_tables(tmp_path / "2", "fot-pmnist-iid", "fot", *where, "optimizer.lr=0.1")[0] == []


def test_figures_of_other_kinds_have_their_units(tmp_path):
    bytes_of_it = {"table": "Table 9", "columns": ["mb_up", "used_share"], "rows": {"fot": [9.794, 62.18]}}
    of_tasks = {"table": "Table 4", "reading": "task_aware", "columns": ["task_1", "acc"], "rows": {"fot": [98.5, 90]}}
    after = {"table": "Table 5", "columns": ["mb_end_up_after_1", "mb_end_up_after_2"], "rows": {"fot": [5.5, 11]}}
    preset = {"name": "one", "figures": [bytes_of_it, of_tasks, after]}
    groups = group_runs(read_runs([write_run(tmp_path / "fot", "fot", 0, tasks=2, preset=preset)]))
    assert describe_other_figures(groups) == [
        "paper: fot, Table 9: mb up 9.794 MB; used share 62.18 %.",
        "paper: fot, Table 5: mb end up after tasks 1 to 2 5.5, 11.0 MB.",
        "paper: fot, Table 4: task 1 98.5 %.",
    ]


def test_a_setting_that_another_one_replaces_is_no_difference_of_its_own(tmp_path):
    """`partition.alpha` has no place under `kind: iid`, which a table names."""
    titles, changes = list_tables(tmp_path / "0", "fedprotip-imagenetr-5", "fot", "partition.kind=iid")
    assert (titles, changes) == (["fot, Table 2, kind=iid"], [])  # a setting of the paper's too
    further = ("partition.kind=iid", "optimizer.lr=9")
    titles, (change,) = list_tables(tmp_path / "1", "fedprotip-imagenetr-5", "fot", *further)
    assert titles == []
    assert "partition.alpha" not in change


def test_figures_after_a_task_and_those_that_the_paper_lacks(tmp_path):
    of_tasks = {"table": "Table 14", "columns": ["tip_acc_after_2", "tip_acc_after_3", "parameters"]}
    preset = {"name": "one", "figures": [of_tasks | {"rows": {"fot": [None, 97.8, 11_700_000]}}]}
    groups = group_runs(read_runs([write_run(tmp_path / "fot", "fot", 0, tasks=2, preset=preset)]))
    assert describe_other_figures(groups) == [
        "paper: fot, Table 14: tip acc after 3 97.8 %; parameters 11700000 parameters."
    ]


def test_a_column_that_is_no_quantity_is_refused(tmp_path):
    table = "{table: Table 1, columns: [joules], rows: {fot: [1]}}"
    (tmp_path / "params.yaml").write_text(f"preset: {{name: one, figures: [{table}]}}\n")
    with pytest.raises(UserError, match="joules is no quantity"):
        load_params(tmp_path / "params.yaml")
