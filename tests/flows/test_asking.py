"""Commands that start no flow: presets, explain, init, status, new-method, completion."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fclmodels.params import load
from flows.init import look
from flows.new_method import with_block, write
from flows.options import METHODS, VERBOSE

ROOT = Path(__file__).parents[2]
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
    assert any(line.split()[:5] == ["Table", "1", "task_aware", "fedavg", "63.12"] for line in _lines(capsys))
    assert fcl("presets", "special-pacs") == 0
    assert "does not have: fedcil, mfcl, pfeddil, sr-fdil" in capsys.readouterr().err
    assert fcl("presets", "fot-cifar") == 2


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def images(folder: Path, domains: tuple[str, ...], classes: tuple[str, ...], count: int, side: int, mode: str) -> None:
    random = np.random.default_rng(0)
    shape = (side, side) if mode == "L" else (side, side, 3)
    for number in range(count):
        for domain in domains:
            for place, name in enumerate(classes):
                (folder / domain / name).mkdir(parents=True, exist_ok=True)
                pixels = (random.integers(0, 90, shape) + 40 * place).astype(np.uint8)
                Image.fromarray(pixels).save(folder / domain / name / f"{number}.png")


def test_init_looks_and_writes_settings_that_load(
    fcl: Fcl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    images(Path("photos of 'us'"), ("indoors", "outdoors"), ("cat", "dog", "elk"), 4, 40, "RGB")
    assert fcl("init", "photos of 'us'", "--json") == 0
    assert json.loads(capsys.readouterr().out)["domains"] == "indoors, outdoors"
    params = load("params.yaml")
    assert params.data.root == (tmp_path / "photos of 'us'").resolve()
    assert (params.data.size, params.data.channels, params.data.domains) == (32, 3, True)  # type: ignore[attr-defined]
    assert (params.stream.kind, params.partition.clients) == ("domain-incremental", 2)
    assert fcl("init", "photos of 'us'") == 2
    assert "params.yaml is there already" in capsys.readouterr().err


def test_init_tells_classes_from_domains_and_grey_from_colour(tmp_path: Path) -> None:
    images(tmp_path / "grey" / "train", ("",), ("a", "b", "c", "d"), 30, 12, "L")
    images(tmp_path / "grey" / "test", ("",), ("a", "b", "c", "d"), 2, 12, "L")
    (tmp_path / "grey" / "train" / "a" / "broken.png").write_text("no image")
    found = look(tmp_path / "grey")
    assert (found.domains, list(found.classes), found.count) == ((), ["a", "b", "c", "d"], 129)
    assert (found.size, found.tasks, found.unreadable, found.grey) == (8, 2, 1, 128)


@pytest.mark.parametrize("made", [(), ("one",)])
def test_init_refuses_what_is_no_folder_of_classes(made: tuple[str, ...], fcl: Fcl, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    if made:
        images(tmp_path / "images", ("",), made, 2, 8, "L")
    assert fcl("init", str(tmp_path / "images"), "--params", str(tmp_path / "p.yaml")) == 2
    assert not (tmp_path / "p.yaml").exists()


@pytest.mark.slow
def test_status_tells_what_is_there_what_is_stale_and_what_is_cached(
    fcl: Fcl, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def states(*settings: str) -> dict[str, tuple[str, str | None, str | None]]:
        capsys.readouterr()
        assert fcl("status", "--json", *(word for text in settings for word in ("--set", text))) == 0
        rows = json.loads(capsys.readouterr().out)
        return {row["what"]: (row["state"], row["why"], row["steps"]) for row in rows}

    methods = "experiment.methods=[fedavg,fedprox]"
    before = states(methods)
    assert before["data/splits"] == ("done", None, None)
    assert before["runs/fedavg-0"] == ("not begun", None, "0 of 8 cached")
    assert fcl("run", "-m", "fedavg", "-q") == 0
    after = states(methods)
    assert after["runs/fedavg-0"] == ("done", None, "8 of 8 cached")
    assert after["runs/fedprox-0"] == ("not begun", None, "0 of 8 cached")
    assert states("optimizer.lr=0.5")["runs/fedavg-0"] == ("stale", "optimizer.lr", "0 of 8 cached")
    assert states("federation.rounds=[2,3]")["runs/fedavg-0"] == ("stale", "federation.rounds", "5 of 8 cached")
    other_data = states("stream.tasks=5")
    assert other_data["data/splits"] == ("stale", "stream.tasks", None)
    assert other_data["runs/fedavg-0"] == ("stale", "of other data", None)


def test_a_new_methods_files_are_written_once_and_only_into_a_clone(tmp_path: Path) -> None:
    for folder in ("fclmodels/methods", "tests/fclmodels/methods"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "params.yaml").write_text("# top\nmethods: # all\n  er: {}\n  fedavg:\n    mu: 1\n\nexperiment: {}\n")
    from fclmodels.errors import UserError

    method, test, params = write("lean-avg", tmp_path)
    assert "class LeanAvg(FedAvg)" in method.read_text()
    assert "from fclmodels.methods.lean_avg import LeanAvg" in test.read_text()
    assert params.read_text().splitlines()[1:6] == [
        "methods: # all",
        "  er: {}",
        "  fedavg:",
        "    mu: 1",
        "  lean-avg: {}",
    ]
    for name in ("lean-avg", "fedavg", "Lean", "class", "a_b"):
        with pytest.raises(UserError):
            write(name, tmp_path)
    with pytest.raises(UserError, match="has no tests"):
        write("other", tmp_path / "nowhere")


def test_a_block_goes_in_by_name() -> None:
    assert with_block("methods:\n  a: {}\n  c:\n    x: 1\nlast: 1\n", "b") == (
        "methods:\n  a: {}\n  b: {}\n  c:\n    x: 1\nlast: 1\n"
    )


@pytest.mark.slow
def test_a_new_method_passes_its_test_and_the_contract_as_it_is_written(tmp_path: Path) -> None:
    """In a copy of the project."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for file in tracked:
        if (
            file.startswith(("fclmodels/", "flows/", "tests/", "pyproject", "params", "docs/"))
            and (ROOT / file).exists()
        ):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def python(*arguments: str) -> None:
        end = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert end.returncode == 0, end.stdout[-3000:] + end.stderr[-3000:]

    python("-c", "from flows.cli import main; import sys; sys.argv = ['fcl', 'new-method', 'lean-avg']; main()")
    python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/fclmodels/methods/test_lean_avg.py")
    python("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/fclmodels/test_contract.py", "-k", "lean-avg")
    python(
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/fclmodels/test_plugins.py",
        "tests/fclmodels/test_params.py",
    )


def test_the_shell_completes_commands_and_methods() -> None:
    assert {"fedavg", "fedprotip", "fot"} <= set(METHODS("f"))
    asked = {"_FCL_COMPLETE": "complete_bash", "COMP_WORDS": "fcl run --method fedp", "COMP_CWORD": "3"}
    code = "import sys; from flows.cli import main; sys.argv = ['fcl']; main()"
    end = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **asked},
        capture_output=True,
        text=True,
        check=False,
    )
    assert end.stdout.split() == ["fedprotip", "fedprox"]


@pytest.mark.parametrize("command", [["--help"], ["list", "methods"], ["run", "-m", "x"]])
def test_no_colours_but_to_a_terminal(command: list[str]) -> None:
    code = f"import sys; from flows.cli import main; sys.argv = ['fcl', *{command}]; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    end = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert end.stdout + end.stderr
    assert "\x1b" not in end.stdout + end.stderr


def test_verbose_lets_the_workflows_own_logs_through(fcl: Fcl, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VERBOSE:
        monkeypatch.setenv(name, "CRITICAL")
    assert fcl("list", "methods", "--json") == 0
    assert {os.environ[name] for name in VERBOSE} == {"CRITICAL"}
    assert fcl("--verbose", "list", "methods", "--json") == 0
    assert {os.environ[name] for name in VERBOSE} == {"INFO"}
