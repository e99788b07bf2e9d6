"""Accuracy, forgetting and task prediction, each by its paper's own formula, from the tables of accuracy and confusion.

Metrics read the matrix of an accuracy table: a[t, k] = accuracy on task k after learning t tasks. The docstrings count
tasks from 1 as the papers do, so task k is column k - 1. A metric that cannot be computed (one task, rows missing) is
None. The columns of both tables are in tables.py.
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import polars as pl

from fclmodels.tables import READINGS

Values = dict[str, float | None]  # of one reading, by metric


def accuracy_matrix(table: pl.DataFrame, reading: str, client: int | None = None) -> np.ndarray:
    """Return accuracies [T + 1, T]: row t after learning t tasks (row 0: the untrained model), NaN without a row.

    `client` None takes the rows over all test samples of a task, a number that client's rows.
    """
    tasks = _count_tasks(table)
    rows = _compute_accuracy(table, reading).filter(pl.col("client").eq_missing(pl.lit(client, pl.Int32)))
    accuracies = np.full((tasks + 1, tasks), np.nan)
    accuracies[rows["after"].to_numpy(), rows["task"].to_numpy()] = rows["accuracy"].to_numpy()
    return accuracies


def client_accuracies(table: pl.DataFrame, reading: str) -> np.ndarray:
    """Return each client's final accuracy [clients] in the order of their numbers: the mean over the tasks it has.

    A client has a task where it has test samples of it. NaN where one of its tasks was not measured at the end.
    """
    final = pl.col("accuracy").filter(pl.col("after") == _count_tasks(table)).first().fill_null(float("nan"))
    by_task = (
        _compute_accuracy(table, reading).drop_nulls("client").group_by("client", "task").agg(final.alias("final"))
    )
    # sorted, because groups come in any order and a sum of floats depends on it
    return by_task.group_by("client").agg(pl.col("final").sort().mean()).sort("client")["final"].to_numpy()


def confusion_matrix(confusion: pl.DataFrame, reading: str, tasks: int) -> np.ndarray:
    """Count test samples of task k that are predicted to be of task j [T, T], after the last of all T tasks."""
    last = confusion.filter(pl.col("reading") == reading, pl.col("after") == tasks)
    counts = np.zeros((tasks, tasks), dtype=np.int64)
    counts[last["task"].to_numpy(), last["predicted"].to_numpy()] = last["count"].to_numpy()
    return counts


def accuracy_curve(a: np.ndarray) -> np.ndarray:
    """Return mean accuracy over the tasks learned so far, after each task [T]: mean_{k <= t} a[t, k] for t = 1..T."""
    return np.array([a[t, :t].mean() for t in range(1, len(a))])


def acc(a: np.ndarray) -> float | None:
    """Return ACC: mean accuracy over all T tasks after the last one (FedProTIP eq. 16, FOT eq. 13, SPECIAL eq. 10)."""
    return _mean(a[-1])


def ft(a: np.ndarray) -> float | None:
    """Return FT of FedProTIP eq. 16: (1/T) sum_{k<T} (max_{k <= i <= T-1} a[i, k] - a[T, k]).

    From the best since the task was learned, and divided by T although it has T - 1 terms (the last task counts
    as a 0), so it is (T-1)/T of the same thing averaged over the earlier tasks.
    """
    drops = _drops_from_best(a)
    return _mean(drops, over=drops.size + 1)


def fgt(a: np.ndarray) -> float | None:
    """Return FGT of FOT eq. 13: (1/(T-1)) sum_{k<T} (a[k, k] - a[T, k]).

    From right after learning, not from the best: a task that improved later and fell back counts for less.
    """
    return _mean(just_learned(a)[:-1] - a[-1, :-1])


def bwt(a: np.ndarray) -> float | None:
    """Return BWT of SPECIAL eq. 10 (after Lin et al. 2022): (1/(T-1)) sum_{k<T} (a[T, k] - a[k, k]).

    Exactly -FGT: forgetting is negative, a later task that helps an earlier one is positive.
    """
    return _mean(a[-1, :-1] - just_learned(a)[:-1])


def af(a: np.ndarray) -> float | None:
    """Return AF of STAMP eq. 44: (1/(T-1)) sum_{k<T} max_{1 <= t <= T-1} (a[t, k] - a[T, k]).

    The maximum runs over all rows but the last, those before the task was learned too. A task that cannot be answered
    before it is learned (the head has no outputs for its classes) has no such rows; then AF is T/(T-1) times FT.
    """
    if len(a) < 3:
        return None
    learned = np.tri(len(a), a.shape[1], k=-1, dtype=bool)
    accuracies = np.where(np.isnan(a) & ~learned, -np.inf, a)
    return _mean(accuracies[1:-1, :-1].max(axis=0) - a[-1, :-1])


def pd(a: np.ndarray) -> float | None:
    """Return PD of PIP (table 2): mean accuracy after the first task minus mean accuracy after the last.

    Not forgetting alone: it is also large where later tasks are harder, or never learned.
    """
    curve = accuracy_curve(a)
    return _mean(curve[:1] - curve[-1:]) if curve.size > 1 else None


def avg(a: np.ndarray) -> float | None:
    """Return Avg of PIP (table 2): mean over t = 1..T of the mean accuracy on the tasks learned so far."""
    return _mean(accuracy_curve(a))


def learning_acc(a: np.ndarray) -> float | None:
    """Return mean accuracy on each task right after learning it, (1/T) sum_k a[k, k], to stand beside forgetting."""
    return _mean(just_learned(a))


def forward(a: np.ndarray) -> float | None:
    """Return forward transfer: (1/(T-1)) sum_{k>1} (a[k-1, k] - a[0, k]) (Lopez-Paz & Ranzato 2017, FWT).

    It is the gain of a task not yet learned from earlier ones, against the untrained model. Where the head has no
    outputs for unseen classes, it is undefined in the task-aware reading, and 0 where all learned classes compete.
    """
    return _mean(np.diagonal(a)[1:] - a[0, 1:])


def worst_drop(a: np.ndarray) -> float | None:
    """Return the worst drop of an earlier task: max_{k<T} (a[k, k] - a[T, k]), as in SPECIAL table 8.

    Its formula is not in the text at hand; this is the worst term of BWT, which stands beside it, with the other sign.
    Negative where every earlier task has gained.
    """
    return _largest(just_learned(a)[:-1] - a[-1, :-1])


def worst_acc(a: np.ndarray) -> float | None:
    """Return accuracy on the worst task after the last one: min_k a[T, k]."""
    return _smallest(a[-1])


def rounds_to_best(monitors: pl.DataFrame) -> int | None:
    """Return rounds until the best, summed over tasks (SPECIAL table 3, which does not say of what): sum_t r_t.

    r_t is the first round of task t, counted from 1, after which the mean accuracy over the tasks so far was as high as
    ever during that task, among the rounds that the monitor `accuracy` looked at. They are test accuracies, looked at
    afterwards: it says how soon a method was at its best, not when to stop. None without that monitor's rows.
    """
    joint = monitors.filter(pl.col("monitor") == "accuracy", pl.col("about").is_null())
    best = joint.sort("value", -pl.col("round"), descending=True).group_by("task").agg(pl.first("round"))
    return int((best["round"] + 1).sum()) if len(best) else None


def client_acc(accuracies: np.ndarray) -> float | None:
    """Return the mean of the clients' final accuracies [clients]; every client counts the same."""
    return _mean(np.sort(accuracies))


def worst_client_acc(accuracies: np.ndarray) -> float | None:
    """Return the final accuracy of the client [clients] that is served worst."""
    return _smallest(accuracies)


def tip_acc(counts: np.ndarray) -> float | None:
    """Return the mean over tasks of the share of samples [T, T] whose task is predicted right (FedProTIP table 14).

    It counts samples in every reading, also where one prediction is made for a batch.
    """
    return _mean(np.diagonal(normalise_rows(counts)))


MATRIX_METRICS: dict[str, Callable[[np.ndarray], float | None]] = {
    metric.__name__: metric for metric in (acc, ft, fgt, bwt, af, pd, avg, learning_acc, forward, worst_drop, worst_acc)
}
CLIENT_METRICS: dict[str, Callable[[np.ndarray], float | None]] = {
    metric.__name__: metric for metric in (client_acc, worst_client_acc)
}
CONFUSION_METRICS: dict[str, Callable[[np.ndarray], float | None]] = {tip_acc.__name__: tip_acc}


def compute_metrics(table: pl.DataFrame, confusion: pl.DataFrame | None = None) -> dict[str, dict[str, float | None]]:
    """Return every metric of every reading in the tables, None where it is undefined."""
    metrics = {reading: _compute_reading(table, reading) for reading in sort_readings(table["reading"])}
    if confusion is not None:
        for reading in sort_readings(confusion["reading"]):
            counts = confusion_matrix(confusion, reading, _count_tasks(table))
            metrics[reading] |= {name: of(counts) for name, of in CONFUSION_METRICS.items()}
    return metrics


def select_shown(metrics: Mapping[str, Values]) -> dict[str, Values]:
    """Return metrics by reading without those of predicted tasks where none is predicted: they repeat other rows."""
    return {
        reading: values
        for reading, values in metrics.items()
        if not reading.endswith("task_predicted") or values.get(tip_acc.__name__) is not None
    }


def sort_readings(readings: Iterable[str]) -> list[str]:
    """Return each reading once, in the usual order, unknown ones last."""
    present = set(readings)
    return [r for r in READINGS if r in present] + sorted(present.difference(READINGS))


def normalise_rows(counts: np.ndarray) -> np.ndarray:
    """Return each count as a share of its row's sum; NaN in a row of zeros."""
    totals = counts.sum(axis=1, keepdims=True)
    return np.divide(counts, totals, out=np.full(counts.shape, np.nan), where=totals > 0)


def just_learned(a: np.ndarray) -> np.ndarray:
    """Return accuracy on each task right after learning it [T]: the diagonal a[k, k]."""
    return np.diagonal(a[1:])


def _compute_reading(table: pl.DataFrame, reading: str) -> dict[str, float | None]:
    a, clients = accuracy_matrix(table, reading), client_accuracies(table, reading)
    return {name: of(a) for name, of in MATRIX_METRICS.items()} | {
        name: of(clients) for name, of in CLIENT_METRICS.items()
    }


def _count_tasks(table: pl.DataFrame) -> int:
    """Return T, the number of tasks in the table, learned or not."""
    return table.select(pl.max_horizontal(pl.max("task") + 1, pl.max("after"))).item() or 0


def _compute_accuracy(table: pl.DataFrame, reading: str) -> pl.DataFrame:
    rows = table.filter(pl.col("reading") == reading, pl.col("total") > 0)
    return rows.with_columns((pl.col("correct") / pl.col("total")).alias("accuracy"))


def _drops_from_best(a: np.ndarray) -> np.ndarray:
    """Return, for each task but the last [T - 1], its best accuracy since it was learned minus the final one."""
    return np.array([a[k + 1 : -1, k].max() - a[-1, k] for k in range(a.shape[1] - 1)])


def _mean(values: np.ndarray, over: int | None = None) -> float | None:
    return float(values.sum() / (over or values.size)) if _is_complete(values) else None


def _largest(values: np.ndarray) -> float | None:
    return float(values.max()) if _is_complete(values) else None


def _smallest(values: np.ndarray) -> float | None:
    return float(values.min()) if _is_complete(values) else None


def _is_complete(values: np.ndarray) -> bool:
    return values.size > 0 and not np.isnan(values).any()
