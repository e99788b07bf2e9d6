"""Numbers only: the loss increase of old tasks that was seen, beside what FedProTIP's Theorem 2 (eq. 13) allows."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import polars as pl

from fclmodels.federation.monitors.rows import row, table


@dataclass(frozen=True)
class Stretch:
    """The training of one later task t: E_t, S_t, eta_t and beta_tau^(t-1)."""

    rounds: int
    steps: float
    lr: float
    beta: float


def forgetting_bound(second_moment: float, smoothness: float, later: Iterable[Stretch]) -> float:
    """Eq. 13: G^2 sum_t E_t (beta S_t eta_t + L/2 S_t^2 eta_t^2)."""
    return second_moment * sum(
        t.rounds * (t.beta * t.steps * t.lr + smoothness / 2 * (t.steps * t.lr) ** 2) for t in later
    )


def with_bounds(seen: pl.DataFrame, rounds: pl.DataFrame, lr: float) -> pl.DataFrame:
    """The table of the tasks so far, with loss_increase and theorem_bound of each old task after each later one.

    E_t and the server's eta_g are those of the rounds table, and eta_t = eta_g lr. Constants are the largest that were
    seen up to the later task, beta the largest in each task (where there is none, that gradient was 0 throughout).
    """
    losses, betas, steps, squares, slopes = (
        _largest(seen, monitor) for monitor in ("loss", "beta", "local_steps", "second_moment", "smoothness")
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
        G2, L = (max((v for (t, _), v in found.items() if t <= task), default=0.0) for found in (squares, slopes))
        rows.append(row("loss_increase", task, value - losses[about, about], about=about))
        rows.append(row("theorem_bound", task, forgetting_bound(G2, L, later), about=about))
    return pl.concat([seen, table(rows)])


def _largest(seen: pl.DataFrame, monitor: str) -> dict[tuple[int, Any], float]:
    """By task and by the task that it is about, over rounds."""
    found = seen.filter(pl.col("monitor") == monitor).group_by("task", "about").agg(pl.max("value"))
    return {(task, about): value for task, about, value in found.iter_rows()}
