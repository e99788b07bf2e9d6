"""Names and meanings of readings and metrics: short enough for a table head, honest enough for a caption."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Label(NamedTuple):
    """Title of a column or reading, and its meaning."""

    title: str
    meaning: str


class Metric(NamedTuple):
    """Label of a metric, and in which direction it is better."""

    title: str
    better: str  # ↑ more is better, ↓ less is better
    meaning: str


_BATCH = "but in test batches that hold one task each, as in some papers' code: a batch gives its task away."
_OWN = "each client's own model answers, on test samples of the classes that this client has had of each task."
BY_BATCH = {  # by the beginning of their names, the readings that depend on the evaluation batch
    "mixed_batch_": "mixed-batch: one task is predicted for a whole batch of mixed tasks",
    "paper_": "paper: batches of one task, the papers' protocol, which tells the method that samples belong together",
}

READINGS = {
    "task_aware": Label("Task-aware", "the task of each test sample is given; only its classes compete."),
    "task_agnostic": Label("Task-agnostic", "the task is not given; all classes seen so far compete."),
    "task_predicted": Label(
        "Task predicted",
        "the task is not given; the method predicts it for each sample, then that task's classes compete. "
        "The same as task-agnostic for a method that predicts none.",
    ),
    "mixed_batch_task_predicted": Label(
        "Task predicted, mixed batches",
        "as task predicted, but one task for each test batch as a whole, though its samples are of all tasks.",
    ),
    "paper_task_aware": Label("Task-aware, paper protocol", f"as task-aware, {_BATCH}"),
    "paper_task_agnostic": Label("Task-agnostic, paper protocol", f"as task-agnostic, {_BATCH}"),
    "paper_task_predicted": Label(
        "Task predicted, paper protocol",
        "test batches hold one task each, as in some papers' code, and where the method can, it predicts one task "
        "for all of a batch: each sample profits from knowing that the others are of its task.",
    ),
    "personal_task_aware": Label("Personal, task-aware", f"the task is given; {_OWN}"),
    "personal_task_agnostic": Label("Personal, task-agnostic", f"the task is not given; {_OWN}"),
}

METRICS = {
    "acc": Metric("ACC", "↑", "mean accuracy over all tasks after the last one (FedProTIP eq. 16, FOT eq. 13)."),
    "learning_acc": Metric("Just learned", "↑", "mean accuracy on each task right after it was learned."),
    "avg": Metric("Avg", "↑", "mean over the whole sequence of the accuracy on the tasks learned so far (PIP)."),
    "forward": Metric(
        "Forward",
        "↑",
        "forward transfer: accuracy on each task just before it is learned, minus the untrained model's. "
        "Undefined or 0 where the head has no outputs yet for unseen classes.",
    ),
    "worst_acc": Metric("Worst task", "↑", "final accuracy on the worst task."),
    "client_acc": Metric("Client mean", "↑", "mean over clients of each one's final accuracy on the tasks it has."),
    "worst_client_acc": Metric("Worst client", "↑", "final accuracy of the client that is served worst."),
    "ft": Metric("FT", "↓", "mean drop from a task's best since learned, divided by all T tasks (FedProTIP eq. 16)."),
    "fgt": Metric("FGT", "↓", "mean drop from right after learning, over the T − 1 earlier tasks (FOT eq. 13)."),
    "bwt": Metric("BWT", "↑", "backward transfer, the same with the other sign (SPECIAL eq. 10): BWT = −FGT."),
    "af": Metric("AF", "↓", "mean drop from a task's best at any time, even before it was learned (STAMP eq. 44)."),
    "pd": Metric(
        "PD",
        "↓",
        "mean accuracy after the first task minus that after the last (PIP). Harder later tasks raise it too.",
    ),
    "tip_acc": Metric(
        "Task prediction",
        "↑",
        "mean over tasks of the share of test samples whose task is predicted right after the last task (FedProTIP "
        "table 14); of samples in every reading, also where a batch is predicted as a whole.",
    ),
    "worst_drop": Metric("Worst drop", "↓", "largest drop of one task from right after learning (SPECIAL table 8)."),
}

FAULTS = {  # counts over all rounds of a run
    "clients": Label("Sampled", "clients asked to train in a round, also where the draw was called off."),
    "missing": Label("Missing", "those that did not answer, with all of a draw that was called off."),
    "lost": Label("Lost", "those that crashed, or had no memory to train."),
    "late": Label("Late", "answers that arrived in a later round of the task."),
    "refused": Label("Refused", "answers that failed a check and went into no model."),
    "dropped": Label("Dropped", "answers too late to count: after the task's last round, or by the settings."),
    "answers": Label("Counted", "answers that went into the model, the late ones with less weight."),
}

ACCURACY = ("acc", "avg", "worst_acc", "client_acc", "worst_client_acc", "forward")
FORGETTING = ("learning_acc", "acc", "ft", "fgt", "bwt", "af", "pd", "worst_drop")  # never without the first

DIRECTIONS = {"up": "left the client", "down": "came to it", "kept": "stays with it"}

LEAST = {"sum": "only the sum", "group": "sums over groups of clients", "each": "each client's own", "-": "–"}


def label_reading(name: str) -> Label:
    return READINGS.get(name, Label(name, "a reading that this version does not know."))


def title_reading(name: str, size: str) -> str:
    """Return a reading's title, with the batch size where it matters."""
    return label_reading(name).title + (f" ({size} a batch)" if name.startswith(tuple(BY_BATCH)) else "")


def explain_batches(names: Iterable[str], size: str) -> str | None:
    """Return how some of these readings depend on batches of that size; None where none does."""
    names = tuple(names)
    ways = [text for prefix, text in BY_BATCH.items() if any(name.startswith(prefix) for name in names)]
    if not ways:
        return None
    return f"{'; '.join(ways)}; others: per sample. A batch: {size} samples (evaluation.batch_size)."


def list_notes(result: Mapping[str, Any]) -> list[str]:
    """Return what must stand beside the numbers of one run's result.json."""
    batches = explain_batches(result["metrics"], str(result["settings"]["evaluation"]["batch_size"]))
    remarks = [f"{remark[0].upper()}{remark[1:]}." for remark in result.get("remarks", ())]
    return [
        *filter(None, [batches]),
        *([describe_privacy(**result["privacy"])] if "privacy" in result else []),
        *remarks,
    ]


def describe_privacy(epsilon: float, delta: float, covers: str, **_: Any) -> str:
    """Return the privacy that a method's noise gives, as one line."""
    return f"epsilon {epsilon:.4g} at delta {delta:g}, for {covers}."
