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

from fclmodels.errors import UserError
from fclmodels.federation.client import Client
from fclmodels.federation.cohort import Cohort
from fclmodels.federation.messages import Part, Payload, Reply
from fclmodels.federation.replies import Replies
from fclmodels.federation.server import Server
from fclmodels.methods.base import Memory
from fclmodels.methods.fedavg import FedAvg


class Diary(FedAvg):
    """FedAvg whose clients write down each round and are asked about it."""

    name = "diary"
    paper = "none"

    class Settings(FedAvg.Settings):
        trouble: Literal["", "error", "mistake", "death", "one death"] = Field("", description="what befalls client 1")
        mark: Path = Field(Path("mark"), description="file that says that the one death has been")

    settings: Settings

    def train(self, client: Client, payload: Payload) -> tuple[Reply, Memory]:
        if client.index == 1 and client.round == 1:
            self.meet_trouble()
        reply, memory = super().train(client, payload)
        page = torch.stack([value.double().sum() for value in reply.parts["update"].tensors.values()])
        pages = [*client.memory.get("pages", []), page]
        learned = {name: value * (1 + 0.01 * len(pages)) for name, value in reply.parts["update"].tensors.items()}
        parts = reply.parts | {
            "update": Part("update", learned, over="weight"),
            "page": Part("sketch", {"page": page}, "each"),
        }
        return replace(reply, parts=parts), {**memory, "pages": pages, "last": [client.task, client.round]}

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
        pages = {str(client): tensors["page"] for client, tensors in replies.each("page")}
        return replace(super().aggregate(server, replies), knowledge={**server.knowledge, "pages": pages})

    def finish_task(self, server: Server, cohort: Cohort) -> Server:
        total = cohort.ask("how much", {"weights": Part("weights", server.weights)}).sum("total")
        shares = cohort.ask("what share", {"total": Part("reference", total)}, cohort.clients[::2])
        each = {str(client): tensors["share"] for client, tensors in shares.each("share")}
        return replace(server, knowledge={**server.knowledge, f"shares of task {server.task}": each})

    def answer(self, client: Client, question: str, payload: Payload) -> tuple[Reply, Memory]:
        own = sum(page.abs().sum() for page in client.memory.get("pages", [torch.ones(1)]))
        if question == "how much":
            return Reply({"total": Part("statistics", {"total": torch.as_tensor(own)})}), client.memory
        noise = torch.rand(3, generator=client.generator("share"))
        share = own / payload["total"].tensors["total"] + noise
        return Reply({"share": Part("statistics", {"share": share}, "each")}), {**client.memory, "asked": client.task}
