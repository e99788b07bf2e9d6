"""The command line: its imports, its output, and how it reports mistakes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from fclmodels.plugins import load_all
from fclmodels.report.comparison import compare_folders
from fclmodels.settings.describe import explain
from flows.cli.app import run_command_line
from flows.cli.run_tables import print_run

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "torchvision", "prefect", "mlflow", "dvc", "polars", "numpy", "pydantic", "sklearn", "plotly")
Fcl = Callable[..., int]

SETTINGS = """
data: {source: digits}
federation: {rounds: 2}
experiment: {methods: [fedavg], seeds: [0]}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with settings and nothing else."""
    (tmp_path / "params.yaml").write_text(SETTINGS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_help_has_the_commands_in_the_order_of_a_first_day() -> None:
    lines = run_python(
        "from flows.cli.app import main; import sys; sys.argv = ['fcl', '--help']; main()"
    ).stdout.splitlines()
    heads = [line.strip("╭─╮ ") for line in lines if line.startswith("╭")]
    assert heads == ["Options", "Start", "Data", "Run", "Compare", "Serve", "Extend"]


def test_help_imports_nothing_heavy() -> None:
    started = time.perf_counter()
    end = run_python(
        "import sys; from flows.cli.app import app; from flows.cli.app import run_command_line;"
        "run_command_line(app, ['--help']);"
        f"print('imported:', sorted(set({HEAVY}) & set(sys.modules)))"
    )
    sys.stdout.write(f"fcl --help took {time.perf_counter() - started:.2f} s\n")
    assert end.stdout.splitlines()[-1] == "imported: []"
    assert "Exit codes: 0 done, 1 something failed, 2 a mistake" in " ".join(end.stdout.split())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("rum", "fcl: No such command 'rum'. Did you mean 'run'? See: fcl --help"),
        ("run --method fedavg --sed 1", "--seed"),
        ("run", "fcl run: Missing option '--method'"),
        ("run -m fedavg --seed one", "Invalid value for '--seed'"),
        ("run -m fedavg --seed -1", "Invalid value for '--seed'"),
        ("run -m fedavgg", "fedavgg is not a method. Did you mean fedavg?"),
        ("run -m fedavg --set federation.roundz=3", "Did you mean federation.rounds?"),
        ("run -m fedavg --set federation.rounds=0", "federation.rounds"),
        ("run -m fedavg --set rounds", "rounds"),
        ("run -m fedavg --params parms.yaml", "parms.yaml"),
        ("run -m fedavg --set partition.kind=dirichlett", "Did you mean dirichlet?"),
        ("prepare --set data.source=digit", "Did you mean digits?"),
        ("partition --set partition.alpha=0", "partition.alpha"),
        ("list method", "method cannot be listed. Did you mean methods?"),
        ("params federation.roundz", "federation.roundz is"),
        ("compare", "runs/fedavg-0: no such run folder."),
        ("compare params.yaml", "params.yaml: no such run folder."),
        ("report --set experiment.seeds=[]", "experiment.seeds is []"),
        ("doctor --set device=7", "device"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    fcl: Fcl, here: Path, command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fcl(*command.split()) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert message in line
    assert out == ""
    assert [path.name for path in here.iterdir()] == ["params.yaml"]


def test_a_missing_extra_is_named(here: Path) -> None:
    packages = ["prefect", "mlflow"]
    end = run_python(
        "import sys; from flows.cli.app import app, run_command_line; import flows.prefect.server\n"
        "flows.prefect.server.connect = lambda home: 'http://127.0.0.1:9'\n"
        f"for package in {packages}:\n"
        "    sys.modules[package] = None\n"
        "    assert run_command_line(app, ['run', '-m', 'fedavg']) == 2\n"
        "    del sys.modules[package]"
    )
    assert end.returncode == 0
    assert end.stderr.splitlines() == [
        f"{package} is not installed. This command needs it: pip install 'fclflow[workflow]'" for package in packages
    ]


def chain(first: BaseException, second: Exception) -> Exception:
    """Return the second as if it was raised while the first was handled."""
    second.__context__ = first
    return second


@pytest.mark.parametrize(
    ("problem", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "stopped; the same command resumes from the last checkpoint\n"),
        (
            chain(KeyboardInterrupt(), ValueError("Task run is not set")),
            130,
            "stopped; the same command resumes from the last checkpoint\n",
        ),
        (
            OSError(28, "No space left on device", "x"),
            1,
            "x: No space left on device. Make room on its disk; the same command resumes from there.\n",
        ),
        (
            RuntimeError("underlying IO error: Read-only file system (os error 30)"),
            1,
            f"{Path.cwd()}: Read-only file system. Make it writable; the same command resumes from there.\n",
        ),
    ],
)
def test_an_end_that_is_no_fault_of_the_program_has_no_traceback(
    problem: BaseException, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(make_app_that_raises(problem), []) == code
    assert capsys.readouterr().err == message


def test_a_fault_of_the_program_has_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(make_app_that_raises(ZeroDivisionError("by nothing")), []) == 1
    message = capsys.readouterr().err
    assert "in command\n    raise problem" in message
    assert "site-packages/typer" not in message
    assert message.endswith("fcl failed: ZeroDivisionError: by nothing\n")


def make_app_that_raises(problem: BaseException) -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def command() -> None:
        raise problem

    return app


@pytest.mark.parametrize("kind", ["method", "source", "stream", "partition", "backbone"])
def test_list_names_every_plugin(fcl: Fcl, here: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fcl("list", f"{kind}s", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(load_all(kind))
    assert all(row["what"] for row in rows)


def test_params_explains_a_plugin(fcl: Fcl, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fcl("params", "fedprox", "--json") == 0
    rows = {row["setting"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["methods.fedprox.mu"]["type"] == "float"
    assert rows["methods.fedprox.mu"]["meaning"]
    assert fcl("params", "fedprox") == 0
    assert "methods.fedprox.mu" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["fot", "dirichlet"])
def test_params_of_a_plugin_keeps_names_whole_on_a_narrow_terminal(
    fcl: Fcl, here: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert fcl("params", name) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["setting", "type", "default", "meaning"]
    starts = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert starts == [row.path for row in explain(name)]
    assert max(map(len, lines)) <= 80


def test_params_shows_defaults_as_yaml_writes_them(fcl: Fcl, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for setting, default in [("data.size", "null"), ("data.skip_bad", "false"), ("data.root", "data/raw")]:
        assert fcl("params", setting) == 0
        assert f" {default} " in capsys.readouterr().out.splitlines()[1]


def test_doctor_looks_at_everything_and_starts_nothing(
    fcl: Fcl, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert fcl("doctor", "--json") == 0
    rows = {row["what"]: row["found"] for row in json.loads(capsys.readouterr().out)}
    assert {"python", "torch", "prefect", "mlflow", "cores", "torch threads", "device", "disk", "malloc"} < set(rows)
    assert rows["Prefect server"].startswith("none runs")
    assert not Path(".fcl").exists()


def test_doctor_reports_a_server_that_does_not_answer(
    fcl: Fcl, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert fcl("doctor") == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "127.0.0.1:9" in line]
    assert line.split()[-1] == "PROBLEM"


def test_a_run_is_shown_with_what_must_be_known(capsys: pytest.CaptureFixture[str]) -> None:
    values = dict.fromkeys(("acc", "learning_acc", "ft", "avg", "worst_acc"), 0.5)
    result = {
        "metrics": {
            "task_agnostic": values,
            "task_predicted": values | {"tip_acc": None},  # no task was predicted: it repeats the line above
            "paper_task_predicted": values | {"tip_acc": 0.5},
        },
        "settings": {"evaluation": {"batch_size": 64}},
        "privacy": {"epsilon": 7.25, "delta": 1e-5, "covers": "sketches", "clip": 1.0},
    }
    print_run(result)
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["reading", "task-agnostic", "paper-task-predicted"]
    batches, privacy = err.splitlines()
    assert batches.startswith("paper: batches of one task")
    assert "A batch: 64 samples (evaluation.batch_size)" in batches
    assert privacy == "epsilon 7.25 at delta 1e-05, for sketches."


def test_run_prints_its_result_and_compare_the_means(
    fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ["runs/fedavg-0", "runs/fedavg-1"]
    for seed in "01":
        assert fcl("run", "-m", "fedavg", "-s", seed, "--json", "-q") == 0
        out = capsys.readouterr().out
        assert json.loads(out) == json.loads(Path(f"runs/fedavg-{seed}/result.json").read_text())
    before = sorted(project.rglob("*"))
    assert fcl("compare", *folders, "--json") == 0
    assert json.loads(capsys.readouterr().out) == compare_folders(folders).to_dicts()
    assert fcl("compare", "--set", "experiment.seeds=[0, 1]") == 0
    table = capsys.readouterr().out
    assert "fedavg" in table
    assert "±" in table
    assert sorted(project.rglob("*")) == before
