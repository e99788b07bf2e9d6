"""What every source, stream and partition keeps."""

from itertools import pairwise
from typing import Any

import numpy as np
from PIL import Image

from fclmodels.data.partitions.base import Partition, Portion
from fclmodels.data.sources.base import COLUMNS, UNPRINTABLE, Catalogue, Source
from fclmodels.data.splits.dealing import deal
from fclmodels.data.streams.base import Layout, PlannedTask, SampleTable, Stream, lay_out_for_all
from fclmodels.testing.plugin_declaration import check_declaration, require
from fclmodels.testing.tiny_splits import load_tiny_params

OPENED = 20  # samples of a source that are opened
CLIENTS = 4


def check_source(source: type[Source], *settings: str) -> None:
    """Raise AssertionError with a line that says what a source does not keep; `settings` as "data.root=folder".

    Its catalogue must have the columns, with names for labels and domains; its samples must open, each time alike.
    """
    check_declaration("source", source)
    name = source.name
    params = load_tiny_params(f"data.source={name}", *settings)
    catalogue, again = source(params.data).catalogue(), source(params.data).catalogue()
    _check_table(name, catalogue)
    same = catalogue.samples.equals(again.samples) and catalogue.classes == again.classes
    require(same, f"{name}: it lists other samples, or in another order, when it is asked again")
    for row in sorted({*np.linspace(0, len(catalogue.samples) - 1, OPENED, dtype=int).tolist()}):
        sample = catalogue.open(row)
        origin = catalogue.samples["origin"][row]
        is_sample = isinstance(sample, Image.Image | np.ndarray)
        require(is_sample, f"{name}: {origin} opens as {type(sample).__name__}, not as a PIL image or an array")
        alike = np.array_equal(np.asarray(sample), np.asarray(again.open(row)))
        require(alike, f"{name}: {origin} opens otherwise the second time")


def _check_table(name: str, catalogue: Catalogue) -> None:
    table = catalogue.samples
    require(dict(table.schema) == COLUMNS, f"{name}: its table has the columns {dict(table.schema)}, not {COLUMNS}")
    require(not table.is_empty(), f"{name}: it lists no samples")
    for column, names in {"label": catalogue.classes, "domain": catalogue.domains}.items():
        right = bool(table[column].is_between(0, len(names) - 1).fill_null(False).all())
        require(right, f"{name}: a {column} is not one of 0 to {len(names) - 1}")
        require(len(set(names)) == len(names), f"{name}: a name is there twice among the {column}s")
    splits = set(table["official"].unique()) - {"train", "test", None}
    require(not splits, f"{name}: its column official holds {', '.join(sorted(splits))}; right: train, test or null")
    printable = table["origin"].null_count() == 0 and not table["origin"].str.contains(UNPRINTABLE).any()
    require(printable, f"{name}: an origin is null or cannot be printed; make_table sees to that")


def make_samples(classes: int = 6, each: int = 12, domains: int = 2, own_label_spaces: bool = False) -> SampleTable:
    """Return a table of samples by hand: `each` of each class in each domain, a quarter of them test rows.

    With own label spaces each domain has classes of its own.
    """
    domain, label, number = (axis.ravel() for axis in np.indices((domains, classes, each)))
    if own_label_spaces:
        label = label + domain * classes
    count = classes * domains if own_label_spaces else classes
    order = np.random.default_rng(0).permutation(len(label))
    names = tuple(f"class {i}" for i in range(count)), tuple(f"domain {i}" for i in range(domains))
    return SampleTable(label[order], domain[order], (number < each // 4)[order], *names, own_label_spaces)


def check_stream(stream: type[Stream], *settings: str, samples: SampleTable | None = None) -> None:
    """Raise AssertionError with a line that says what a stream does not keep; `settings` as "stream.tasks=3".

    Of these samples (default: `make_samples()`) it must make tasks with classes, and pools whose rows cover them.
    """
    check_declaration("stream", stream)
    name, samples = stream.name, samples or make_samples()
    params = load_tiny_params(f"stream.kind={name}", *settings)
    layout, again = (stream(params.stream).lay_out(samples, CLIENTS) for _ in range(2))
    same = _flatten(layout) == _flatten(again)
    require(same, f"{name}: it lays out the same samples differently the second time; draw from self.generator(...)")
    require(bool(layout.tasks), f"{name}: it has no tasks")
    for index, task in enumerate(layout.tasks):
        _check_task(name, task, index, samples)
    for pool in layout.pools:
        label = f"{name}: the pool {pool.name}"
        require(len(set(pool.rows.tolist())) == len(pool.rows), f"{label} has a row twice")
        require(
            bool(np.isin(pool.rows, np.arange(len(samples.labels))).all()), f"{label} has a row that is no sample's"
        )
        require(set(samples.labels[pool.rows].tolist()) <= set(pool.classes), f"{label} has samples of other classes")
        right = (CLIENTS, len(pool.classes))
        shape = pool.task_of.shape
        require(shape == right, f"{label}: task_of is {list(shape)}, not [clients, classes] = {list(right)}")
        is_task = np.isin(pool.task_of, np.arange(-1, len(layout.tasks))).all()
        require(bool(is_task), f"{label}: task_of holds numbers of no task; -1 is for never")
    _check_cover(name, layout, samples)


def _check_task(name: str, task: PlannedTask, index: int, samples: SampleTable) -> None:
    label = f"{name}: task {index}"
    require(bool(task.name and task.classes), f"{label} has no name or no classes")
    require(len(set(task.classes)) == len(task.classes), f"{label} has a class twice")
    strange = sorted(set(task.classes) - set(range(len(samples.classes))))
    require(not strange, f"{label} has the classes {strange}, of {len(samples.classes)}")


def _check_cover(name: str, layout: Layout, samples: SampleTable) -> None:
    """Each class of each task must have train and test rows in a pool that some client meets in that task."""
    for index, task in enumerate(layout.tasks):
        covered: dict[str, set[int]] = {"train": set(), "test": set()}
        for pool in layout.pools:
            met = {c for c, tasks in zip(pool.classes, pool.task_of.T, strict=True) if (tasks == index).any()}
            for half, rows in (("test", samples.test[pool.rows]), ("train", ~samples.test[pool.rows])):
                covered[half] |= met & set(samples.labels[pool.rows[rows]].tolist())
        for half, classes in covered.items():
            missing = [samples.classes[c] for c in task.classes if c not in classes]
            require(not missing, f"{name}: task {index} has no {half} samples of {', '.join(missing)} for any client")


def _flatten(layout: Layout) -> list[Any]:
    pools = [(p.name, p.rows.tolist(), p.classes, p.task_of.tolist(), p.key, p.promised) for p in layout.pools]
    return [layout.tasks, pools, [p.owners is not None and p.owners.tolist() for p in layout.pools]]


def check_partition(partition: type[Partition], *settings: str) -> None:
    """Raise AssertionError with a line that says what a partition does not keep; `settings` as "partition.alpha=1".

    It must give all samples of a class that a client may have, each to one client unless it says that they share, and
    the same ones each time.
    """
    check_declaration("partition", partition)
    params = load_tiny_params("partition.clients=4", f"partition.kind={partition.name}", *settings)
    kind, name = partition(params.partition), partition.name
    everyone = np.ones((CLIENTS, 3), bool)
    some = everyone.copy()
    some[0, 1] = some[:, 2] = False
    for may in (everyone, some):
        portion = Portion("by hand", ("a", "b", "c"), np.array([40, 24, 32]), may)
        allotted, again = (kind.allot(portion, kind.make_generator("check")) for _ in range(2))
        _check_allotted(name, allotted, portion, kind.shares_images)
        require(np.array_equal(allotted, again), f"{name}: it draws from another generator than its own")
    _check_deal(name, kind)


def _check_allotted(name: str, allotted: np.ndarray, portion: Portion, shares: bool) -> None:
    right = portion.may.shape
    require(
        allotted.shape == right, f"{name}: it allots {list(allotted.shape)}, not [clients, classes] = {list(right)}"
    )
    require(bool((allotted >= 0).all()), f"{name}: it allots fewer than 0 samples")
    require(not allotted[~portion.may].any(), f"{name}: a client gets a class that it may not have")
    if shares:
        all_or_none = np.isin(allotted - portion.counts * (allotted > 0), 0).all()
        require(bool(all_or_none), f"{name}: clients share samples, and one of them gets a part of a class")
        return
    totals, counts = allotted.sum(axis=0), portion.counts * portion.may.any(axis=0)
    for label, total, count in zip(portion.classes, totals, counts, strict=True):
        require(total == count, f"{name}: of {count} samples of class {label} it allots {total}")


def _check_deal(name: str, kind: Partition) -> None:
    samples = make_samples(classes=4, each=48, domains=1)
    halves = ((0, 1), (2, 3))
    tasks = [PlannedTask(f"task {i}", classes) for i, classes in enumerate(halves)]
    layout = lay_out_for_all(tasks, [samples.find_rows(classes) for classes in halves], CLIENTS)
    (train, test), again = deal(layout, samples, kind), deal(layout, samples, kind)
    same = all(np.array_equal(a.samples, b.samples) for a, b in zip((train, test), again, strict=True))
    require(same, f"{name}: it deals the same samples differently the second time")
    if not kind.shares_images:
        order = np.sort(train.samples)
        twice = [int(a) for a, b in pairwise(order) if a == b]
        require(not twice, f"{name}: sample {twice[:1]} goes to two clients; `shares_images` says that they share")
