"""`fcl new-method`: the file of a method, its test, and its block in params.yaml."""

import keyword
import re
from pathlib import Path

import fclmodels
from fclmodels.errors import UserError
from fclmodels.plugins import all_of

HOUSE = Path(fclmodels.__file__).parents[1]

METHOD = '''\
"""{title}: what it is, and which paper and equations it follows.

Say here what its server knows (`knowledge`) and what its clients remember (`memory`), if anything.
"""

import torch
from pydantic import Field, NonNegativeFloat

from fclmodels.federation.local import LocalTraining
from fclmodels.methods.fedavg import FedAvg


class {cls}(FedAvg):
    """FedAvg whose clients shrink their weights a little with each step."""

    name = "{name}"
    paper = "none yet"

    class Settings(FedAvg.Settings):
        strength: NonNegativeFloat = Field(0.01, description="weight of the term that is added to the loss")

    settings: Settings

    # Other places to differ from FedAvg: loss, step, after (on a client), aggregate, start_task, finish_task (on the
    # server), payload (what travels down), further_parts and answer (up), and sends, the form of these two. See
    # fclmodels/methods/base.py.
    @torch.no_grad()
    def gradient(self, training: LocalTraining) -> None:
        """Of F_k(w) + strength / 2 ||w||^2."""
        for name, gradient in training.gradients.items():
            gradient.add_(training.parameters[name], alpha=self.settings.strength)
'''
TEST = '''\
"""What {title} claims. What every method has to keep is tests/fclmodels/test_contract.py, which runs on it too."""

from collections.abc import Callable

from fclmodels import state
from fclmodels.methods.fedavg import FedAvg
from fclmodels.methods.{module} import {cls}


def test_with_strength_0_it_is_fedavg_to_the_bit(method_of: Callable, federate: Callable) -> None:
    ours, theirs = federate(method_of({cls}, strength=0)), federate(method_of(FedAvg))
    assert state.digest(ours.weights) == state.digest(theirs.weights)


def test_weights_end_nearer_to_zero_than_fedavgs(method_of: Callable, federate: Callable) -> None:
    ours, theirs = federate(method_of({cls}, strength=1)), federate(method_of(FedAvg))
    name = "heads.0.weight"
    assert ours.weights[name].norm() < theirs.weights[name].norm()
'''


def write(name: str, house: Path = HOUSE) -> list[Path]:
    """The files, none of which may be there already."""
    module = name.replace("-", "_")
    if not re.fullmatch("[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or keyword.iskeyword(module):
        raise UserError(f"{name} is no name for a method. Right: lower case, words joined by -, such as my-method.")
    file, test = house / f"fclmodels/methods/{module}.py", house / f"tests/fclmodels/methods/test_{module}.py"
    if name in all_of("method") or file.exists():
        raise UserError(f"{name}: there is such a method, or a file {file.name}, already. Take another name.")
    if not test.parent.is_dir():
        raise UserError(f"{house} has no tests: it is an installed fclflow. Work in a clone of the project.")
    words = {"name": name, "module": module, "cls": name.title().replace("-", ""), "title": name}
    file.write_text(METHOD.format(**words))
    test.write_text(TEST.format(**words))
    params = house / "params.yaml"
    params.write_text(with_block(params.read_text(), name))
    return [file, test, params]


def with_block(text: str, name: str) -> str:
    """params.yaml with an empty block for the method, before the first one that comes after it by name."""
    lines = text.splitlines(keepends=True)
    start = next(number for number, line in enumerate(lines) if line.startswith("methods:")) + 1
    place = start
    for number, line in enumerate(lines[start:], start=start):
        if line.strip() and not line.startswith(" "):
            break
        block = re.match(r"  ([a-z][a-z0-9-]*):", line)
        if block and block[1] > name:
            break
        place = number + 1 if line.strip() else place
    return "".join([*lines[:place], f"  {name}: {{}}\n", *lines[place:]])
