"""`fcl new-method`: write the file of a method, its test, and its block in params.yaml.

In a clone of fclflow these go beside its own methods, elsewhere into the folder `plugins/` of the project.
"""

import keyword
import re
from pathlib import Path

from fclmodels.errors import UserError
from fclmodels.plugins import read_names

METHODS = "plugins/methods"  # of a project
METHOD = '''\
"""{name}: what it is, and the paper and equations that it follows.

Say here what its server knows (`knowledge`) and what its clients remember (`memory`), if anything.
"""

import torch
from pydantic import Field, NonNegativeFloat

from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.fedavg import FedAvg


class {cls}(FedAvg):
    """FedAvg whose clients shrink their weights a little with each step."""

    name = "{name}"
    paper = "none yet"

    class Settings(FedAvg.Settings):
        strength: NonNegativeFloat = Field(0.01, description="weight of the term that is added to the loss")

    settings: Settings

    # Other places to differ from FedAvg: compute_loss, step, finish_step (on a client), start_task, make_payload,
    # aggregate, finish_task (on the server), make_further_parts (what a client sends besides; make_update_form declares
    # it), and an exchange of one's own (declared in __init__, asked in finish_task): fclmodels/federation/method.py.
    @torch.no_grad()
    def change_gradients(self, training: LocalTraining) -> None:
        """Add the gradient of strength / 2 ||w||^2, in place."""
        for name, gradient in training.gradients.items():
            gradient.add_(training.parameters[name], alpha=self.settings.strength)
'''
IN_CLONE = '''\
"""Claims of {name}. tests/fclmodels/methods/test_contract.py runs on it too."""

from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.{module} import {cls}
from fclmodels.storage import trees
from fclmodels.testing import train
'''
IN_PROJECT = '''\
"""What every method keeps, and the claims of {name}."""

from fclmodels.methods.fedavg import FedAvg
from fclmodels.plugins import find
from fclmodels.storage import trees
from fclmodels.testing import check_method, train

{cls} = find("method", "{name}")


def test_it_keeps_what_every_method_keeps() -> None:
    check_method({cls})
'''
CLAIMS = """

def test_with_strength_0_it_is_fedavg_to_the_bit() -> None:
    ours, theirs = train({cls}, "methods.{name}.strength=0"), train(FedAvg)
    assert trees.digest(ours.weights) == trees.digest(theirs.weights)


def test_weights_end_nearer_to_zero_than_fedavgs() -> None:
    ours, theirs = train({cls}, "methods.{name}.strength=1"), train(FedAvg)
    head = "heads.0.weight"
    assert ours.weights[head].norm() < theirs.weights[head].norm()
"""
SETTINGS = """\
# What is not here has its default: fcl params.
methods:
"""


def is_clone(folder: Path) -> bool:
    """Return whether a folder is a clone of fclflow, which has its package."""
    return (folder / "fclmodels").is_dir()


def write_files(name: str, folder: Path = Path()) -> list[Path]:
    """Write the three files and return their paths; UserError where there is such a method, or a file, already."""
    module = name.replace("-", "_")
    if not re.fullmatch("[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or keyword.iskeyword(module):
        raise UserError(f"{name} cannot name a method. Right: lower case, words joined by -, such as my-method.")
    methods, tests = ("fclmodels/methods", "tests/fclmodels/methods") if is_clone(folder) else (METHODS, "tests")
    file, test, params = folder / methods / f"{module}.py", folder / tests / f"test_{module}.py", folder / "params.yaml"
    if name in read_names("method") or file.exists() or test.exists():
        raise UserError(f"{name}: a method of this name, {file} or {test} exists already. Take another name.")
    words = {"name": name, "module": module, "cls": name.title().replace("-", "")}
    head = IN_CLONE if is_clone(folder) else IN_PROJECT
    contents = {
        file: METHOD.format(**words),
        test: (head + CLAIMS).format(**words),
        params: insert_block(params.read_text() if params.exists() else SETTINGS, name),
    }
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return list(contents)


def insert_block(text: str, name: str) -> str:
    """Insert an empty block for the method into the text of params.yaml, before the next one by name."""
    lines = text.splitlines(keepends=True)
    heads = [number for number, line in enumerate(lines) if line.startswith("methods:")]
    if not heads:
        end = "" if not text or text.endswith("\n") else "\n"
        return f"{text}{end}\nmethods:\n  {name}: {{}}\n"
    if inline := re.match(r"methods:\s*\{(\s*\})?", lines[heads[0]]):
        rest = lines[heads[0]][inline.end() :]
        lines[heads[0]] = f"methods: {{{name}: {{}}{'}' if inline[1] else ', '}{rest}"
        return "".join(lines)
    start = place = heads[0] + 1
    for number, line in enumerate(lines[start:], start=start):
        if line.strip() and not line.startswith(" "):
            break
        block = re.match(r"  ([a-z][a-z0-9-]*):", line)
        if block and block[1] > name:
            break
        place = number + 1 if line.strip() else place
    return "".join([*lines[:place], f"  {name}: {{}}\n", *lines[place:]])
