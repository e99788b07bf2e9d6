"""Prefect tasks on the arrivals of a stream: take them in, and version the stream with DVC."""

import subprocess
import sys
from pathlib import Path

from prefect import State, Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import TaskRun

from fclmodels import plugins
from fclmodels.data.arrivals.arrival_folders import ArrivedFolder
from fclmodels.data.arrivals.growing_stream import GrowingStream, StreamPart
from fclmodels.errors import UserError
from fclmodels.settings.schema import ImageSettings, Params

STREAMS = Path("data/streams")


@task(name="take in", task_run_name="take in {name}", cache_policy=NO_CACHE)
def take_in(stream: GrowingStream, arrived: ArrivedFolder, name: str, params: Params) -> StreamPart:
    """Validate an arrival, assign its samples to clients, and append it to the stream."""
    assert isinstance(params.data, ImageSettings)
    partition = plugins.find("partition", params.partition.kind)(params.partition)
    return stream.take_in(arrived, params.data, partition)


def is_locked_out(_task: Task[..., None], _run: TaskRun, state: State[None]) -> bool:
    """Return whether it failed because another DVC command holds DVC's lock."""
    return "Unable to acquire lock" in (state.message or "")


@task(
    name="version",
    task_run_name="version {folder}",
    cache_policy=NO_CACHE,
    retries=3,
    retry_delay_seconds=10,
    retry_condition_fn=is_locked_out,
)
def add_to_dvc(folder: Path) -> None:
    """Run `dvc add` if the project has DVC; retried while another DVC command holds its lock."""
    if not Path(".dvc").is_dir():
        return
    command = [sys.executable, "-m", "dvc", "add", str(folder)]  # with -q it does not say what is wrong
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if ended.returncode:
        reason = " ".join(ended.stderr.split()).removeprefix("ERROR: ").rstrip(".")
        if "not a git repository" in reason:
            reason += ", and the project has a folder .dvc. Run git init, or dvc config core.no_scm true to do without"
        raise UserError(f"dvc add {folder}: {reason}.")
