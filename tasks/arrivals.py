"""What arrives in a stream that goes on: taken in or set aside, and versioned."""

import subprocess
import sys
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from fclmodels import plugins
from fclmodels.data.growing import GrowingStream, Part
from fclmodels.data.incoming import Arrived
from fclmodels.settings import ImageSettings, Params

STREAMS = Path("data/streams")


@task(name="take in", task_run_name="take in {name}", cache_policy=NO_CACHE)
def take_in(stream: GrowingStream, arrived: Arrived, name: str, params: Params) -> Part:
    """Validate what has arrived, give its samples to clients, append it to the stream."""
    assert isinstance(params.data, ImageSettings)
    partition = plugins.find("partition", params.partition.kind)(params.partition)
    return stream.take_in(arrived, params.data, partition)


@task(name="version", task_run_name="version {folder}", cache_policy=NO_CACHE, retries=3, retry_delay_seconds=10)
def version(folder: Path) -> None:
    """`dvc add`, where the project has DVC; it is tried again while another DVC command holds its lock."""
    if not Path(".dvc").is_dir():
        return
    command = [sys.executable, "-m", "dvc", "add", str(folder)]  # with -q it does not say what is wrong
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"dvc add {folder}: {done.stderr.strip()}")
