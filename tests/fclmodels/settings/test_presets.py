"""The presets say what the papers say, and a comparison puts the right figures beside the right runs."""

import json
from collections.abc import Callable
from functools import cache
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fclmodels.backbones.model.network import build_network, build_skeleton
from fclmodels.backbones.model.prompt_adapters import adapt
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.data.prepare import prepare
from fclmodels.data.sources.base import list_arrays
from fclmodels.data.sources.digits import DIGITS
from fclmodels.data.splits.make_splits import write_splits
from fclmodels.data.splits.split_reader import Splits
from fclmodels.data.streams.overlapping_classes import count_tasks
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.run_context import Run as FederationRun
from fclmodels.plugins import find, read_names
from fclmodels.report.paper_figures import Figure, collect_figures, describe_fewer_rounds
from fclmodels.report.read_runs import Group, Result, RunFolder
from fclmodels.settings import load as reading
from fclmodels.settings.describe import explain
from fclmodels.settings.federation import FederationSettings
from fclmodels.settings.preset import find_unit
from fclmodels.settings.schema import Params
from fclmodels.tables import READINGS

ROOT = Path(__file__).parents[3]
FILES = {path.stem: path for path in sorted((ROOT / "presets").glob("*.yaml"))}
ACCURACIES = ("acc", "avg", "local_acc", "global_acc", "tip_acc")
SMALL = ("pip-digits", "pip-cifar100-small")  # a paper's set-up in a size that it has no figures for

MakeExperiment = Callable[..., Experiment]


def load(name: str, *overrides: str, method: str | None = None) -> Params:
    return reading.load_params(FILES[name], overrides, method)


def total_rounds(name: str, method: str, tasks: int) -> int:
    rounds = load(name, method=method).federation.rounds
    return rounds * tasks if isinstance(rounds, int) else sum(rounds)


def run_of(settings: dict[str, Any], method: str, preset: Any = None, **result: Any) -> RunFolder:
    """A run as a comparison reads it, without its tables."""
    content = {"format": 1, "method": method, "seed": 0, "metrics": {}, "settings": settings, "digests": {}}
    content |= {"versions": {}, "seconds": 0, "bytes_up": 0, "bytes_down": 0, "preset": preset}
    tables = {field: pl.DataFrame() for field in RunFolder.__dataclass_fields__ if field not in ("folder", "result")}
    return RunFolder(Path(method), Result.model_validate(content | result), **tables)


def group_of(run: RunFolder) -> Group:
    return Group(run.result.method, (run,))


def find_figures(name: str, method: str, of_reading: str | None, *overrides: str) -> list[Figure]:
    return collect_figures([group_of(run_of_preset(name, method, *overrides))]).get(of_reading, [])


@cache
def run_of_preset(name: str, method: str, *overrides: str) -> RunFolder:
    params = reading.note_changes(load(name, *overrides, method=method), method, FILES[name])
    return run_of(reading.collect_settings(params, method), method, params.preset.model_dump(exclude={"only"}))


# the files


def test_every_preset_of_the_issue_is_there() -> None:
    fot = {f"fot-{of}" for of in ("pmnist-iid", "pmnist-noniid", "cifar100-iid", "cifar100-noniid")}
    fot |= {"fot-5datasets", "fot-miniimagenet"}
    cifar = {f"fedprotip-cifar100-{of}" for of in ("iid", "a05", "a02", "scratch", "vit")}
    others = {f"fedprotip-imagenetr-{n}" for n in (5, 10, 20)} | {f"fedprotip-domainnet-order{n}" for n in (1, 2)}
    special = {f"special-{of}" for of in ("digit10", "vlcs", "pacs", "dn4il", "cifar100-ci", "glue")}
    assert fot | cifar | others | special <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_preset_says_what_it_is(name: str) -> None:
    preset, experiment = reading.load_preset(FILES[name])
    assert preset.name == name
    assert preset.paper
    assert preset.needs
    tables = [table for table in preset.figures if table.reading and not table.where]
    groups = {method: group_of(run_of_preset(name, method)) for method in experiment.methods}
    with_figures = {method for method, group in groups.items() if any(collect_figures([group]))}
    without = "lost" in preset.note or name in SMALL
    assert set(experiment.methods) <= with_figures or (not tables and without)


@pytest.fixture(scope="module")
def settings() -> set[str]:
    return {setting.path for setting in explain()}


@pytest.mark.parametrize("name", FILES)
def test_a_papers_figures_are_possible_and_do_not_contradict_each_other(name: str, settings: set[str]) -> None:
    preset, _ = reading.load_preset(FILES[name])
    cells: dict[Any, float] = {}
    for table in preset.figures:
        assert table.reading in (*READINGS, None)
        assert table.where.keys() <= settings
        for method, row in table.rows.items():
            for column, value in zip(table.columns, row, strict=True):
                if value is None:
                    continue
                is_accuracy = column.partition("_after_")[0] in ACCURACIES or column.startswith("task_")
                assert not is_accuracy or (table.reading and 0 < value <= 100)
                assert not column.endswith("_std") or 0 <= value < 11
                assert find_unit(column) == "%" or value > 0
                cell = (method, table.reading, column, *sorted(table.where.items()))
                assert cells.setdefault(cell, value) == value


def test_each_presets_methods_are_all_rows_of_its_tables_that_are_methods_here() -> None:
    """Without exception: a row that is no method here is there for its figures alone."""
    methods = set(read_names("method"))
    for path in FILES.values():
        preset, experiment = reading.load_preset(path)
        rows = {method for table in preset.figures for method in table.rows}
        assert rows & methods <= set(experiment.methods), path.stem


@pytest.mark.parametrize("name", FILES)
def test_a_synthetic_pool_of_a_preset_is_below_a_quarter_of_a_gigabyte(name: str) -> None:
    """At 224 pixels the releases' 8,000 to 12,800 images would have 1.2 to 2 GB, in each task and at each client."""
    params = load(name)
    for method in {"target", "target-lode", "lander"} & set(params.experiment.methods):
        of = reading.load_method_settings(load(name, method=method), method)
        side = of.side or getattr(params.data, "size", None) or 32
        assert 3 * of.pool * side**2 < 2**28


@pytest.mark.parametrize("name", list(FILES))
def test_a_preset_loads_for_each_of_its_methods_and_sets_nothing_apart_for_tuning(name: str) -> None:
    for method in load(name).experiment.methods:
        params = load(name, method=method)
        assert params.partition.val == 0
        assert method in params.methods
        reading.load_method_settings(params, method)


# facts on paper


@pytest.mark.parametrize(
    ("name", "tasks", "clients", "per_round", "batch", "rounds", "last_threshold"),
    [
        ("fot-pmnist-iid", 10, 125, 64, 64, 2000, 0.94),
        ("fot-pmnist-noniid", 10, 125, 64, 64, 2000, 0.96),
        ("fot-cifar100-iid", 10, 50, 25, 16, 10_000, 0.879),
        ("fot-cifar100-noniid", 10, 50, 25, 16, 10_000, 0.879),
        ("fot-5datasets", 5, 150, 64, 16, 1500, 0.954),
        ("fot-miniimagenet", 20, 50, 25, 16, 5000, 0.919),
    ],
)
def test_fot_f4(
    name: str, tasks: int, clients: int, per_round: int, batch: int, rounds: int, last_threshold: float
) -> None:
    params = load(name, method="fot")
    fot = reading.load_method_settings(params, "fot")
    assert (params.partition.clients, params.federation.clients_per_round) == (clients, per_round)
    assert (params.federation.batch_size, params.federation.local_epochs, params.optimizer.lr) == (batch, 1, 0.01)
    assert total_rounds(name, "fot", tasks) == rounds
    assert fot.threshold + (tasks - 1) * fot.threshold_step == pytest.approx(last_threshold)
    assert (fot.samples, fot.patches) == (None, None)
    assert (fot.rank_rule, fot.threshold_by, fot.budget) == ("release", "fixed", 1.0)
    er, ewc = (reading.load_method_settings(params, method) for method in ("er", "ewc"))
    assert (er.memory, er.memory_of) == (1, "each-task")
    assert reading.load_method_settings(params, "rgo-approx").share == 0.4
    assert ewc.lam == {"pmnist": 40, "cifar100": 20, "5datasets": 1, "miniimagenet": 0.01}[name.split("-")[1]]
    kind = "shards" if name.endswith("noniid") else "iid"
    assert params.partition.kind == kind


@pytest.mark.parametrize("name", ["fot-pmnist-iid", "fot-pmnist-noniid"])
def test_fedavg_has_1100_rounds_on_permuted_mnist_and_the_others_2000(name: str) -> None:
    assert total_rounds(name, "fedavg", 10) == 1100
    assert {total_rounds(name, method, 10) for method in ("fot", "gpm")} == {2000}
    assert load(name).federation.rounds == 200


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("fedprotip") and "vit" not in name])
def test_fedprotip_e3(name: str) -> None:
    params = load(name, method="fedprotip")
    own = reading.load_method_settings(params, "fedprotip")
    assert (params.partition.clients, params.federation.clients_per_round) == (5, None)
    assert (params.federation.local_epochs, params.federation.batch_size) == (5, 64)
    assert params.federation.rounds == (20 if "domainnet" in name else 50)
    assert (params.optimizer.kind, params.optimizer.lr, params.optimizer.weight_decay) == ("sgd", 0.01, 5e-4)
    assert (own.threshold, own.threshold_step, own.patches) == (0.95 if "scratch" in name else 0.7, 0.001, 512)
    assert reading.load_method_settings(params, "fot").threshold == (0.87 if "cifar" in name else 0.9)
    assert (params.model.weights is None) == ("scratch" in name)


def test_fedprotips_network_has_2048_features_and_a_frozen_head_a_task() -> None:
    params = load("fedprotip-cifar100-scratch", method="fedprotip")
    spec = ModelSpec(params.model.model_dump(mode="json"), (3, 32, 32), params.model.head, ((0, 1), (2, 3)))
    network = build_network(spec, torch.Generator())
    assert (network.backbone.features, len(network.heads)) == (2048, 2)


@cache
def count_parameters(model: str) -> float:
    """In millions, with one head of 100 classes on images of 224 pixels."""
    settings = json.loads(model)
    with torch.device("meta"):
        network = build_skeleton(ModelSpec(settings, (3, 224, 224), settings["head"], (tuple(range(100)),)))
    return sum(p.numel() for p in network.parameters()) / 1e6


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("pip-") and name not in SMALL])
def test_pips_rivals_have_a_resnet_18_of_table_1(name: str) -> None:
    """Of 11.3 million parameters; no rival inherits a setting of the ViT-B/16, which has 86."""
    models = {method: load(name, method=method).model for method in load(name).experiment.methods}
    counts = {method: count_parameters(model.model_dump_json()) for method, model in models.items()}
    resnets = {method for method, model in models.items() if model.backbone == "resnet18"}
    assert resnets >= {"icarl", "glfc", "lga", "podnet", "dde-icarl"}
    assert all(counts[method] == pytest.approx(11.3, abs=0.1) for method in resnets)
    assert counts["dytox"] < 12
    assert max(counts.values()) < 100


@pytest.mark.parametrize(
    ("name", "alpha", "rounds", "domains", "weight"),
    [
        ("special-digit10", 0.1, 20, ["usps", "svhn", "emnist", "mnist"], 0.25),
        ("special-vlcs", 0.3, 20, ["caltech101", "labelme", "sun09", "voc2007"], 0.4),
        ("special-pacs", 0.3, 20, ["sketch", "cartoon", "photo", "art_painting"], 0.05),
        ("special-dn4il", 5.0, 30, ["sketch", "infograph", "painting", "quickdraw", "real", "clipart"], None),
    ],
)
def test_special_table_6(name: str, alpha: float, rounds: int, domains: list[str], weight: float | None) -> None:
    """Its settings, the orders of the domains in Tables 9 to 12, and lambda as a review has it."""
    params = load(name, method="special")
    assert (params.partition.clients, params.partition.kind, params.partition.alpha) == (8, "dirichlet", alpha)
    assert (params.federation.rounds, params.federation.local_epochs, params.federation.batch_size) == (rounds, 5, 32)
    assert (params.optimizer.kind, params.optimizer.lr, params.federation.server_lr_schedule) == ("sgd", 0.001, "1/t")
    assert (params.model.backbone, params.stream.kind) == ("resnet18", "domain-incremental")
    named = params.stream.domains or [part["source"] for part in params.data.parts]
    assert list(named) == domains
    if weight is not None:
        assert params.methods["special"]["lambda"] == weight


def test_digit10_is_one_stream_of_the_ten_digits(tmp_path: Path) -> None:
    """Four data sets in four sizes, grey and colour, with one head over the same ten classes."""
    params = load("special-digit10")
    source = find("source", params.data.source)(params.data)
    for part, size in zip(source.parts, ((16,), (32, 3), (28,), (28,)), strict=True):
        images = np.zeros((200, size[0], *size), np.uint8)
        halves = {split: (images[:100], np.arange(100) % 10) for split in ("train", "test")}
        part.catalogue = lambda halves=halves, name=part.name: list_arrays(name, DIGITS, halves)
    prepare(source, tmp_path / "prepared")
    stream, partition = (
        find(kind, getattr(params, kind).kind)(getattr(params, kind)) for kind in ("stream", "partition")
    )
    splits = Splits.open(write_splits(tmp_path / "prepared", stream, partition, tmp_path / "splits"))
    assert params.data.parts[2] == {"source": "emnist", "split": "digits"}
    assert [task.name for task in splits.tasks] == ["usps", "svhn", "emnist", "mnist"]
    assert {task.classes for task in splits.tasks} == {tuple(range(10))}
    assert (splits.head, splits.shape, splits.clients) == ("growing", (3, 32, 32), 8)


def test_specials_network_has_the_bytes_of_table_15() -> None:
    """42.69 MB, of 2^20 bytes and with all buffers: only the 7x7 stem with three channels comes to that."""
    model = load("special-digit10").model.model_dump(mode="json")

    def megabytes(channels: int, **changed: Any) -> float:
        network = build_network(
            ModelSpec(model | changed, (channels, 32, 32), "growing", (tuple(range(10)),)), torch.Generator()
        )
        return sum(t.numel() * t.element_size() for t in network.state_dict().values()) / 2**20

    assert round(megabytes(3), 2) == 42.69
    assert round(megabytes(1), 2) != 42.69
    assert round(megabytes(3, stem="cifar"), 2) != 42.69


@pytest.mark.parametrize(
    ("name", "method", "of_reading", "acc", "forgetting"),
    [
        ("special-digit10", "special", "task_agnostic", 62.12, None),
        ("special-vlcs", "fedavg", "task_agnostic", 51.22, None),
        ("special-pacs", "special-c", "task_agnostic", 43.30, None),
        ("special-dn4il", "flwf-2t", "task_agnostic", 23.21, None),
        ("fot-pmnist-iid", "fot", "task_aware", 90.35, 1.75),
        ("fot-pmnist-noniid", "fot", "task_aware", 85.21, 1.97),
        ("fot-pmnist-iid", "fedavg", "task_aware", 85.68, 8.29),
        ("fot-pmnist-noniid", "fedavg", "task_aware", 80.06, 9.21),
        ("fot-cifar100-noniid", "fot", "task_aware", 66.31, 0.60),
        ("fedprotip-cifar100-a05", "fedprotip", "paper_task_predicted", 86.00, 0.83),
        ("fedprotip-cifar100-a05", "fedprotip", "task_agnostic", 48.41, 15.59),
        ("fedprotip-cifar100-scratch", "fot", "task_agnostic", 22.18, 9.10),
        ("fedprotip-imagenetr-20", "fedavg", "task_agnostic", 6.08, 31.75),
        ("fedprotip-domainnet-order2", "fedprotip", "paper_task_predicted", 28.06, 2.10),
    ],
)
def test_the_papers_figures(name: str, method: str, of_reading: str, acc: float, forgetting: float | None) -> None:
    figure = next(figure for figure in find_figures(name, method, of_reading) if "acc" in figure.values)
    assert figure.values["acc"] == acc
    assert figure.values.get("ft", figure.values.get("fgt")) == forgetting


def test_table_12_stands_beside_the_thresholds_that_were_run() -> None:
    name = "fot-cifar100-noniid"
    overrides = [f"methods.fot.threshold={threshold}" for threshold in (0.8, 0.87, 0.9)]
    runs = [group_of(run_of_preset(name, "fot", override)) for override in overrides]
    figures = collect_figures(runs)["task_aware"]
    assert [(figure.table.table, figure.values.get("acc")) for figure in figures] == [
        ("Table 12", 67.7),
        ("Table 1", 66.31),
        ("Table 12", None),
        ("Table 12", 65.2),
    ]
    assert figures[0].title == "fot, Table 12, threshold=0.8"


SHARDS = ("partition.kind=shards",)
AT_0775 = ("methods.fedprotip.threshold=0.775", "methods.fedprotip.tip_threshold=0.775")
SKETCHED = ("methods.fedprotip.exchange=sketch",)


@pytest.mark.parametrize(
    ("name", "method", "overrides", "column", "value"),
    [
        ("fot-pmnist-iid", "fot", (), "used_share", 62.18),
        ("fot-cifar100-noniid", "fot", (), "used_share", 32.96),
        ("fot-miniimagenet", "fot", SHARDS, "used_share", 86.44),
        ("fot-pmnist-noniid", "fot", (), "seconds_end", 0.024),
        ("fot-cifar100-iid", "fot", (), "mb_total_after_10", 28402.6),
        ("fot-cifar100-noniid", "fot", ("methods.fot.threshold=0.96",), "task_10", 64.5),
        ("fot-5datasets", "fot", (*SHARDS, "partition.task_share=0.6", "partition.clients=250"), "fgt", 1.99),
        ("fot-miniimagenet", "fot", ("model.freeze=[conv1]",), "acc", 69.30),
        ("fot-miniimagenet", "fot", ("methods.fot.protect=[layer3, layer4]",), "fgt", 33.41),
        ("fedprotip-cifar100-a05", "fedprotip", (), "mb_end_up_after_1", 9.794),
        ("fedprotip-cifar100-a05", "fot", (), "mb_model_after_10", 47.389),
        ("fedprotip-cifar100-a05", "fedprotip", (), "tip_acc_after_10", 99.6),
        ("fedprotip-domainnet-order1", "fedprotip", (), "tip_acc_after_3", 67.3),
        ("fedprotip-cifar100-a05", "fedprotip", ("methods.fedprotip.patches=2048",), "hours", 3.42),
        ("fedprotip-cifar100-a05", "fedprotip", (*AT_0775, *SKETCHED), "mb_end_up", 366.9),
        ("fedprotip-cifar100-a05", "fedprotip", SKETCHED, "mb_end_up", None),
        ("fedprotip-cifar100-a05", "fot", ("evaluation.batch_size=32",), "acc", None),
        ("pip-cifar100-t10", "pip-dualp", (), "acc_after_9", 84.8),
        ("pip-cifar100-t10", "fed-l2p", (), "forgetting_after_10", -4.0),
        ("pip-cifar100-t10", "fed-l2p", (), "hours", 5.1),
        ("pip-cifar100-t10", "fed-dualp", ("federation.clients_per_round=3",), "avg", 76.96),
        ("pip-cifar100-t10", "pip-dualp", ("methods.pip-dualp.head=own",), "pd", 12.90),
        ("pip-tinyimagenet", "pip-l2p", ("federation.clients_per_round=3", "federation.rounds=2"), "acc", 67.18),
        ("stamp-scifar100-c2", "stamp", (), "seconds_per_round", 9.1),
        ("stamp-scifar100-c2", "stamp", ("federation.clients_per_round=1",), "acc", 45.3),
        ("stamp-scifar100-c2", "stamp", ("methods.stamp.spatio=false",), "af", 21.8),
        ("stamp-simagenet", "stamp", (), "mb_memory", 152.6),
        ("stamp-simagenet", "fedavg", ("stream.tasks=50", "stream.classes_per_task=20"), "gb_peak", 16.11),
        ("stamp-office31", "fedavg", (), "parameters", 11_700_000),
        ("special-digit10", "special", (), "task_1", 86.18),
        ("special-dn4il", "special", (), "task_6", 39.97),
        ("special-vlcs", "special", (), "rounds_to_best", 55),
        ("special-digit10", "fedavg", (), "gb_peak", 1.54),
        ("pip-miniimagenet", "pip-dualp", ("stream.tasks=20", "federation.rounds=5"), "acc_after_1", 97.80),
    ],
)
def test_figures_of_any_kind(name: str, method: str, overrides: tuple[str, ...], column: str, value: Any) -> None:
    """They stand beside a run of just their settings: Table 19 is at a threshold of its own; None: beside none."""
    figures = collect_figures([group_of(run_of_preset(name, method, *overrides))])
    values = [figure.values[column] for of_one in figures.values() for figure in of_one if column in figure.values]
    assert values == ([] if value is None else [value])


@pytest.mark.parametrize("name", list(FILES))
def test_every_variant_is_found_by_running_it(name: str) -> None:
    """What `where` names can be set, and the figure then takes the place of the preset's own."""
    preset, experiment = reading.load_preset(FILES[name])
    for table in preset.figures:
        for method in sorted(table.rows.keys() & set(experiment.methods))[:1] if table.where else ():
            overrides = [f"{setting}={value}" for setting, value in table.where.items()]
            run = run_of_preset(name, method, *overrides)
            figures = collect_figures([group_of(run)])[table.reading]
            assert table in [figure.table for figure in figures]
            assert all(figure.table.where for figure in figures)
            assert run.result.preset.changes.keys() <= table.where.keys()


def test_table_15_uses_every_class() -> None:
    preset, _ = reading.load_preset(FILES["fedprotip-cifar100-a05"])
    wheres = [figures.where for figures in preset.figures if figures.table == "Table 15"]
    assert len(wheres) == 6
    for where in wheres:
        sizes = (where[f"stream.{key}"] for key in ("classes_per_task", "overlap"))
        assert count_tasks(100, *sizes, None) == where["stream.tasks"]


# what holds for one method only

ONLY = """
federation: {rounds: 7}
methods: {fedavg: {}, fedprox: {}}
preset:
  name: one
  only:
    fedavg:
      federation:
        rounds: [4, 2]
      optimizer: {lr: 0.5}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        Path("one.yaml").write_text(text)
        return Path("one.yaml")

    return write


def test_only_holds_for_its_method_and_overrides_stand_above_it(file: Callable[[str], Path]) -> None:
    path = file(ONLY)
    assert reading.load_params(path, method="fedavg").federation.rounds == (4, 2)
    assert reading.load_params(path, method="fedavg").optimizer.lr == 0.5
    assert [reading.load_params(path, method=name).federation.rounds for name in ("fedprox", None)] == [7, 7]
    assert reading.load_params(path, ["federation.rounds=3"], "fedavg").federation.rounds == 3


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("rounds: [4, 2]", "rounds: [4, 0]", "one.yaml:9: federation.rounds is [4, 0]; it must be"),
        ("rounds: [4, 2]", "roundz: 4", "one.yaml:9: federation.roundz is not a setting. Did you mean"),
        ("optimizer: {lr: 0.5}", "stream: {tasks: 3}", "preset.only is "),
        ("name: one", "nam: one", "one.yaml:5: preset.nam is not a setting. Did you mean preset.name?"),
    ],
)
def test_a_mistake_in_a_preset_is_told_with_its_place(
    file: Callable[[str], Path], old: str, new: str, text: str
) -> None:
    with pytest.raises(UserError) as caught:
        reading.load_params(file(ONLY.replace(old, new)), method="fedavg")
    assert text in str(caught.value)


def test_a_row_that_does_not_fit_its_columns_is_refused(file: Callable[[str], Path]) -> None:
    table = "{table: T, reading: task_aware, columns: [acc, ft], rows: {fot: [1]}}"
    with pytest.raises(UserError, match="fot has 1 figures for 2 columns"):
        reading.load_params(file(f"preset: {{name: x, figures: [{table}]}}"))


# fewer rounds


@given(rounds=st.integers(1, 10_000), scale=st.floats(0, 1, exclude_min=True))
def test_a_scale_leaves_its_share_of_the_rounds_and_at_least_one(rounds: int, scale: float) -> None:
    params = SimpleNamespace(federation=FederationSettings(rounds=rounds, rounds_scale=scale))
    left = FederationRun(params, None, 0, None, None).count_rounds(0)
    assert 1 <= left <= rounds
    assert left == 1 or abs(left - scale * rounds) <= 0.5


@pytest.mark.parametrize("scale", [0, -0.1, 1.01, inf])
def test_a_scale_outside_of_its_range_is_refused(params_of: Callable[..., Params], scale: float) -> None:
    with pytest.raises(UserError, match="rounds_scale"):
        params_of(f"federation.rounds_scale={scale}")


def test_a_scaled_run_is_the_short_one_and_says_so(
    experiment_of: MakeExperiment, tmp_path: Path, remains: Callable[[Path], dict[str, Any]]
) -> None:
    home = tmp_path / "home"
    scaled = experiment_of("federation.rounds=[10, 4]", "federation.rounds_scale=0.2", home=home)
    short = experiment_of("federation.rounds=[2, 1]", home=home)
    folders = [tmp_path / "scaled", tmp_path / "short"]
    results = [scaled.run(folders[0]), short.run(folders[1])]
    assert results[0]["scaled"] == {"rounds": [2, 1], "of": [10, 4]}
    assert "scaled" not in results[1]
    assert remains(folders[0]) == remains(folders[1])
    steps = [[e.step("learn", None, task).key for task in (0, 1)] for e in (scaled, short)]
    assert steps[0] == steps[1]


def test_a_comparison_tells_what_was_shrunk() -> None:
    run = run_of({}, "fot", scaled={"rounds": [10] * 10, "of": [200] * 10})
    assert describe_fewer_rounds([group_of(run), group_of(run_of({}, "fedavg"))]) == [
        "fot: 100 rounds in place of 2000 (federation.rounds_scale)."
    ]


@pytest.mark.parametrize(
    ("name", "method", "of_reading", "override", "texts"),
    [
        ("fot-pmnist-iid", "fot", "task_aware", "", ["90.35 ± 0.06", "1.75 ± 0.06", "–"]),
        ("fedprotip-cifar100-a05", "fedprotip", "paper_task_predicted", "", ["86.00 ± 0.75", "–", "0.83 ± 0.47"]),
        ("fot-cifar100-noniid", "fot", "task_aware", "methods.fot.threshold=0.96", ["61.4", "−0.1", "–"]),
    ],
)
def test_a_papers_figures_are_shown_with_its_decimals(
    name: str, method: str, of_reading: str, override: str, texts: list[str]
) -> None:
    overrides = [override] if override else []
    figure = find_figures(name, method, of_reading, *overrides)[0]
    assert [figure.text(column) for column in ("acc", "fgt", "ft")] == texts


def test_a_run_keeps_its_preset_and_can_be_run_again_from_what_it_kept(
    splits_of: Callable[..., Splits], tmp_path: Path, params_file: Path
) -> None:
    """`only` is settled in the settings that are kept: a second time it would undo an override."""
    text = params_file.read_text()
    preset = "preset: {name: one, paper: P, only: {fedavg: {federation: {rounds: [9, 9]}}}}"
    (tmp_path / "one.yaml").write_text(f"{text}{preset}\n")
    params = reading.load_params(tmp_path / "one.yaml", ["federation.rounds=1"], "fedavg")
    with Experiment(params, "fedavg", 0, splits_of(), tmp_path / "home") as experiment:
        result = experiment.run(tmp_path / "run")
    assert result["preset"] == {"name": "one", "paper": "P"}
    settings_file = tmp_path / "run" / "settings.json"
    assert json.loads(settings_file.read_text())["preset"] == result["preset"]
    assert reading.load_params(settings_file, method="fedavg").federation.rounds == 1


@pytest.mark.parametrize(
    ("name", "tasks", "rounds"),
    [
        ("pip-cifar100-t5", 5, 20),
        ("pip-cifar100-t10", 10, 10),
        ("pip-cifar100-t20", 20, 5),
        ("pip-miniimagenet", 10, 10),
        ("pip-tinyimagenet", 10, 10),
    ],
)
def test_pip_6_1(name: str, tasks: int, rounds: int) -> None:
    """30 clients, 10 a round, 60 % of the classes, 100 rounds in all, two epochs; T prompts, for T = 10 0.33 M."""
    params = load(name)
    assert (params.partition.clients, params.partition.eta, params.federation.clients_per_round) == (30, 0.6, 10)
    assert (params.stream.tasks, params.federation.rounds, params.federation.local_epochs) == (tasks, rounds, 2)
    assert tasks * rounds == 100
    adapter = {"kind": "dualp", "pool": reading.load_method_settings(params, "pip-dualp").pool}
    spec = ModelSpec(params.model.model_dump(mode="json"), (3, 224, 224), "growing", (tuple(range(100)),), adapter)
    with torch.device("meta"):
        backbone = find("backbone", "vit")(params.model).build((3, 224, 224))
        numbers = sum(p.numel() for p in adapt(backbone, spec.adapter, tasks).prompts.parameters())
    assert numbers == (2 + 3 * tasks) * 2 * 5 * 768 + tasks * 768
    assert (tasks == 10) == (numbers + 100 * 769 == 330_340)
    assert reading.load_method_settings(params, "pip-l2p").pool == tasks
    for name in ("pip-dualp", "pip-l2p"):
        settings = reading.load_method_settings(params, name)
        assert (settings.inject, settings.pooled, settings.augmentation) == ("all", "omega", "paper")
        assert settings.omega == "all-participation"
    assert (str(params.model.weights), params.optimizer.clip) == ("timm", 1.0)
