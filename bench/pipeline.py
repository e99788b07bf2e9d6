"""What Prefect, MLflow and DVC add to the demo: `dvc repro` against the same experiments without them.

    python bench/pipeline.py

Both work in a temporary copy of this project, one after the other. Prints seconds; the training itself is in both.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).parents[1]
PARTS = ("flows", "tasks", "fclmodels", "params.yaml", "dvc.yaml", ".dvc", ".dvcignore", ".gitignore")
PLAIN = """
import sys
from pathlib import Path
from fclmodels import params, plugins
from fclmodels.data.prepare import prepare
from fclmodels.data.split import split
from fclmodels.data.splits import Splits
from fclmodels.experiment import Experiment
settings = params.load("params.yaml")
find = lambda kind, block, name: plugins.find(kind, name)(block)
prepare(find("source", settings.data, settings.data.source), Path("plain/prepared"))
stream = find("stream", settings.stream, settings.stream.kind)
partition = find("partition", settings.partition, settings.partition.kind)
split(Path("plain/prepared"), stream, partition, Path("plain/splits"))
for method in settings.experiment.methods:
    for seed in settings.experiment.seeds:
        with Experiment(settings, method, seed, Splits.open(Path("plain/splits")), Path("plain/home")) as experiment:
            experiment.run(Path("plain/runs") / experiment.label)
"""


def timed(*command: str, folder: Path) -> float:
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for part in PARTS:
            copy = shutil.copytree if (PROJECT / part).is_dir() else shutil.copy
            copy(PROJECT / part, folder / part)
        identity = ("-c", "user.email=bench@localhost", "-c", "user.name=bench")
        for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "bench"]):
            subprocess.run(["git", *command], cwd=folder, check=True)
        repro = timed("dvc", "repro", folder=folder)
        stages = 3 + len(list((folder / "runs").glob("*/result.json")))
        cached = timed("fcl", "run", "--method", "fedavg", "--seed", "0", folder=folder)
        result = {
            "stages": stages,
            "dvc_repro_s": repro,
            "plain_s": timed(sys.executable, "-c", PLAIN, folder=folder),
            "allowed_overhead_s": 10 + 4 * stages,
            "fcl_run_cached_s": cached,
            "dvc_repro_again_s": timed("dvc", "repro", folder=folder),
            "fcl_help_s": timed("fcl", "--help", folder=folder),
        }
        result["overhead_s"] = result["dvc_repro_s"] - result["plain_s"]
        print(json.dumps({name: round(value, 2) for name, value in result.items()}))


if __name__ == "__main__":
    main()
