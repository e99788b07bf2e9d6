"""How a command ends: its exit code, and what a person is told when it did not go well."""

import errno
import os
import re
import traceback
from collections.abc import Sequence

import typer

from fclmodels.errors import UserError
from flows.terminal import tell

DONE, FAILED, MISTAKE, STOPPED = 0, 1, 2, 130
EXTRA = ("prefect", "mlflow", "dvc", "fastapi", "jinja2", "matplotlib", "pandas", "sqlalchemy")  # of fclflow[workflow]
FULL, LOCKED = "Make room on its disk", "Make it writable"
NO_FAULT = {  # of the program: what helps, and no traceback
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EACCES: LOCKED,
    errno.EPERM: LOCKED,
    errno.EROFS: LOCKED,
}
PASS_ON = tuple(f"{os.sep}site-packages{os.sep}{package}{os.sep}" for package in ("prefect", "typer"))


def end_well(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Run a command line; a user's mistake is told in plain lines, without a traceback."""
    try:
        code = app(list(arguments), prog_name="fcl", standalone_mode=False) or DONE
    except UserError as mistake:
        tell(str(mistake))
        return MISTAKE
    except typer.TyperException as mistake:
        tell(_usage(mistake))
        return MISTAKE
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in EXTRA:
            raise
        tell(f"{missing.name} is not installed. This command needs it: pip install 'fclflow[workflow]'")
        return MISTAKE
    except KeyboardInterrupt:
        code = STOPPED
    except Exception as problem:
        if not _interrupted(problem):
            tell(_of_the_disk(problem) or f"{_trace(problem)}fcl failed: {type(problem).__name__}: {problem}")
            return FAILED
        code = STOPPED
    if code == STOPPED:
        tell("stopped; the same command goes on from the last checkpoint")
    return code


def _usage(mistake: typer.TyperException) -> str:
    """What is wrong with the command line, with the nearest name where the parser knows one."""
    context = getattr(mistake, "ctx", None)
    command = context.command_path if context else "fcl"
    return f"{command}: {mistake.format_message()} See: {command} --help"


def _interrupted(problem: BaseException | None) -> bool:
    """Whether it came of an interrupt: where Prefect begins a task, it makes an error of its own of that."""
    while problem is not None and not isinstance(problem, KeyboardInterrupt):
        problem = problem.__context__
    return problem is not None


def _of_the_disk(problem: Exception) -> str | None:
    """What could not be written, and what helps; a file that is open already does not tell its name."""
    told = re.search(r"\(os error (\d+)\)", str(problem))  # by what is written in Rust, such as Polars
    number = problem.errno if isinstance(problem, OSError) else told and int(told[1])
    if number not in NO_FAULT:
        return None
    place = getattr(problem, "filename", None) or os.getcwd()
    return f"{place}: {os.strerror(number)}. {NO_FAULT[number]}; the same command goes on from there."


def _trace(problem: Exception) -> str:
    """Where it failed, without the frames of what only passes calls on."""
    frames = traceback.extract_tb(problem.__traceback__)
    own = [frame for frame in frames if not any(package in frame.filename for package in PASS_ON)]
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(own)])
