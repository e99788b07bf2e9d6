"""The measured loss increase of old tasks, beside the bound of FedProTIP's Theorem 2 (eq. 13); numbers only."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import polars as pl

from fclmodels.federation.monitors.rows import make_row, make_table


@dataclass(frozen=True)
class Stretch:
    """The training of one later task t."""

    rounds: int  # E_t
    steps: float  # S_t, local steps a round
    lr: float  # eta_t
    beta: float  # beta_tau^(t-1)


def compute_forgetting_bound(second_moment: float, smoothness: float, later: Iterable[Stretch]) -> float:
    """Return G^2 sum_t E_t (beta S_t eta_t + L/2 S_t^2 eta_t^2) (eq. 13)."""
    return second_moment * sum(
        t.rounds * (t.beta * t.steps * t.lr + smoothness / 2 * (t.steps * t.lr) ** 2) for t in later
    )


def add_bounds(monitors: pl.DataFrame, rounds: pl.DataFrame, lr: float) -> pl.DataFrame:
    """Return the table of monitors with loss_increase and theorem_bound of each old task after each later one.

    E_t and the server's eta_g are those of the rounds table, and eta_t = eta_g lr. Constants are the largest measured
    up to the later task, beta the largest in each task (where there is none, that gradient was 0 throughout).
    """
    losses, betas, steps, squares, slopes = (
        _find_largest(monitors, monitor) for monitor in ("loss", "beta", "local_steps", "second_moment", "smoothness")
    )
    budgets = rounds.group_by("task").agg(pl.len(), pl.max("server_lr"))
    trained = {task: (count, lr * eta) for task, count, eta in budgets.iter_rows()}
    rows = []
    for (task, about), value in sorted(losses.items()):
        if about == task:
            continue
        later = [
            Stretch(trained[t][0], steps[t, None], trained[t][1], betas.get((t, about), 0.0))
            for t in range(about + 1, task + 1)
        ]
        G2, L = (max((v for (t, _), v in values.items() if t <= task), default=0.0) for values in (squares, slopes))
        rows.append(make_row("loss_increase", task, value - losses[about, about], about=about))
        rows.append(make_row("theorem_bound", task, compute_forgetting_bound(G2, L, later), about=about))
    return pl.concat([monitors, make_table(rows)])


def _find_largest(monitors: pl.DataFrame, monitor: str) -> dict[tuple[int, Any], float]:
    """Return a monitor's largest value over rounds, by task and by the task that it is about."""
    largest = monitors.filter(pl.col("monitor") == monitor).group_by("task", "about").agg(pl.max("value"))
    return {(task, about): value for task, about, value in largest.iter_rows()}
