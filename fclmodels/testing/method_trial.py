"""A method's runs on tiny splits, and what every method keeps, however it learns."""

import hashlib
import json
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor

from fclmodels.backbones.adapters.adapted import Adapted
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.experiment.stages import Stage
from fclmodels.federation.client import Client
from fclmodels.federation.engine.listener import Listener
from fclmodels.federation.exchange import Answer, Exchange
from fclmodels.federation.messages import Reply
from fclmodels.federation.method import Method
from fclmodels.federation.prediction import Prediction, Predictor
from fclmodels.federation.protection.inspection import describe_form, list_entries
from fclmodels.federation.server import Server
from fclmodels.testing.plugin_declaration import check_declaration, require
from fclmodels.testing.served_answers import compare_with_evaluation
from fclmodels.testing.tiny_splits import CONVIT, VIT, load_tiny_params, write_splits

# Two of four clients a round; client 0 has nothing of the second task.
PARTIAL = ("federation.clients_per_round=2", "federation.checkpoint_seconds=0")
SIZES = {(task, client): 6 + 2 * client for task in range(2) for client in range(4) if (task, client) != (1, 0)}
LABELS = 4
CHECKED = 5  # samples whose predictions are looked at
STAGES: list[tuple[Stage, int]] = [("begin", 0), ("learn", 0), ("conclude", 0), ("learn", 1), ("conclude", 1)]
EXECUTORS = ("serial", "processes")


def check_method(method: type[Method], *settings: str, executors: Sequence[str] = EXECUTORS) -> None:
    """Raise AssertionError with a line that says what a method does not keep; `settings` are such as "optimizer.lr=1".

    It must send what it declares, end with the same bits when it runs again, when it was stopped, and in worker
    processes, predict in the declared shape, and leave a ledger of every byte.
    """
    check_declaration("method", method)
    with tempfile.TemporaryDirectory() as folder, MethodTrial(method, *settings, folder=Path(folder)) as trial:
        trial.check_predictions()
        trial.check_ledger()
        trial.check_exported_model()
        trial.check_second_run()
        for executor in executors:
            trial.check_stopped_run(f"federation.executor={executor}", "federation.workers=2")


def train(method: type[Method], *settings: str) -> Server:
    """Return the server after a method has learned both tasks of tiny splits, with seed 0."""
    with tempfile.TemporaryDirectory() as name:
        folder, params = Path(name), load_tiny_params(*find_needed_settings(method), *settings)
        with Experiment(params, method.name, 0, write_splits(folder / "data"), folder / "home") as experiment:
            experiment.run(folder / "run")
            return Server.from_tree(load_last_state(experiment)["server"])


def find_needed_settings(method: type[Method]) -> tuple[str, ...]:
    """Return settings without which a method cannot run on tiny splits: a transformer, where it needs one."""
    if getattr(method, "needs_backbone", None) == "convit":
        return CONVIT
    if getattr(method, "needs_own_heads", False):
        return ("model.head=per-task",)
    return VIT if getattr(method, "attaches", Adapted).needs_transformer else ()


def load_last_state(experiment: Experiment) -> dict[str, Any]:
    """Return the state after the second task of an experiment that has run, from nothing but its store."""
    state = None
    for stage, task in STAGES:
        outcome = experiment.step(stage, state, task).recall()
        assert outcome is not None
        state = outcome["objects"]["state"]
    return dict(experiment.store.get(str(state)))


class MethodTrial(AbstractContextManager["MethodTrial"]):
    """A method that has run once, in this process, in `folder / run`; the checks run it again and compare."""

    def __init__(self, method: type[Method], *settings: str, folder: Path) -> None:
        self.name = method.name
        self.settings = (*find_needed_settings(method), *PARTIAL, *settings)
        self.folder = folder
        self.splits = write_splits(folder / "data", train=SIZES)
        self._number = count()
        refusals = Refusals()
        self.experiment = self._open(folder / "home", listener=refusals)
        compare_replies(self.experiment.method)
        check_each_prediction(self.experiment.method)
        try:
            self.experiment.run(folder / "run")
        except UserError as problem:
            raise AssertionError(f"{self.name}: {problem}") from problem
        self._outcome = read_outcome(folder / "run")
        require(not refusals.lines, f"{self.name}: the server refused replies: {'; '.join(refusals.lines[:3])}")

    def __exit__(self, *_: object) -> None:
        self.experiment.__exit__()

    def check_second_run(self) -> None:
        """Run the method anew; it must end with the same bits."""
        folder = self.folder / f"again-{next(self._number)}"
        with self._open(folder / "home") as experiment:
            experiment.run(folder / "run")
        self._compare(folder / "run", "a second run")

    def check_stopped_run(self, *settings: str) -> Path:
        """Stop a run in the last round of the second task and start it again; it must end with the same bits.

        A run whose second task asks no client just goes on. Returned is the run's folder.
        """
        folder = self.folder / f"stopped-{next(self._number)}"
        try:
            with self._open(folder / "home", *settings, listener=Stopping()) as experiment:
                experiment.run(folder / "run")
        except Stopped:
            with self._open(folder / "home", *settings) as experiment:
                experiment.run(folder / "run")
        self._compare(folder / "run", f"a run that was stopped and started again ({' '.join(settings)})")
        return folder / "run"

    def check_predictions(self) -> None:
        """Check that the predictor gives a logit for each class and, where it predicts tasks, a score for each task."""
        method = self.experiment.method
        server = Server.from_tree(load_last_state(self.experiment)["server"])
        inputs = next(method.run.batches.iterate_ordered(self.splits.select_test_rows(0), CHECKED)).inputs
        with torch.inference_mode():
            prediction = method.make_predictor(server)(inputs)
        check_shapes(method, server, prediction, CHECKED)
        require(not bool(prediction.logits.isnan().any()), f"{self.name}: a logit is not a number")
        columns = method.list_columns(server)
        labels = sorted(set(columns.labels.tolist()))
        require(labels == list(range(LABELS)), f"{self.name}: its columns stand for the labels {labels}, not 0 to 3")
        without = (~columns.mask_tasks(server.spec.tasks).any(1)).nonzero().flatten().tolist()
        require(not without, f"{self.name}: no column is of task {without}")

    def check_ledger(self) -> None:
        """Check that the ledger names those who took part, and that its bytes are those that travelled and are kept."""
        folder, method = self.folder / "run", self.experiment.method
        ledger, result = pl.read_parquet(folder / "ledger.parquet"), json.loads((folder / "result.json").read_text())
        in_rounds = ledger.filter(pl.col("direction") != "kept", pl.col("round") >= 0)
        if not method.is_centralised:
            absent = in_rounds.filter(task=1, client=0)
            require(absent.is_empty(), f"{self.name}: client 0 has no sample of the second task, and took part in it")
            sizes = in_rounds.group_by("task", "round").agg(pl.col("client").n_unique())["client"].to_list()
            require(sizes == [2] * 4, f"{self.name}: not two clients took part in each round, but {sizes}")
        for way in ("up", "down"):
            total = ledger.filter(direction=way)["bytes"].sum()
            right = result[f"bytes_{way}"]
            require(total == right, f"{self.name}: the ledger has {total} bytes {way}, the result {right}")
        rows = ledger.filter(direction="kept").group_by("client").agg(pl.col("bytes").last())
        memories = load_last_state(self.experiment)["memories"]
        sizes_of_files = {
            int(client): self.experiment.store.find_path(digest).stat().st_size for client, digest in memories.items()
        }
        noted = dict(rows.filter(pl.col("bytes") > 0).iter_rows())
        require(noted == sizes_of_files, f"{self.name}: clients keep {sizes_of_files} bytes, the ledger says {noted}")

    def check_exported_model(self) -> None:
        """Check that the exported model answers as often right as the evaluation has counted."""
        compare_with_evaluation(self.folder / "run", self.splits)

    def _open(self, home: Path, *settings: str, listener: Listener | None = None) -> Experiment:
        params = load_tiny_params(*self.settings, *settings)
        return Experiment(params, self.name, 0, self.splits, home, listener)

    def _compare(self, folder: Path, run: str) -> None:
        outcome = read_outcome(folder)
        differing = sorted(name for name in {*outcome, *self._outcome} if outcome.get(name) != self._outcome.get(name))
        require(
            not differing,
            f"{self.name}: {run} ends with other {', '.join(differing)}. State belongs into the server's and the "
            "clients' values, and random numbers come from run.generator and client.generator.",
        )


def read_outcome(folder: Path) -> dict[str, Any]:
    """Return all that a run folder holds but for times and where it ran: equal for equal runs."""
    result = json.loads((folder / "result.json").read_text())
    tables = {name: pl.read_parquet(folder / f"{name}.parquet") for name in ("accuracy", "rounds", "ledger")}
    tables["rounds"] = tables["rounds"].drop("seconds")
    files = [folder / "model" / "weights.safetensors", *sorted(folder.glob("knowledge/*"))]
    return (
        {key: result[key] for key in ("metrics", "digests", "bytes_up", "bytes_down", "bytes_kept")}
        | {name: table.rows() for name, table in tables.items()}
        | {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    )


def check_shapes(method: Method, server: Server, prediction: Prediction, count: int) -> None:
    """Raise AssertionError where predictions of so many samples lack a logit a column, or a score a task."""
    tasks = len(server.spec.tasks)
    for title, values, right in (
        ("logits", prediction.logits, [count, len(method.list_columns(server).labels)]),
        ("task scores", prediction.task_scores, [count, tasks]),
        ("batch scores", prediction.batch_scores, [tasks]),
    ):
        shape = right if values is None else list(values.shape)
        require(shape == right, f"{method.name}: {title} of {count} samples are {shape}, not {right}")


def check_each_prediction(method: Method) -> None:
    """Make a prediction of this process raise AssertionError from now on where it has another shape."""
    make_predictor = method.make_predictor

    def predictor(server: Server) -> Predictor:
        predict = make_predictor(server)

        def check_answers(inputs: Tensor) -> Prediction:
            prediction = predict(inputs)
            check_shapes(method, server, prediction, len(inputs))
            return prediction

        return check_answers

    method.make_predictor = predictor


def compare_replies(method: Method) -> None:
    """Make a reply of this process raise AssertionError from now on where it differs from its declared form."""
    for name, exchange in method.exchanges.items():
        values = {field.name: getattr(exchange, field.name) for field in fields(exchange)}
        method.exchanges[name] = ComparedExchange(**values)


@dataclass(frozen=True)
class ComparedExchange(Exchange):
    """An exchange whose replies are compared with their form."""

    def fill(self, client: Client, answer: Answer) -> Reply:
        reply = super().fill(client, answer)
        declared, sent = (
            list_entries(describe_form(self.form(client.task, client.round))),
            list_entries(describe_form(reply.parts)),
        )
        differences = {"declared, not sent": declared - sent, "sent, not declared": sent - declared}
        lines = [f"{text}: {_describe_part(*part)}" for text, parts in differences.items() for part in parts]
        require(not lines, f"client {client.index}'s answer to {self.name}: {'; '.join(sorted(lines)[:4])}")
        return reply


def _describe_part(part: object, kind: object, over: object, tensor: object, shape: object) -> str:
    return f"{part} ({kind}{f', over {over}' if over else ''}), {tensor} {shape}"


class Refusals(Listener):
    """Notes which replies the server refuses."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_refusal(self, task: int, round: int, client: int, why: str) -> None:
        self.lines.append(f"of client {client} in task {task}, round {round}: {why}")


class Stopped(Exception):  # noqa: N818
    pass


class Stopping(Listener):
    """Interrupts a run in the last round of the second task."""

    def on_client_done(self, task: int, round: int, done: int, of: int) -> None:
        if (task, round) == (1, 1):
            raise Stopped
