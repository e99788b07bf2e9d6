"""What secure aggregation costs one client and the server in a round of FedAvg, on the works of works.py.

    python bench/secagg.py [w1 w2 w3] [--clients 10 32 64]

One client runs the whole protocol on a real reply, the others only as much as it needs of them; the server unmasks the
sum once with all clients there and once with a tenth of them gone after they have shared. One thread, seconds of the
processor. `plain` is the same reply without masks: the bytes that it has, and the seconds in which the server adds up
one of each client. `train` is the client's training, to compare with.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
import torch
from works import WORKS, run_on

from fclmodels.federation import malloc, secagg, secure
from fclmodels.federation.client import Client
from fclmodels.federation.messages import Reply
from fclmodels.federation.replies import Tensors, TreeSum
from fclmodels.methods.fedavg import FedAvg
from fclmodels.settings import SecAggSettings

SETTINGS = SecAggSettings(on=True)


T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[float, T]:
    started = time.process_time()
    made = work()
    return time.process_time() - started, made


def trained(name: str) -> tuple[float, Reply]:
    """Seconds of one client's round of training, and its reply."""
    with run_on(WORKS[name]) as run:
        method = FedAvg(FedAvg.Settings(), run)
        payload = method.payload(method.start_task(method.setup(), 0))
        client = Client(0, 0, 0, run, method.rows(0, 0), {})
        method.train(client, payload)  # warms up
        seconds, (reply, _) = timed(lambda: method.train(client, payload))
        return seconds, reply


def added(replies: Iterable[Tensors], clients: int) -> Tensors:
    total = TreeSum(clients)
    for place, tensors in enumerate(replies):
        total.add(place, tensors)
    return total.result()


def size(parts: dict[str, Tensors]) -> int:
    return sum(X.numel() * X.element_size() for tensors in parts.values() for X in tensors.values())


def measure(name: str, clients: int, train: float, reply: Reply) -> str:
    plain = {part: of.tensors for part, of in reply.parts.items()}
    t = secagg.threshold_of(clients, SETTINGS.threshold)
    others = {client: secagg.Secrets.new() for client in range(1, clients)}
    starting, me = timed(secagg.Secrets.new)
    secrets = {0: me, **others}
    keys = {client: own.public for client, own in secrets.items()}
    sharing, sealed = timed(lambda: secagg.shared(me, 0, keys, t))
    all_sealed = {0: sealed} | {client: secagg.shared(own, client, keys, t) for client, own in others.items()}

    encoding, code = timed(lambda: secure.in_the_ring(reply, SETTINGS, clients))
    vector = secure.joined(code)
    masking, _ = timed(lambda: secagg.masked(me, 0, keys, keys, vector))

    received = {sender: of[0] for sender, of in all_sealed.items()}
    revealing, _ = timed(lambda: secagg.revealed(me, 0, keys, received, keys, t))

    def server(survivors: list[int]) -> float:
        said = {
            c: secagg.revealed(secrets[c], c, keys, {s: of[c] for s, of in all_sealed.items()}, survivors, t)
            for c in survivors[:t]
        }
        total = np.zeros_like(vector)  # whatever the sum is, taking the masks out takes as long
        return timed(lambda: secagg.unmasked(total, keys, keys, survivors, said, t))[0]

    update = plain["update"]
    summing, _ = timed(lambda: added((update for _ in range(clients)), clients))
    unmasking, with_gone = server(list(range(clients))), server(list(range(clients // 10, clients)))
    packed = {n: size({"": secure.table(m)}) for n, m in (("keys", keys), ("shares", received))}
    up = size(secure.taken_apart(vector, code)) + size({"": secure.table({0: keys[0]})})
    up += packed["shares"] + clients * (4 + secagg.shamir.BYTES)
    down = packed["keys"] + packed["shares"] + 2 * 4 * clients
    return (
        f"{name}, {clients} clients, {len(vector)} numbers | client: train {train:.3f}, keys and shares "
        f"{starting + sharing:.3f}, encode {encoding:.3f}, mask {masking:.3f}, reveal {revealing:.3f} s | "
        f"server: plain sum {summing:.3f}, unmask {unmasking:.3f}, with {clients // 10} gone {with_gone:.3f} s | "
        f"up: plain {size(plain)}, masked {up} bytes ({up / size(plain):.3f}), down besides the model {down} bytes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("works", nargs="*", default=["w1", "w3"], help=f"of {', '.join(WORKS)}")
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 32, 64])
    given = parser.parse_args()
    malloc.tune()
    torch.set_num_threads(1)
    for name in given.works:
        train, reply = trained(name)
        for clients in given.clients:
            print(measure(name, clients, train, reply), flush=True)


if __name__ == "__main__":
    main()
