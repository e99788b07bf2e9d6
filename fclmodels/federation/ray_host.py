"""What runs in an actor of the executor `ray`: it is set up, begins with a job, and runs chunks of clients."""

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

from fclmodels import state
from fclmodels.errors import UserError
from fclmodels.federation import inspection, malloc
from fclmodels.federation.executor import Job, perform
from fclmodels.federation.inspection import Form
from fclmodels.federation.messages import Reply, from_bytes, parts_from_tree, parts_to_tree, to_bytes
from fclmodels.federation.replies import TreeSum
from fclmodels.federation.worker import method_of
from fclmodels.fingerprint import source_closure
from fclmodels.state import Tree


class Host:
    """Each call answers with bytes; a mistake or an error is an answer too."""

    def __init__(self) -> None:
        malloc.tune()
        node = importlib.import_module("ray._private.worker")._global_node
        # Goes with the session of Ray at the latest, however this process ends.
        self.folder = Path(tempfile.mkdtemp(prefix="fcl-", dir=node.get_session_dir_path()))

    def set_up(self, words: str) -> bytes:
        return told(lambda: self._set_up(json.loads(words)))

    def fetch(self, *data: Any) -> bytes:
        """Splits from the object store. Their files need no name once they are mapped."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            for name, held in zip(data[::2], data[1::2], strict=True):
                (Path(folder) / name).write_bytes(held)
            return told(lambda: self._open(Path(folder)))

    def begin(self, words: str, payload: bytes) -> bytes:
        return told(lambda: self._begin(words, payload))

    def run(self, order: bytes) -> bytes:
        return told(lambda: self._run(from_bytes(order)))

    def _set_up(self, facts: dict[str, Any]) -> Tree:
        self.facts = facts
        torch.set_num_threads(facts["threads"])
        if Path(facts["folder"]).is_dir():
            os.chdir(facts["folder"])  # paths in settings begin there
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
        self.method = method_of(self.facts, settings, splits)
        if source_closure(type(self.method).__module__) != self.facts["code"]:
            raise UserError(f"{socket.gethostname()} has another version of {self.method.name}. Install the same one.")
        return {}

    def _begin(self, words: str, payload: bytes) -> Tree:
        question, task, round, asked, summed = json.loads(words)
        job = Job(question, task, round, parts_from_tree(from_bytes(payload)), Path(), asked, summed)
        self.job = job.to(self.method.run.device)
        return {}

    def _run(self, orders: list[Tree]) -> Tree:
        """A chunk of clients. Where sums will do, replies are looked at, and summed while all are alike."""
        answers, sums, forms = [], dict[str, TreeSum](), set[Form]()
        for place, order in enumerate(orders):
            answer, reply = self._answer(**order)
            if self.job.summed:
                look = inspection.look(reply, self.job.payload, self.method.largest_weight(self.job.task))
                answer |= {"fault": look.fault, "sizes": look.sizes}
                forms.add(look.form)
                reply, summed = reply.apart()
                if len(forms) == 1 and not look.fault:
                    for name, tensors in summed.items():
                        sums.setdefault(name, TreeSum(len(orders))).add(place, tensors)
            answers.append(answer | {"parts": parts_to_tree(reply.parts)})
        # Of replies that differ, or are not right, some are refused, and no sum with them is of use.
        alike = len(forms) == 1 and not any(answer.get("fault") for answer in answers)
        return {"answers": answers, "sums": {name: total.result() for name, total in sums.items()} if alike else {}}

    def _answer(self, client: int, memory: str | None, files: dict[str, torch.Tensor]) -> tuple[Tree, Reply]:
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            scratch = Path(folder)
            for name, kept in files.items():
                (scratch / name).write_bytes(state.as_bytes(kept))
            remembered = scratch / memory if memory else None
            answer = perform(self.method, replace(self.job, scratch=scratch), client, remembered)
            return {
                "client": client,
                "facts": answer.reply.facts,
                "memory": answer.memory and answer.memory.name,
                "files": {path.name: content(path) for path in scratch.iterdir() if path.name != memory},
                "seconds": answer.seconds,
            }, answer.reply


def told(work: Callable[[], Tree]) -> bytes:
    """What the work gives, or what went wrong with it."""
    try:
        return to_bytes(work())
    except Exception as problem:
        mistake = isinstance(problem, UserError)
        return to_bytes({"user": mistake, "error": str(problem) if mistake else traceback.format_exc()})


def content(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(path, np.uint8))
