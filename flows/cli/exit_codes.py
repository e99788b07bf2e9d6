"""Exit codes of the commands, and the message of one that did not succeed."""

import errno
import os
import re
import traceback

import typer

from fclmodels.errors import UserError
from flows.cli.terminal import tell

SUCCESS, FAILURE, USER_MISTAKE, INTERRUPTED = 0, 1, 2, 130
EXTRA = (
    "prefect",
    "mlflow",
    "dvc",
    "fastapi",
    "jinja2",
    "matplotlib",
    "optuna",
    "pandas",
    "sqlalchemy",
)  # of fclflow[workflow]
MAKE_ROOM, MAKE_WRITABLE = "Make room on its disk", "Make it writable"
REMEDIES = {  # for errors of the disk, which are not the program's and need no traceback
    errno.ENOSPC: MAKE_ROOM,
    errno.EDQUOT: MAKE_ROOM,
    errno.EACCES: MAKE_WRITABLE,
    errno.EPERM: MAKE_WRITABLE,
    errno.EROFS: MAKE_WRITABLE,
}
FORWARDING = tuple(f"{os.sep}site-packages{os.sep}{package}{os.sep}" for package in ("prefect", "typer"))


def report_end(problem: Exception | KeyboardInterrupt) -> int:
    """Print why a command did not succeed and return its exit code; a user's mistake is one line, no traceback."""
    if isinstance(problem, UserError):
        tell(str(problem))
        return USER_MISTAKE
    if isinstance(problem, typer.TyperException):
        tell(_describe_usage_error(problem))
        return USER_MISTAKE
    if isinstance(problem, ModuleNotFoundError) and (problem.name or "").partition(".")[0] in EXTRA:
        tell(f"{problem.name} is not installed. This command needs it: pip install 'fclflow[workflow]'")
        return USER_MISTAKE
    if _was_interrupted(problem):
        tell("stopped; the same command resumes from the last checkpoint")
        return INTERRUPTED
    trace = _format_traceback(problem)
    tell(_describe_disk_error(problem) or f"{trace}fcl failed: {type(problem).__name__}: {problem}")
    return FAILURE


def _describe_usage_error(mistake: typer.TyperException) -> str:
    """Return the parser's message, which names the nearest option or command, and where to find help."""
    context = getattr(mistake, "ctx", None)
    command = context.command_path if context else "fcl"
    return f"{command}: {mistake.format_message()} See: {command} --help"


def _was_interrupted(problem: BaseException | None) -> bool:
    """Return whether an interrupt caused the error: Prefect raises its own one if it comes at the start of a task."""
    while problem is not None and not isinstance(problem, KeyboardInterrupt):
        problem = problem.__context__
    return problem is not None


def _describe_disk_error(problem: BaseException) -> str | None:
    """Return which file could not be written and the remedy, None for an error that is not the disk's.

    The current folder stands in for a file that was open already, whose name the error does not have.
    """
    match = re.search(r"\(os error (\d+)\)", str(problem))  # from libraries written in Rust, such as Polars
    number = problem.errno if isinstance(problem, OSError) else match and int(match[1])
    if number not in REMEDIES:
        return None
    place = getattr(problem, "filename", None) or os.getcwd()
    return f"{place}: {os.strerror(number)}. {REMEDIES[number]}; the same command resumes from there."


def _format_traceback(problem: BaseException) -> str:
    """Return the traceback without the frames of packages that only forward calls."""
    frames = traceback.extract_tb(problem.__traceback__)
    relevant = [frame for frame in frames if not any(package in frame.filename for package in FORWARDING)]
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(relevant)])
