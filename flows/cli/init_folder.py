"""`fcl init` looks at a folder of images: classes, domains, sizes, colours."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from fclmodels.data.decoding import GREY
from fclmodels.data.sources.image_folder import find_official_splits, list_folders, list_images
from fclmodels.errors import UserError
from fclmodels.storage.untrusted import open_image

OPENED = 200  # images, from all over the folder
IMAGES_PER_CLIENT = 40  # of a task, at least and in the mean


@dataclass(frozen=True)
class FolderSummary:
    """Contents of a folder of images, of which some were opened."""

    folder: Path
    domains: tuple[str, ...]
    classes: dict[str, int]  # number of images by class
    sides: tuple[int, ...]  # shorter side of each image that was opened
    grey: int  # images without colour among them
    unreadable: int  # images that could not be opened

    @property
    def count(self) -> int:
        return sum(self.classes.values())

    @property
    def side(self) -> int:
        """Pixels of the shorter side of an image, in the median."""
        return int(median(self.sides))

    @property
    def channels(self) -> int:
        return 1 if self.grey == len(self.sides) else 3

    @property
    def tasks(self) -> int:
        return len(self.domains) if len(self.domains) > 1 else max(1, min(5, len(self.classes) // 2))

    @property
    def clients(self) -> int:
        return max(2, min(10, self.count // self.tasks // IMAGES_PER_CLIENT))

    @property
    def images_of_client(self) -> int:
        """Images of a client in a task, in the mean."""
        return max(1, self.count // self.tasks // self.clients)

    def describe(self) -> dict[str, str]:
        return {
            "images": str(self.count),
            "classes": ", ".join(f"{name} ({count})" for name, count in self.classes.items()),
            "domains": ", ".join(self.domains) or "none",
            "sides": format_range(self.sides),
            "unreadable": f"{self.unreadable} of {len(self.sides) + self.unreadable} opened",
            "tasks": f"{self.tasks}, {'the domains' if len(self.domains) > 1 else 'of classes'}",
            "clients": str(self.clients),
        }


def inspect_folder(folder: Path) -> FolderSummary:
    """Count the images of each class, open some, and return a summary.

    The folders below are domains where they hold folders of the same names instead of images.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder. Name the one that holds one folder a class.")
    tops = [below for _, below in find_official_splits(folder)]
    above = [name for top in tops for name in list_folders(top)]
    inner = [{name.name for name in list_folders(domain)} for domain in above]
    with_domains = len(above) > len(tops) and all(inner) and bool(set.intersection(*inner))
    leaves = [leaf for domain in above for leaf in list_folders(domain)] if with_domains else above
    counts: Counter[str] = Counter()
    files: list[str] = []
    for leaf in leaves:
        images = list_images(leaf)
        counts[leaf.name] += len(images)
        files += images
    if not files or len(counts) < 2:
        raise UserError(f"{folder}: no images in two folders or more. Right: {folder}/CLASS/*.jpg, a folder a class.")
    sides, grey, unreadable = _open_images(files[:: max(1, len(files) // OPENED)])
    if not sides:
        raise UserError(f"{folder}: none of {unreadable} images that were opened can be read.")
    domains = tuple(sorted({domain.name for domain in above})) if with_domains else ()
    return FolderSummary(folder, domains, dict(sorted(counts.items())), tuple(sides), grey, unreadable)


def format_range(sides: tuple[int, ...]) -> str:
    """Return the least and the largest of some sides, and their median."""
    return str(sides[0]) if min(sides) == max(sides) else f"{min(sides)} to {max(sides)}, median {median(sides):g}"


def _open_images(files: list[str]) -> tuple[list[int], int, int]:
    """Return the shorter side of each that can be read, how many of these are grey, and how many cannot be read."""
    sides, grey, unreadable = [], 0, 0
    for file in files:
        try:
            with open_image(file) as image:
                sides.append(min(image.size))
                grey += image.mode in GREY
        except Exception:  # on a damaged file a decoder may raise anything
            unreadable += 1
    return sides, grey, unreadable
