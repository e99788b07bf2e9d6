"""Optuna's search for a row's settings: sampled by its tree of Parzen estimators, pruned by the median on val rows.

One row is searched one choice after another, from a fixed seed, so that the same study makes the same choices whatever
runs beside it; a repeated one takes what the store has.
"""

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import optuna

from fclmodels.study.plan import Point, Study, StudyRow, ValueRange, build_job, format_override
from fclmodels.study.trial import PRUNED, TriedPoint, try_point
from flows.study.jobs import watch

STARTUP = 4  # choices at random before estimates and pruning begin; ours


def search_row(order: tuple[Study, str]) -> list[TriedPoint]:
    """Return the trials of a row's search, as many as the budget has."""
    study, label = order
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    search = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=STARTUP),
        pruner=optuna.pruners.NopPruner(),
    )
    trials: list[TriedPoint] = []
    looks_before: list[dict[int, float]] = []  # of each choice, by step
    for _ in range(study.budget or 0):
        proposal = search.ask()
        point = suggest_point(proposal, study.rows[label])

        own: dict[int, float] = {}
        is_hopeless = partial(note_look, own, looks_before)
        looks = [watch(build_job(study, label, point, seed), study, True) for seed in study.tuning_seeds]
        trial = try_point(looks, point, is_hopeless)
        state = optuna.trial.TrialState.PRUNED if trial.problem == PRUNED else optuna.trial.TrialState.FAIL
        if trial.value is None:
            search.tell(proposal, state=state)
        else:
            search.tell(proposal, trial.value)
        trials.append(trial)
        looks_before.append(own)
    return trials


def note_look(own: dict[int, float], before: Sequence[dict[int, float]], step: int, value: float) -> bool:
    """Note a look at val rows; return whether it is below the median of earlier choices' looks at the same step.

    Optuna's own median pruner compares the best look so far, which of a stream is that after the first task: it would
    never prune what forgets.
    """
    own[step] = value
    others = [looks[step] for looks in before if step in looks]
    return len(others) >= STARTUP and value < median(others)


def suggest_point(proposal: optuna.Trial, row: StudyRow) -> Point:
    """Return the next choice of settings."""
    return tuple(format_override(key, _suggest(proposal, key, values)) for key, values in row.search.items())


def _suggest(proposal: optuna.Trial, key: str, values: tuple[Any, ...] | ValueRange) -> Any:
    if not isinstance(values, ValueRange):  # by number, for a value may be a block of settings
        return values[proposal.suggest_categorical(key, range(len(values)))]
    if values.whole:
        return proposal.suggest_int(key, int(values.low), int(values.high), log=values.log)
    return float(f"{proposal.suggest_float(key, values.low, values.high, log=values.log):.4g}")
