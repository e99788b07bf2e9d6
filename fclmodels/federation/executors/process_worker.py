"""The worker process of the `processes` executor: reads orders, runs clients, answers. Ends when its socket closes."""

import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fclmodels import machine, plugins
from fclmodels.data.splits.split_reader import Splits
from fclmodels.errors import UserError
from fclmodels.federation.executors import glibc_malloc
from fclmodels.federation.executors.base import ClientResult, Job
from fclmodels.federation.executors.client_work import work
from fclmodels.federation.messages import SharedBuffer, convert_parts_to_tree, convert_tree_to_parts
from fclmodels.federation.run_context import Run
from fclmodels.settings import load
from fclmodels.source_digest import digest_sources
from fclmodels.storage.trees import Tree

if TYPE_CHECKING:
    from fclmodels.federation.method import Method


def set_up_of(method: "Method", threads: int) -> dict[str, Any]:
    """Return the facts that a worker needs besides the settings."""
    run = method.run
    return {
        "method": type(method).name,
        "splits": str(run.splits.folder.absolute()),
        "digest": run.splits.digest,
        "seed": run.seed,
        "home": run.home and str(run.home.absolute()),
        "threads": threads,
    }


def digest_code(method: "Method") -> str:
    """Return the digest of the code of a method and of its backbone, which must be the same wherever clients run."""
    backbone = plugins.find("backbone", method.run.params.model.backbone)
    return digest_sources(type(method).__module__, backbone.__module__)


def build_method(set_up: dict[str, Any], params_file: Path, folder: Path) -> "Method":
    """Return the method that these facts describe, in this process, with its splits in a folder."""
    settings, splits = load.load_params(params_file), Splits.open(folder)
    if splits.digest != set_up["digest"]:
        raise UserError(f"{splits.folder} was changed while a run was using it. Start the run again.")
    run = Run.on(settings, splits, set_up["seed"], set_up["home"] and Path(set_up["home"]))
    return plugins.find("method", set_up["method"])(load.load_method_settings(settings, set_up["method"]), run)


def convert_job_to_tree(job: Job) -> Tree:
    """Return a job as a worker is sent it."""
    facts = ("question", "task", "round", "client_count", "summed")
    return {
        **{name: getattr(job, name) for name in facts},
        "scratch": str(job.scratch.absolute()),
        "payload": convert_parts_to_tree(job.payload),
        "own_payloads": {str(client): convert_parts_to_tree(payload) for client, payload in job.own_payloads.items()},
    }


def convert_tree_to_job(tree: Tree) -> Job:
    """Return the job that such a tree holds."""
    own = {int(client): convert_tree_to_parts(payload) for client, payload in tree["own_payloads"].items()}
    payload, scratch = convert_tree_to_parts(tree["payload"]), Path(tree["scratch"])
    return Job(**{**tree, "payload": payload, "scratch": scratch, "own_payloads": own})


def main(control: int, payload: int, replies: int) -> None:
    """Answer orders until the socket closes; arguments are file descriptors."""
    glibc_malloc.tune()
    machine.offer_to_be_killed_first()
    connection = socket.socket(fileno=control)
    lines = connection.makefile("rb")
    try:
        shared, buffer = SharedBuffer(payload), SharedBuffer(replies)
        method, job, waits = None, None, False
        for line in lines:
            message = json.loads(line)
            if "set_up" in message:
                method, job, waits = None, None, False
                shared, buffer = SharedBuffer(payload), SharedBuffer(replies)
                glibc_malloc.return_freed_memory()
                machine.forget_peak_memory()
                if set_up := message["set_up"]:  # else a run has ended
                    torch.set_num_threads(set_up["threads"])
                    method = build_method(set_up, Path(set_up["params"]), Path(set_up["splits"]))
            elif "job" in message:
                assert method is not None
                job = convert_tree_to_job(shared.read(message["job"])).to(method.run.device)
            elif "taken" in message:
                waits = False
            else:
                assert method is not None
                assert job is not None
                memory = Path(message["memory"]) if message["memory"] else None
                answer = work(method, job, message["client"], memory)
                if waits:  # until the main process has read the last reply
                    lines.readline()
                _send(connection, _write(answer, buffer))
                waits = True
                del answer  # its memory, as much as a model's, goes to the next client's gradients
    except (ConnectionError, KeyboardInterrupt):
        return
    except Exception as problem:
        by_user = isinstance(problem, UserError)
        _send(connection, {"user": by_user, "error": str(problem) if by_user else traceback.format_exc()})


def _write(answer: ClientResult, buffer: SharedBuffer) -> dict[str, Any]:
    """Write a result's parts into the buffer; return its other fields."""
    return {
        "client": answer.client,
        "size": buffer.write(convert_parts_to_tree(answer.reply.parts)),
        "facts": answer.reply.facts,
        "memory": str(answer.memory) if answer.memory else None,
        "seconds": answer.seconds,
    }


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    os._exit(0)  # the main process waits for the end, and torch's cleanup takes long
