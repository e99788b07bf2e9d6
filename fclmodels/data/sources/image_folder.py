"""Trees of image files, as torchvision's ImageFolder reads them: a folder a class, labels in the order of the names.

Above the classes there may be an official split (train and test, or train and val as ImageNet names it) and, where
`domains` is set, below it or alone, a level of domains as in PACS.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import Field

from fclmodels.data.sources.base import Catalogue, Source, table
from fclmodels.errors import UserError, did_you_mean
from fclmodels.foreign import open_image
from fclmodels.settings import ImageSettings

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class ImageFolder(Source):
    """any tree of images: [train|test]/[domain]/class/*; official splits are found by their names"""

    name = "image-folder"

    class Settings(ImageSettings):
        folder: Path = Field(Path("."), description="top of the tree, from root on")
        domains: bool = Field(False, description="the tree has a level of domains above its classes")

    settings: Settings

    def catalogue(self) -> Catalogue:
        top = self.settings.root / self.settings.folder
        if not top.is_dir():
            beside = [path.name for path in top.parent.iterdir() if path.is_dir()] if top.parent.is_dir() else []
            hint = f" {did_you_mean(top.name, beside)}" if beside else ""
            raise UserError(f"data.folder: {top} is not a folder. Name the one that holds one folder a class.{hint}")
        leaves = list(self._leaves(top))
        classes = _numbered(folder.name for _, _, folder in leaves)
        domains = _numbered(domain for _, domain, _ in leaves)
        found = [(split, domain, folder.name, path) for split, domain, folder in leaves for path in images_in(folder)]
        if not found:
            raise UserError(
                f"data.folder: {top} holds no images in class folders. Their names end in {', '.join(SUFFIXES)}."
            )
        splits, of_domain, of_class, paths = zip(*found, strict=True)
        samples = table(
            label=[classes[name] for name in of_class],
            domain=[domains[name] for name in of_domain],
            official=splits,
            # A name that is no UTF-8 cannot stand in a table.
            origin=[os.fsencode(path.removeprefix(f"{top}{os.sep}")).decode(errors="replace") for path in paths],
        )
        return Catalogue(tuple(classes), tuple(domains), samples, lambda row: open_image(paths[row]))

    def _leaves(self, top: Path) -> Iterator[tuple[str | None, str, Path]]:
        """Each class folder with its official split and its domain."""
        for split, below in official_splits(top):
            for domain in folders_in(below) if self.settings.domains else (below,):
                for folder in folders_in(domain):
                    yield split, domain.name if self.settings.domains else self.name, folder


def official_splits(top: Path) -> list[tuple[str | None, Path]]:
    """The train and test folders of a tree, or the tree itself where it has none."""
    names = {folder.name for folder in folders_in(top)}
    if "train" not in names or not names & {"test", "val"}:
        return [(None, top)]
    if len(names) != 2:
        raise UserError(
            f"data.folder: {top} holds {', '.join(sorted(names))}. Right: train and test, or train and val alone."
        )
    (held_out,) = names - {"train"}
    return [("train", top / "train"), ("test", top / held_out)]


def folders_in(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    for path in found:
        if not path.name.isprintable():  # bytes that are no UTF-8 among others
            raise UserError(f"data.folder: {folder} holds {path.name!a}, no readable name for a class. Rename it.")
    return found


def images_in(folder: Path) -> list[str]:
    """Image files at any depth below the folder, in the order of their paths; none twice where links lead back."""
    found, seen = [], set()
    for parent, below, names in os.walk(folder, followlinks=True):
        below.sort()
        place = os.stat(parent)
        if (place.st_dev, place.st_ino) in seen:
            below.clear()
            continue
        seen.add((place.st_dev, place.st_ino))
        found += [os.path.join(parent, n) for n in names if n.lower().endswith(SUFFIXES) and not n.startswith(".")]
    return sorted(found)


def _numbered(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(sorted(set(names)))}
