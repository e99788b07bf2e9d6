"""Refusals of methods whose server takes what clients learned in a round as it is, not a share of the way to it.

Both raise UserError with the method's reason.
"""

from fclmodels.errors import UserError
from fclmodels.federation.run_context import Run


def refuse_server_lr(run: Run, why: str) -> None:
    """Raise UserError where the server's rate is not 1 in every task."""
    federation = run.params.federation
    if federation.server_lr != 1 or federation.server_lr_schedule != "constant":
        raise UserError(f"federation.server_lr: {why}. Use 1, and server_lr_schedule: constant.")


def refuse_late_answers(run: Run, why: str) -> None:
    """Raise UserError where an answer may count in a later round."""
    if run.params.federation.faults.late:
        raise UserError(f"federation.faults.late: {why}. Use 0.")
