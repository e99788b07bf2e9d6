"""Task identity prediction (TIP) of FedProTIP, section 4.4: what clients and server gather for a Router.

After task t each client sends U_k diag(sigma_k), the directions of its features (the last layer's input, uncentred)
outside U_1..U_{t-1}, as long as its features are in them together. U_t is made of those that lead over all clients. A
reference omega^(tau,t) is the root mean square length of a client's features of task tau on U_t (eq. 10). For a
later t it needs features that are gone: their second moment, which the client keeps, gives it exactly.

knowledge: `tip`, a Router's tree, and the `clients` that its references are from ([0] for their mean).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fclmodels.backbones.layer_inputs import LayerInputs
from fclmodels.federation.client import Client
from fclmodels.federation.cohort import Cohort
from fclmodels.federation.messages import Part, Reply, outline
from fclmodels.federation.prediction import Prediction
from fclmodels.federation.run import Run
from fclmodels.federation.server import Server
from fclmodels.methods.base import Memory, Predictor
from fclmodels.methods.projected import Projected
from fclmodels.methods.subspaces import Bases
from fclmodels.numerics.relevance import Router
from fclmodels.numerics.subspace import extend
from fclmodels.settings import Settings as BaseSettings

REFERENCES = "references"


class Tip(Projected):
    class Settings(Projected.Settings):
        tip: bool = Field(
            True,
            description="predict tasks, with a head each under model.head: auto; false: FedProTIP(-t)",
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

    settings: Settings

    def __init__(self, settings: BaseSettings, run: Run) -> None:
        super().__init__(settings, run)
        if self.settings.tip and run.params.model.head == "auto" and self.no_new_classes:
            # In a head that tasks share in full, a predicted task would change no answer.
            model = run.params.model.model_copy(update={"head": "per-task"})
            self.run = replace(run, params=run.params.model_copy(update={"model": model}))

    @property
    def needs_each(self) -> str | None:
        if self.settings.tip and self._votes:
            return f"methods.{self.name}.tip_reference: each lets every client vote. Use tip_reference: mean."
        if self.settings.tip and self.settings.tip_voters == 1:
            return f"methods.{self.name}.tip_voters: 1 makes a client's own reference the mean. Use more."
        return super().needs_each

    def sends(self, task: int, round: int) -> dict[str, dict[str, Part]]:
        shapes = {"omega": (task + 1, task + 1), "count": (task + 1,)}
        asked = {REFERENCES: {REFERENCES: outline("reference", shapes)}} if self.settings.tip else {}
        return {**super().sends(task, round), **asked}

    # On the server.

    def known_features(self, server: Server) -> Tensor:
        """U_1 to U_{t-1} side by side [F, r]."""
        nothing = server.weights["heads.0.weight"][:0].T
        return torch.cat([nothing, *_tip(server)["bases"]], dim=1)

    def with_task(self, server: Server, cohort: Cohort, found: Sequence[Tensor]) -> Server:
        """The server that can predict the task just learned, given the directions [F, k] that its clients found."""
        bases = [*_tip(server)["bases"], self._task_basis(self.known_features(server), found)]
        clients = self.voters(server.task)
        moments = self.settings.tip_later == "moments"
        asked = clients if moments else self.witnesses(server.task)
        answers = self._ask(cohort, bases, asked) if asked else {}
        clients = clients if self._votes else [0]
        tip = {"clients": clients, **_merged(_tip(server), clients, bases, answers).to_tree()}
        return replace(server, knowledge={**server.knowledge, "tip": tip})

    def _task_basis(self, known: Tensor, found: Sequence[Tensor]) -> Tensor:
        """U_t [F, r_t], orthogonal to earlier tasks': `extend` puts first where what clients found is longest."""
        fresh = extend(known, torch.cat(list(found), dim=1))[:, known.shape[1] :]
        return fresh[:, : self.settings.tip_rank].contiguous()

    def _ask(self, cohort: Cohort, bases: Sequence[Tensor], clients: Sequence[int]) -> dict[int, Bases]:
        """`omega` [T, T] and `count` [T] of each client, or their means."""
        part = Part("basis", {str(task): basis for task, basis in enumerate(bases)})
        replies = cohort.ask(REFERENCES, {"features": part}, clients)
        if self._votes:
            return dict(replies.each(REFERENCES))
        sums = replies.sum(REFERENCES)
        return {0: {"omega": sums["omega"] / sums["count"].clamp(min=1)[:, None], "count": sums["count"]}}

    @property
    def _votes(self) -> bool:
        return self.settings.tip_reference == "each"

    def voters(self, task: int) -> list[int]:
        """The clients that give references of some task so far."""
        return sorted({client for earlier in range(task + 1) for client in self.witnesses(earlier)})

    def witnesses(self, task: int) -> list[int]:
        """Of a task's clients, those that give references of it: the first in a fixed random order."""
        able = set(self.participants(task))
        order = torch.randperm(self.run.splits.clients, generator=self.run.generator("voters")).tolist()
        return [client for client in order if client in able][: self.settings.tip_voters]

    # On a client.

    def remembering(self, client: Client, features: LayerInputs) -> Memory:
        """Its memory with the second moment of this task's features, where it is to give references."""
        if client.index not in self.witnesses(client.task):
            return client.memory
        moments = {**client.memory.get("moments", {}), str(client.task): second_moment(features)}
        return {**client.memory, "moments": moments}

    def references(self, client: Client, bases: Sequence[Tensor]) -> tuple[Reply, Memory]:
        """omega [T, T], a row for each task that the client has a moment of, and which those are: count [T]."""
        omega, count = torch.zeros(len(bases), len(bases)), torch.zeros(len(bases))
        for task, moment in client.memory["moments"].items():
            omega[int(task)] = reference(moment, bases)
            count[int(task)] = 1
        part = Part("reference", {"omega": omega, "count": count}, "each" if self._votes else "sum")
        memory = client.memory
        if self.settings.tip_later == "zero":
            memory = {name: value for name, value in memory.items() if name != "moments"}
        return Reply({REFERENCES: part}), memory

    # Prediction.

    def router(self, server: Server) -> Router | None:
        return Router.from_tree(server.knowledge["tip"]) if "tip" in server.knowledge else None

    def predictor(self, server: Server) -> Predictor:
        network, router = self.networks.load(server.spec, server.weights).eval(), self.router(server)
        if router is None:
            return self.predict_with(network)

        def predict(inputs: Tensor) -> Prediction:
            features = network.backbone(inputs)
            logits = torch.cat([head(features) for head in network.heads], dim=1)
            return Prediction(logits, router.sample_scores(features), router.batch_scores(features))

        return predict


def second_moment(features: LayerInputs) -> Tensor:
    """M = A A^T / n [F, F] of features A [F, n]: all that eq. 10 needs of them, for any basis."""
    A, gram = features.columns, features.gram
    total = gram if A is None else A.double() @ A.double().T
    assert total is not None
    return (total / features.seen).float()


def reference(moment: Tensor, bases: Sequence[Tensor]) -> Tensor:
    """omega_t = ||U_t^T A||_F / sqrt(n) = sqrt(tr(U_t^T M U_t)) on each basis: [T] (eq. 10)."""
    squares = torch.stack([(U * (moment @ U)).sum() for U in (basis.to(moment) for basis in bases)])
    return squares.clamp(min=0).sqrt()


def _merged(before: dict[str, Any], clients: list[int], bases: list[Tensor], answers: dict[int, Bases]) -> Router:
    """What is known of each client's references, and over it what it has answered."""
    references = torch.zeros(len(clients), len(bases), len(bases))
    known = torch.zeros(len(clients), len(bases), dtype=torch.bool)
    for place, client in enumerate(clients):
        if client in before["clients"]:
            old = before["clients"].index(client)
            references[place, :-1, :-1], known[place, :-1] = before["references"][old], before["known"][old]
        if client in answers:
            rows = answers[client]["count"] > 0
            references[place, rows], known[place, rows] = answers[client]["omega"][rows], True
    return Router(tuple(bases), references, known)


def _tip(server: Server) -> dict[str, Any]:
    knowledge: dict[str, Any] = server.knowledge.get("tip", {"clients": [], "bases": []})
    return knowledge
