"""The federated training of one task of the stream."""

from fclmodels.experiment import Step
from tasks.caching import Outcome, stored_task


@stored_task("{label}: begin")
def begin(step: Step, label: str) -> Outcome:
    """The model before the first task, and what the server knows then."""
    return step.done() or step.run()


@stored_task("{label}: learn task {task}")
def learn(step: Step, label: str, task: int) -> Outcome:
    """All rounds of one task, going on from the last checkpoint if there is one."""
    return step.done() or step.run()
