"""The shape of the house: few classes stand above a method, and none of its functions is defined again and again."""

from collections import Counter
from typing import Any

import pytest

from fclmodels.federation.method import Method
from fclmodels.plugins import load_all

METHODS = load_all("method")
MOST_CLASSES = 3  # on the way from Method down to a method, it included
MOST_DEFINITIONS = 2  # of one function on that way, Method's own included


def classes_below_contract(kind: type[Method]) -> tuple[type, ...]:
    """A method and all classes that Python looks at before Method."""
    return kind.__mro__[: kind.__mro__.index(Method)]


def is_defined(value: Any) -> bool:
    """Whether it is a function or a property, and not a nested class, a constant or a declaration."""
    return (callable(value) and not isinstance(value, type)) or isinstance(value, property | classmethod | staticmethod)


def count_definitions(kind: type[Method]) -> Counter[str]:
    """How often each function is defined from Method down, but for `__init__`, which every class may have."""
    chain = [*classes_below_contract(kind), Method]
    return Counter(
        name for cls in chain for name, value in vars(cls).items() if is_defined(value) and name != "__init__"
    )


@pytest.mark.parametrize("name", METHODS)
def test_at_most_three_classes_stand_on_the_way_to_a_method(name: str) -> None:
    assert len(classes_below_contract(METHODS[name])) <= MOST_CLASSES


@pytest.mark.parametrize("name", METHODS)
def test_no_function_is_defined_three_times_on_the_way(name: str) -> None:
    assert {n: times for n, times in count_definitions(METHODS[name]).items() if times > MOST_DEFINITIONS} == {}
