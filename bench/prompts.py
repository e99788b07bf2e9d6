"""What prompts cost a client: an epoch with kept queries against one of two passes for each batch.

A client's 128 images of 32 px on W4's transformer, in CPU seconds of one thread; and 32 images of 56 px, which are 197
tokens each, as ViT-B/16 has of 224 px. What is kept are queries and, where the lowest layers have no prompts, the
tokens above those. Asked: the frozen network sees each batch first, for its queries. Plain: so, and the last layer
makes something of all tokens, as the papers' code does, not only of those that are read.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from measuring import Bench, Row, taking_turns
from torch import Tensor
from works import WORKS, method_on, run_on

from fclmodels.federation.client import Client

LIMIT = 0.70


def epoch(label: str, name: str, side: int, images: int, turns: int) -> Iterator[Row]:
    work = replace(WORKS["w4"], clients=1, samples=images, batch=32, shape=(3, side, side))
    with run_on(work) as run:
        method = method_on(run, name)
        server = method.start_task(method.setup(), 0)
        client, payload = Client(0, 0, 0, method.run, method.rows(0, 0), {}), method.payload(server)
        kept, asked, encode = (method.queries, method.below), (None, None), method.frozen.encode

        def train(known: tuple[Tensor | None, Tensor | None], way: Callable[..., Tensor]) -> None:
            (method.queries, method.below), method.frozen.encode = known, way
            method.prepared(client, payload).run()

        sides = {
            "kept": partial(train, kept, encode),
            "plain": partial(train, asked, all_tokens(encode)),
            "asked": partial(train, asked, encode),
        }
        seconds = taking_turns(sides, turns, time.thread_time)
    what = "an epoch with kept queries, two passes as in the papers' code"
    yield Row(f"{label}-of-plain", what, seconds["kept"], seconds["plain"], "CPU s", LIMIT)
    yield Row(f"{label}-of-asked", "the same, our two passes", seconds["kept"], seconds["asked"], "CPU s")


def all_tokens(encode: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of which as many are given back as are read."""

    def plain(tokens: Tensor, attached: Mapping = {}, first: int = 0, read: int = 1) -> Tensor:
        return encode(tokens, attached, first, tokens.shape[1])[:, :read]

    return plain


BENCHES = [
    *(Bench(f"epoch-{m}", partial(epoch, f"epoch-{m}", m, 32, 128), 7)
      for m in ("fed-dualp", "pip-dualp", "fed-l2p", "pip-l2p")),
    *(Bench(f"epoch-{m}-197", partial(epoch, f"epoch-{m}-197", m, 56, 32), 5) for m in ("pip-dualp", "pip-l2p")),
]  # fmt: skip
