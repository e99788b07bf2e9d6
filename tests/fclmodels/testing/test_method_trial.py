"""check_method passes a right method, and says in a line what a wrong one does not keep."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fclmodels.methods.fedavg import FedAvg
from fclmodels.plugins import find
from fclmodels.storage import trees
from fclmodels.testing import check_method, train

Write = Callable[[str, str], Path]

HEAD = """
import dataclasses, random, torch
from fclmodels.federation.exchange import Answer
from fclmodels.federation.messages import make_outline
from fclmodels.methods.fedavg import FedAvg
class Mine(FedAvg):
    '''Mine.'''
    name = "mine"
"""
STATE_IN_THE_METHOD = """
    count = 0
    def change_gradients(self, training):
        Mine.count += 1
        for gradient in training.gradients.values():
            gradient.mul_(Mine.count)
"""
UNKEYED_RANDOMNESS = """
    def change_gradients(self, training):
        for gradient in training.gradients.values():
            gradient.mul_(random.random())
"""
ANOTHER_TYPE = """
    def make_update_form(self, task, round):
        return super().make_update_form(task, round) | {"extra": make_outline("count", {"n": ()}, torch.float64)}
    def make_further_parts(self, training, payload):
        return {"extra": {"n": torch.zeros(2)}}
"""
NEGATIVE_COUNT = """
    def make_update_form(self, task, round):
        return super().make_update_form(task, round) | {"extra": make_outline("count", {"n": ()})}
    def make_further_parts(self, training, payload):
        return {"extra": {"n": torch.tensor(-1.0)}}
"""
TOO_FEW_LOGITS = """
    def make_predictor(self, server):
        predict = super().make_predictor(server)
        return lambda inputs: dataclasses.replace(predict(inputs), logits=predict(inputs).logits[:, :-1])
"""
STATE_OF_A_PROCESS = """
    def change_gradients(self, training):
        import os
        for gradient in training.gradients.values():
            gradient.mul_(1 + os.getpid() % 97 / 100)
"""


def test_a_right_method_passes(write_plugin: Write) -> None:
    write_plugin("methods/mine.py", HEAD)
    check_method(find("method", "mine"), "optimizer.lr=0.05", executors=["serial"])


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (UNKEYED_RANDOMNESS, "mine: a second run ends with other .*random numbers come from run.generator"),
        (ANOTHER_TYPE, r"client .'s answer to train: declared, not sent: extra \(count\), n:float64 \(\);"),
        (NEGATIVE_COUNT, "mine: task 0, round 0: no reply of 2 can be used; client .'s extra is negative"),
        (TOO_FEW_LOGITS, r"mine: logits of 16 samples are \[16, 1\], not \[16, 2\]"),
        ("    class Settings(FedAvg.Settings):\n        mu: float = 1\n", "the setting mu has no description"),
        ("    __doc__ = None\n", "has no docstring"),
    ],
)
def test_a_wrong_method_gets_one_line(write_plugin: Write, body: str, line: str) -> None:
    write_plugin("methods/mine.py", HEAD + body)
    with pytest.raises(AssertionError, match=line) as caught:
        check_method(find("method", "mine"), executors=["serial"])
    assert len(str(caught.value).splitlines()) == 1


def test_state_in_the_method_is_noticed(write_plugin: Write) -> None:
    write_plugin("methods/mine.py", HEAD + STATE_IN_THE_METHOD)
    with pytest.raises(AssertionError, match="State belongs into the server's and the clients' values"):
        check_method(find("method", "mine"), executors=["serial"])


@pytest.mark.slow
def test_what_differs_in_worker_processes_is_noticed(write_plugin: Write) -> None:
    write_plugin("methods/mine.py", HEAD + STATE_OF_A_PROCESS)
    with pytest.raises(AssertionError, match=r"started again \(federation.executor=processes"):
        check_method(find("method", "mine"))


def test_a_class_that_no_process_would_find_is_refused() -> None:
    class Lost(FedAvg):
        """Lost."""

        name = "lost"

    with pytest.raises(AssertionError, match="Put it into plugins/methods/ of the current folder"):
        check_method(Lost)

    class Twin(FedAvg):
        """Twin."""

        name = "fedavg"

    with pytest.raises(AssertionError, match=r"fedavg is the name of fclmodels\.methods"):
        check_method(Twin)


def test_train_is_the_same_each_time_and_follows_settings() -> None:
    once, again, other = train(FedAvg), train(FedAvg), train(FedAvg, "optimizer.lr=0.01")
    assert trees.digest(once.weights) == trees.digest(again.weights)
    assert not torch.equal(once.weights["heads.0.weight"], other.weights["heads.0.weight"])
    assert once.task == 1
