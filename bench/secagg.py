"""Cost of secure aggregation for one client and the server in a round of FedAvg, on the workloads of workloads.py.

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
from workloads import WORKS, open_run

from fclmodels.federation.client import Client
from fclmodels.federation.engine.faults import compute_secagg_threshold
from fclmodels.federation.engine.replies import Tensors, TreeSum
from fclmodels.federation.exchange import TRAIN
from fclmodels.federation.executors import glibc_malloc
from fclmodels.federation.messages import Reply
from fclmodels.federation.protection import secagg_protocol, secure_aggregation
from fclmodels.methods.fedavg import FedAvg
from fclmodels.settings.federation import SecAggSettings

SETTINGS = SecAggSettings(on=True)


T = TypeVar("T")


def measure_time(work: Callable[[], T]) -> tuple[float, T]:
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def train_once(name: str) -> tuple[float, Reply]:
    """Return seconds of one client's round of training, and its reply."""
    with open_run(WORKS[name]) as run:
        method = FedAvg(FedAvg.Settings(), run)
        payload = method.make_payload(method.start_task(method.create_server(), 0))
        client = Client(0, 0, 0, run, method.select_rows(0, 0), {})
        method.train(client, payload)  # warms up
        seconds, (reply, _) = measure_time(lambda: method.exchanges[TRAIN].reply(client, payload))
        return seconds, reply


def sum_replies(replies: Iterable[Tensors], clients: int) -> Tensors:
    total = TreeSum(clients)
    for place, tensors in enumerate(replies):
        total.add(place, tensors)
    return total.compute_sum()


def count_bytes(parts: dict[str, Tensors]) -> int:
    return sum(X.numel() * X.element_size() for tensors in parts.values() for X in tensors.values())


def measure(name: str, clients: int, train: float, reply: Reply) -> str:
    plain = {part: of.tensors for part, of in reply.parts.items()}
    t = compute_secagg_threshold(clients, SETTINGS.threshold)
    others = {client: secagg_protocol.Secrets.new() for client in range(1, clients)}
    starting, me = measure_time(secagg_protocol.Secrets.new)
    secrets = {0: me, **others}
    keys = {client: own.public for client, own in secrets.items()}
    sharing, sealed = measure_time(lambda: secagg_protocol.share_secrets(me, 0, keys, t))
    all_sealed = {0: sealed} | {
        client: secagg_protocol.share_secrets(own, client, keys, t) for client, own in others.items()
    }

    encoding, code = measure_time(lambda: secure_aggregation.encode_reply(reply, SETTINGS, clients))
    vector = secure_aggregation.join_numbers(code)
    masking, _ = measure_time(lambda: secagg_protocol.mask_values(me, 0, keys, keys, vector))

    received = {sender: of[0] for sender, of in all_sealed.items()}
    revealing, _ = measure_time(lambda: secagg_protocol.reveal_shares(me, 0, keys, received, keys, t))

    def server(survivors: list[int]) -> float:
        answers = {
            c: secagg_protocol.reveal_shares(
                secrets[c], c, keys, {s: of[c] for s, of in all_sealed.items()}, survivors, t
            )
            for c in survivors[:t]
        }
        total = np.zeros_like(vector)  # removing the masks takes as long for any sum
        return measure_time(lambda: secagg_protocol.unmask_sum(total, keys, keys, survivors, answers, t))[0]

    update = plain["update"]
    summing, _ = measure_time(lambda: sum_replies((update for _ in range(clients)), clients))
    unmasking, with_gone = server(list(range(clients))), server(list(range(clients // 10, clients)))
    packed = {
        n: count_bytes({"": secure_aggregation.pack_messages(m)}) for n, m in (("keys", keys), ("shares", received))
    }
    up = count_bytes(secure_aggregation.split_numbers(vector, code)) + count_bytes(
        {"": secure_aggregation.pack_messages({0: keys[0]})}
    )
    up += packed["shares"] + clients * (4 + secagg_protocol.shamir.BYTES)
    plain_up = count_bytes(plain)
    down = packed["keys"] + packed["shares"] + 2 * 4 * clients
    return (
        f"{name}, {clients} clients, {len(vector)} numbers | client: train {train:.3f}, keys and shares "
        f"{starting + sharing:.3f}, encode {encoding:.3f}, mask {masking:.3f}, reveal {revealing:.3f} s | "
        f"server: plain sum {summing:.3f}, unmask {unmasking:.3f}, with {clients // 10} gone {with_gone:.3f} s | "
        f"up: plain {plain_up}, masked {up} bytes ({up / plain_up:.3f}), down besides the model {down} bytes"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("works", nargs="*", default=["w1", "w3"], help=f"of {', '.join(WORKS)}")
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 32, 64])
    options = parser.parse_args()
    glibc_malloc.tune()
    torch.set_num_threads(1)
    for name in options.works:
        train, reply = train_once(name)
        for clients in options.clients:
            print(measure(name, clients, train, reply), flush=True)


if __name__ == "__main__":
    main()
