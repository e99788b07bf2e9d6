"""A preset: a paper's setting and its figures, and the settings in which a run differs from it."""

import json
import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from fclmodels.settings.base import Settings

# How the names of settings begin that say how a run is made, not what it computes: experiments do not differ in them.
NEUTRAL = ("federation.executor", "federation.workers", "federation.checkpoint_seconds", "monitors.")
LAST_BITS = ("federation.threads", "device", "data.root")  # of no weight beside a paper's figures
UNITS = {  # of all that a paper may give a figure of
    **dict.fromkeys(("acc", "ft", "fgt", "bwt", "af", "pd", "avg", "learning_acc", "worst_drop", "tip_acc"), "%"),
    "forgetting": "%",  # by a formula that the paper does not give
    "used_share": "%",
    **dict.fromkeys(("mb_up", "mb_down"), "MB"),  # of a client in a round
    **dict.fromkeys(("mb_end_up", "mb_end_down"), "MB"),  # of a client at a task's end
    "mb_total": "MB",  # of a client that takes part in each round so far, both ways
    **dict.fromkeys(("mb_model", "mb_client", "mb_memory"), "MB"),  # the model, all that a client keeps, what it stores
    "gb_peak": "GB",
    **{"seconds_per_round": "s", "hours": "h", "hours_end": "h"},  # of a run, and of its tasks' ends
    **dict.fromkeys(("seconds_epoch", "seconds_end"), "s"),  # of a client's local epoch, of its work at a task's end
    **{"rounds_to_best": "rounds", "rounds": "rounds", "parameters": "parameters", "epsilon": ""},
}
QUANTITY = re.compile(r"task_[1-9][0-9]?|(?P<name>\w+?)(_after_[1-9][0-9]?)?(_std)?")  # task_3: its accuracy at the end


class PaperTable(Settings):
    """Figures of a paper, a row a method; UNITS has the columns. Without a reading: not of accuracies.

    `acc_after_3` is `acc` after three tasks, `acc_std` its standard deviation. Null: the paper has no figure there.
    """

    table: str
    reading: str | None = None
    where: dict[str, str | int | float] = Field({})  # settings, by dotted name, that differ from the preset's
    columns: tuple[str, ...]
    rows: dict[str, tuple[float | None, ...]]

    @field_validator("columns")
    @classmethod
    def _are_quantities(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        for column in columns:
            if find_unit(column) is None:
                raise ValueError(f"{column} is no quantity. There are {', '.join(UNITS)} and task_1, task_2, ...")
        return columns

    @model_validator(mode="after")
    def _rows_fit_columns(self) -> "PaperTable":
        for method, row in self.rows.items():
            if len(row) != len(self.columns):
                raise ValueError(f"{method} has {len(row)} figures for {len(self.columns)} columns.")
        return self


class PresetSettings(Settings):
    name: str | None = Field(None, description="name of the preset; null: these settings are no preset")
    paper: str = Field("", description="the paper whose settings these are")
    needs: tuple[str, ...] = Field((), description="what must be there before it can run")
    note: str = Field("", description="where it differs from the paper")
    figures: tuple[PaperTable, ...] = Field((), description="the paper's figures: table, reading, where, columns, rows")
    changes: dict[str, tuple[str, str]] = Field(
        {}, description="settings of a run that are not the preset's, with both values; not to be set by hand"
    )
    only: dict[str, dict[Literal["model", "federation", "optimizer", "augment"], dict[str, Any]]] = Field(
        {}, description="settings that hold for one method only: under its name, as they are written at the top"
    )


def find_unit(column: str) -> str | None:
    """Return the unit of a column of a paper's table, None if it is of no quantity that there is."""
    if match := QUANTITY.fullmatch(column):
        return UNITS.get(match["name"]) if match["name"] else "%"
    return None


def list_changes(own: dict[str, Any], published: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the settings, by dotted name, that change what is computed and are not the preset's: own value, preset's.

    Seeds, monitors and where clients are computed change nothing that a paper's figure depends on. A setting that is
    the preset's alone has no place beside another one of the run's, which is listed: `partition.alpha` under `kind`.
    """
    texts = [{name: format_setting(value) for name, value in settings.items()} for settings in (own, published)]
    names = [name for name in texts[0] if not name.startswith((*NEUTRAL, *LAST_BITS)) and not is_seed(name)]
    pairs = {name: (texts[0][name], texts[1].get(name, "-")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def is_seed(name: str) -> bool:
    return name.rpartition(".")[2] == "seed"


def format_setting(value: Any) -> str:
    """Return a setting's value as text, such as null or 0.5."""
    return value if isinstance(value, str) else json.dumps(value)
