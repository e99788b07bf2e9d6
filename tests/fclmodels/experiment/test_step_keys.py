"""Cache keys of steps: they change with what a result depends on, and with nothing else.

Edits are made to the text that source_digest reads, not to files.
"""

import ast
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from fclmodels import source_digest
from fclmodels.backbones.adapters.adapted import Adapted
from fclmodels.experiment.step_keys import MONITORS, compute_step_key, identify, list_modules, list_optional_modules
from fclmodels.federation import evaluation
from fclmodels.federation.executors.client_work import PROTECTION, list_stage_modules
from fclmodels.methods.fedavg import FedAvg
from fclmodels.plugins import find, load_all
from fclmodels.source_digest import list_closure

ON_CNN = ("model={backbone: cnn, width: 2, features: 5}",)
ATTACK = ("federation.attack.kind=label-flip",)
NOISE = ("federation.privacy.noise_multiplier=1", "federation.weighting=uniform")
MASKS = ("federation.secagg.on=true",)
FEDAVG, CNN, VIT = "fclmodels.methods.fedavg", "fclmodels.backbones.cnn", "fclmodels.backbones.vit"
SERVER_TRAINING = "fclmodels.federation.training.server_training"
# Modules that are imported inside of functions and make no result, or are in the key by another way.
WITHOUT_EFFECT = {
    "fclmodels.plugins": "finds the backbone, whose module is in the key by its name",
    "fclmodels.backbones.model.prompt_adapters": "only methods that attach an adapter need it, and they import it",
    "fclmodels.federation.evaluation": "answers questions about accuracy, and is in the keys of these steps",
    "fclmodels.storage.parquet_check": "refuses damaged files",
}

Edit = Callable[[bytes], bytes]
Keys = dict[str, str]


def add_code(source: bytes) -> bytes:
    return source + b"\nEDITED = 1\n"


def add_comments(source: bytes) -> bytes:
    return b"# edited\n" + source + b"\n\n# edited\n"


def change_docstrings(source: bytes) -> bytes:
    """Another docstring in the place of each one, and new ones where there was none."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            has_docstring = ast.get_docstring(node) is not None
            node.body[: int(has_docstring)] = [ast.Expr(ast.Constant("Edited."))]
    return ast.unparse(ast.fix_missing_locations(tree)).encode()


@pytest.fixture
def edit_sources(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, Edit]], None]:
    """Makes source_digest read these modules as edited, and all others as they are."""
    read, cached = source_digest._read_source, (source_digest._digest_code, source_digest._list_imports)

    def edit(edits: Mapping[str, Edit]) -> None:
        def look(function: Any, name: str, *rest: Any) -> Any:
            return (function.__wrapped__ if name in edits else function)(name, *rest)  # else from its cache

        monkeypatch.setattr(source_digest, "_read_source", lambda name: edits.get(name, bytes)(read(name)))
        for function in cached:
            monkeypatch.setattr(source_digest, function.__name__, partial(look, function))

    return edit


@pytest.fixture
def stale(method_of: Callable[..., Any], edit_sources: Callable[..., None]) -> Callable[..., set[str]]:
    """The steps of the first task whose keys these edits change, under these settings."""

    def keys(kind: type[FedAvg], overrides: tuple[str, ...], edits: Mapping[str, Edit]) -> Keys:
        edit_sources(edits)
        method = method_of(kind, *overrides)
        identity = identify(method)
        return {stage: compute_step_key(method, identity, stage, "state", 0, 1) for stage in sorted(ALL)}

    def compare(edits: Mapping[str, Edit], *overrides: str, method: type[FedAvg] = FedAvg) -> set[str]:
        before, after = keys(method, overrides, {}), keys(method, overrides, edits)
        return {stage for stage in before if before[stage] != after[stage]}

    return compare


ALL = {"begin", "learn", "conclude", "evaluate", "judge"}


@pytest.mark.parametrize(
    ("module", "edit"),
    [
        (f"{PROTECTION}.secagg_protocol", add_comments),
        (f"{PROTECTION}.secagg_protocol", add_code),
        (FEDAVG, change_docstrings),
        (FEDAVG, add_comments),
        (VIT, add_code),
        (f"{PROTECTION}.attacks", add_code),
        (f"{PROTECTION}.privacy", add_code),
        (f"{PROTECTION}.secure_aggregation", add_code),
        ("fclmodels.numerics.robust_means", add_code),
        (SERVER_TRAINING, add_code),
        ("fclmodels.federation.training.frozen_activations", add_code),
        ("fclmodels.federation.executors.processes", add_code),
        ("fclmodels.federation.engine.ledger", add_code),
        ("fclmodels.methods.fedprox", add_code),
        (MONITORS, add_code),
    ],
)
def test_what_fedavg_on_cnn_does_not_use_makes_no_step_stale(
    module: str, edit: Edit, stale: Callable[..., set[str]]
) -> None:
    assert stale({module: edit}, *ON_CNN) == set()


@pytest.mark.parametrize("module", [FEDAVG, CNN, "fclmodels.federation.engine.rounds", "fclmodels.randomness"])
def test_code_that_it_runs_makes_every_step_stale(module: str, stale: Callable[..., set[str]]) -> None:
    assert stale({module: add_code}, *ON_CNN) == ALL


def test_evaluation_makes_only_steps_stale_that_evaluate(stale: Callable[..., set[str]]) -> None:
    assert stale({evaluation.__name__: add_code}, *ON_CNN) == {"evaluate", "judge"}


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (f"{PROTECTION}.attacks", ATTACK),
        (f"{PROTECTION}.privacy", NOISE),
        (f"{PROTECTION}.secure_aggregation", MASKS),
        (f"{PROTECTION}.secagg_protocol", MASKS),
        ("fclmodels.numerics.robust_means", ("federation.aggregation=median",)),
    ],
)
def test_an_edit_of_an_option_counts_where_it_is_on(
    module: str, settings: tuple[str, ...], stale: Callable[..., set[str]]
) -> None:
    assert stale({module: add_code}, *ON_CNN, *settings) == ALL
    assert stale({module: add_comments}, *ON_CNN, *settings) == set()


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (f"{PROTECTION}.attacks", (*NOISE, *MASKS)),
        (f"{PROTECTION}.privacy", (*ATTACK, *MASKS)),
        (f"{PROTECTION}.secure_aggregation", ATTACK),
    ],
)
def test_an_edit_of_an_option_does_not_count_where_others_are_on(
    module: str, settings: tuple[str, ...], stale: Callable[..., set[str]]
) -> None:
    assert stale({module: add_code}, *ON_CNN, *settings) == set()


def test_an_edit_of_vit_counts_where_it_runs(stale: Callable[..., set[str]]) -> None:
    vit = "model={backbone: vit, patch: 3, width: 8, depth: 1, attention_heads: 2}"
    assert stale({VIT: add_code}, vit) == ALL
    assert stale({CNN: add_code}, vit) == set()


def test_monitors_count_where_they_look(stale: Callable[..., set[str]]) -> None:
    assert stale({MONITORS: add_code}, *ON_CNN, "monitors.drift=true") == {"learn"}
    assert stale({MONITORS: add_code}, *ON_CNN, "monitors.used_share=true") == {"conclude"}


@pytest.mark.parametrize("toy", ["server-student", "beside-network"])
def test_the_servers_training_counts_for_methods_whose_server_trains(
    toy: str, toys: object, stale: Callable[..., set[str]]
) -> None:
    assert stale({SERVER_TRAINING: add_code}, method=find("method", toy)) == ALL


def modules_of_fedavg_on_cnn() -> set[str]:
    engine = ("fclmodels.federation.engine.rounds", "fclmodels.federation.executors.client_work")
    return list_closure([FEDAVG, CNN, *engine])


def test_fedavg_on_cnn_depends_on_40_modules_at_most(method_of: Callable[..., FedAvg]) -> None:
    modules = modules_of_fedavg_on_cnn()
    assert len(modules) <= 40, sorted(modules)
    assert list_closure(list_modules(method_of(FedAvg, *ON_CNN))) == modules


def test_of_none_of_these_a_comment_or_a_docstring_counts_and_of_each_a_line_of_code_does(
    edit_sources: Callable[..., None],
) -> None:
    modules = sorted(modules_of_fedavg_on_cnn())
    digest = partial(source_digest.digest_sources, *modules)
    edit_sources({})
    before = digest()
    for edit in (add_comments, change_docstrings):
        edit_sources(dict.fromkeys(modules, edit))
        assert digest() == before
    edit_sources({})
    digests = {name: source_digest._digest_code(name) for name in modules}
    edit_sources(dict.fromkeys(modules, add_code))
    assert all(source_digest._digest_code(name) != digests[name] for name in modules)


def test_every_import_inside_of_a_function_is_in_the_key_where_it_is_used_or_makes_no_result(
    method_of: Callable[..., FedAvg],
) -> None:
    """Over all that any method's result depends on."""
    options = {*list_optional_modules(method_of(FedAvg).run.params), *every_stage(method_of)}
    plugins = {kind.__module__ for family in ("method", "backbone") for kind in load_all(family).values()}
    modules = modules_of_fedavg_on_cnn() | list_closure(plugins | options)
    importers = {name: module for module in modules for name in imports_inside_of_functions(module)}
    missing = {name: importers[name] for name in importers.keys() - options - WITHOUT_EFFECT.keys()}
    assert not missing
    assert WITHOUT_EFFECT.keys() <= importers.keys(), "a module on the list is not imported inside of a function"


def every_stage(method_of: Callable[..., FedAvg]) -> list[str]:
    return list_stage_modules(method_of(FedAvg, *ATTACK, *NOISE, *MASKS).run.params.federation)


def test_the_list_of_stages_is_complete(method_of: Callable[..., FedAvg]) -> None:
    names = ("privacy", "attacks", "secure_aggregation")
    assert every_stage(method_of) == [f"{PROTECTION}.{name}" for name in names]


def imports_inside_of_functions(module: str) -> set[str]:
    """The project's modules that functions of this one import."""
    nodes = list(ast.walk(ast.parse(source_digest._read_source(module))))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    statements = [node for function in functions for node in ast.walk(function)]
    names = {node.module or "" for node in statements if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
    return {name for name in names if name.startswith("fclmodels.")}


def test_whoever_attaches_an_adapter_has_its_code_in_the_key() -> None:
    methods = [kind for kind in load_all("method").values() if issubclass(getattr(kind, "attaches", object), Adapted)]
    assert len(methods) > 3
    for kind in methods:
        assert "fclmodels.backbones.model.prompt_adapters" in list_closure([kind.__module__]), kind.name


@pytest.mark.parametrize(
    ("setting", "switch"),
    [
        ("federation.attack.strength=9", "federation.attack.kind=label-flip"),
        ("federation.secagg.threshold=0.9", "federation.secagg.on=true"),
        ("federation.robust.bad=0.3", "federation.aggregation=trimmed-mean"),
        ("federation.faults.late_rounds=3", "federation.faults.late=0.1"),
    ],
)
def test_settings_of_what_is_off_do_not_count(setting: str, switch: str, method_of: Callable[..., FedAvg]) -> None:
    assert identify(method_of(FedAvg, setting)) == identify(method_of(FedAvg))
    assert identify(method_of(FedAvg, switch, setting)) != identify(method_of(FedAvg, switch))


def test_papers_figures_do_not_count(method_of: Callable[..., FedAvg]) -> None:
    assert "fclmodels.settings.preset" not in list_closure(list_modules(method_of(FedAvg)))
