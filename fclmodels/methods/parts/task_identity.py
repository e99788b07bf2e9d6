"""Task identity prediction (TIP) of FedProTIP, section 4.4: how clients and server build a Router.

After task t each client sends U_k diag(sigma_k), the directions of its features (the last layer's input, uncentred)
outside U_1..U_{t-1}, scaled to the features' length along them. U_t has the leading directions over all clients. A
reference omega^(tau,t) is the root mean square length of a client's features of task tau on U_t (eq. 10). For a later t
the features of task tau are gone: their second moment, which the client keeps, gives the reference exactly.

knowledge: `tip`, a Router's tree, and the `clients` that its references are from ([0] for their mean).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fclmodels.backbones.inputs.layer_inputs import LayerInputs
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form, Memory
from fclmodels.federation.messages import Part, Payload
from fclmodels.federation.method import Obstacle
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.methods.parts.protected_subspace import Bases, has_no_new_classes
from fclmodels.numerics.subspace import WIDE, extend
from fclmodels.numerics.task_relevance import Router
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
    tip_later: Literal["moments", "zero"] = Field(
        "moments", description="references on later tasks: by second moments that clients keep, or taken as 0"
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
        self.references = Exchange("references", self.bases_payload, self.answer_references, self.references_form)

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
        moments = self.settings.tip_later == "moments"
        present = clients if moments else self.choose_reference_clients(server.task)
        answers = self._ask(cohort, bases, present) if present else {}
        clients = clients if self.votes else [0]
        tip = {"clients": clients, **merge_references(before, clients, bases, answers).to_tree()}
        return replace(server, knowledge={**server.knowledge, "tip": tip})

    def router(self, server: Server) -> Router | None:
        return Router.from_tree(server.knowledge["tip"]) if "tip" in server.knowledge else None

    def list_reference_clients(self, task: int) -> list[int]:
        """Return the clients that give references of some task so far."""
        return sorted({client for earlier in range(task + 1) for client in self.choose_reference_clients(earlier)})

    def choose_reference_clients(self, task: int) -> list[int]:
        """Return the clients of a task that give references of it: the first in a fixed random order."""
        able = set(self.run.splits.list_clients(task))
        order = torch.randperm(self.run.splits.clients, generator=self.run.generator("voters")).tolist()
        return [client for client in order if client in able][: self.settings.tip_voters]

    def _extract_task_basis(self, earlier: Tensor, directions: Sequence[Tensor]) -> Tensor:
        """Return U_t [F, r_t], orthogonal to earlier tasks'; `extend` puts the longest directions first."""
        fresh = extend(earlier, torch.cat(list(directions), dim=1))[:, earlier.shape[1] :]
        return fresh[:, : self.settings.tip_rank].contiguous()

    def _ask(self, cohort: Cohort, bases: Sequence[Tensor], clients: Sequence[int]) -> dict[int, Bases]:
        """Return `omega` [T, T] and `count` [T] of each client, or their means."""
        replies = cohort.ask(self.references, bases, clients=clients)
        if self.votes:
            return dict(replies.each("references"))
        sums = replies.sum("references")
        return {0: {"omega": sums["omega"] / sums["count"].clamp(min=1)[:, None], "count": sums["count"]}}

    # The exchange.

    def bases_payload(self, bases: Sequence[Tensor]) -> Payload:
        return {"features": Part("basis", {str(task): basis for task, basis in enumerate(bases)})}

    def references_form(self, task: int, round: int) -> Form:
        shapes = {"omega": (task + 1, task + 1), "count": (task + 1,)}
        outlines = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        return {"references": Part("reference", outlines, "each" if self.votes else "sum")}

    def answer_references(self, client: Client, payload: Payload) -> Answer:
        """Return omega [T, T], with a row for each task of which the client has a moment, and these rows: count [T]."""
        by_task = payload["features"].tensors
        bases = [by_task[str(task)] for task in range(len(by_task))]
        omega, count = torch.zeros(len(bases), len(bases)), torch.zeros(len(bases))
        for task, moment in client.memory["moments"].items():
            omega[int(task)] = measure_reference(moment, bases)
            count[int(task)] = 1
        memory = client.memory
        if self.settings.tip_later == "zero":
            memory = {name: value for name, value in memory.items() if name != "moments"}
        return Answer({"references": {"omega": omega, "count": count}}, memory)

    def remember(self, client: Client, features: LayerInputs) -> Memory:
        """Return a client's memory with the second moment of this task's features, where it is to give references."""
        if client.index not in self.choose_reference_clients(client.task):
            return client.memory
        moments = {**client.memory.get("moments", {}), str(client.task): compute_second_moment(features)}
        return {**client.memory, "moments": moments}


def begin_knowledge(server: Server) -> dict[str, Any]:
    """Return the server's knowledge of tasks' features."""
    knowledge: dict[str, Any] = server.knowledge.get("tip", {"clients": [], "bases": []})
    return knowledge


def compute_second_moment(features: LayerInputs) -> Tensor:
    """Return M = A A^T / n [F, F] of features A [F, n], enough for eq. 10 on any basis; of wide ones A / sqrt(n)."""
    A, gram = features.columns, features.gram
    if A is not None and features.width > WIDE:
        return A / features.count**0.5
    total = gram if A is None else A.double() @ A.double().T
    assert total is not None
    return (total / features.count).float()


def measure_reference(moment: Tensor, bases: Sequence[Tensor]) -> Tensor:
    """Return omega_t = ||U_t^T A||_F / sqrt(n) = sqrt(tr(U_t^T M U_t)) on each basis: [T] (eq. 10).

    moment: M [F, F], or of wide features A / sqrt(n) [F, n].
    """
    is_factor = len(moment) > WIDE
    squares = torch.stack(
        [
            (moment.T @ U).square().sum() if is_factor else (U * (moment @ U)).sum()
            for U in (basis.to(moment) for basis in bases)
        ]
    )
    return squares.clamp(min=0).sqrt()


def merge_references(
    before: dict[str, Any], clients: list[int], bases: list[Tensor], answers: dict[int, Bases]
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
    return Router(tuple(bases), references, has_reference)
