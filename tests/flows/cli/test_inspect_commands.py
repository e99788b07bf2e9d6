"""Commands that start no flow: presets, explain, status; and options of all commands."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli.app import VERBOSE
from flows.cli.options import complete_methods

ROOT = Path(__file__).parents[3]
Fcl = Callable[..., int]


def test_explain_prints_lines_and_json(fcl: Fcl, capsys: pytest.CaptureFixture[str]) -> None:
    assert fcl("explain", "fedprox") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("fedprox: FedAvg with a proximal term")
    assert out[-1] == "settings: fcl params fedprox"
    assert fcl("explain", "fedprox", "--json") == 0
    assert json.loads(capsys.readouterr().out)["traffic"]["sends in each round"]
    assert fcl("explain", "fedproxx") == 2
    assert "Did you mean fedprox?" in capsys.readouterr().err


def test_every_preset_of_the_project_is_listed_with_a_figure(
    fcl: Fcl, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    assert fcl("presets") == 0
    out = capsys.readouterr().out
    assert [name for name in sorted(p.stem for p in Path("presets").glob("*.yaml")) if f"{name} " not in out] == []
    (line,) = [line for line in out.splitlines() if line.startswith("fot-cifar100-iid ")]
    assert "fot acc 71.9" in line
    assert fcl("presets", "fot-cifar100-iid") == 0
    assert any(line.split()[:5] == ["Table", "1", "task_aware", "fedavg", "63.12"] for line in read_lines(capsys))
    assert fcl("presets", "special-pacs") == 0
    assert capsys.readouterr().err == ""  # every row is of a method that is there
    assert fcl("presets", "fot-cifar") == 2


def read_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_status_shows_data_and_runs_that_are_done_or_stale_and_cached_steps(
    fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def states(*settings: str) -> dict[str, tuple[str, str | None, str | None]]:
        capsys.readouterr()
        assert fcl("status", "--json", *(word for text in settings for word in ("--set", text))) == 0
        rows = json.loads(capsys.readouterr().out)
        return {row["what"]: (row["state"], row["why"], row["steps"]) for row in rows}

    methods = "experiment.methods=[fedavg,fedprox]"
    before = states(methods)
    assert before["data/splits/0"] == ("done", None, None)
    assert before["runs/fedavg-0"] == ("not begun", None, "0 of 8 cached")
    assert fcl("run", "-m", "fedavg", "-q") == 0
    after = states(methods)
    assert after["runs/fedavg-0"] == ("done", None, "8 of 8 cached")
    assert after["runs/fedprox-0"] == ("not begun", None, "0 of 8 cached")
    assert states("optimizer.lr=0.5")["runs/fedavg-0"] == ("stale", "optimizer.lr", "0 of 8 cached")
    assert states("federation.rounds=[2,3]")["runs/fedavg-0"] == ("stale", "federation.rounds", "5 of 8 cached")
    other_data = states("stream.tasks=5")
    assert other_data["data/splits/0"] == ("stale", "stream.tasks", None)
    assert other_data["runs/fedavg-0"] == ("stale", "of other data", None)


def test_the_shell_completes_commands_and_methods() -> None:
    assert {"fedavg", "fedprotip", "fot"} <= set(complete_methods("f"))
    variables = {"_FCL_COMPLETE": "complete_bash", "COMP_WORDS": "fcl run --method fedp", "COMP_CWORD": "3"}
    code = "import sys; from flows.cli.app import main; sys.argv = ['fcl']; main()"
    end = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert end.stdout.split() == ["fedprotip", "fedproto", "fedprox"]


def test_no_colours_but_to_a_terminal() -> None:
    commands = [["--help"], ["list", "methods"], ["run", "-m", "x"]]
    code = f"from flows.cli.app import app, run_command_line; [run_command_line(app, each) for each in {commands}]"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    end = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "Usage: fcl" in end.stdout
    assert "fedavg" in end.stdout
    assert end.stderr
    assert "\x1b" not in end.stdout + end.stderr


def test_verbose_lets_the_workflows_own_logs_through(fcl: Fcl, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VERBOSE:
        monkeypatch.setenv(name, "CRITICAL")
    assert fcl("list", "methods", "--json") == 0
    assert {os.environ[name] for name in VERBOSE} == {"CRITICAL"}
    assert fcl("--verbose", "list", "methods", "--json") == 0
    assert {os.environ[name] for name in VERBOSE} == {"INFO"}
