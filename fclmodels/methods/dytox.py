"""DyTox+FL: one transformer, a token and a head for each task, and exemplars (Douillard et al., CVPR 2022), by FedAvg.

The encoder of `convit` makes patches of an image. Each task's token attends to them in the decoder's block, and the
task's head, with a norm of its own, reads that token alone ("1-1"); all heads' logits stand side by side. With n old
and m new columns, lam = n / (n + m) and the last task's final model (°) a client descends, on the shuffled union of new
rows and exemplars,

    (1 - lam) BCE(z, one-hot) + lam tau^2 mean KL(softmax(z°/tau) || softmax(z_old/tau)) + c BCE(divergence, one-hot)

the mean of KL over samples and old columns, as in the release. The divergence head, of each task's own, reads the new
token and tells the m new classes from one class of all old ones. Earlier tasks' tokens, norms and heads are frozen. In
the first task it is BCE alone. After each later task every client tunes decoder, tokens, norms and heads on its
exemplars, which are balanced, with the encoder frozen and without teacher or divergence head.

How PIP federated it (Tables 2 and 3), nothing says. Ours: all that trains is averaged, tokens too; tuning is one more
exchange with the task's clients, after they have chosen exemplars by herding on all tokens together; a further task's
token is drawn by the run's seed. Mixup (DyTox+) is left out. The published memory was one for each GPU, so that its
figures are of more exemplars than they say (the release's erratum).

knowledge: `anchor` and `anchor-tokens`, the last task's final model. memory: exemplars (exemplar_memory.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, kl_div, one_hot

from fclmodels.backbones.layers.norms import SharedPolicy
from fclmodels.backbones.model.network import Network, NetworkCache
from fclmodels.data.batches import Batch
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.prediction import OwnModel
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.auxiliary_networks import Auxiliary
from fclmodels.federation.training.local_training import LocalTraining, ParameterGroup
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.anchor import anchor_payload, anchor_to
from fclmodels.methods.parts.exemplar_memory import (
    ExemplarMemory,
    ExemplarSettings,
    iterate_joined_epochs,
    iterate_stored_epochs,
)
from fclmodels.methods.parts.joined_heads import find_columns
from fclmodels.methods.parts.replay_memory import unpack_samples
from fclmodels.methods.parts.task_tokens import (
    LastTokenModel,
    TokenModel,
    build_task_tokens,
    embed_tokens,
    get_convit,
    score_tokens,
)
from fclmodels.settings.schema import OptimizerSettings

ENCODER = ("backbone.embed.", "backbone.layers.")


@dataclass(frozen=True)
class Tuning:
    """The exemplars on which a training tunes what is above the encoder."""

    samples: Batch


class Dytox(FedAvg):
    """Clients train one transformer with a token and a head for each task, on new samples and exemplars."""

    name = "dytox"
    paper = "DyTox: Transformers for Continual Learning with DYnamic TOken eXpansion"
    needs_backbone: ClassVar[str] = "convit"

    class Settings(FedAvg.Settings, ExemplarSettings):
        batch_norm: SharedPolicy = Field("average", description="convit has no running statistics")
        exemplars: int = Field(
            2000,
            ge=1,
            le=1_000_000,
            description="samples that each client keeps, of all classes or of each (see budget)",
        )
        divergence: NonNegativeFloat = Field(0.1, le=1e6, description="c, weight of the divergence head's loss")
        temperature: PositiveFloat = Field(1.0, le=1e6, description="tau, which logits are divided by in distillation")
        tuning_epochs: NonNegativeInt = Field(20, le=10_000, description="epochs on exemplars after each later task")
        tuning_lr: PositiveFloat = Field(5e-5, le=1e6, description="learning rate of these epochs")

    settings: Settings
    uses_frozen_activations = False

    def __init__(self, settings: Settings, run: Run) -> None:
        if run.params.model.backbone != self.needs_backbone or run.make_spec(1).head != "per-task":
            raise UserError(
                "methods.dytox: each task has a token that attends to convit's patches, and a head. "
                "Use model.backbone: convit and model.head: per-task."
            )
        super().__init__(settings, run)
        self.memory = ExemplarMemory(settings)
        self.teachers = NetworkCache(run.device, self.prepare_network)
        self.select = self.declare(Exchange("select", self.make_payload, self.select_exemplars))
        self.tune = self.declare(Exchange("tune", self.make_payload, self.tune_on_exemplars, self.make_tune_form))

    def list_auxiliary_networks(self) -> list[Auxiliary]:
        return [Auxiliary("tokens", self.token_spec, build_task_tokens, "averaged", self.run.params.optimizer)]

    @cached_property
    def token_spec(self) -> dict[str, Any]:
        width = self.networks.build(self.run.make_spec(1)).backbone.features
        return {"width": width, "classes": [len(task.classes) for task in self.run.splits.tasks]}

    # On the server.

    def start_task(self, server: Server, task: int) -> Server:
        started = anchor_to(super().start_task(server, task), server)
        # A stream that goes on has tasks of which an earlier state has no tokens.
        tokens = {**self.auxiliaries.create_initial()["tokens"], **server.networks["tokens"]}
        knowledge = {**started.knowledge, **({"anchor-tokens": tokens} if task else {})}
        return replace(started, networks={"tokens": tokens}, knowledge=knowledge)

    def make_payload(self, server: Server) -> Payload:
        parts = {**super().make_payload(server), **anchor_payload(server)}
        if (tokens := server.knowledge.get("anchor-tokens")) is not None:
            parts["anchor-tokens"] = Part("generator", tokens, once=True)
        return parts

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        cohort.ask(self.select, server)
        if server.task == 0 or not self.settings.tuning_epochs:
            return server
        return self.aggregate(server, cohort.ask(self.tune, server))

    def make_own_model(self, server: Server) -> OwnModel:
        """Return the network with the tokens of the tasks that it has heads for."""
        classes = self.token_spec["classes"][: len(server.spec.head_labels)]
        spec = {"model": server.spec.to_json(), **self.token_spec, "classes": classes}
        network = {f"network.{name}": tensor for name, tensor in server.weights.items()}
        tokens = {f"tokens.{name}": server.networks["tokens"][name] for name in build_task_tokens(spec).state_dict()}
        return OwnModel(spec, {**network, **tokens})

    @staticmethod
    def build_own_model(spec: Mapping[str, Any]) -> nn.Module:
        return TokenModel(spec)

    # On a client.

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        for task, token in enumerate(training.networks["tokens"][0].children()):
            token.requires_grad_(task == training.client.task)
        if "anchor" in payload:
            network = self.teachers.load(self.run.make_spec(training.client.task), payload["anchor"].tensors).eval()
            self.teacher_tokens.load_state_dict(payload["anchor-tokens"].tensors)
            training.add(LastTokenModel(network, self.teacher_tokens))

    @cached_property
    def teacher_tokens(self) -> nn.Module:
        return build_task_tokens(self.token_spec).to(self.run.device).eval()

    def yield_epochs(self, training: LocalTraining) -> Iterator[Iterator[Batch]]:
        tuning = training.find_added(Tuning)
        if tuning is not None:
            return iterate_stored_epochs(training.client, tuning.samples, self.settings.tuning_epochs)
        return iterate_joined_epochs(training.client, unpack_samples(training.client.memory))

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        network, tokens = training.network, training.networks["tokens"][0]
        embedded = embed_tokens(network, tokens, batch.inputs)
        logits = score_tokens(network, tokens, embedded)
        labels = find_columns(network.spec, batch.labels, batch.tasks)
        last = training.find_added(LastTokenModel)
        if last is None or training.find_added(Tuning) is not None:
            return compare_one_hot(logits, labels)
        answers = last.answer(batch.inputs)
        loss = compare_and_distil(logits, labels, answers, self.settings.temperature)
        new = (labels - answers.shape[1] + 1).clamp(min=0)  # 0: any old class
        divergence = tokens.get_submodule(f"{training.client.task}.divergence")(embedded[-1])
        return loss + self.settings.divergence * compare_one_hot(divergence, new)

    def select_exemplars(self, client: Client, payload: Payload) -> Answer:
        """Return the memory with exemplars of the task that has ended; the answer itself is empty."""
        network = self.networks.load(self.run.make_spec(client.task + 1), payload["weights"].tensors).eval()
        tokens = self.auxiliaries.start(client, payload)["tokens"][0]
        return Answer(
            {}, self.memory.add_task(client, network, lambda x: torch.cat(embed_tokens(network, tokens, x), 1))
        )

    # Tuning.

    def select_tuned(self, network: Network) -> dict[str, nn.Parameter]:
        """Return the network's parameters that tuning moves: all but the encoder's."""
        return {name: p for name, p in network.named_parameters() if not name.startswith(ENCODER)}

    def make_tune_form(self, task: int, round: int) -> Form:
        tuned = self.select_tuned(self.networks.build(self.run.make_spec(task + 1)))
        return {
            "update": Part("update", {name: p.to("meta") for name, p in tuned.items()}, over="weight"),
            "weight": make_outline("count", {"weight": ()}, torch.float64),
            **self.auxiliaries.make_form(),
        }

    def tune_on_exemplars(self, client: Client, payload: Payload) -> Answer:
        """Return the update of what is above the encoder, trained on the client's exemplars."""
        training = self.prepare_training(client, payload)
        samples = unpack_samples(client.memory)
        assert samples is not None  # the client has just chosen some of the task's
        training.add(Tuning(samples))
        training.parameters = self.select_tuned(training.network)
        convit = get_convit(training.network)
        convit.embed.eval()
        convit.layers.eval()
        tokens, auxiliary = training.networks["tokens"]
        training.networks["tokens"] = (tokens.requires_grad_(True), replace(auxiliary, optimizer=self.tuning))
        return self.report(training, payload, training.run())

    def group_parameters(self, training: LocalTraining) -> list[ParameterGroup]:
        """Return tuning's learning rate for all parameters while a client tunes."""
        if training.find_added(Tuning) is None:
            return []
        return [ParameterGroup(list(training.parameters), self.tuning)]

    @property
    def tuning(self) -> OptimizerSettings:
        """The optimiser of tuning, which is no round: its learning rate does not decay."""
        return self.run.params.optimizer.model_copy(update={"lr": self.settings.tuning_lr, "lr_decay": 1.0})


def compare_one_hot(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the binary cross entropy of logits [B, C] and one-hot labels [B], a mean over all numbers."""
    return binary_cross_entropy_with_logits(logits, one_hot(labels, logits.shape[1]).to(logits))


def compare_and_distil(logits: Tensor, labels: Tensor, answers: Tensor, temperature: float) -> Tensor:
    """Return (1 - lam) BCE + lam tau^2 KL of logits [B, n + m], labels [B] and the teacher's logits [B, n]."""
    old = answers.shape[1]
    share = old / logits.shape[1]
    ours, theirs = ((z / temperature).log_softmax(1) for z in (logits[:, :old], answers))
    divergence = kl_div(ours, theirs, reduction="none", log_target=True).mean()
    return (1 - share) * compare_one_hot(logits, labels) + share * temperature**2 * divergence
