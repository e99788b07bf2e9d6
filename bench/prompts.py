"""Cost of prompts for a client: an epoch with stored queries against one of two passes for each batch.

A client's 128 images of 32 px on W4's transformer, in CPU seconds of one thread; and 32 images of 56 px, which are 197
tokens each, as ViT-B/16 has of 224 px. Stored are queries and, where the lowest layers have no prompts, the tokens
above those. Asked: each batch passes the frozen network first, for its queries. Plain: the same, and the last layer
computes all tokens, as the papers' code does, not only those that are read.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from measuring import Bench, Row, take_turns
from torch import Tensor
from workloads import WORKS, build_method, open_run

from fclmodels.federation.client import Client

LIMIT = 0.70


def measure_epoch(label: str, name: str, side: int, images: int, turns: int) -> Iterator[Row]:
    work = replace(WORKS["w4"], clients=1, samples=images, batch=32, shape=(3, side, side))
    with open_run(work) as run:
        method = build_method(run, name)
        server = method.start_task(method.create_server(), 0)
        client, payload = Client(0, 0, 0, method.run, method.select_rows(0, 0), {}), method.make_payload(server)
        backbone = method.network
        kept_queries, no_queries, encode = (backbone.queries, backbone.below), (None, None), backbone.frozen.encode

        def train(queries: tuple[Tensor | None, Tensor | None], way: Callable[..., Tensor]) -> None:
            (backbone.queries, backbone.below), backbone.frozen.encode = queries, way
            method.prepare_training(client, payload).run()

        sides = {
            "kept": partial(train, kept_queries, encode),
            "plain": partial(train, no_queries, keep_all_tokens(encode)),
            "asked": partial(train, no_queries, encode),
        }
        seconds = take_turns(sides, turns, time.thread_time)
    what = "an epoch with kept queries, two passes as in the papers' code"
    yield Row(f"{label}-of-plain", what, seconds["kept"], seconds["plain"], "CPU s", LIMIT)
    yield Row(f"{label}-of-asked", "the same, our two passes", seconds["kept"], seconds["asked"], "CPU s")


def keep_all_tokens(encode: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the encoder with a last layer that computes all tokens, and returns those that are read."""

    def plain(tokens: Tensor, attached: Mapping = {}, first: int = 0, read: int = 1) -> Tensor:
        return encode(tokens, attached, first, tokens.shape[1])[:, :read]

    return plain


BENCHES = [
    *(Bench(f"epoch-{m}", partial(measure_epoch, f"epoch-{m}", m, 32, 128), 7)
      for m in ("fed-dualp", "pip-dualp", "fed-l2p", "pip-l2p")),
    *(Bench(f"epoch-{m}-197", partial(measure_epoch, f"epoch-{m}-197", m, 56, 32), 5)
      for m in ("pip-dualp", "pip-l2p")),
]  # fmt: skip
