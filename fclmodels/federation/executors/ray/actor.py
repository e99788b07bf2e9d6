"""The code in an actor of the executor `ray`: it is set up, begins with a job, and runs chunks of clients."""

import importlib
import json
import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fclmodels.errors import UserError
from fclmodels.federation.engine.replies import TreeSum
from fclmodels.federation.executors import glibc_malloc
from fclmodels.federation.executors.client_work import work
from fclmodels.federation.executors.process_worker import build_method, convert_tree_to_job, digest_code
from fclmodels.federation.messages import Reply, convert_parts_to_tree, from_bytes, to_bytes
from fclmodels.federation.protection import inspection
from fclmodels.federation.protection.inspection import ReplyForm
from fclmodels.storage import trees
from fclmodels.storage.trees import Tree


class Host:
    """The actor. Each call answers with bytes; an error is an answer too."""

    def __init__(self) -> None:
        glibc_malloc.tune()
        node = importlib.import_module("ray._private.worker")._global_node
        # Deleted with the session of Ray at the latest, however this process ends.
        self.folder = Path(tempfile.mkdtemp(prefix="fcl-", dir=node.get_session_dir_path()))

    def set_up(self, words: str) -> bytes:
        return answer_or_error(lambda: self._set_up(json.loads(words)))

    def fetch(self, *data: Any) -> bytes:
        """Open splits from the object store. Their files need no name once they are mapped."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            for name, array in zip(data[::2], data[1::2], strict=True):
                (Path(folder) / name).write_bytes(array)
            return answer_or_error(lambda: self._open(Path(folder)))

    def begin(self, job: bytes) -> bytes:
        return answer_or_error(lambda: self._begin(job))

    def run(self, order: bytes) -> bytes:
        return answer_or_error(lambda: self._run(from_bytes(order)))

    def _set_up(self, facts: dict[str, Any]) -> Tree:
        self.facts = facts
        torch.set_num_threads(facts["threads"])
        if Path(facts["folder"]).is_dir():
            os.chdir(facts["folder"])  # paths in settings, and the project's plugins, begin there
        elif facts["needs_folder"]:
            raise UserError(
                f"{socket.gethostname()} does not see {facts['folder']}, whose folder plugins/ this run needs. "
                "Share it, at the same path."
            )
        try:
            here = json.loads((Path(facts["splits"]) / "stream.json").read_text())["digest"] == facts["digest"]
        except (OSError, ValueError):
            here = False
        return self._open(Path(facts["splits"])) if here else {"needs data": True}

    def _open(self, splits: Path) -> Tree:
        settings = self.folder / "params.json"
        settings.write_text(json.dumps(self.facts["params"]))
        if not Path(self.facts["beside"]).exists():
            self.facts["home"] = str(self.folder / "home")
        self.method = build_method(self.facts, settings, splits)
        if digest_code(self.method) != self.facts["code"]:
            raise UserError(f"{socket.gethostname()} has another version of {self.method.name}. Install the same one.")
        return {}

    def _begin(self, job: bytes) -> Tree:
        self.job = convert_tree_to_job(from_bytes(job)).to(self.method.run.device)
        return {}

    def _run(self, orders: list[Tree]) -> Tree:
        """Run a chunk of clients. Where sums are enough, inspect replies, and sum them while all have one form."""
        answers, sums, forms = [], dict[str, TreeSum](), set[ReplyForm]()
        for place, order in enumerate(orders):
            answer, reply = self._answer(**order)
            if self.job.summed:
                classes = self.method.run.splits.count_classes(self.job.task + 1)
                largest = self.method.bound_client_weight(self.job.task)
                finding = inspection.inspect_reply(reply, self.job.join_payload(order["client"]), largest, classes)
                answer |= {"defect": finding.defect, "sizes": finding.sizes}
                forms.add(finding.form)
                reply, summed = reply.set_apart()
                if len(forms) == 1 and not finding.defect:
                    for name, tensors in summed.items():
                        sums.setdefault(name, TreeSum(len(orders))).add(place, tensors)
            answers.append(answer | {"parts": convert_parts_to_tree(reply.parts)})
        # Where replies differ or have defects, some are refused, and a sum with them is of no use.
        alike = len(forms) == 1 and not any(answer.get("defect") for answer in answers)
        summed = {name: total.compute_sum() for name, total in sums.items()} if alike else {}
        return {"answers": answers, "sums": summed}

    def _answer(self, client: int, memory: str | None, files: dict[str, torch.Tensor]) -> tuple[Tree, Reply]:
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            scratch = Path(folder)
            for name, data in files.items():
                (scratch / name).write_bytes(trees.view_bytes(data))
            memory_file = scratch / memory if memory else None
            answer = work(self.method, replace(self.job, scratch=scratch), client, memory_file)
            return {
                "client": client,
                "facts": answer.reply.facts,
                "memory": answer.memory and answer.memory.name,
                "files": {path.name: read_content(path) for path in scratch.iterdir() if path.name != memory},
                "seconds": answer.seconds,
            }, answer.reply


def answer_or_error(work: Callable[[], Tree]) -> bytes:
    """Return the work's result as bytes, or its error."""
    try:
        return to_bytes(work())
    except Exception as problem:
        by_user = isinstance(problem, UserError)
        return to_bytes({"user": by_user, "error": str(problem) if by_user else traceback.format_exc()})


def read_content(path: Path) -> torch.Tensor:
    """Return a file's bytes as a tensor."""
    return torch.from_numpy(np.fromfile(path, np.uint8))
