"""Local and global accuracy of clients' models (STAMP, Figure 1), for the rows of a study, as Markdown.

    python bench/local_global.py bench/studies/stamp-c2.yaml --rows FedAvg STAMP [--out tries/stamp-c2] [--seeds 0]

A client's model is what it sends in the last round of the last task, before the server puts the clients' together.
Local: on the test rows of the client's own classes; global: on those of all clients; both mean over tasks, then over
clients, with no task given. Beside them the server's model, which has one accuracy for both. Settings are those that
the study has chosen, under --out.
"""

import argparse
import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import yaml
from study import Job, Study, choices, jobs, splits_of

from fclmodels.data.splits import Rows, Splits
from fclmodels.experiment import Experiment
from fclmodels.federation.client import Client
from fclmodels.federation.evaluation import read
from fclmodels.federation.messages import Payload, Reply
from fclmodels.federation.server import Server
from fclmodels.methods.base import Memory, Method
from fclmodels.metrics import acc, matrix

READING = "task_agnostic"


class Judge:
    """Judges the model of each client of the last round as it comes from training."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.train = method.train
        self.tasks = len(method.run.splits.tasks)
        self.found: list[tuple[float, float]] = []
        vars(method)["train"] = self

    def __call__(self, client: Client, payload: Payload) -> tuple[Reply, Memory]:
        reply, memory = self.train(client, payload)
        if client.task == self.tasks - 1 and client.round == self.method.run.rounds(client.task) - 1:
            splits = self.method.run.splits
            weight = float(reply.parts["weight"].tensors["weight"])
            moved = {name: change / weight for name, change in reply.parts["update"].tensors.items()}
            weights = {n: w + moved[n] if n in moved else w for n, w in payload["weights"].tensors.items()}
            server = Server(self.method.run.spec(self.tasks), weights, client.task)
            own = [splits.test_rows(task, client.index) for task in range(self.tasks)]
            everyones = [splits.test_rows(task) for task in range(self.tasks)]
            self.found.append((self.accuracy(server, own), self.accuracy(server, everyones)))
        return reply, memory

    def accuracy(self, server: Server, rows: Sequence[Rows]) -> float:
        method = self.method
        table = read(method.run, method.predictor(server), method.columns(server), rows, self.tasks, alone=False)
        return float(acc(matrix(table.accuracy, READING)))


def measured(job: Job) -> tuple[float, float, float]:
    """In %: of clients' models the local and the global accuracy, and that of the server's model."""
    with tempfile.TemporaryDirectory() as home:
        splits = Splits.open(splits_of(job.load(), job.out))
        with Experiment(job.load(), job.method, job.seed, splits, Path(home)) as experiment:
            judge = Judge(experiment.method)
            result = experiment.run(Path(home) / "run")
    local, everyones = 100 * np.mean(judge.found, axis=0)
    return local, everyones, 100 * result["metrics"][READING]["acc"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, help="if not the study's")
    given = parser.parse_args()
    study = Study.model_validate(yaml.safe_load(given.study.read_text()))
    out = given.out or Path("tries") / given.study.stem
    print("| | clients' models, local | clients' models, global | server's model |\n|---|---|---|---|")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        chosen = choices(study, given.rows, pool, out)
        for label in given.rows:
            row = study.rows[label]
            wanted = jobs(study, row, chosen.get(row.like or label, []), given.seeds or study.seeds, False, out)
            means = np.mean(list(pool.map(measured, wanted)), axis=0)
            print(f"| {label} | " + " | ".join(f"{value:.1f}" for value in means) + " |", flush=True)


if __name__ == "__main__":
    main()
