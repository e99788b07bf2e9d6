"""Cost of checking and storing replies beside a round: seconds of processor time a client.

    python bench/inspection.py [--images 100] [--repeats 5]

One client trains one epoch on so many images of noise; its reply is inspected, stored, and summed with seven others.
Last column: look, store and sum less the plain tree's copies and sums, as a share of the training.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from fclmodels.backbones.model.network import build_network
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.federation.engine.replies import Replies, TreeSum
from fclmodels.federation.messages import Part, Reply
from fclmodels.federation.protection import inspection
from fclmodels.settings.load import load_params

CLIENTS = 8
NETWORKS = {"cnn": (1, 8, 8), "mlp": (1, 28, 28), "alexnet": (3, 32, 32), "resnet18": (3, 32, 32)}


def measure_costs(name: str, shape: tuple[int, int, int], images: int, repeats: int, folder: Path) -> list[float]:
    """Return milliseconds a client of training, look, store, sum; and of a sum of replies that are not stored."""
    settings = load_params(Path("params.yaml"), [f"model={{backbone: {name}}}"]).model.model_dump(mode="json")
    network = build_network(
        ModelSpec(settings, shape, "growing", (tuple(range(10)),), None), torch.Generator().manual_seed(0)
    )
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items() if tensor.is_floating_point()}
    payload = {"weights": Part("weights", weights)}
    update = Part("update", weights, over="weight")
    reply = Reply({"update": update, "weight": Part("count", {"weight": torch.tensor(1.0, dtype=torch.float64)})})
    inputs, labels = torch.randn(images, *shape), torch.arange(images) % 10
    optimiser = torch.optim.SGD(network.parameters(), 0.01)
    replies = Replies(range(CLIENTS), folder / name)

    def train() -> None:
        for x, y in zip(inputs.split(32), labels.split(32), strict=True):
            optimiser.zero_grad()
            cross_entropy(network(x), y).backward()
            optimiser.step()

    def as_they_come() -> None:
        total = TreeSum(CLIENTS)
        for place in range(CLIENTS):
            total.add(place, weights)

    def store() -> None:
        for client in range(CLIENTS):
            replies.add(client, reply)

    return [
        measure_milliseconds(train, repeats),
        measure_milliseconds(lambda: inspection.inspect_reply(reply, payload), repeats),
        measure_milliseconds(store, 1) / CLIENTS,
        measure_milliseconds(lambda: replies.sum("update"), repeats) / CLIENTS,
        measure_milliseconds(as_they_come, repeats) / CLIENTS,
    ]


def measure_milliseconds(do: Callable[[], object], repeats: int) -> float:
    """Return the least of some repeats, in milliseconds of processor time."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        do()
        times.append(time.process_time() - started)
    return 1000 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | train ms | look ms | store ms | sum ms | sum unstored ms | more |\n" + "|---" * 7 + "|")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.networks:
            train, look, store, total, plain = measure_costs(
                name, NETWORKS[name], options.images, options.repeats, Path(folder)
            )
            figures = " | ".join(f"{value:.3g}" for value in (train, look, store, total, plain))
            print(f"| {name} | {figures} | {(look + store + total - plain) / train:.2%} |")


if __name__ == "__main__":
    main()
