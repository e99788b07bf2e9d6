"""A method that uses all that the engine offers: memories, single replies, questions, and models that differ by client.

What a client learns depends on what it remembers, so an engine that mixes memories up gives another model.
"""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.engine.replies import Replies
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.methods.fedavg import FedAvg


class Diary(FedAvg):
    """FedAvg whose clients write down each round and are asked about it."""

    name = "diary"
    paper = "none"

    class Settings(FedAvg.Settings):
        trouble: Literal["", "error", "mistake", "death", "one death"] = Field("", description="what befalls client 1")
        mark: Path = Field(Path("mark"), description="file that says that the one death has been")

    settings: Settings

    def __init__(self, settings: Settings, run: Run) -> None:
        super().__init__(settings, run)
        self.how_much = self.declare(Exchange("how much", self.weights_payload, self.add_up_pages, self.total_form))
        self.what_share = self.declare(Exchange("what share", self.total_payload, self.divide_pages, self.share_form))

    def make_update_form(self, task: int, round: int) -> Form:
        form = super().make_update_form(task, round)
        page = make_outline("sketch", {"page": (len(form["update"].tensors),)}, torch.float64, "each")
        return {**form, "page": page}

    def train(self, client: Client, payload: Payload) -> Answer:
        if client.index == 1 and client.round == 1:
            self.meet_trouble()
        answer = super().train(client, payload)
        update = answer.tensors["update"]
        page = torch.stack([value.double().sum() for value in update.values()])
        pages = [*client.memory.get("pages", []), page]
        learned = {name: value * (1 + 0.01 * len(pages)) for name, value in update.items()}
        tensors = {**answer.tensors, "update": learned, "page": {"page": page}}
        memory = {**answer.memory, "pages": pages, "last": [client.task, client.round]}
        return answer._replace(tensors=tensors, memory=memory)

    def meet_trouble(self) -> None:
        if self.settings.trouble == "error":
            raise ValueError("trouble in client 1")
        if self.settings.trouble == "mistake":
            raise UserError("client 1 has no disk. Give it one.")
        if self.settings.trouble == "death" or (
            self.settings.trouble == "one death" and not self.settings.mark.exists()
        ):
            self.settings.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def aggregate(self, server: Server, replies: Replies) -> Server:
        pages = {str(client): tensors["page"] for client, tensors in replies.yield_each("page")}
        return replace(super().aggregate(server, replies), knowledge={**server.knowledge, "pages": pages})

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        total = cohort.ask(self.how_much, server).sum("total")["total"]
        shares = cohort.ask(self.what_share, total, clients=cohort.clients[::2])
        share_by_client = {str(client): tensors["share"] for client, tensors in shares.yield_each("share")}
        return replace(server, knowledge={**server.knowledge, f"shares of task {server.task}": share_by_client})

    def weights_payload(self, server: Server) -> Payload:
        return {"weights": Part("weights", server.weights)}

    def add_up_pages(self, client: Client, payload: Payload) -> Answer:
        return Answer({"total": {"total": own_total(client)}}, client.memory)

    def total_form(self, task: int, round: int) -> Form:
        return {"total": make_outline("statistics", {"total": ()}, torch.float64)}

    def total_payload(self, total: Tensor) -> Payload:
        return {"total": Part("reference", {"total": total})}

    def divide_pages(self, client: Client, payload: Payload) -> Answer:
        noise = torch.rand(3, generator=client.make_generator("share"))
        share = own_total(client) / payload["total"].tensors["total"] + noise
        return Answer({"share": {"share": share}}, {**client.memory, "asked": client.task})

    def share_form(self, task: int, round: int) -> Form:
        return {"share": make_outline("statistics", {"share": (3,)}, least="each")}


def own_total(client: Client) -> Tensor:
    return sum(page.abs().sum() for page in client.memory.get("pages", [torch.ones(1, dtype=torch.float64)]))
