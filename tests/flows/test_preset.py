"""Presets from the command line: listed, run from data to report, and refused in one line."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fclmodels.report.traffic import measure_traffic

Fcl = Callable[..., int]

TINY = """
data: {source: digits}
stream: {kind: class-incremental, tasks: 2}
partition: {kind: iid, clients: 3, val: 0}
model: {backbone: mlp, hidden: 8}
federation: {rounds: 10, executor: serial}
device: cpu
methods: {fedavg: {}, fedprox: {}}
experiment: {methods: [fedavg, fedprox], seeds: [0]}
preset:
  name: tiny
  paper: "Of Digits"
  needs: [nothing]
  only: {fedavg: {federation: {rounds: [20, 10]}}}
  figures:
  - {table: Table 7, reading: task_aware, columns: [acc, fgt], rows: {fedavg: [98.76, 5.25], other: [50, 1]}}
"""


@pytest.fixture
def presets(project: Path) -> Path:
    folder = project / "presets"
    folder.mkdir()
    (folder / "tiny.yaml").write_text(f"{TINY}tracking: {{uri: 'sqlite:///{project}/mlflow.db'}}\n")
    return folder


def test_presets_are_listed_one_a_line(fcl: Fcl, presets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fcl("presets") == 0
    out, err = capsys.readouterr()
    title, header, row = out.splitlines()
    assert (title, header.split()) == ("Of Digits", ["preset", "the", "paper's", "needs"])
    assert row.split() == ["tiny", "fedavg", "acc", "98.76", "nothing"]
    assert err == "all figures: fcl presets NAME; all of it: presets/NAME.yaml\n"
    assert fcl("presets", "--json") == 0
    (preset,) = json.loads(capsys.readouterr().out)
    assert preset["figures"][0]["rows"] == {"fedavg": [98.76, 5.25], "other": [50.0, 1.0]}
    assert preset["methods"] == ["fedavg", "fedprox"]


def test_a_preset_runs_from_data_to_report_beside_the_papers_figures(
    fcl: Fcl, presets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fcl("preset", "tiny", "--scale", "0.2", "--seeds", "0,1", "--methods", "fedavg") == 0
    out, err = capsys.readouterr()
    folder = Path("tries/tiny")
    assert sorted(path.name for path in folder.iterdir()) == ["fedavg-0", "fedavg-1", "report"]
    results = [json.loads((folder / f"fedavg-{seed}" / "result.json").read_text()) for seed in (0, 1)]
    assert [result["scaled"] for result in results] == [{"rounds": [4, 2], "of": [20, 10]}] * 2
    assert [result["preset"]["name"] for result in results] == ["tiny"] * 2
    assert "paper: fedavg" not in out + (folder / "report" / "index.html").read_text()
    assert "fedavg differs from the paper's setting, tiny, in: federation.rounds_scale 0.2 (there 1.0)." in err
    assert err.splitlines()[-1] == "tries/tiny/report/index.html"
    assert "fedavg: 6 rounds in place of 30 (federation.rounds_scale)." in err
    page = (folder / "report" / "index.html").read_text()
    assert "fedavg: 6 rounds in place of 30" in page
    assert fcl("preset", "tiny", "--methods", "fedavg", "--set", "federation.executor=serial") == 0
    out, err = capsys.readouterr()
    row = next(line for line in out.splitlines() if line.startswith("paper: fedavg"))
    assert re.search(r"98\.76 +– +5\.25", row)
    assert "differs from" not in err
    assert "paper: fedavg, Table 7" in (folder / "report" / "index.html").read_text()
    again = ("run", "-m", "fedavg", "--params", str(folder / "fedavg-0" / "settings.json"), "--out", "again")
    assert fcl(*again, "--set", "partition.kind=shards") == 0
    assert fcl("compare", "again") == 0
    out, err = capsys.readouterr()
    assert "paper:" not in out
    assert "partition.kind shards (there iid)" in err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("preset tini", "tini is not a preset. Did you mean tiny?"),
        ("preset tiny --scale 0", "federation.rounds_scale is 0.0; it must be greater than 0."),
        ("preset tiny --methods fedavgg", "fedavgg is not a method. Did you mean fedavg?"),
        ("preset tiny --set partition.val=2", "partition.val"),
        ("preset tiny --methods=", "experiment.methods is []"),
        ("preset tiny --set data.source=image-folder --set data.folder=none -q", "data.folder: data/raw/none is not"),
        ("preset tiny --set data.source=image-folder --set data.folder=none -q", "a class. It needs nothing."),
        ("preset tiny --set model.weights=w.pth -q", "tiny: there is no file w.pth (model.weights). It needs nothing."),
    ],
)
def test_a_mistake_is_one_line(
    fcl: Fcl, presets: Path, command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fcl(*command.split()) == 2
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if "has another origin" not in line]
    assert message in line
    assert out == ""


def test_without_presets_it_says_where_they_are(fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fcl("presets") == 2
    assert capsys.readouterr().err == "presets: no presets here. Work in the project's folder, which holds them.\n"


def test_the_ledger_of_runs_side_by_side(
    fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = ["runs/fedavg-0", "runs/fedprox-0"]
    for method in ("fedavg", "fedprox"):
        assert fcl("run", "-m", method, "-q") == 0
    capsys.readouterr()
    assert fcl("ledger", *folders, "--json") == 0
    assert json.loads(capsys.readouterr().out) == measure_traffic([Path(folder) for folder in folders]).to_dicts()
    monkeypatch.setenv("COLUMNS", "30")  # narrower than a line, which stays whole
    assert fcl("ledger", *folders) == 0
    table, note = capsys.readouterr()
    weights = 4 * (64 * 8 + 8 + 2 * (8 * 8 + 8) + 5 * (8 + 1))  # mlp of 64-8-8-8 and a head of five classes
    for name in ("fedavg-0", "fedprox-0"):
        assert re.search(rf"down +weights +{name} +2 +{weights / 1e6:.3f} ", table)
    assert "count" not in table
    assert note == "Parts that would show as 0.000 are left out; --json has them.\n"
