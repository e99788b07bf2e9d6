"""What checking and holding replies costs beside a round: seconds of processor time a client.

    python bench/inspection.py [--images 100] [--repeats 5]

One client trains one epoch on so many images of noise; its reply is looked at, held, and summed with seven others.
Last column: look, hold and sum less the plain tree's copies and sums, as a share of the training.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from fclmodels.backbones.network import build
from fclmodels.backbones.spec import ModelSpec
from fclmodels.federation import inspection
from fclmodels.federation.messages import Part, Reply
from fclmodels.federation.replies import Replies, TreeSum
from fclmodels.params import load

CLIENTS = 8
NETWORKS = {"cnn": (1, 8, 8), "mlp": (1, 28, 28), "alexnet": (3, 32, 32), "resnet18": (3, 32, 32)}


def cost(name: str, shape: tuple[int, int, int], images: int, repeats: int, folder: Path) -> list[float]:
    """Milliseconds a client of training, look, hold, sum; and of the sum as replies came, without holding them."""
    settings = load(Path("params.yaml"), [f"model={{backbone: {name}}}"]).model.model_dump(mode="json")
    network = build(ModelSpec(settings, shape, "growing", (tuple(range(10)),), None), torch.Generator().manual_seed(0))
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

    def hold() -> None:
        for client in range(CLIENTS):
            replies.add(client, reply)

    return [
        seconds(train, repeats),
        seconds(lambda: inspection.look(reply, payload), repeats),
        seconds(hold, 1) / CLIENTS,
        seconds(lambda: replies.sum("update"), repeats) / CLIENTS,
        seconds(as_they_come, repeats) / CLIENTS,
    ]


def seconds(do: Callable[[], object], repeats: int) -> float:
    """The least of some repeats, in milliseconds of processor time."""
    taken = []
    for _ in range(repeats):
        started = time.process_time()
        do()
        taken.append(time.process_time() - started)
    return 1000 * min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=[*NETWORKS])
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| network | train ms | look ms | hold ms | sum ms | sum as they come ms | more |\n" + "|---" * 7 + "|")
    with tempfile.TemporaryDirectory() as folder:
        for name in given.networks:
            train, look, hold, total, plain = cost(name, NETWORKS[name], given.images, given.repeats, Path(folder))
            figures = " | ".join(f"{value:.3g}" for value in (train, look, hold, total, plain))
            print(f"| {name} | {figures} | {(look + hold + total - plain) / train:.2%} |")


if __name__ == "__main__":
    main()
