"""The work that a peer's process was handed, and when its next round begins (peers.py). It runs in the peer's own
environment, and in the processes that it starts."""

import os
import sys
from functools import cache

from handed import Handed

READY = "the next round may begin"
WORK = Handed(os.environ["FCL_BENCH_WORK"])

network, data = cache(WORK.network), cache(WORK.data)


def wait() -> None:
    """Until the measuring process lets the next round begin; it ends this one when it has seen enough."""
    print(READY, flush=True)
    if not sys.stdin.readline():
        sys.exit()
