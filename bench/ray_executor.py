"""A FedAvg round of W1 on a Ray cluster of this machine, against two worker processes and against one process."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial

from measuring import Bench, Row, take_turns
from workloads import WORKS, open_run, run_rounds, start_processes, start_serial

from fclmodels.federation.executors.base import Executor
from fclmodels.federation.executors.ray.cluster import RayCluster
from fclmodels.federation.method import Method
from fclmodels.settings import load
from fclmodels.storage.sealed_json import write_json


def on_ray(method: Method) -> Executor:
    assert method.run.home is not None
    file = method.run.home / "ray.json"
    write_json(file, load.collect_settings(method.run.params, method.name))
    return RayCluster(method, file, workers=2, threads=1)


def rounds(turns: int) -> Iterator[Row]:
    with open_run(WORKS["w1"]) as run, ExitStack() as opened:
        executors = {"ray": on_ray, "processes": start_processes, "serial": start_serial}
        loops = {name: run_rounds(run, "fedavg", executor, 0) for name, executor in executors.items()}
        sides = {name: partial(next, opened.enter_context(closing(loop))) for name, loop in loops.items()}
        seconds = take_turns(sides, turns)
    for other in ("processes", "serial"):
        yield Row(f"w1-ray-{other}", f"a round on two actors, {other}", seconds["ray"], seconds[other])


BENCHES = [Bench("w1-ray", rounds, 9)]
