"""What `fcl init` finds out about this machine: cores, a GPU, and how fast a core trains."""

import time
from dataclasses import dataclass

TRIED_SIDE, TRIED_BATCH, TRIED_STEPS = 32, 32, 5
OTHER_WORK = 1.2  # of a step's time: what else a client does to it, reading its samples and sending the update included


@dataclass(frozen=True)
class Machine:
    """What a run can use: cores, a GPU by its name, and a core's seconds for training on a pixel of an image."""

    cores: int
    gpu: str | None
    pixel_seconds: float

    def __str__(self) -> str:
        return f"{self.cores} core{'s' * (self.cores > 1)} and {self.gpu or 'no GPU'}"


def look_at_machine() -> Machine:
    """Return the cores that this process may use, the GPU that torch sees, and how fast a core trains the cnn."""
    import torch

    from fclmodels.federation.executors.auto_choice import count_cores

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return Machine(count_cores(), gpu, measure_pixel_seconds())


def measure_pixel_seconds() -> float:
    """Return a core's seconds for training the cnn on a pixel of an image: the least of a few steps on noise.

    The processor's seconds, not the clock's: what else runs here now is no reason for fewer epochs.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from fclmodels.backbones.model.network import build_network
    from fclmodels.backbones.model.spec import ModelSpec

    classes = tuple(range(10))
    random = torch.Generator().manual_seed(0)
    spec = ModelSpec({"backbone": "cnn"}, (3, TRIED_SIDE, TRIED_SIDE), "growing", (classes,))
    network = build_network(spec, random).train()
    inputs = torch.randn(TRIED_BATCH, *spec.shape, generator=random)
    labels = torch.randint(len(classes), (TRIED_BATCH,), generator=random)
    threads, seconds = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for _ in range(1 + TRIED_STEPS):
        start = time.process_time()
        network.zero_grad()
        cross_entropy(network(inputs), labels).backward()
        seconds.append(time.process_time() - start)
    torch.set_num_threads(threads)
    return OTHER_WORK * min(seconds[1:]) / (TRIED_BATCH * TRIED_SIDE**2)
