"""The worker process of the `processes` executor: reads orders, runs clients, answers. Ends when its socket closes."""

import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fclmodels import params, plugins
from fclmodels.data.splits import Splits
from fclmodels.errors import UserError
from fclmodels.federation import malloc
from fclmodels.federation.executor import Answer, Job, perform
from fclmodels.federation.messages import SharedBuffer, parts_from_tree, parts_to_tree
from fclmodels.federation.run import Run

if TYPE_CHECKING:
    from fclmodels.methods.base import Method


def set_up_of(method: "Method", threads: int) -> dict[str, Any]:
    """What a worker must know besides the settings."""
    run = method.run
    return {
        "method": type(method).name,
        "splits": str(run.splits.folder.absolute()),
        "digest": run.splits.digest,
        "seed": run.seed,
        "home": run.home and str(run.home.absolute()),
        "threads": threads,
    }


def method_of(set_up: dict[str, Any], params_file: Path, folder: Path) -> "Method":
    """The same method on the same splits, here."""
    settings, splits = params.load(params_file), Splits.open(folder)
    if splits.digest != set_up["digest"]:
        raise UserError(f"{splits.folder} was changed while a run was using it. Start the run again.")
    run = Run.on(settings, splits, set_up["seed"], set_up["home"] and Path(set_up["home"]))
    return plugins.find("method", set_up["method"])(params.method_settings(settings, set_up["method"]), run)


def main(control: int, payload: int, replies: int) -> None:
    malloc.tune()
    connection = socket.socket(fileno=control)
    lines = connection.makefile("rb")
    try:
        set_up = json.loads(lines.readline())
        torch.set_num_threads(set_up["threads"])
        method = method_of(set_up, Path(set_up["params"]), Path(set_up["splits"]))
        shared, buffer = SharedBuffer(payload), SharedBuffer(replies)
        job, waits = None, False
        for line in lines:
            message = json.loads(line)
            if "job" in message:
                facts = message["job"] | {"scratch": Path(message["job"]["scratch"])}
                job = Job(**facts, payload=parts_from_tree(shared.read(message["size"]))).to(method.run.device)
            elif "taken" in message:
                waits = False
            else:
                assert job is not None
                memory = Path(message["memory"]) if message["memory"] else None
                answer = perform(method, job, message["client"], memory)
                if waits:  # until the last reply is taken in
                    lines.readline()
                _send(connection, _written(answer, buffer))
                waits = True
                del answer  # a model's worth, which the next client's gradients take
    except (ConnectionError, KeyboardInterrupt):
        return
    except Exception as problem:
        mistake = isinstance(problem, UserError)
        _send(connection, {"user": mistake, "error": str(problem) if mistake else traceback.format_exc()})


def _written(answer: Answer, buffer: SharedBuffer) -> dict[str, Any]:
    """The answer's facts; its parts are in the buffer."""
    return {
        "client": answer.client,
        "size": buffer.write(parts_to_tree(answer.reply.parts)),
        "facts": answer.reply.facts,
        "memory": str(answer.memory) if answer.memory else None,
        "seconds": answer.seconds,
    }


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    os._exit(0)  # whoever stops a worker waits for its end, and torch takes its time to be taken apart
