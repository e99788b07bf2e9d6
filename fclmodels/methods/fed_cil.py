"""FedCIL: clients train an AC-GAN, and the server consolidates it on images of their generators (Qi et al. 2023).

The network with its heads, and one unit more, is the critic of an AC-GAN (ac_gan.py); its class heads answer. A client
takes a step of the critic and one of the generator for each batch (x, y). In the first task the critic descends L_D(x),
later (L_D(x) + L_D(x_)) / 2, x_ as many images of earlier classes that the client's own generator draws as its last
task ended; a client that has none, as it comes late, draws them with the last task's global one (ours). Draws are of
the classes that the client has had so far. From a task's second round on the critic also descends

    consistency * (KL(p(g) || p(x)) + KL(p(g') || p(f')) + NLL(g', y'))

with images g, g' of the round's global generator and f' of the client's own, g of the classes of x, y' of all clients'
classes so far. The release multiplies this by 0; its weight is nowhere, so that 1 is ours.

The server averages critic and generator, and then takes `consolidation` steps of both on images of the clients' own
generators: "real" are images of the task's classes that their clients have, drawn from every one of the round and then
picked so that each class is as likely as another; replay, from the second task on, are such images of the generators
with which these clients last ended an earlier task. So the server needs each client's generator and classes. A
generator that comes late is averaged, and not drawn from.

The paper's release uses Adam (0.0001, betas 0.5 and 0.99), 400 batches a round, for both networks, whose states go on;
here the critic has the run's optimiser, the generator that Adam, and they start anew in each round. The global model is
evaluated (the release: each client's own critic), whose running statistics are those of real samples alone (ours).
With a consolidation and a consistency of 0, the first task is FedAvg of an AC-GAN. Where tasks have heads of their own,
a draw is of a task's class, and its NLL within that head (ours); FOT's adaptation to such heads is not in its text.

knowledge: `columns` (label_sets.py); `past`, the last task's generator; with consolidation `rounds` of this task,
`uploads` and `earlier`, by client {state, columns}, the generators of this task and of earlier ones: at most two for
each client. memory: `generator` and `last` {task, state, columns}, at most two generators, and `columns`.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from fclmodels.backbones.layers.norms import SharedPolicy
from fclmodels.backbones.model.network import Network, build_skeleton
from fclmodels.data.batches import Batch
from fclmodels.data.sample_kind import TEXTS, find_kind
from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Form, Memory
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.method import Obstacle
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.federation.training.auxiliary_networks import Auxiliary, AuxiliaryNetworks, copy_state
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.federation.training.server_training import refuse_divergence
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.parts.ac_gan import AcGan, GanTraining, build_generator, build_judge, make_generator_adam
from fclmodels.methods.parts.class_table import grow_tables
from fclmodels.methods.parts.consolidation import ClientGenerator, Moment, consolidate
from fclmodels.methods.parts.joined_heads import count_columns, find_columns, list_task_columns
from fclmodels.methods.parts.label_sets import LabelSets
from fclmodels.storage.trees import Tree


class FedCil(FedAvg):
    """Clients train an AC-GAN and replay what their generators draw; the server consolidates both."""

    name = "fed-cil"
    paper = "Better Generative Replay for Continual Federated Learning"

    class Settings(FedAvg.Settings):
        batch_norm: SharedPolicy = Field(
            "average", description="running statistics: average over clients; batch: none; frozen after task 1"
        )
        consistency: NonNegativeFloat = Field(
            1.0, le=1e6, description="weight of consistency with the global generator (ours); the release's code: 0"
        )
        consolidation: NonNegativeInt = Field(
            50, le=100_000, description="the server's steps in a round (md_iter: 50 or 100); 0: none, sums are enough"
        )
        noise: PositiveInt = Field(100, le=100_000, description="random numbers of an image, beside its class")
        width: PositiveInt = Field(64, le=10_000, description="channels of the generator's last layers")
        generator_lr: PositiveFloat = Field(1e-4, le=100, description="rate of the generator's Adam; CIFAR-10's: 2e-4")

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        if find_kind(run.splits.shape) is TEXTS:
            raise UserError(f"methods.{self.name}: it draws images, these samples are texts. Use lwf or er.")
        super().__init__(settings, run)
        self.labels = LabelSets(run)
        self.declare(self.labels.exchange)
        # Generators of the past and of others, beside the one that trains.
        self.others = [AuxiliaryNetworks(self.list_auxiliary_networks(), run.seed, run.device) for _ in range(2)]

    def list_auxiliary_networks(self) -> list[Auxiliary]:
        classes = count_columns(self.run.make_spec(len(self.run.splits.tasks)))
        sizes = {"noise": self.settings.noise, "width": self.settings.width}
        generator = {**sizes, "classes": classes, "shape": list(self.run.splits.shape)}
        judge = {"features": build_skeleton(self.run.make_spec(1)).backbone.features}
        return [
            Auxiliary("generator", generator, build_generator, "averaged"),
            Auxiliary("judge", judge, build_judge, "averaged", self.run.params.optimizer),
        ]

    @property
    def obstacle_to_sums(self) -> Obstacle | None:
        if not self.settings.consolidation:
            return None
        return Obstacle(
            f"methods.{self.name} consolidates on each client's generator", f"Set methods.{self.name}.consolidation: 0"
        )

    @property
    def obstacle_to_noise(self) -> Obstacle | None:
        return Obstacle("asks which classes clients have, which noise would hide", "Use lwf or fedproto")

    @property
    def obstacle_to_robust_rules(self) -> Obstacle | None:
        return (
            Obstacle("draws images with each client's generator", "Use mean") if self.settings.consolidation else None
        )

    def list_advice(self) -> list[str]:
        if not self.settings.consolidation:
            return []
        states = self.auxiliaries.create_initial()["generator"].values()
        size = sum(tensor.nbytes for tensor in states)
        return [
            f"the server keeps up to two generators of each client, of {size:,} bytes each (consolidation: 0: none)"
        ]

    # On the server.

    def start_task(self, server: Server, task: int) -> Server:
        started, fresh = super().start_task(server, task), self.auxiliaries.create_initial()
        grown = {name: grow_tables(state, fresh[name]) for name, state in server.networks.items()}
        uploads = {**server.knowledge.get("earlier", {}), **server.knowledge.get("uploads", {})}
        earlier = {c: {**of, "state": grow_tables(of["state"], fresh["generator"])} for c, of in uploads.items()}
        knowledge = {**started.knowledge, **({"past": grown["generator"]} if task else {})}
        if self.settings.consolidation:
            knowledge |= {"rounds": 0, "uploads": {}, "earlier": earlier}
        return self.labels.start_task(replace(started, networks=grown, knowledge=knowledge))

    def begin_task(self, server: Server, cohort: Cohort) -> Server:
        return self.labels.ask(server, cohort)

    def make_payload(self, server: Server) -> Payload:
        parts = {**super().make_payload(server), **self.labels.make_payload(server)}
        if "past" in server.knowledge:
            parts["past"] = Part("generator", server.knowledge["past"], once=True)
        return parts

    def aggregate(self, server: Server, replies: Replies) -> Server:
        averaged = super().aggregate(server, replies)
        if not self.settings.consolidation:
            return averaged
        round, start = server.knowledge["rounds"], server.networks["generator"]
        # What comes late is a change of an earlier generator, which is not there any more.
        punctual = [client for client in replies.clients if replies.facts[client]["base_round"] == round]
        weights, columns = (dict(replies.yield_each(part)) for part in ("weight", "columns"))
        uploads = dict(server.knowledge["uploads"])
        for client, change in replies.yield_each("generator-update"):
            if client in punctual:
                weight = weights[client]["weight"]
                state = {**start, **{n: start[n] + (c / weight).to(c.dtype) for n, c in change.items()}}
                uploads[str(client)] = {"state": state, "columns": columns[client]["columns"]}
        server = replace(averaged, knowledge={**server.knowledge, "uploads": uploads, "rounds": round + 1})
        return self.consolidate(server, [str(client) for client in sorted(punctual)]) if punctual else server

    def consolidate(self, server: Server, clients: list[str]) -> Server:
        """Return the server after steps of both networks on images of these clients' generators."""
        knowledge, task = server.knowledge, server.task
        network = self.networks.load(server.spec, server.weights)
        self.set_modes(network, task)
        parameters = self.select_trainable(network, task)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name in parameters)
        generator, judge = (
            self.auxiliaries.load(a, server.networks[a.name]).requires_grad_(True) for a in self.auxiliaries.auxiliaries
        )
        consolidate(
            self.run,
            AcGan(network, judge, generator, self.run.batches.normalise_pixels),
            [*parameters.values(), *judge.parameters()],
            make_generator_adam(generator, self.settings.generator_lr),
            [
                ClientGenerator(of["state"], of["columns"][0])
                for client in clients
                if (of := knowledge["uploads"].get(client))
            ],
            [
                ClientGenerator(of["state"], of["columns"][1])
                for client in clients
                if (of := knowledge["earlier"].get(client))
            ],
            lambda state: self.others[0].load(self.auxiliaries.auxiliaries[0], state).train(),
            knowledge["columns"]["now"].to(self.run.device),
            Moment(self.settings.consolidation, task, knowledge["rounds"] - 1),
        )
        remedy = f"Lower methods.{self.name}.generator_lr or optimizer.lr."
        refuse_divergence(f"consolidation in round {knowledge['rounds']}", [network, judge, generator], remedy)
        weights = {**server.weights, **{name: p.detach().clone() for name, p in parameters.items()}}
        return replace(
            server, weights=weights, networks={"generator": copy_state(generator), "judge": copy_state(judge)}
        )

    # On a client.

    def make_update_form(self, task: int, round: int) -> Form:
        form = super().make_update_form(task, round)
        if not self.settings.consolidation:
            return form
        single = {name: replace(form[name], least="each") for name in ("generator-update", "weight")}
        columns = count_columns(self.run.make_spec(task + 1))
        return {**form, **single, "columns": make_outline("count", {"columns": (2, columns)}, least="each")}

    def make_further_parts(self, training: LocalTraining, payload: Payload) -> Mapping[str, Mapping[str, Tensor]]:
        """Return which columns the client has samples of in this task, and so far."""
        if not self.settings.consolidation:
            return {}
        sets = list_columns(training.client, training.network)
        marked = torch.zeros(2, count_columns(training.network.spec))
        for row, columns in zip(marked, sets, strict=True):
            row[columns] = 1
        return {"columns": {"columns": marked}}

    def remember(self, training: LocalTraining) -> Memory:
        client = training.client
        state, (_, columns) = copy_state(training.networks["generator"][0]), list_columns(client, training.network)
        memory = {**super().remember(training), "columns": columns}
        memory["generator"] = {"task": client.task, "state": state, "columns": columns}
        if (last := find_last(client)) is not None:
            memory["last"] = last
        return memory

    def start_training(self, training: LocalTraining, payload: Payload) -> None:
        if "columns" not in payload:
            return
        device, client = self.run.device, training.client
        generator, declared = training.networks["generator"]
        gan = AcGan(training.network, training.networks["judge"][0], generator, self.run.batches.normalise_pixels)
        generator.requires_grad_(True)
        sets = {name: columns.to(device) for name, columns in payload["columns"].tensors.items()}
        last, past, server = find_last(client), None, None
        if last is not None:
            state = grow_tables(last["state"], payload["generator"].tensors)
            past = (self.others[0].load(declared, state).train(), last["columns"].to(device))
        elif "past" in payload and len(sets["past"]):
            past = (self.others[0].load(declared, payload["past"].tensors).train(), sets["past"])
        if client.round > 0 and self.settings.consistency:
            server = self.others[1].load(declared, payload["generator"].tensors).train()
        _, own = list_columns(client, training.network)
        optimiser = make_generator_adam(generator, self.settings.generator_lr)
        training.add(GanTraining(gan, optimiser, own.to(device), sets["now"], past, server))

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        network, of = training.network, training.find_added(GanTraining)
        features = training.compute_features(batch)
        nll = self.compute_cross_entropy(network, features, batch.labels, training.client.task)
        if of is None:
            return nll
        columns = find_columns(network.spec, batch.labels, batch.tasks)
        return of.measure_critic(features, nll, columns, self.settings.consistency)

    def finish_step(self, training: LocalTraining) -> None:
        if (of := training.find_added(GanTraining)) is not None:
            of.step_generator()


def find_last(client: Client) -> Tree | None:
    """Return the client's own generator, and the columns that it draws, as the client ended its last task before."""
    latest: Tree | None = client.memory.get("generator")
    if latest is None or latest["task"] == client.task:
        return client.memory.get("last")
    return latest


def list_columns(client: Client, network: Network) -> tuple[Tensor, Tensor]:
    """Return the columns that a client has samples of in this task, and those that it has had so far."""
    columns, labels = (
        list_task_columns(network.spec, torch.device("cpu"))[client.task],
        torch.tensor(client.rows.labels),
    )
    present = columns[[bool((labels == label).any()) for label in network.spec.tasks[client.task]]]
    before = client.memory.get("columns", torch.zeros(0, dtype=torch.int64))
    return present, torch.cat([before, present]).unique()
