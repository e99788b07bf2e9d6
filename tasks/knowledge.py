"""What a method takes out of a learned task: bases, prototypes, references."""

from fclmodels.experiment import Step
from tasks.caching import Outcome, stored_task


@stored_task("{label}: conclude task {task}")
def conclude(step: Step, label: str, task: int) -> Outcome:
    """The exchanges after the last round of a task."""
    return step.done() or step.run()
