"""Local and global accuracy of clients' models (STAMP, Figure 1), for the rows of a study, as Markdown.

    python bench/local_global.py bench/studies/stamp-c2.yaml --rows FedAvg STAMP [--seeds 0]

A client's model is what it sends in the last round of the last task, before the server puts the clients' together.
Local: on the test rows of the client's own classes; global: on those of all clients; both mean over tasks, then over
clients, with no task given. Beside them the server's model, which has one accuracy for both. Settings are the
study's, chosen as `fcl study` does.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fclmodels.data.splits.split_reader import Rows, Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.federation.client import Client
from fclmodels.federation.evaluation import read
from fclmodels.federation.exchange import TRAIN, Answer
from fclmodels.federation.messages import Payload
from fclmodels.federation.method import Method
from fclmodels.federation.server import Server
from fclmodels.metrics import acc, accuracy_matrix
from fclmodels.study.plan import Point, Study, StudyJob, build_job, load_study
from fclmodels.study.trial import choose
from flows.prefect.environment import HOME
from flows.study.jobs import run_trials
from tasks.data import ensure_splits

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


def measure(job: StudyJob) -> tuple[float, float, float]:
    """Return local and global accuracy of clients' models and accuracy of the server's model, in percent."""
    params = job.load()
    splits = Splits.open(ensure_splits(params, HOME, print))
    with (
        tempfile.TemporaryDirectory() as home,
        Experiment(params, job.method, job.seed, splits, Path(home)) as experiment,
    ):
        judge = Judge(experiment.method)
        result = experiment.run(Path(home) / "run")
    local, everyones = 100 * np.mean(judge.accuracies, axis=0)
    return local, everyones, 100 * result["metrics"][READING]["acc"]


def choose_point(study: Study, label: str) -> Point:
    """Return the settings that val rows choose for a row, or for the row whose choice it takes."""
    tuned = study.rows[label].like or label
    points = study.rows[tuned].points
    return choose(tuned, [run_trials((study, tuned, point)) for point in points]).point if points[0] else ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--rows", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, help="if not the study's")
    options = parser.parse_args()
    study = load_study(options.study)
    print("| | clients' models, local | clients' models, global | server's model |\n|---|---|---|---|")
    for label in options.rows:
        point = choose_point(study, label)
        jobs = [build_job(study, label, point, seed) for seed in options.seeds or study.seeds]
        means = np.mean([measure(job) for job in jobs], axis=0)
        print(f"| {label} | " + " | ".join(f"{value:.1f}" for value in means) + " |", flush=True)


if __name__ == "__main__":
    main()
