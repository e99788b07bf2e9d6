"""A FedAvg round of W1 on a Ray cluster of this machine, against two worker processes and against one process."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial

from measuring import Bench, Row, taking_turns
from works import WORKS, our_rounds, processes, run_on, serial

from fclmodels import params
from fclmodels.federation.executor import Executor
from fclmodels.federation.ray_cluster import RayCluster
from fclmodels.methods.base import Method
from fclmodels.state import write_json


def on_ray(method: Method) -> Executor:
    assert method.run.home is not None
    file = method.run.home / "ray.json"
    write_json(file, params.effective(method.run.params, method.name))
    return RayCluster(method, file, workers=2, threads=1)


def rounds(turns: int) -> Iterator[Row]:
    with run_on(WORKS["w1"]) as run, ExitStack() as opened:
        executors = {"ray": on_ray, "processes": processes, "serial": serial}
        loops = {name: our_rounds(run, "fedavg", executor, 0) for name, executor in executors.items()}
        sides = {name: partial(next, opened.enter_context(closing(loop))) for name, loop in loops.items()}
        seconds = taking_turns(sides, turns)
    for other in ("processes", "serial"):
        yield Row(f"w1-ray-{other}", f"a round on two actors, {other}", seconds["ray"], seconds[other])


BENCHES = [Bench("w1-ray", rounds, 9)]
