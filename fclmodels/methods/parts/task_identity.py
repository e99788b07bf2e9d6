"""Task identity prediction (TIP) of FedProTIP, section 4.4: how clients and server build a Router.

After task t each client sends U_k diag(sigma_k), the directions of its features (the last layer's input, uncentred)
outside U_1..U_{t-1}, scaled to the features' length along them. U_t has the leading directions over all clients. A
reference omega^(tau,t) is the root mean square length of a client's features of task tau on U_t (eq. 10).

References of earlier tasks are of features that clients keep, which may move with training (feature_memory.py). A
sample is routed by itself where that is worth it (routing_margin.py).

knowledge: `tip`, a Router's tree, the `clients` that its references are from ([0] for their mean), and the `drifts`,
||X_new - X_old|| / ||X_old|| over all clients in each task; `before`, the weights that the current task began with.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fclmodels.backbones.model.network import Network
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form, Memory
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.method import Obstacle
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.methods.parts.feature_memory import remember_features
from fclmodels.methods.parts.protected_subspace import Bases, has_no_new_classes
from fclmodels.methods.parts.routing_margin import RoutingMargin
from fclmodels.numerics.subspace import extend
from fclmodels.numerics.task_relevance import Router, batch_relevance, relevance
from fclmodels.settings.base import Settings as BaseSettings


class TipSettings(BaseSettings):
    tip: bool = Field(
        True,
        description="predict tasks, with a head each under model.head: auto; false: FedProTIP(-t)",
    )
    head_start: Literal["earlier", "drawn"] = Field(
        "earlier", description="of classes that come again, a task's own head begins as an earlier one's (ours)"
    )
    tip_rank: PositiveInt | None = Field(
        10, description="leading directions of the features that stand for a task; null: all that clients find"
    )
    tip_threshold: float = Field(
        0.7,
        gt=0,
        le=1,
        description="share of the residual's singular values that a client's directions of the features keep",
    )
    tip_later: Literal["drift", "features", "zero"] = Field(
        "drift",
        description="references after later tasks: by the features that clients keep, moved as far as training moves "
        "others (ours); features: by those as they were (release); zero: taken as 0",
    )
    tip_rule: Literal["paper", "release"] = Field(
        "paper",
        description="cosine with a client's reference (eq. 11); release: mean cosine with those of batches of 64, "
        "without the first task's bases, and of two tasks the nearer length",
    )
    tip_reject: Literal["calibrated", "never"] = Field(
        "calibrated",
        description="single samples of small margin are answered by all heads, as pays on stored features (ours)",
    )
    tip_reference: Literal["each", "mean"] = Field("each", description="each client votes, or their mean reference")
    tip_voters: PositiveInt | None = Field(
        None, description="clients that give references of a task, at random; null: all of its clients"
    )


def give_own_heads(run: Run, settings: TipSettings) -> Run:
    """Return the run with a head for each task, where by default tasks would share one in full.

    There a predicted task would change no answer.
    """
    if not (settings.tip and run.params.model.head == "auto" and has_no_new_classes(run)):
        return run
    model = run.params.model.model_copy(update={"head": "per-task"})
    return replace(run, params=run.params.model_copy(update={"model": model}))


def copy_earlier_rows(spec: ModelSpec, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights whose last head begins, for classes that come again, as the latest earlier head with them."""
    if spec.head != "per-task":
        return weights
    last, weights = len(spec.tasks) - 1, dict(weights)
    for row, label in enumerate(spec.tasks[last]):
        earlier = [task for task in range(last) if label in spec.tasks[task]]
        for part in ("weight", "bias") if earlier else ():
            head = weights[f"heads.{last}.{part}"].clone()
            head[row] = weights[f"heads.{earlier[-1]}.{part}"][spec.tasks[earlier[-1]].index(label)]
            weights[f"heads.{last}.{part}"] = head
    return weights


class TaskIdentity:
    """Asks clients for references of their tasks on the tasks' bases, and keeps the Router that they make."""

    def __init__(self, settings: TipSettings, run: Run, method: str) -> None:
        self.settings = settings
        self.run = run
        self.method = method
        self.votes = settings.tip_reference == "each"
        self.references = Exchange(
            "references", self.make_bases_payload, self.answer_references, self.make_references_form
        )
        self.margin = RoutingMargin(run, settings.tip_rule)

    @property
    def obstacle_to_sums(self) -> Obstacle | None:
        if self.votes:
            return Obstacle(
                f"methods.{self.method}.tip_reference: each lets every client vote", "Use tip_reference: mean"
            )
        if self.settings.tip_voters == 1:
            return Obstacle(f"methods.{self.method}.tip_voters: 1 makes a client's own reference the mean", "Use more")
        return None

    # On the server.

    def join_feature_bases(self, server: Server) -> Tensor:
        """Return U_1 to U_{t-1} side by side [F, r]."""
        nothing = server.weights["heads.0.weight"][:0].T
        return torch.cat([nothing, *begin_knowledge(server)["bases"]], dim=1)

    def learn_task(self, server: Server, cohort: Cohort, directions: Sequence[Tensor]) -> Server:
        """Return the server that can predict the task just learned, given its clients' directions [F, k]."""
        before = begin_knowledge(server)
        bases = [*before["bases"], self._extract_task_basis(self.join_feature_bases(server), directions)]
        clients = self.list_reference_clients(server.task)
        present = clients if self.keeps_features else self.choose_reference_clients(server.task)
        answers = self._ask(cohort, bases, present) if present else {}
        router = merge_references(before, clients if self.votes else [0], bases, answers, self.settings.tip_rule)
        if self.calibrates and len(bases) > 1:
            router = self.margin.calibrate(server, cohort, router, clients)
        tip = {**before, "clients": clients if self.votes else [0], **router.to_tree()}
        knowledge = {name: value for name, value in server.knowledge.items() if name != "before"}
        return replace(server, knowledge={**knowledge, "tip": tip})

    @property
    def keeps_features(self) -> bool:
        return self.settings.tip_later != "zero"

    @property
    def calibrates(self) -> bool:
        return self.keeps_features and self.settings.tip_reject == "calibrated"

    def measures_drift(self, task: int) -> bool:
        return task > 0 and self.settings.tip_later == "drift"

    def start_task(self, server: Server) -> Server:
        """Return the server that keeps the weights with which the task begins, where drift is measured from these."""
        if not self.measures_drift(server.task):
            return server
        return replace(server, knowledge={**server.knowledge, "before": server.weights})

    def note_drift(self, server: Server, energies: dict[str, Tensor]) -> Server:
        """Return the server that knows how far features moved in the task, from sums over clients; None: unknown."""
        tip = begin_knowledge(server)
        drift = float((energies["moved"] / energies["size"]).sqrt()) if energies and energies["size"] else None
        return replace(server, knowledge={**server.knowledge, "tip": {**tip, "drifts": [*tip["drifts"], drift]}})

    def list_remarks(self, knowledge: Any) -> list[str]:
        """Return a line of the first task in which features moved by more than a tenth of their length."""
        drifts = knowledge.get("tip", {}).get("drifts", [])
        large = [(task, drift) for task, drift in enumerate(drifts, 1) if drift is not None and drift > 0.1]
        return [
            f"while task {task} was learned, features of its images moved by {100 * drift:.0f} % of their length. "
            "Those of earlier tasks are moved alike to predict tasks, which is an estimate"
            for task, drift in large[:1]
        ]

    def make_router(self, server: Server) -> Router | None:
        return Router.from_tree(server.knowledge["tip"]) if "tip" in server.knowledge else None

    def list_reference_clients(self, task: int) -> list[int]:
        """Return the clients that give references of some task so far."""
        return sorted({client for earlier in range(task + 1) for client in self.choose_reference_clients(earlier)})

    def choose_reference_clients(self, task: int) -> list[int]:
        """Return the clients of a task that give references of it: the first in a fixed random order."""
        able = set(self.run.splits.list_clients(task))
        order = torch.randperm(self.run.splits.clients, generator=self.run.make_generator("voters")).tolist()
        return [client for client in order if client in able][: self.settings.tip_voters]

    def _extract_task_basis(self, earlier: Tensor, directions: Sequence[Tensor]) -> Tensor:
        """Return U_t [F, r_t], orthogonal to earlier tasks'; `extend` puts the longest directions first."""
        fresh = extend(earlier, torch.cat(list(directions), dim=1))[:, earlier.shape[1] :]
        return fresh[:, : self.settings.tip_rank].contiguous()

    def _ask(self, cohort: Cohort, bases: Sequence[Tensor], clients: Sequence[int]) -> dict[int, Bases]:
        """Return `omega` [T, T] and `count` [T] of each client, or their means."""
        replies = cohort.ask(self.references, bases, clients=clients)
        if self.votes:
            return dict(replies.yield_each("references"))
        sums = replies.sum("references")
        return {0: {"omega": sums["omega"] / sums["count"].clamp(min=1)[:, None], "count": sums["count"]}}

    # The exchange.

    def make_bases_payload(self, bases: Sequence[Tensor]) -> Payload:
        return {"features": Part("basis", {str(task): basis for task, basis in enumerate(bases)})}

    def make_references_form(self, task: int, round: int) -> Form:
        shapes = {"omega": (task + 1, task + 1), "count": (task + 1,)}
        outlines = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        return {"references": Part("reference", outlines, "each" if self.votes else "sum")}

    def answer_references(self, client: Client, payload: Payload) -> Answer:
        """Return omega [T, T], with a row for each task of which the client has features, and these rows: count [T]."""
        by_task = payload["features"].tensors
        bases = [by_task[str(task)] for task in range(len(by_task))]
        omega, count = torch.zeros(len(bases), len(bases)), torch.zeros(len(bases))
        release = self.settings.tip_rule == "release" and len(bases) > 2
        for task, features in client.memory["features"].items():
            omega[int(task)] = (average_batches if release else measure_reference)(features, bases)
            count[int(task)] = 1
        memory = client.memory
        if not self.keeps_features:
            memory = {name: value for name, value in memory.items() if name not in ("features", "labels")}
        return Answer({"references": {"omega": omega, "count": count}}, memory)

    def remember(
        self, client: Client, load: Callable[[dict[str, Tensor]], Network], payload: Payload
    ) -> tuple[Memory, dict[str, Tensor]]:
        """Return a client's memory after a task, and how far its features moved (feature_memory.py)."""
        stores = client.index in self.choose_reference_clients(client.task)
        return remember_features(client, load, payload, stores)


def begin_knowledge(server: Server) -> dict[str, Any]:
    """Return the server's knowledge of tasks' features."""
    knowledge: dict[str, Any] = server.knowledge.get("tip", {"clients": [], "bases": [], "drifts": []})
    return knowledge


def measure_reference(features: Tensor, bases: Sequence[Tensor]) -> Tensor:
    """Return omega_t = ||A U_t||_F / sqrt(n) of features A [n, F] on each basis: [T] (eq. 10)."""
    return batch_relevance(relevance(features, bases)) / len(features) ** 0.5


def average_batches(features: Tensor, bases: Sequence[Tensor]) -> Tensor:
    """Return the mean over batches of 64 features [n, F] of unit vectors of relevance [T], the first entry 0."""
    units = []
    for batch in features.split(64):
        lengths = batch_relevance(relevance(batch, bases))
        lengths[0] = 0
        units.append(torch.nn.functional.normalize(lengths, dim=0))
    return torch.stack(units).mean(0)


def merge_references(
    before: dict[str, Any], clients: list[int], bases: list[Tensor], answers: dict[int, Bases], rule: str
) -> Router:
    """Return the router with each client's references: those that it has just sent, else its earlier ones."""
    references = torch.zeros(len(clients), len(bases), len(bases))
    has_reference = torch.zeros(len(clients), len(bases), dtype=torch.bool)
    for place, client in enumerate(clients):
        if client in before["clients"]:
            old = before["clients"].index(client)
            references[place, :-1, :-1], has_reference[place, :-1] = before["references"][old], before["known"][old]
        if client in answers:
            rows = answers[client]["count"] > 0
            references[place, rows], has_reference[place, rows] = answers[client]["omega"][rows], True
    return Router(tuple(bases), references, has_reference, rule)
