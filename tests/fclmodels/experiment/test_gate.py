"""The gate: limits on accuracy and forgetting, by val rows, in the reading that a served model gives."""

import polars as pl
import pytest

from fclmodels.experiment.gate import judge
from fclmodels.settings.schema import GateSettings

LIMITS = GateSettings(acc=0.6, forgetting=0.25)


def table(*rows: tuple[int, int, int], reading: str = "task_predicted") -> pl.DataFrame:
    """Correct of ten, by (after, task, correct)."""
    schema = {"after": pl.Int16, "task": pl.Int16, "correct": pl.Int64}
    facts = pl.DataFrame(rows, schema=schema, orient="row")
    return facts.with_columns(reading=pl.lit(reading), client=pl.lit(None, pl.Int32), total=pl.lit(10, pl.Int64))


def test_after_the_first_task_accuracy_alone_decides() -> None:
    assert not judge(table((1, 0, 6)), LIMITS).reasons
    verdict = judge(table((1, 0, 5)), LIMITS)
    assert verdict.reasons == ("accuracy 50.0 % is below arrivals.gate.acc, 60.0 %",)
    assert verdict.forgetting is None


@pytest.mark.parametrize(
    ("first", "second", "reasons"),
    [
        (7, 8, []),
        (8, 8, []),
        (6, 9, ["forgetting"]),  # 9 - 6 of 10: above a quarter
        (7, 4, ["accuracy"]),
        (2, 8, ["accuracy", "forgetting"]),
    ],
)
def test_both_limits_hold_a_model_back(first: int, second: int, reasons: list[str]) -> None:
    verdict = judge(table((1, 0, 9), (2, 0, first), (2, 1, second)), LIMITS)
    assert [reason.partition(" ")[0] for reason in verdict.reasons] == reasons
    assert verdict.acc == pytest.approx((first + second) / 20)
    assert verdict.forgetting == pytest.approx((9 - first) / 10)


def test_limits_themselves_are_kept() -> None:
    exact = GateSettings(acc=0.75, forgetting=0.5)
    assert not judge(table((1, 0, 10), (2, 0, 5), (2, 1, 10)), exact).reasons


def test_other_readings_do_not_count() -> None:
    low, high = table((1, 0, 1)), table((1, 0, 10), reading="task_aware")
    assert judge(pl.concat([low, high]), LIMITS).reasons


def test_what_was_not_measured_is_no_champion() -> None:
    verdict = judge(table((1, 0, 9), (2, 1, 9)), LIMITS)
    assert verdict.reasons[0] == "accuracy (unknown) is below arrivals.gate.acc, 60.0 %"
    assert verdict.reasons[1].startswith("forgetting (unknown)")
