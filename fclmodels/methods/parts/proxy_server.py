"""GLFC's proxy server: it rebuilds clients' prototypes from gradients, and chooses the model that answers them best.

Before a task's first round each of its clients trains as in that round, takes for each of its classes the sample that
is nearest to the class's mean feature, and moves its pixels some steps down the loss of the trained model. What it
sends is the gradient of this image's cross entropy on a network that everybody draws from the run's seed and nobody
trains (numerics/gradient_inversion.py). The server inverts the gradients, keeps the last iterates of each image, and
from then on measures each round's model on them: the best is the next task's teacher.

The paper calls the moved images perturbed, but they go *down* the loss, and differ little from the sample. In the
release a client sends gradients in the first round that it takes part in after its entropy rises; here all clients of a
task are asked before it (ours), and their local training is the first round's, to the bit. Prototypes are inputs of the
network, normalised as in training (the release: not), and the best score starts anew in each task (the release:
never). A step of L-BFGS is one iteration, which ends at the same image (docs/privacy.md).

knowledge: `proxy` {inputs [n, ...] of the encoder's size, labels [n]} of the present task, at most `iterates` for each
class of each client; `best` {weights, score, rounds} of this task so far. memory: `entropy` under `signal: entropy`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from fclmodels.backbones.model.network import Network
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.data.batches import Batch
from fclmodels.data.sample_kind import TEXTS, find_kind
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form, Memory
from fclmodels.federation.executors.base import set_torch_threads
from fclmodels.federation.messages import Payload, make_outline
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.federation.training.server_training import ServerWork
from fclmodels.methods.parts.coreset_memory import EMBED
from fclmodels.methods.parts.joined_heads import find_columns, join_heads
from fclmodels.methods.parts.replay_memory import pack_samples, unpack_samples
from fclmodels.numerics.exemplar_losses import distil_targets
from fclmodels.numerics.gradient_compensation import weigh_cross_entropy
from fclmodels.numerics.gradient_inversion import Kind, SigmoidLeNet, differentiate, infer_label, invert_gradient
from fclmodels.settings.base import Settings as BaseSettings
from fclmodels.storage.trees import Tree


class ProxySettings(BaseSettings):
    proxy: bool = Field(
        True, description="whether gradients of prototypes choose the teacher; false: it is the last task's final model"
    )
    perturb_steps: NonNegativeInt = Field(
        50, le=10_000, description="steps that a prototype's pixels go down the local model's loss (the release's)"
    )
    perturb_lr: PositiveFloat = Field(0.2, le=1e6, description="their rate; the release: a tenth of training's 2.0")
    inversion: Kind = Field("l-bfgs", description="how the server inverts gradients; FedProTIP's runs of LGA: sgd")
    inversion_steps: PositiveInt = Field(250, le=100_000, description="steps for each prototype (the release's)")
    inversion_lr: PositiveFloat = Field(
        0.1, le=1e6, description="their rate; the release's, and FedProTIP's for ImageNet-R; its others: 0.5"
    )
    encoder_size: int | None = Field(
        None,
        ge=8,
        le=1024,
        description="side of the images whose gradients travel, to which larger prototypes are shrunk (the release's "
        "images have 32 pixels); null: their own. A gradient grows with its square, and with the classes so far",
    )
    signal: Literal["boundary", "entropy"] = Field(
        "boundary", description="how a client notices a new task: it is told (ours), or by the rise of its entropy"
    )
    rise: PositiveFloat = Field(1.2, le=100, description="of the mean entropy that is a new task, in nats")
    iterates: PositiveInt = Field(
        20, le=1000, description="last iterates of each image that models are measured on (the release's)"
    )


# A client's training from what it was sent, ready to run; and the model that it was sent, in evaluation mode.
Train = Callable[[Client, Payload], LocalTraining]
Load = Callable[[Client, Payload], Network]


class ProxyServer:
    """Asks for gradients of prototypes, inverts them, and holds on to the best model."""

    def __init__(self, settings: ProxySettings, run: Run, method: str, train: Train, load: Load) -> None:
        self.settings = settings
        self.run = run
        self.train = train
        self.load = load
        if settings.proxy and find_kind(run.splits.shape) is TEXTS:
            raise UserError(f"methods.{method}.proxy: it rebuilds images, these samples are texts. Set it to false.")
        if settings.signal == "entropy" and not settings.proxy:
            raise UserError(
                f"methods.{method}.signal: entropy chooses who shows prototypes, and proxy: false has none. "
                "Use signal: boundary, or proxy: true."
            )
        if settings.iterates > settings.inversion_steps:
            raise UserError(
                f"methods.{method}.iterates: {settings.iterates} of inversion_steps: {settings.inversion_steps}. "
                "Keep at most as many."
            )

    def draw_encoder(self, spec: ModelSpec) -> SigmoidLeNet:
        """Return the network whose gradients travel, with a row for each class so far; the same one for everybody."""
        random = self.run.make_generator("encoder", len(spec.tasks))
        return SigmoidLeNet(self.shape, spec.label_count, random).to(self.run.device)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the images whose gradients travel."""
        channels, *sides = self.run.splits.shape
        return (channels, *(min(side, self.settings.encoder_size or side) for side in sides))

    # On a client.

    def show_prototypes(self, client: Client, payload: Payload) -> Answer:
        """Return the gradients of the client's prototypes, and its memory after it has noticed the task or not."""
        network = self.load(client, payload)
        if not self.notices_task(client, network):
            return Answer({"prototypes": self.make_gradients(network, None)}, forget_task(client))
        training = self.train(replace(client, round=0), payload)
        training.run()
        samples = self.run.batches.read_raw(client.rows)
        return Answer({"prototypes": self.make_gradients(training.network, samples)}, client.memory)

    def notices_task(self, client: Client, network: Network) -> bool:
        """Return whether a client notices, by the model that it is sent, that a task has begun."""
        if self.settings.signal == "boundary":
            return True
        return self.measure_entropy(client, network) - client.memory.get("entropy", 0.0) > self.settings.rise

    def note_entropy(self, client: Client, network: Network, memory: Memory) -> Memory:
        """Return a client's memory with the entropy that a further task's is compared with."""
        if self.settings.signal == "boundary" or not len(client.rows):
            return memory
        return {**memory, "entropy": self.measure_entropy(client, network)}

    @torch.no_grad()
    def measure_entropy(self, client: Client, network: Network) -> float:
        """Return the mean entropy of softmax over a client's rows of the task, in nats."""
        total = 0.0
        for batch in self.run.batches.iterate_ordered(client.rows, EMBED):
            log_p = join_heads(network, network.backbone(batch.inputs)).float().log_softmax(1)
            total -= float((log_p.exp() * log_p).sum())
        return total / len(client.rows)

    def make_form(self, task: int, round: int) -> Form:
        """Return the outlines of gradients by the encoder's parameters, one for each class of the task."""
        spec = self.run.make_spec(task + 1)
        encoder = self.draw_encoder(spec)
        shapes = {name: (len(spec.tasks[task]), *p.shape) for name, p in encoder.named_parameters()}
        part = make_outline("gradient", shapes, least="each")
        return {"prototypes": replace(part, of="encoder")}

    def make_gradients(self, network: Network, samples: Batch | None) -> dict[str, Tensor]:
        """Return the gradient of each class's prototype among a client's raw samples; zeros without any."""
        spec, encoder = network.spec, self.draw_encoder(network.spec)
        classes = spec.tasks[-1]
        gradients = {n: torch.zeros(len(classes), *p.shape, device=p.device) for n, p in encoder.named_parameters()}
        for place, label in enumerate(classes):
            if samples is None or not (mine := samples.labels == label).any():
                continue
            own = self.run.batches.prepare_inputs(samples.take(mine.nonzero().flatten()))
            image = self.perturb(network, find_prototype(network, own.inputs), own.take(torch.tensor([0])))
            small = resize(image, self.shape)
            for name, gradient in zip(gradients, differentiate(encoder, small, own.labels[:1]), strict=True):
                gradients[name][place] = gradient
        return gradients

    def perturb(self, network: Network, image: Tensor, of: Batch) -> Tensor:
        """Return the image [1, ...] after steps of SGD down the network's binary cross entropy of its class."""
        network.eval().requires_grad_(False)
        column = find_columns(network.spec, of.labels, of.tasks)
        for _ in range(self.settings.perturb_steps):
            image = image.detach().requires_grad_()
            logits = join_heads(network, network.backbone(image))
            loss = weigh_cross_entropy(logits, distil_targets(column, logits.shape[1], column[:0], None))
            (gradient,) = torch.autograd.grad(loss, [image])
            image = image - self.settings.perturb_lr * gradient
        return image.detach()

    # On the server.

    def choose_teacher(self, server: Server, last: Server) -> Server:
        """Return the server that starts a task with the last task's best model as teacher, if one was measured."""
        knowledge = {name: value for name, value in server.knowledge.items() if name not in ("proxy", "best")}
        best = last.knowledge.get("best", {})
        teacher = {"anchor": best["weights"]} if "weights" in best and "anchor" in knowledge else {}
        return replace(server, knowledge={**knowledge, **teacher})

    def rebuild(self, server: Server, cohort: Cohort, show: Exchange) -> Server:
        """Return the server with the images of a task's clients, whom it asks for gradients."""
        if not self.settings.proxy:
            return server
        knowledge, replies = dict(server.knowledge), cohort.ask(show, server)
        sent = [
            [tensors[name][place] for name in tensors]
            for _, tensors in replies.yield_each("prototypes")
            for place in range(len(server.spec.tasks[server.task]))
        ]
        gradients = [[g.to(self.run.device) for g in gradient] for gradient in sent if any(g.any() for g in gradient)]
        if gradients:
            work = Inversion(self.draw_encoder(server.spec), gradients, self.settings, self.shape)
            cohort.train(work, len(gradients))
            labels = torch.cat([infer_label(gradient) for gradient in gradients]).cpu()
            labels = labels.repeat_interleave(self.settings.iterates)
            knowledge["proxy"] = {"inputs": torch.cat(work.images).cpu(), "labels": labels}
        return replace(server, knowledge=knowledge)

    def hold_best(self, server: Server, judge: Callable[[Server], float]) -> Server:
        """Return the server after a round, with its model in the best one's place if its score is no lower."""
        if "proxy" not in server.knowledge:
            return server
        score = judge(server)
        best: dict[str, Any] = server.knowledge.get("best", {"score": -1.0, "rounds": 0})
        best = {**best, "rounds": best["rounds"] + 1}
        if score >= best["score"]:
            best = {**best, "weights": server.weights, "score": score}
        return replace(server, knowledge={**server.knowledge, "best": best})

    @torch.no_grad()
    def embed_images(self, network: Network, proxy: Tree) -> Tensor:
        """Return the features [n, F] of the images on a network in evaluation mode."""
        parts = (part.to(self.run.device) for part in proxy["inputs"].split(EMBED))
        return torch.cat([network.backbone(resize(part, self.run.splits.shape)) for part in parts])

    @torch.no_grad()
    def measure(self, network: Network, features: Tensor, proxy: Tree, copies: int = 1) -> float:
        """Return the share of right answers among features [copies n, F]."""
        labels = proxy["labels"].to(features.device).repeat(copies)
        tasks = torch.full_like(labels, len(network.spec.tasks) - 1)
        right = join_heads(network, features).argmax(1) == find_columns(network.spec, labels, tasks)
        return float(right.double().mean())


class Inversion(ServerWork):
    """The server's work on one prototype after another."""

    name = "inversion"

    def __init__(
        self,
        encoder: SigmoidLeNet,
        gradients: Sequence[Sequence[Tensor]],
        settings: ProxySettings,
        shape: Sequence[int],
    ) -> None:
        self.encoder = encoder
        self.gradients = gradients
        self.settings = settings
        self.shape = shape
        self.images: list[Tensor] = []

    def step(self, number: int) -> float:
        of = self.settings
        gradient = self.gradients[number]
        start = torch.randn(1, *self.shape, device=gradient[0].device)
        # One image keeps one thread busy: on a shared machine two wait for each other.
        with set_torch_threads(1):
            images, distance = invert_gradient(
                self.encoder, gradient, start, of.inversion, of.inversion_lr, of.inversion_steps, of.iterates
            )
        self.images.append(images)
        return distance

    def collect_state(self) -> Tree:
        return {"images": self.images}

    def restore(self, state: Tree) -> None:
        self.images = list(state["images"])


@torch.no_grad()
def find_prototype(network: Network, inputs: Tensor) -> Tensor:
    """Return the sample [1, ...] of a class whose feature of length 1 is nearest to their mean."""
    network.eval()
    features = normalize(torch.cat([network.backbone(part) for part in inputs.split(EMBED)]))
    return inputs[(features - features.mean(0)).norm(dim=1).argmin()][None]


def resize(images: Tensor, shape: Sequence[int]) -> Tensor:
    """Return images [n, C, ...] with sides of this shape [C, H, W]; as they are where they have them."""
    if images.shape[1:] == torch.Size(shape):
        return images
    return interpolate(images, list(shape[1:]), mode="bilinear", align_corners=False, antialias=True)


def forget_task(client: Client) -> Memory:
    """Return a client's memory without exemplars of the task before its present one."""
    samples = unpack_samples(client.memory)
    if samples is None:
        return client.memory
    stay = (samples.tasks != client.task - 1).nonzero().flatten()
    return {**client.memory, **pack_samples(samples.take(stay))}
