"""Rounds in which clients train nothing: they send the number 1, and nothing about their samples."""

import torch

from fclmodels.federation.client import Client
from fclmodels.federation.exchange import Answer, Form
from fclmodels.federation.messages import Payload, make_outline


def make_idle_form() -> Form:
    """Return the outline of the number 1."""
    return {"weight": make_outline("count", {"weight": ()}, torch.float64)}


def answer_idly(client: Client, payload: Payload) -> Answer:
    """Return the number 1."""
    return Answer({"weight": {"weight": torch.ones((), dtype=torch.float64)}}, client.memory)
