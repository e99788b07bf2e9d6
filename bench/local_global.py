"""Local and global accuracy of clients' models (STAMP, Figure 1), for the rows of a study, as Markdown.

    python bench/local_global.py bench/studies/stamp-c2.yaml --rows FedAvg STAMP [--out tries/stamp-c2] [--seeds 0]

A client's model is what it sends in the last round of the last task, before the server puts the clients' together.
Local: on the test rows of the client's own classes; global: on those of all clients; both mean over tasks, then over
clients, with no task given. Beside them the server's model, which has one accuracy for both. Settings are the
study's, tuned under --out.
"""

import argparse
import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml
from study import Job, Study, build_jobs, choose_points, make_splits

from fclmodels.data.splits.split_reader import Rows, Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.client import Client
from fclmodels.federation.evaluation import read
from fclmodels.federation.exchange import TRAIN, Answer
from fclmodels.federation.messages import Payload
from fclmodels.federation.method import Method
from fclmodels.federation.server import Server
from fclmodels.metrics import acc, accuracy_matrix

READING = "task_agnostic"


class Judge:
    """Replacement of `Method.train` that evaluates each client's model after the last round."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.train = method.exchanges[TRAIN].answer
        self.tasks = len(method.run.splits.tasks)
        self.accuracies: list[tuple[float, float]] = []
        method.declare(replace(method.exchanges[TRAIN], answer=self))

    def __call__(self, client: Client, payload: Payload) -> Answer:
        answer = self.train(client, payload)
        if client.task == self.tasks - 1 and client.round == self.method.run.count_rounds(client.task) - 1:
            splits = self.method.run.splits
            weight = float(answer.tensors["weight"]["weight"])
            moved = {name: change / weight for name, change in answer.tensors["update"].items()}
            weights = {n: w + moved[n] if n in moved else w for n, w in payload["weights"].tensors.items()}
            server = Server(self.method.run.make_spec(self.tasks), weights, client.task)
            own = [splits.select_test_rows(task, client.index) for task in range(self.tasks)]
            everyones = [splits.select_test_rows(task) for task in range(self.tasks)]
            self.accuracies.append((self.accuracy(server, own), self.accuracy(server, everyones)))
        return answer

    def accuracy(self, server: Server, rows: Sequence[Rows]) -> float:
        method = self.method
        predictor = method.make_predictor(server)
        table = read(method.run, predictor, method.list_columns(server), rows, self.tasks, alone=False)
        return float(acc(accuracy_matrix(table.accuracy, READING)))


def measure(job: Job) -> tuple[float, float, float]:
    """Return local and global accuracy of clients' models and accuracy of the server's model, in percent."""
    with tempfile.TemporaryDirectory() as home:
        splits = Splits.open(make_splits(job.load(), job.out))
        with Experiment(job.load(), job.method, job.seed, splits, Path(home)) as experiment:
            judge = Judge(experiment.method)
            result = experiment.run(Path(home) / "run")
    local, everyones = 100 * np.mean(judge.accuracies, axis=0)
    return local, everyones, 100 * result["metrics"][READING]["acc"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, help="if not the study's")
    options = parser.parse_args()
    study = Study.model_validate(yaml.safe_load(options.study.read_text()))
    out = options.out or Path("tries") / options.study.stem
    print("| | clients' models, local | clients' models, global | server's model |\n|---|---|---|---|")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        points = choose_points(study, options.rows, pool, out)
        for label in options.rows:
            row = study.rows[label]
            runs = build_jobs(study, row, points.get(row.like or label, []), options.seeds or study.seeds, False, out)
            means = np.mean(list(pool.map(measure, runs)), axis=0)
            print(f"| {label} | " + " | ".join(f"{value:.1f}" for value in means) + " |", flush=True)


if __name__ == "__main__":
    main()
