"""Names with which MLflow's pages are readable as they open: what they sort first, and what runs share."""

from typing import Any

from fclmodels.report import labels
from fclmodels.settings.federation import FederationSettings
from fclmodels.settings.schema import Params
from tasks.mlflow.naming import METRICS, SYSTEM_SETTINGS, describe_run, flatten_params, name_metrics

SETTINGS: dict[str, Any] = {
    "data": {"source": "digits", "size": None},
    "federation": {"rounds": 4, "executor": "serial", "workers": 2, "threads": 1, "checkpoint_seconds": 5.0},
    "optimizer": {"lr": 0.05, "momentum": 0.0},
    "device": "cpu",
    "methods": {"fedprox": {"mu": 1.0, "batch_norm": "average", "nested": {"on": True}}},
}


def choose_axes(*runs: dict[str, str]) -> list[str]:
    """Choose the axes of parallel coordinates as MLflow does for a comparison: params that differ, by name."""
    names = {name for run in runs for name in run}
    return sorted(name for name in names if len({run.get(name) for run in runs}) > 1)[:3]


def test_every_metric_has_a_name() -> None:
    assert METRICS.keys() == labels.METRICS.keys()
    assert len(set(METRICS.values())) == len(METRICS)


def test_accuracy_comes_first_and_the_usual_readings_before_the_special_ones() -> None:
    readings = ["paper_task_aware", "task_aware", "mixed_batch_task_predicted", "task_agnostic"]
    names = list(name_metrics({reading: {"ft": 0.1, "acc": 0.5, "bwt": None} for reading in readings}))
    assert names == sorted(names)
    assert names[0] == "acc/task_agnostic"
    assert names[1:4] == ["acc/task_aware", "acc/task_aware_paper", "acc/task_predicted_mixed_batch"]
    assert names[4] == "forgetting_ft/task_agnostic"
    assert len(names) == 8


def test_params_are_flat_texts_without_what_is_not_set() -> None:
    assert flatten_params(SETTINGS, "fedprox", 3) == {
        "method": "fedprox",
        "seed": "3",
        "data.source": "digits",
        "federation.rounds": "4",
        "optimizer.lr": "0.05",
        "optimizer.momentum": "0.0",
        "settings.mu": "1.0",
        "settings.batch_norm": "average",
        "settings.nested.on": "true",
        "system.executor": "serial",
        "system.workers": "2",
        "system.threads": "1",
        "system.checkpoint_seconds": "5.0",
        "system.device": "cpu",
    }
    assert set(SYSTEM_SETTINGS) < FederationSettings.model_fields.keys()
    assert {"methods", "device", "federation"} < Params.model_fields.keys()


def test_methods_with_seeds_open_with_method_and_seed_and_a_sweep_with_what_was_swept() -> None:
    other = SETTINGS | {"methods": {"fedavg": {"batch_norm": "local"}}}
    other["federation"] = {**SETTINGS["federation"], "executor": "processes", "threads": 2}
    runs = [
        flatten_params(SETTINGS, "fedprox", 0),
        flatten_params(SETTINGS, "fedprox", 1),
        flatten_params(other, "fedavg", 0),
    ]
    assert choose_axes(*runs) == ["method", "seed", "settings.batch_norm"]
    swept = SETTINGS | {"methods": {"fedprox": {**SETTINGS["methods"]["fedprox"], "mu": 2.0}}}
    assert choose_axes(runs[0], flatten_params(swept, "fedprox", 0)) == ["settings.mu"]


def test_a_runs_page_has_its_figures_by_reading_its_matrix_and_the_command_that_reproduces_it() -> None:
    result = {
        "metrics": {"task_agnostic": {"acc": 0.123, "fgt": -0.05}},
        "settings": {"evaluation": {"batch_size": 64}},
        "remarks": ["the bases are full"],
        "command": "fcl run --method fot",
    }
    table, remark, matrix, command = describe_run(result, "abc").split("\n\n")
    assert table.splitlines()[2].replace("&emsp;", "") == "| Task-agnostic | 12.3 | – | −5.0 | – |"
    assert (remark, command) == ("The bases are full.", "`fcl run --method fot`")
    assert matrix == "![accuracy matrix](get-artifact?path=accuracy.png&run_uuid=abc)"
