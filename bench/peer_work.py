"""Workload of a peer's process, and the signal for its next round (peers.py).

It runs in the peer's own environment, and in the processes that it starts.
"""

import os
import sys
from functools import cache

from work_folder import WorkFolder

READY = "the next round may begin"
WORK = WorkFolder(os.environ["FCL_BENCH_WORK"])

network, data = cache(WORK.network), cache(WORK.data)


def wait() -> None:
    """Wait until the measuring process starts the next round, and exit where it has ended."""
    print(READY, flush=True)
    if not sys.stdin.readline():
        sys.exit()
