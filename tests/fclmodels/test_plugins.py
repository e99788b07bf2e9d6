"""Finding plugins by name, what every real one must tell of itself, and the params.yaml that is made of them."""

import importlib
import inspect
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from fclmodels.errors import UserError
from fclmodels.plugins import PACKAGES, find, is_of_project, list_plugins, load_all, read_names
from fclmodels.settings.base import Settings
from fclmodels.settings.describe import explain
from fclmodels.settings.load import collect_settings, load_params
from fclmodels.settings.schema import BLOCKS, CHOICES, Params
from fclmodels.source_digest import digest_sources, list_closure

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
    assert {name: cls.__name__ for name, cls in load_all("method").items()} == {
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


OWN = """
from fclmodels.methods.fedavg import FedAvg
class {cls}(FedAvg):
    \"\"\"Mine.\"\"\"
    name = "{name}"
    class Settings(FedAvg.Settings):
        pass
"""
MINE = OWN.format(cls="Mine", name="mine")


def test_a_projects_own_plugin_is_found_and_listed_with_its_file(write_plugin):
    assert "mine" not in load_all("method")
    write_plugin("methods/own_file.py", MINE)
    write_plugin("partitions/halves.py", "class Halves:\n    name = 'halves'\n")
    mine = find("method", "mine")
    assert (mine.__module__, mine.__name__) == ("plugins.methods.own_file", "Mine")
    assert find("partition", "halves").__module__ == "plugins.partitions.halves"
    listing = list_plugins("method")
    assert listing.plugins["mine"].plugin is mine
    assert [listing.plugins[name].module.origin for name in ("mine", "fedavg")] == [
        "plugins/methods/own_file.py",
        "fclflow",
    ]
    assert not listing.problems
    assert "mine" in read_names("method")
    assert is_of_project(mine)
    assert not is_of_project(find("method", "fedavg"))


def test_own_plugins_import_one_another(write_plugin):
    write_plugin("methods/mine.py", MINE)
    write_plugin("methods/further.py", "from plugins.methods.mine import Mine\nclass F(Mine):\n    name = 'further'\n")
    assert find("method", "further").__mro__[1] is find("method", "mine")


@pytest.mark.parametrize("file", ["fedavg.py", "other.py"])
def test_a_name_that_two_plugins_have_is_refused_with_both_files(write_plugin, file):
    write_plugin(f"methods/{file}", OWN.format(cls="Again", name="fedavg"))
    line = f"fclmodels/methods/fedavg.py and plugins/methods/{file}. Give each a name of its own."
    with pytest.raises(UserError) as caught:
        find("method", "fedavg")
    assert str(caught.value) == f"fedavg is the name of several plugins: {line}"
    assert list_plugins("method").problems == [str(caught.value)]
    assert find("method", "fedprox").name == "fedprox"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1\ny = z\n", "plugins/methods/bad.py:2 cannot be imported: NameError: name 'z' is not defined"),
        ("def f(:\n", "plugins/methods/bad.py:1 cannot be imported: SyntaxError: invalid syntax"),
        (
            "import no_such_package\n",
            "plugins/methods/bad.py:1 cannot be imported: ModuleNotFoundError: No module named 'no_such_package'",
        ),
        ("raise ValueError('a\\nb')", "plugins/methods/bad.py:1 cannot be imported: ValueError: a b"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_line_and_stands_in_no_others_way(write_plugin, text, problem):
    write_plugin("methods/mine.py", MINE)
    write_plugin("methods/bad.py", f'{text}\nclass Bad:\n    name = "bad"\n')
    listing = list_plugins("method")
    assert listing.problems == [problem]
    assert {"mine", "fedavg"} <= listing.plugins.keys()
    assert find("method", "mine").name == "mine"
    with pytest.raises(UserError) as caught:
        find("method", "bad")
    assert str(caught.value) == problem
    with pytest.raises(UserError) as caught:
        find("method", "minne")
    assert str(caught.value) == f"minne is not a method. Did you mean mine? {problem}"


def install(folder, monkeypatch, group, value, module):
    """A package toy-package with one entry point, as pip leaves it."""
    (folder / "toy_package-1.2.dist-info").mkdir(parents=True)
    (folder / "toy_package-1.2.dist-info" / "METADATA").write_text("Name: toy-package\nVersion: 1.2\n")
    (folder / "toy_package-1.2.dist-info" / "entry_points.txt").write_text(f"[{group}]\nmine = {value}\n")
    (folder / "toy_package").mkdir()
    (folder / "toy_package" / "__init__.py").touch()
    (folder / "toy_package" / "method.py").write_text(module)
    monkeypatch.syspath_prepend(folder)


@pytest.fixture
def no_toy_package():
    yield
    for name in [name for name in sys.modules if name.startswith("toy_package")]:
        del sys.modules[name]


def test_an_installed_packages_plugin_is_found_by_its_entry_point(write_plugin, tmp_path, monkeypatch, no_toy_package):
    install(tmp_path / "site", monkeypatch, "fclflow.methods", "toy_package.method:Mine", MINE)
    mine = find("method", "mine")
    assert mine.__module__ == "toy_package.method"
    assert list_plugins("method").plugins["mine"].module.origin == "toy-package 1.2"
    write_plugin("methods/mine.py", MINE)
    with pytest.raises(UserError, match=r"plugins/methods/mine.py and toy_package.method:Mine of toy-package 1.2\."):
        find("method", "mine")


BASES = {
    "backbone": "fclmodels.backbones.mlp import Mlp",
    "source": "fclmodels.data.sources.digits import Digits",
    "stream": "fclmodels.data.streams.task_incremental import TaskIncremental",
    "partition": "fclmodels.data.partitions.iid import Iid",
}


@pytest.mark.parametrize("kind", BASES)
def test_each_kind_has_entry_points(kind, tmp_path, monkeypatch, no_toy_package):
    base = BASES[kind].rpartition(" ")[2]
    module = f"from {BASES[kind]}\nclass Mine({base}):\n    \"Mine.\"\n    name = 'mine'\n"
    install(tmp_path / "site", monkeypatch, f"fclflow.{kind}s", "toy_package.method:Mine", module)
    assert find(kind, "mine").__mro__[1].__name__ == base
    assert list_plugins(kind).plugins["mine"].module.origin == "toy-package 1.2"


@pytest.mark.parametrize(("value", "why"), [("toy_package.gone:Mine", "No module"), ("toy_package.method:No", "No")])
def test_an_entry_point_that_leads_nowhere_is_one_line(write_plugin, tmp_path, monkeypatch, no_toy_package, value, why):
    install(tmp_path / "site", monkeypatch, "fclflow.methods", value, MINE)
    (problem,) = list_plugins("method").problems
    assert problem.startswith(f"{value} of toy-package 1.2 cannot be imported: ")
    assert why in problem
    with pytest.raises(UserError, match="cannot be imported"):
        find("method", "mine")


def test_another_package_called_plugins_is_not_the_projects(write_plugin, tmp_path, monkeypatch):
    (tmp_path / "site" / "plugins").mkdir(parents=True)
    (tmp_path / "site" / "plugins" / "__init__.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    write_plugin("methods/mine.py", MINE)
    assert find("method", "mine").name == "mine"
    del sys.modules["plugins"], sys.modules["plugins.methods"], sys.modules["plugins.methods.mine"]
    importlib.import_module("plugins")
    with pytest.raises(UserError, match=rf"has a package plugins from {tmp_path}/site/plugins already"):
        find("method", "mine")
    assert find("method", "fedavg").name == "fedavg"


def test_settings_of_an_own_plugin_are_read_explained_and_checked(write_plugin, tmp_path):
    write_plugin(
        "methods/mine.py",
        "from pydantic import Field\n" + MINE.replace("pass", "mu: float = Field(0.5, description='a weight')"),
    )
    params = tmp_path / "params.yaml"
    params.write_text("methods:\n  mine: {mu: 2}\n")
    assert collect_settings(load_params(params), "mine")["methods"]["mine"]["mu"] == 2
    assert {row.path for row in explain("mine")} == {"methods.mine.batch_norm", "methods.mine.mu"}
    params.write_text("methods:\n  mine: {nu: 2}\n")
    with pytest.raises(UserError, match=r"methods.mine.nu is not a setting. Valid: batch_norm, mu"):
        load_params(params)


def test_keys_change_with_the_code_of_what_is_used_and_with_nothing_else(write_plugin):
    def code():
        return digest_sources(find("method", "mine").__module__)

    write_plugin("methods/mine.py", "from plugins.helpers import x\n" + MINE)
    write_plugin("helpers.py", "x = 1\n")
    first = code()
    write_plugin("methods/other.py", OWN.format(cls="Other", name="other"))
    write_plugin("helpers.py", '"""A docstring."""\nx = 1  # a comment\n')
    assert code() == first
    write_plugin("helpers.py", "x = 2\n")
    second = code()
    write_plugin("methods/mine.py", "from plugins.helpers import x\n" + MINE.replace("pass", "y: int = 1"))
    assert len({first, second, code()}) == 3


def test_keys_change_with_an_installed_packages_own_code(write_plugin, tmp_path, monkeypatch, no_toy_package):
    folder = tmp_path / "site"
    install(folder, monkeypatch, "fclflow.methods", "toy_package.method:Mine", f"import toy_package.part\n{MINE}")
    (folder / "toy_package" / "part.py").write_text("x = 1\n")
    module = find("method", "mine").__module__
    assert {"toy_package.method", "toy_package.part", "fclmodels.methods.fedavg"} <= list_closure([module])


@pytest.mark.parametrize("kind", PACKAGES)
def test_every_plugin_says_in_one_line_what_it_is_and_keeps_its_settings_beside(kind):
    block = {kind: BLOCKS[block] for block, (kind, _) in CHOICES.items()}.get(kind, Settings)
    assert load_all(kind), f"there is no {kind}"
    for name, plugin in load_all(kind).items():
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
        before, after = (
            load_params(empty, chosen),
            load_params(empty, [*chosen, f"{row.path}={json.dumps(row.default)}"]),
        )
        assert collect_settings(before, method) == collect_settings(after, method), row.path


def test_explain_says_which_kinds_have_a_setting():
    partition = {row.path: row for row in explain("partition")}
    assert partition["partition.alpha"].kinds == ("dirichlet",)
    assert partition["partition.clients"].kinds == ()
    assert partition["partition.kind"].allowed == ", ".join(load_all("partition"))


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
        ("rates_lr", ["methods.fedl2p-meta.rates_lr"]),
        ("device", ["device"]),
        ("late_rounds", ["federation.faults.late_rounds"]),
        ("mu", ["methods.feddbe.mu", "methods.fedprox.mu", "methods.prox-anchor.mu"]),
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
    params = load_params(ROOT / "params.yaml")
    assert (params.data.source, params.stream.kind, params.stream.tasks) == ("digits", "class-incremental", 5)
    assert (params.partition.kind, params.partition.clients, params.model.backbone) == ("dirichlet", 10, "cnn")
    methods = ("fedavg", "fot", "fedprotip", "special", "stamp", "er", "joint")
    assert params.experiment.model_dump() == {"methods": methods, "seeds": (0,)}


def test_the_default_params_hold_every_block_that_dvc_tracks():
    """DVC refuses a stage whose parameter is missing, and --set-param one that is not in the file."""
    params = load_params(ROOT / "params.yaml")
    assert params.model_fields_set | {"tracking", "preset"} == set(Params.model_fields)
    own = {name for name, cls in load_all("method").items() if ROOT / "fclmodels" in Path(inspect.getfile(cls)).parents}
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
    assert load_params(rewritten) == load_params(ROOT / "params.yaml", [change])
    before, after = (re.findall("#.*", file.read_text()) for file in (ROOT / "params.yaml", rewritten))
    assert before == after
