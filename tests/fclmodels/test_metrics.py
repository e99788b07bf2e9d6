import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fclmodels import metrics
from fclmodels.metrics import MATRIX_METRICS, accuracy_matrix, client_accuracies, compute_metrics

# three tasks; row t: after learning t tasks. Task 1 gets better with task 2 (.8 -> .9) and then falls to .5,
# task 2 was guessed right more often before it was learned (.7) than ever after.
A = np.array(
    [
        [0.10, 0.20, 0.30],
        [0.80, 0.70, 0.40],
        [0.90, 0.60, 0.50],
        [0.50, 0.40, 0.70],
    ]
)

BY_HAND = {
    "acc": (0.50 + 0.40 + 0.70) / 3,
    "ft": ((0.90 - 0.50) + (0.60 - 0.40)) / 3,  # over T = 3
    "fgt": ((0.80 - 0.50) + (0.60 - 0.40)) / 2,  # from the diagonal, over T - 1
    "bwt": ((0.50 - 0.80) + (0.40 - 0.60)) / 2,
    "af": ((0.90 - 0.50) + (0.70 - 0.40)) / 2,  # task 2's best is from before it was learned
    "pd": 0.80 - (0.50 + 0.40 + 0.70) / 3,
    "avg": (0.80 + (0.90 + 0.60) / 2 + (0.50 + 0.40 + 0.70) / 3) / 3,
    "learning_acc": (0.80 + 0.60 + 0.70) / 3,
    "forward": ((0.70 - 0.20) + (0.50 - 0.30)) / 2,
    "worst_drop": 0.80 - 0.50,  # task 1 fell by .3 from the diagonal, task 2 by .2
    "worst_acc": 0.40,
}
FORGETTING = ("ft", "fgt", "bwt", "af", "worst_drop")
NEED_TWO_TASKS = {*FORGETTING, "pd", "forward"}


def rows(a, reading="task_aware", client=None, total=100, tasks=None):
    """The long table of a matrix; a NaN has no row."""
    return pl.DataFrame(
        [
            {
                "reading": reading,
                "after": after,
                "task": task,
                "client": client,
                "correct": round(a[after, task] * total),
                "total": total,
            }
            for after, task in np.ndindex(*a.shape)
            if not np.isnan(a[after, task])
        ],
        schema={
            "reading": pl.String,
            "after": pl.Int16,
            "task": pl.Int16,
            "client": pl.Int32,
            "correct": pl.Int64,
            "total": pl.Int64,
        },
    )


accuracies = st.integers(1, 6).flatmap(
    lambda tasks: st.lists(
        st.lists(st.integers(0, 100), min_size=tasks, max_size=tasks), min_size=tasks + 1, max_size=tasks + 1
    ).map(lambda counts: np.array(counts) / 100)
)


@pytest.mark.parametrize("name", MATRIX_METRICS)
def test_every_metric_by_hand(name):
    assert MATRIX_METRICS[name](A) == pytest.approx(BY_HAND[name])
    assert compute_metrics(rows(A))["task_aware"][name] == pytest.approx(BY_HAND[name])


def test_pd_and_avg_give_the_figures_of_pips_table_2():
    averages = [89.0, 55.0, 57.0, 52.3, 50.3, 49.3, 46.3, 41.7, 40.3, 36.7]  # iCaRL+FL, CIFAR100
    a = np.vstack([np.zeros(10), *(np.full(10, average) for average in averages)])
    assert metrics.pd(a) == pytest.approx(52.3)
    assert round(metrics.avg(a), 1) == 51.8


def test_acc_gives_the_figure_of_fots_table_12():
    final = [51.9, 57.0, 70.9, 66.2, 69.4, 70.2, 72.9, 70.0, 72.6, 76.2]  # threshold 0.80
    assert round(metrics.acc(np.vstack([np.zeros((10, 10)), final])), 1) == 67.7


def test_matrix_holds_each_count_in_its_place_and_nan_elsewhere():
    a = A.copy()
    a[2, 0] = np.nan
    np.testing.assert_array_equal(accuracy_matrix(rows(a), "task_aware"), a)
    assert np.isnan(accuracy_matrix(rows(A), "task_agnostic")).all()


def test_matrix_of_a_client_and_of_all_are_kept_apart():
    table = pl.concat([rows(A), rows(A / 2, client=0, total=200), rows(A, reading="task_agnostic", client=1)])
    np.testing.assert_array_equal(accuracy_matrix(table, "task_aware"), A)
    np.testing.assert_array_equal(accuracy_matrix(table, "task_aware", client=0), A / 2)
    assert np.isnan(accuracy_matrix(table, "task_aware", client=1)).all()


def test_a_task_without_test_samples_is_undefined_not_zero():
    table = rows(A).with_columns(
        total=pl.when(pl.col("task") == 1).then(0).otherwise("total"),
        correct=pl.when(pl.col("task") == 1).then(0).otherwise("correct"),
    )
    assert np.isnan(accuracy_matrix(table, "task_aware")[:, 1]).all()
    assert compute_metrics(table)["task_aware"]["acc"] is None


def test_one_task_has_an_accuracy_and_no_forgetting():
    of = compute_metrics(rows(np.array([[0.1], [0.9]])))["task_aware"]
    assert {name for name in MATRIX_METRICS if of[name] is None} == NEED_TWO_TASKS
    assert of["acc"] == of["avg"] == of["learning_acc"] == of["worst_acc"] == 0.9


def test_an_empty_table_has_no_readings():
    assert compute_metrics(rows(A).clear()) == {}
    assert all(metric(accuracy_matrix(rows(A).clear(), "task_aware")) is None for metric in MATRIX_METRICS.values())


@pytest.mark.parametrize(
    ("after", "task", "undefined"),
    [
        (0, 1, {"forward"}),
        (0, 0, set()),  # nobody compares the first task with the untrained model
        (1, 0, {"ft", "fgt", "bwt", "af", "pd", "avg", "learning_acc", "worst_drop"}),
        (2, 2, {"forward"}),
        (1, 2, set()),
        (2, 0, {"ft", "af", "avg"}),  # neither on the diagonal nor last
        (3, 2, {"acc", "pd", "avg", "learning_acc", "worst_acc"}),
        (3, 0, {"acc", "ft", "fgt", "bwt", "af", "pd", "avg", "worst_drop", "worst_acc"}),
    ],
)
def test_a_missing_row_undefines_exactly_what_needs_it(after, task, undefined):
    a = A.copy()
    a[after, task] = np.nan
    of = compute_metrics(rows(a))["task_aware"]
    assert {name for name in MATRIX_METRICS if of[name] is None} == undefined
    assert all(of[name] == pytest.approx(BY_HAND[name]) for name in MATRIX_METRICS if name not in undefined)


def test_tasks_that_cannot_be_answered_before_they_are_learned():
    a = np.where(np.tri(4, 3, -1, dtype=bool), A, np.nan)  # a growing head with the task known
    of = compute_metrics(rows(a))["task_aware"]
    assert of["forward"] is None
    assert of["af"] == pytest.approx(((0.90 - 0.50) + (0.60 - 0.40)) / 2)  # task 2's .7 of before is not there
    assert all(of[name] == pytest.approx(BY_HAND[name]) for name in MATRIX_METRICS if name not in ("forward", "af"))


def test_a_run_that_stopped_before_the_last_task_has_no_final_accuracy():
    a = A.copy()
    a[3] = np.nan
    of = compute_metrics(rows(a))["task_aware"]
    assert [of[name] for name in ("acc", "fgt", "ft", "af", "pd", "worst_acc")] == [None] * 6
    assert of["forward"] == pytest.approx(BY_HAND["forward"])


def test_clients_are_averaged_over_the_tasks_they_have():
    only_first = A.copy()
    only_first[:, 1:] = np.nan
    table = pl.concat([rows(A), rows(A, client=7), rows(only_first, client=2)])
    np.testing.assert_allclose(client_accuracies(table, "task_aware"), [0.5, (0.5 + 0.4 + 0.7) / 3])  # clients 2, 7
    of = compute_metrics(table)["task_aware"]
    assert of["client_acc"] == pytest.approx((0.5 + (0.5 + 0.4 + 0.7) / 3) / 2)
    assert of["worst_client_acc"] == 0.5


def test_a_task_of_which_a_client_has_no_test_samples_is_not_its_task():
    none_of_first = rows(A, client=0).with_columns(
        pl.when(pl.col("task") == 0).then(0).otherwise(pl.col(name)).alias(name) for name in ("correct", "total")
    )
    assert client_accuracies(none_of_first, "task_aware").tolist() == pytest.approx([(0.4 + 0.7) / 2])


def test_a_client_not_measured_at_the_end_undefines_the_client_metrics():
    early = A.copy()
    early[3, 1] = np.nan
    of = compute_metrics(pl.concat([rows(A), rows(A, client=0), rows(early, client=1)]))["task_aware"]
    assert (of["client_acc"], of["worst_client_acc"]) == (None, None)
    assert of["acc"] == pytest.approx(BY_HAND["acc"])


def test_without_rows_of_clients_the_client_metrics_are_undefined():
    of = compute_metrics(rows(A))["task_aware"]
    assert (of["client_acc"], of["worst_client_acc"]) == (None, None)


def test_readings_do_not_mix_and_come_in_their_order():
    table = pl.concat([rows(A / 2, "task_predicted"), rows(A, "task_aware")])
    both = compute_metrics(table)
    assert list(both) == ["task_aware", "task_predicted"]
    assert both["task_predicted"]["acc"] == pytest.approx(both["task_aware"]["acc"] / 2)


def count_predictions(counts, after, reading="task_predicted"):
    """The long table of counts [tasks, predicted]; a 0 has no row."""
    return pl.DataFrame(
        [
            (reading, after, task, predicted_task, int(counts[task][predicted_task]))
            for task, predicted_task in np.argwhere(counts)
        ],
        schema={"reading": pl.String, "after": pl.Int16, "task": pl.Int16, "predicted": pl.Int16, "count": pl.Int64},
        orient="row",
    )


CONFUSION = np.array([[9, 1, 0], [2, 2, 0], [0, 15, 5]])


def test_the_task_prediction_is_a_mean_over_tasks_after_the_last_one():
    both = pl.concat([rows(A, "task_predicted"), rows(A, "task_aware")])
    table = pl.concat(
        [
            count_predictions(np.array([[7]]), 1),
            count_predictions(np.array([[0, 3], [3, 0]]), 2),
            count_predictions(CONFUSION, 3),
        ]
    )
    of = compute_metrics(both, table)
    assert of["task_predicted"]["tip_acc"] == pytest.approx((0.9 + 0.5 + 0.25) / 3)  # not 16/34, the share of samples
    assert of["task_predicted"].items() >= compute_metrics(both)["task_predicted"].items()
    assert of["task_aware"] == compute_metrics(both)["task_aware"]
    np.testing.assert_array_equal(metrics.confusion_matrix(table, "task_predicted", 3), CONFUSION)


@pytest.mark.parametrize("predicted", [CONFUSION * [[1], [0], [1]], np.zeros((3, 3), int)], ids=["no samples", "none"])
def test_a_task_without_test_samples_has_no_task_prediction(predicted):
    table = pl.concat([count_predictions(CONFUSION[:2, :2], 2), count_predictions(predicted, 3)])
    assert compute_metrics(rows(A, "task_predicted"), table)["task_predicted"]["tip_acc"] is None


def test_figures_of_fedprotips_table_14():
    """10-split CIFAR100: its tasks in turn, of a thousand test samples each."""
    right = np.array([1, 1, 0.978, 1, 1, 0.989, 0.997, 0.989, 1, 0.996]) * 1000
    counts = np.diag(right.round().astype(int)) + np.diag(1000 - right[1:].round().astype(int), -1)
    counts[0, 0] = 1000
    assert metrics.tip_acc(counts) == pytest.approx(0.9949)


@given(final=st.lists(st.integers(0, 100), min_size=2, max_size=6))
def test_a_frozen_model_forgets_nothing_by_any_definition(final):
    frozen = np.tile(np.array(final) / 100, (len(final) + 1, 1))
    assert [MATRIX_METRICS[name](frozen) for name in FORGETTING] == [0.0] * len(FORGETTING)
    assert metrics.forward(frozen) == 0
    assert metrics.learning_acc(frozen) == metrics.acc(frozen)
    # PIP's PD is no measure of forgetting alone: here it is the first task's advantage
    assert metrics.pd(frozen) == pytest.approx(frozen[0, 0] - frozen[0].mean())


@given(accuracies)
def test_the_definitions_stand_in_their_order(a):
    if a.shape[1] < 2:
        return
    share = (a.shape[1] - 1) / a.shape[1]
    assert metrics.bwt(a) == -metrics.fgt(a)
    assert metrics.ft(a) / share >= metrics.fgt(a) - 1e-12  # the best is at least the diagonal
    assert metrics.af(a) >= metrics.ft(a) / share - 1e-12  # and the best of more rows at least that
    learned = np.where(np.tri(*a.shape, -1, dtype=bool), a, np.nan)
    assert metrics.af(learned) == pytest.approx(metrics.ft(a) / share, abs=1e-12)
    assert metrics.worst_drop(a) >= metrics.fgt(a) - 1e-12  # the largest of what FGT is the mean of
    assert metrics.learning_acc(a) - metrics.acc(a) == pytest.approx(share * metrics.fgt(a), abs=1e-12)
    assert metrics.worst_acc(a) <= metrics.acc(a) + 1e-12


@given(accuracies, st.integers(0, 50))
def test_forgetting_does_not_see_a_shift_of_all_accuracies(a, shift):
    for name in (*FORGETTING, "pd", "forward"):
        shifted = MATRIX_METRICS[name](a + shift / 100)
        assert shifted is None if a.shape[1] < 2 else shifted == pytest.approx(MATRIX_METRICS[name](a), abs=1e-9)


@settings(deadline=None, max_examples=30)
@given(st.lists(accuracies, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_numbers_of_clients_and_order_of_rows_change_nothing(of_clients, random):
    names = random.sample(range(100), len(of_clients))
    table = pl.concat([rows(a, client=number) for number, a in enumerate(of_clients)] + [rows(of_clients[0])])
    other = pl.concat([rows(a, client=name) for name, a in zip(names, of_clients, strict=True)] + [rows(of_clients[0])])
    other = other.sample(fraction=1, shuffle=True, seed=random.randrange(1000))
    assert compute_metrics(other) == compute_metrics(table)


def looked(*rows):
    """What the monitor `accuracy` saw of all tasks together: (task, round, value)."""
    facts = {"monitor": "accuracy", "about": None, "layer": None}
    names = {"monitor": pl.String, "task": pl.Int16, "round": pl.Int32, "about": pl.Int16, "value": pl.Float64}
    return pl.DataFrame(
        [facts | {"task": task, "round": round, "value": value} for task, round, value in rows], schema=names
    )


def test_rounds_to_best_are_summed_over_tasks_and_counted_from_one():
    monitor_rows = looked((0, 1, 0.5), (0, 3, 0.75), (0, 5, 0.75), (1, 1, 0.6), (1, 3, 0.5), (1, 5, 0.4), (2, 5, 0.1))
    assert metrics.rounds_to_best(monitor_rows) == 4 + 2 + 6
    others = monitor_rows.with_columns(about=pl.lit(0, pl.Int16), value=1 - pl.col("value"))
    assert (
        metrics.rounds_to_best(pl.concat([others, monitor_rows.with_columns(monitor=pl.lit("rho")), monitor_rows]))
        == 12
    )
    assert metrics.rounds_to_best(others) is None


def test_a_model_that_only_gains_has_a_negative_worst_drop():
    a = np.array([[0, 0, 0], [0.5, 0, 0], [0.6, 0.5, 0], [0.7, 0.9, 0.5]])
    assert metrics.worst_drop(a) == pytest.approx(-0.2)
