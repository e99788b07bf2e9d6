"""The plan of a study: its choices by hand, its runs, and each mistake in one line before anything runs."""

from pathlib import Path

import pytest

from fclmodels.errors import UserError
from fclmodels.study.plan import ALONE, Study, ValueRange, build_job, check_plan, load_study, make_tuning, name_folder

PARAMS = """
data: {source: digits}
stream: {kind: class-incremental, tasks: 2}
partition: {kind: iid, clients: 3, val: 0.2}
model: {backbone: mlp, hidden: 8}
device: cpu
"""
STUDY = """
params: params.yaml
set: [federation.rounds=2]
seeds: [0, 1]
budget: 6
rows:
  FedAvg: {method: fedavg}
  Prox: {method: fedprox, grid: {optimizer.lr: [0.1, 0.2], methods.fedprox.mu: [1, 2, 3]}, set: [partition.clients=4]}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(PARAMS)
    return tmp_path


def load(text: str = STUDY, *overrides: str, scale: float | None = None) -> Study:
    Path("s.yaml").write_text(text)
    study = load_study(Path("s.yaml"), overrides, scale)
    check_plan(study)
    return study


def test_a_grid_has_every_combination_in_the_order_of_the_file() -> None:
    points = load().rows["Prox"].points
    assert points[:2] == [("optimizer.lr=0.1", "methods.fedprox.mu=1"), ("optimizer.lr=0.1", "methods.fedprox.mu=2")]
    assert len(points) == len(set(points)) == 6
    assert load().rows["FedAvg"].points == [()]


def test_a_job_has_the_settings_of_study_scale_choice_and_row_in_this_order() -> None:
    job = build_job(load(STUDY, "federation.batch_size=7", scale=0.5), "Prox", ("optimizer.lr=0.2",), 5)
    own = ("federation.rounds=2", "federation.batch_size=7", "optimizer.lr=0.2", "partition.clients=4")
    assert job.overrides == (*ALONE, "federation.rounds_scale=0.5", *own)
    params = job.load()
    assert (params.partition.seed, params.stream.seed, params.federation.rounds_scale) == (5, 5, 0.5)
    assert (params.optimizer.lr, params.partition.clients, params.federation.batch_size) == (0.2, 4, 7)


def test_rows_are_selected_with_those_whose_choice_they_take() -> None:
    text = f"{STUDY}  Like: {{method: fedprox, like: Prox}}\n"
    assert list(load(text).select_rows(["Like"]).rows) == ["Prox", "Like"]
    with pytest.raises(UserError, match=r"^Pro is no row of the study. Did you mean Prox\?$"):
        load(text).select_rows(["Pro"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("budget", "budgets", "s.yaml:5: budgets is not a setting. Did you mean budget?"),
        ("grid:", "gird:", "s.yaml:8: rows.Prox.gird is not a setting. Did you mean rows.Prox.grid?"),
        ("budget: 6", "budget: 5", "rows.Prox.grid has 6 choices, and budget is 5"),
        ("[0, 1]", "[0, 100]", "seed 100 is in seeds and in tuning_seeds"),
        ("method: fedavg", "method: fedavgg", "rows.FedAvg: fedavgg is not a method."),
        ("method: fedavg", "method: fedavg, like: FedAvg", "rows.FedAvg.like is FedAvg, which is no row with a grid"),
        ("FedAvg:", "prox:", "prox and Prox would share a folder"),
        ("budget: 6", "reference: Fed", "reference is Fed. Did you mean FedAvg?"),
        ("budget: 6", "metrics: [accc]", "accc is no metric here. Did you mean acc?"),
        ("budget: 6", "metrics: [task.acc]", "task is no reading."),
        ("methods.fedprox.mu", "methods.fedprox.muu", "rows.Prox: --set methods.fedprox.muu=1"),
        ("partition.clients=4", "partition.val=0", "rows.Prox: partition.val is 0, and val rows choose settings."),
        ("seeds: [0, 1]", "seeds: []", "seeds is []"),
        ("grid: {optimizer.lr: [0.1, 0.2],", "search: {optimizer.lr: {low: 2, high: 1},", "is no range"),
        (
            "grid: {optimizer.lr: [0.1, 0.2],",
            "search: {optimizer.lr: {low: 1, high: 2, lo: 3},",
            "Did you mean rows.Prox.search",
        ),
        ("grid:", "like: Prox, grid:", "a row has one of grid, search and like"),
        ("optimizer.lr: [0.1, 0.2]", "optimizer.lr: []", "optimizer.lr has no values"),
        ("[partition.clients=4]", "[optimizer.lr=1]", "optimizer.lr=1 is set, and its values are tried"),
        ("method: fedavg", "method: fedavg, seeds: []", "seeds has none"),
        ("method: fedavg", "method: fedavg, like: Prox, seeds: [100]", "seed 100 is in seeds and in tuning_seeds"),
        ("[0, 1]", "[0, 0]", "seeds has a seed twice"),
    ],
)
def test_a_mistake_is_one_line(old: str, new: str, message: str) -> None:
    assert old in STUDY
    with pytest.raises(UserError) as mistake:
        load(STUDY.replace(old, new, 1))
    assert message in str(mistake.value)
    assert "\n" not in str(mistake.value)


def test_a_row_is_a_folder() -> None:
    assert [name_folder(label) for label in ("ER, same bytes", "STAMP (0.5)", "1/t: EMA", "é", "…")] == [
        *("er-same-bytes", "stamp-0.5", "1-t-ema", "é", "row")
    ]


def test_options_make_the_study_that_tunes_a_method() -> None:
    grids = ["optimizer.lr=0.1,1e-3", "methods.fot.x=[1,2]"]
    with pytest.raises(UserError, match=r"methods.fot.x=\[1,2\]: "):
        make_tuning("fot", Path("params.yaml"), [], grids, [], None, [100], "task_aware")
    study = make_tuning("fot", Path("params.yaml"), ["federation.rounds=1"], grids[:1], [], 2, [100, 7], "task_aware")
    assert study.rows["fot"].points == [("optimizer.lr=0.1",), ("optimizer.lr=0.001",)]
    assert (study.tuning_seeds, study.set, study.reading) == ((100, 7), ("federation.rounds=1",), "task_aware")
    ranges = ["optimizer.lr=1e-3:0.1:log", "federation.batch_size=8:64"]
    searched = make_tuning("fot", Path("params.yaml"), [], [], ranges, 9, [100], "task_aware").rows["fot"].search
    assert list(searched.values()) == [
        ValueRange(low=0.001, high=0.1, log=True),
        ValueRange(low=8, high=64, whole=True),
    ]


@pytest.mark.parametrize(
    ("grids", "ranges", "budget", "message"),
    [
        ([], [], None, "Name what to tune"),
        (["a=1"], ["a=1:2"], 3, "Name what to tune"),
        ([], ["a=1:2"], None, "--search needs --budget"),
        ([], ["a=2:1"], 3, "a=2:1: no range"),
        ([], ["a=x:1"], 3, "a=x:1: no range"),
        ([], ["a=0:1:log"], 3, "a=0:1:log: no range"),
        (["a"], [], None, "a: write a setting and its values"),
        (["a=1,2"], [], 1, "--grid has 2 choices, and --budget is 1"),
    ],
)
def test_a_wrong_option_is_one_line(grids: list[str], ranges: list[str], budget: int | None, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        make_tuning("fot", Path("params.yaml"), [], grids, ranges, budget, [100], "task_aware")
