"""A worker of a study: takes jobs as lines of JSON from standard input, answers each in one line, ends with its parent.

What libraries print goes to standard error.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fclmodels.errors import UserError
from fclmodels.machine import end_with_parent
from fclmodels.study.plan import StudyJob
from flows.study.jobs import pack_result, run_trials, unpack_order


def main() -> None:
    """Answer until standard input ends."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def answer(message: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a job, or what it has raised."""
    from flows.study.search import search_row

    jobs: dict[str, Callable[[Any], Any]] = {
        "run_trials": run_trials,
        "search_row": search_row,
        "run_judged": run_judged_with_server,
    }
    try:
        return {"result": pack_result(jobs[message["job"]](unpack_order(message)))}
    except UserError as problem:
        return {"mistake": str(problem)}
    except Exception:
        return {"error": traceback.format_exc()}


def run_judged_with_server(order: tuple[StudyJob, Path]) -> str:
    """Run a job as `run_judged` does, with a connection of its own to the project's Prefect server."""
    from flows.prefect.launch import run_flow

    job, folder = order
    arguments = {"method": job.method, "seed": job.seed, "out": folder, "params": Path(job.params)}
    try:
        run_flow("flows.experiment", "experiment", **arguments, overrides=job.overrides, quiet=True)
    except UserError as problem:
        return str(problem)
    return ""


if __name__ == "__main__":
    main()
