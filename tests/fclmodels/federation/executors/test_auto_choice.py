"""Executor and threads: as set, or measured once and kept."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.executors import auto_choice
from fclmodels.federation.executors.auto_choice import Choice, choose, list_candidates

AUTO = ("federation.executor=auto", "federation.workers=2")


def test_what_is_set_is_not_measured(method_of: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(auto_choice, "predict_seconds")
    method = method_of(
        type(method_of()), "federation.executor=processes", "federation.workers=3", "federation.threads=2"
    )
    assert choose(method, tmp_path / "choices", "key") == Choice("processes", 3, 2)
    assert not (tmp_path / "choices").exists()


def test_a_measured_choice_stands_whatever_a_later_measurement_would_say(
    method_of: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = method_of(type(method_of()), *AUTO)
    monkeypatch.setattr(auto_choice, "predict_seconds", lambda method, candidate: candidate.executor != "processes")
    assert choose(method, tmp_path, "key") == Choice("processes", 2, 1)
    monkeypatch.setattr(auto_choice, "predict_seconds", lambda method, candidate: candidate.executor != "serial")
    assert choose(method, tmp_path, "key") == Choice("processes", 2, 1)
    assert choose(method, tmp_path, "other settings") == Choice("serial", 2, 1)


def test_only_what_is_open_is_tried(method_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_choice, "count_cores", lambda: 4)

    def tried(*overrides: str) -> set[Choice]:
        return set(list_candidates(method_of(type(method_of()), *overrides), 2))

    assert tried("federation.executor=auto") == {Choice("serial", 2, 1), Choice("processes", 2, 1)}
    assert tried("federation.executor=auto", "federation.threads=3") == {
        Choice("serial", 2, 3),
        Choice("processes", 2, 3),
    }
    assert tried("federation.threads=auto") == {Choice("serial", 2, 1), Choice("serial", 2, 4)}
    assert tried("federation.executor=auto", "federation.threads=auto") == {
        Choice("serial", 2, 1),
        Choice("serial", 2, 4),
        Choice("processes", 2, 1),
    }


def test_a_small_run_is_done_here_and_a_long_one_by_workers(
    method_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that says that a batch takes a millisecond, or a second."""
    method = method_of(type(method_of()), *AUTO)
    for seconds, executor in ((0.001, "serial"), (1.0, "processes")):
        monkeypatch.setattr(auto_choice, "measure_seconds_a_batch", lambda *_, seconds=seconds: seconds)
        assert (
            min(list_candidates(method, 2), key=lambda c: auto_choice.predict_seconds(method, c)).executor == executor
        )


@pytest.mark.parametrize(
    ("batches", "workers", "most"),
    [([8] * 5, 2, 24), ([8] * 5, 5, 8), ([8] * 5, 9, 8), ([9, 4, 3, 2], 2, 9), ([5, 4, 3, 2, 1], 2, 8), ([7, 1], 1, 8)],
)
def test_clients_are_whole_so_one_worker_may_have_more_to_do(batches: list[int], workers: int, most: int) -> None:
    assert auto_choice.count_most_batches(batches, workers) == most


def test_two_threads_are_taken_where_five_clients_leave_a_worker_idle(
    method_of: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch takes 0.58 of the time with two threads: five clients in turn less than three, four more than two."""
    monkeypatch.setattr(auto_choice, "count_cores", lambda: 2)
    monkeypatch.setattr(auto_choice, "WORKER_START", 0)
    monkeypatch.setattr(
        auto_choice, "measure_seconds_a_batch", lambda method, index, threads: 1.0 if threads == 1 else 0.58
    )
    method = method_of(type(method_of()), *AUTO, "federation.threads=auto")
    monkeypatch.setattr(method, "select_rows", lambda task, client: range(100))
    for clients, expected in ((5, Choice("serial", 2, 2)), (4, Choice("processes", 2, 1))):
        monkeypatch.setattr(method, "list_participants", lambda task, clients=clients: range(clients))
        assert min(list_candidates(method, 2), key=lambda c: auto_choice.predict_seconds(method, c)) == expected


def test_measuring_changes_no_result(
    experiment_of: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("model.dropout=[0.2, 0.5]",)
    plain = experiment_of(*settings).run(tmp_path / "plain")
    monkeypatch.setattr(auto_choice, "WORKER_START", 1e9)
    measured = experiment_of(*settings, "federation.executor=auto").run(tmp_path / "measured")
    assert measured["settings"]["federation"]["executor"] == "serial"
    assert (measured["digests"], measured["metrics"]) == (plain["digests"], plain["metrics"])


def test_a_spoilt_choice_is_one_line_that_names_the_file(method_of: Callable, tmp_path: Path) -> None:
    choose(method_of(type(method_of()), *AUTO), tmp_path, "key")
    (kept,) = tmp_path.glob("key-*.json")
    for content in ("", "{", "[]", json.dumps({"executor": "serial"})):
        kept.write_text(content)
        with pytest.raises(UserError, match=str(kept)) as error:
            choose(method_of(type(method_of()), *AUTO), tmp_path, "key")
        assert "\n" not in str(error.value)


def test_a_kept_choice_does_not_overrule_what_is_set_later(method_of: Callable, tmp_path: Path) -> None:
    kind = type(method_of())
    choose(method_of(kind, *AUTO), tmp_path, "key")
    assert choose(method_of(kind, "federation.executor=auto", "federation.threads=2"), tmp_path, "key").threads == 2
    asked = choose(method_of(kind, "federation.executor=processes", "federation.threads=auto"), tmp_path, "key")
    assert asked.executor == "processes"
