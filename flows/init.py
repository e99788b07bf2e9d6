"""`fcl init`: a look at a folder of images, and a params.yaml for them that says why."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fclmodels.data.decoding import GREY
from fclmodels.data.sources.image_folder import folders_in, images_in, official_splits
from fclmodels.errors import UserError
from fclmodels.foreign import open_image
from fclmodels.params import load

LOOKED_AT = 200  # images that are opened, from all over the folder
LARGEST = 64  # side in pixels up to which a CPU trains in minutes
PER_CLIENT = 40  # images of a task that a client should have at least, in the mean

TEMPLATE = """\
# Written by `fcl init {folder}`, which saw {count} images of {classes} classes{in_domains}.
# `fcl params` explains every setting; what is not here has its default.

data:
  source: image-folder
  root: {root}
  domains: {domains} # whether there is a level of folders above those of the classes
  size: {size} # pixels a side, squashed; sides seen: {sides}
  channels: {channels} # {colours}
  skip_bad: false # true leaves out unreadable images instead of refusing them

stream:
{stream}

partition:
  kind: dirichlet # others: fcl list partitions
  clients: {clients} # so that each has about {each} images of a task
  alpha: 0.5 # 0.1: each client holds few classes; 100: all hold nearly the same mix
  val: 0.1 # share of each client's images for tuning

model:
  backbone: cnn # others: fcl list backbones

federation:
  rounds: 10 # in each task
  batch_size: 32

optimizer:
  lr: 0.05

augment:
  flip: true # false where left and right matter, as in letters

methods: # settings of a method: fcl params METHOD
  fedavg: {{}}
  er:
    memory: 100 # images that each client keeps

experiment: # what `fcl compare` and `fcl status` look at
  methods: [fedavg, er]
  seeds: [0]
"""
DOMAINS = "  kind: domain-incremental # a task is a domain; class-incremental makes tasks of classes instead"
CLASSES = (
    "  kind: class-incremental # each task brings classes not seen before; others: fcl list streams\n  tasks: {tasks}"
)


@dataclass(frozen=True)
class Look:
    """What is in the folder. classes: images of each; sides and grey: of those that were opened."""

    folder: Path
    domains: tuple[str, ...]
    classes: dict[str, int]
    sides: tuple[int, ...]
    grey: int
    unreadable: int

    @property
    def count(self) -> int:
        return sum(self.classes.values())

    @property
    def size(self) -> int:
        return min(LARGEST, 2 ** (int(median(self.sides)).bit_length() - 1))

    @property
    def tasks(self) -> int:
        return len(self.domains) if len(self.domains) > 1 else max(1, min(5, len(self.classes) // 2))

    @property
    def clients(self) -> int:
        return max(2, min(10, self.count // self.tasks // PER_CLIENT))

    def facts(self) -> dict[str, Any]:
        return {
            "images": str(self.count),
            "classes": ", ".join(f"{name} ({count})" for name, count in self.classes.items()),
            "domains": ", ".join(self.domains) or "none",
            "sides": _range(self.sides),
            "unreadable": f"{self.unreadable} of {len(self.sides) + self.unreadable} looked at",
            "tasks": f"{self.tasks}, {'the domains' if len(self.domains) > 1 else 'of classes'}",
            "clients": str(self.clients),
        }


def look(folder: Path) -> Look:
    """Whether the folders below are domains is told by what is in them: folders of the same names, not images."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder. Name the one that holds one folder a class.")
    tops = [below for _, below in official_splits(folder)]
    above = [name for top in tops for name in folders_in(top)]
    inner = [{name.name for name in folders_in(domain)} for domain in above]
    with_domains = len(above) > len(tops) and all(inner) and bool(set.intersection(*inner))
    leaves = [leaf for domain in above for leaf in folders_in(domain)] if with_domains else above
    found: Counter[str] = Counter()
    files: list[str] = []
    for leaf in leaves:
        images = images_in(leaf)
        found[leaf.name] += len(images)
        files += images
    if not files or len(found) < 2:
        raise UserError(f"{folder}: no images in two folders or more. Right: {folder}/CLASS/*.jpg, a folder a class.")
    sides, grey, unreadable = _opened(files[:: max(1, len(files) // LOOKED_AT)])
    if not sides:
        raise UserError(f"{folder}: none of {unreadable} images tried can be read.")
    domains = tuple(sorted({domain.name for domain in above})) if with_domains else ()
    return Look(folder, domains, dict(sorted(found.items())), tuple(sides), grey, unreadable)


def write(found: Look, params: Path) -> None:
    """The settings file; refused where there is one."""
    if params.exists():
        raise UserError(f"{params} is there already. Name another with --params, or remove it.")
    all_grey = found.grey == len(found.sides)
    stream = DOMAINS if len(found.domains) > 1 else CLASSES.format(tasks=found.tasks)
    params.write_text(
        TEMPLATE.format(
            folder=found.folder,
            count=found.count,
            classes=len(found.classes),
            in_domains=f" in {len(found.domains)} domains" if found.domains else "",
            root=_quoted(found.folder.resolve()),
            domains=str(bool(found.domains)).lower(),
            size=found.size,
            sides=_range(found.sides),
            channels=1 if all_grey else 3,
            colours="all that were looked at are grey" if all_grey else "1 makes all grey",
            stream=stream,
            clients=found.clients,
            each=found.count // found.tasks // found.clients,
        )
    )
    load(params)


def _opened(files: list[str]) -> tuple[list[int], int, int]:
    """The shorter side of each that can be read, how many of them are grey, and how many cannot be read."""
    sides, grey, unreadable = [], 0, 0
    for file in files:
        try:
            with open_image(file) as image:
                sides.append(min(image.size))
                grey += image.mode in GREY
        except Exception:  # on a damaged file a decoder may raise anything
            unreadable += 1
    return sides, grey, unreadable


def _range(sides: tuple[int, ...]) -> str:
    return str(sides[0]) if min(sides) == max(sides) else f"{min(sides)} to {max(sides)}, median {median(sides):g}"


def _quoted(text: Path | str) -> str:
    """As YAML reads it back, whatever is in it."""
    return "'" + str(text).replace("'", "''") + "'"
