"""Our own sources, streams and partitions pass their checks; a wrong one gets a line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fclmodels.plugins import find, load_all
from fclmodels.testing import check_partition, check_source, check_stream, make_samples

Write = Callable[[str, str], Path]

STREAMS = {
    "class-incremental": ("stream.tasks=3",),
    "overlapping-classes": ("stream.tasks=2", "stream.classes_per_task=4", "stream.overlap=2"),
    "task-incremental": ("stream.tasks=3",),
    "task-pool": ("stream.tasks=3",),
}


@pytest.mark.parametrize("name", ["digits", "digits-domains", "letters"])
def test_every_embedded_source_passes(name: str) -> None:
    check_source(find("source", name))


def test_a_source_of_other_sources_passes() -> None:
    check_source(find("source", "sequence"), "data.parts=[{source: digits}, {source: digits, name: again}]")


@pytest.mark.parametrize("name", load_all("stream"))
def test_every_stream_passes(name: str) -> None:
    samples = make_samples(own_label_spaces=name == "datasets")
    check_stream(find("stream", name), *STREAMS.get(name, ()), samples=samples)


@pytest.mark.parametrize("name", load_all("partition"))
def test_every_partition_passes(name: str) -> None:
    check_partition(find("partition", name))


def test_a_partition_whose_clients_share_samples_passes() -> None:
    check_partition(find("partition", "class-share"), "partition.samples=shared")


SOURCE = """
import numpy as np
from fclmodels.data.sources.base import Source, list_arrays
class Mine(Source):
    '''Mine.'''
    name = "mine"
    def catalogue(self):
        images = np.arange(192, dtype=np.uint8).reshape(12, 4, 4)
        return list_arrays("mine", ("a", "b"), {None: (images, np.arange(12) % 2)})
"""
STREAM = """
import numpy as np
from fclmodels.data.streams.base import PlannedTask, Stream, lay_out_for_all
class Mine(Stream):
    '''Mine.'''
    name = "mine"
    def lay_out(self, samples, clients):
        classes = tuple(range(len(samples.classes)))
        tasks = [PlannedTask("first", classes[:2]), PlannedTask("second", classes[2:])]
        return lay_out_for_all(tasks, [samples.find_rows(task.classes) for task in tasks], clients)
"""
PARTITION = """
import numpy as np
from fclmodels.data.partitions.base import Partition
class Mine(Partition):
    '''Mine.'''
    name = "mine"
    def draw_counts(self, counts, clients, generator):
        allotted = np.zeros((clients, len(counts)), np.int64)
        allotted[generator.integers(clients)] = counts
        return allotted
"""


@pytest.mark.parametrize(
    ("kind", "text", "right", "wrong", "line"),
    [
        ("source", SOURCE, "% 2)", "% 3)", "a label is not one of 0 to 1"),
        ("source", SOURCE, '("a", "b")', '("a", "a")', "a name is there twice among the labels"),
        ("source", SOURCE, "{None:", '{"valid":', "its column official holds valid"),
        (
            "source",
            SOURCE,
            "np.arange(192, dtype=np.uint8)",
            "np.random.randint(0, 99, 192, np.uint8)",
            "otherwise",
        ),
        ("stream", STREAM, "classes[:2]", "()", "task 0 has no name or no classes"),
        ("stream", STREAM, "classes[:2])", "(0, 0))", "task 0 has a class twice"),
        ("stream", STREAM, "(task.classes) for", "(task.classes[:1]) for", "has no train samples of class 1"),
        ("stream", STREAM, "(task.classes) for", "(classes) for", "has samples of other classes"),
        ("stream", STREAM, '"first", classes[:2]', "str(np.random.rand()), classes[:2]", "differently the second time"),
        ("partition", PARTITION, "] = counts", "] = counts - 1", "of 40 samples of class a it allots 39"),
        ("partition", PARTITION, "] = counts", "] = -counts", "it allots fewer than 0 samples"),
        ("partition", PARTITION, "generator.integers", "np.random.randint", "another generator than its own"),
    ],
)
def test_a_wrong_one_gets_one_line(
    write_plugin: Write, kind: str, text: str, right: str, wrong: str, line: str
) -> None:
    check = {"source": check_source, "stream": check_stream, "partition": check_partition}[kind]
    write_plugin(f"{kind}s/mine.py", text)
    check(find(kind, "mine"))
    assert right in text
    write_plugin(f"{kind}s/mine.py", text.replace(right, wrong))
    with pytest.raises(AssertionError, match=line) as caught:
        check_often(lambda: check(find(kind, "mine")))
    assert len(str(caught.value).splitlines()) == 1


def check_often(check: Callable[[], None]) -> None:
    """Of what is drawn from a wrong generator, some may be alike."""
    for _ in range(9):
        check()
