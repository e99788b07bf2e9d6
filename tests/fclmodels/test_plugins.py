"""Finding plugins by name, what every real one must tell of itself, and the params.yaml that is made of them."""

import inspect
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from fclmodels.errors import UserError
from fclmodels.params import effective, explain, load
from fclmodels.plugins import PACKAGES, all_of, find
from fclmodels.settings import BLOCKS, CHOICES, Params, Settings

ROOT = Path(__file__).parents[2]

FILES = {
    "base.py": """
        from dataclasses import dataclass
        from typing import NamedTuple
        class Base: pass
        class Row(NamedTuple):
            name: str
        @dataclass(slots=True)
        class Column:
            name: str
        """,
    "two_words.py": """
        from stub_methods.base import Base
        from stub_methods.pair import Left
        from fclmodels.data.partitions.iid import Iid
        class TwoWords(Base):
            name = "two-words"
        class Helper(TwoWords): pass
        """,
    "pair.py": """
        from stub_methods.base import Base
        class Right(Base):
            name = "right"
        class Left(Base):
            name = "left"
        """,
}


@pytest.fixture
def stubs(tmp_path, monkeypatch):
    package = tmp_path / "stub_methods"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, source in FILES.items():
        (package / name).write_text(inspect.cleandoc(source))
    for module in [name for name in sys.modules if name.split(".")[0] == package.name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PACKAGES, "method", "stub_methods")
    return package


def test_a_plugin_is_a_class_with_a_name_of_its_own_in_the_file_that_defines_it(stubs):
    assert {name: cls.__name__ for name, cls in all_of("method").items()} == {
        "left": "Left",
        "right": "Right",
        "two-words": "TwoWords",
    }
    assert find("method", "right").__name__ == "Right"


def test_finding_a_plugin_in_the_file_of_its_name_imports_no_other(stubs):
    (stubs / "broken.py").write_text("raise ImportError")
    assert find("method", "two-words").__name__ == "TwoWords"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("two_words", "Did you mean two-words?"),
        ("rihgt", "Did you mean right?"),
        ("", "Valid: left, right, two-words."),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(stubs, name, hint):
    with pytest.raises(UserError) as caught:
        find("method", name)
    assert str(caught.value) == f"{name} is not a method. {hint}"


@pytest.mark.parametrize("kind", PACKAGES)
def test_every_plugin_says_in_one_line_what_it_is_and_keeps_its_settings_beside(kind):
    block = {kind: BLOCKS[block] for block, (kind, _) in CHOICES.items()}.get(kind, Settings)
    assert all_of(kind), f"there is no {kind}"
    for name, plugin in all_of(kind).items():
        assert plugin.__doc__, f"{name} has no docstring"
        assert issubclass(plugin.Settings, block), f"{name} has settings of another block"
        assert find(kind, name) is plugin


def test_every_setting_has_a_description():
    assert [row.path for row in explain() if not row.description] == []


def test_every_setting_has_a_default_and_it_is_what_explain_says(tmp_path):
    empty = tmp_path / "params.yaml"
    empty.touch()
    for row in explain():
        block, method = row.path.split(".")[0], "fedavg"
        chosen = [f"{block}.{CHOICES[block][1]}={row.kinds[0]}"] if block in CHOICES and row.kinds else []
        if block == "methods":
            (method,) = row.kinds
        before, after = load(empty, chosen), load(empty, [*chosen, f"{row.path}={json.dumps(row.default)}"])
        assert effective(before, method) == effective(after, method), row.path


def test_explain_says_which_kinds_have_a_setting():
    partition = {row.path: row for row in explain("partition")}
    assert partition["partition.alpha"].kinds == ("dirichlet",)
    assert partition["partition.clients"].kinds == ()
    assert partition["partition.kind"].allowed == ", ".join(all_of("partition"))


def test_explain_tells_type_default_range_and_meaning():
    (row,) = explain("federation.rounds")
    assert (row.type, row.default) == ("int | list[int]", 10)
    assert row.allowed == "a whole number greater than 0, or a list, each item a whole number greater than 0"
    assert row.description == "rounds a task, or a list with one number a task"


@pytest.mark.parametrize(
    ("name", "type_"),
    [
        ("optimizer.kind", "sgd | adam | adamw"),
        ("device", "auto | cpu | cuda | str"),
        ("federation.threads", "int | auto"),
        ("model.stem_stride", "1 | 2"),
        ("methods.fot.protect", "list[str] | null"),
        ("methods.fedprotip.vectors", "frozen | trained"),
    ],
)
def test_the_type_of_a_choice_is_its_values(name, type_):
    (row,) = explain(name)
    assert row.type == type_


def test_explain_of_a_plugin_is_what_its_block_may_hold():
    assert {row.path for row in explain("iid")} == {
        f"partition.{key}" for key in find("partition", "iid").Settings.model_fields
    }
    assert {row.path for row in explain("dirichlet")} >= {"partition.alpha", "partition.clients"}
    assert {row.path for row in explain("fedprox")} >= {"methods.fedprox.mu"}
    assert all(row.path.startswith("methods.fedprox.") for row in explain("fedprox"))


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("lr", ["optimizer.lr"]),
        ("device", ["device"]),
        ("late_rounds", ["federation.faults.late_rounds"]),
        ("mu", ["methods.fedprox.mu", "methods.prox-anchor.mu"]),
        ("evaluation", ["evaluation.batch_size"]),
        ("seed", ["data.seed", "stream.seed", "partition.seed", "arrivals.seed"]),
    ],
)
def test_explain_finds_settings_by_their_last_name_or_block(name, paths):
    assert [row.path for row in explain(name)] == paths


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("fedprx", "Did you mean fedprox?"),
        ("federation.round", "Did you mean federation.rounds?"),
        ("optimiser", "Did you mean optimizer?"),
        ("?", "fcl params shows them all."),
    ],
)
def test_explain_names_the_nearest(name, hint):
    with pytest.raises(UserError) as caught:
        explain(name)
    assert str(caught.value) == f"{name} is neither a setting nor a plugin. {hint}"


def test_the_default_params_are_those_of_the_demo():
    params = load(ROOT / "params.yaml")
    assert (params.data.source, params.stream.kind, params.stream.tasks) == ("digits", "class-incremental", 5)
    assert (params.partition.kind, params.partition.clients, params.model.backbone) == ("dirichlet", 10, "cnn")
    assert params.experiment.model_dump() == {"methods": ("fedavg", "fedprox", "joint"), "seeds": (0, 1)}


def test_the_default_params_hold_every_block_that_dvc_tracks():
    """DVC refuses a stage whose parameter is missing, and --set-param one that is not in the file."""
    params = load(ROOT / "params.yaml")
    assert params.model_fields_set | {"tracking", "preset"} == set(Params.model_fields)
    own = {name for name, cls in all_of("method").items() if ROOT / "fclmodels" in Path(inspect.getfile(cls)).parents}
    assert set(params.methods) == own


@pytest.mark.parametrize(
    "change",
    [
        "federation.rounds=3",
        "federation.rounds=[1,2,3,4,5]",
        "federation.clients_per_round=4",
        "optimizer.lr=1e-5",
        "methods.fedprox.mu=1",
        "partition.kind=iid",
        "device=cuda:1",
        "experiment.seeds=[0,1,2]",
    ],
)
def test_dvc_exp_run_with_a_changed_parameter_is_the_same_as_an_override(tmp_path, change):
    hydra = pytest.importorskip("dvc.utils.hydra")
    rewritten = tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", rewritten)
    hydra.apply_overrides(rewritten, [change])
    assert load(rewritten) == load(ROOT / "params.yaml", [change])
    before, after = (re.findall("#.*", file.read_text()) for file in (ROOT / "params.yaml", rewritten))
    assert before == after
