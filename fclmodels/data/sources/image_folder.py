"""Trees of image files, as torchvision's ImageFolder reads them: a folder a class, labels in the order of the names.

Above the classes there may be an official split (train and test, or train and val as ImageNet names it) and, where
`domains` is set, below it or alone, a level of domains as in PACS.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import Field

from fclmodels.data.sources.base import Catalogue, Source, make_table
from fclmodels.errors import UserError, suggest_name
from fclmodels.settings.schema import ImageSettings
from fclmodels.storage.untrusted import open_image

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
            hint = f" {suggest_name(top.name, beside)}" if beside else ""
            raise UserError(f"data.folder: {top} is not a folder. Name the one that holds one folder a class.{hint}")
        folders = list(self._find_class_folders(top))
        classes = _number_names(folder.name for _, _, folder in folders)
        domains = _number_names(domain for _, domain, _ in folders)
        images = [
            (split, domain, folder.name, path) for split, domain, folder in folders for path in list_images(folder)
        ]
        if not images:
            raise UserError(
                f"data.folder: {top} holds no images in class folders. Their names end in {', '.join(SUFFIXES)}."
            )
        splits, of_domain, of_class, paths = zip(*images, strict=True)
        samples = make_table(
            label=[classes[name] for name in of_class],
            domain=[domains[name] for name in of_domain],
            official=splits,
            # A name that is no UTF-8 cannot stand in a table.
            origin=[os.fsencode(path.removeprefix(f"{top}{os.sep}")).decode(errors="replace") for path in paths],
        )
        return Catalogue(tuple(classes), tuple(domains), samples, lambda row: open_image(paths[row]))

    def _find_class_folders(self, top: Path) -> Iterator[tuple[str | None, str, Path]]:
        """Yield each class folder with its official split and its domain."""
        for split, below in find_official_splits(top):
            for domain in list_folders(below) if self.settings.domains else (below,):
                for folder in list_folders(domain):
                    yield split, domain.name if self.settings.domains else self.name, folder


def find_official_splits(top: Path) -> list[tuple[str | None, Path]]:
    """Return the train and test folders of a tree, or the tree itself where it has none."""
    names = {folder.name for folder in list_folders(top)}
    if "train" not in names or not names & {"test", "val"}:
        return [(None, top)]
    if len(names) != 2:
        raise UserError(
            f"data.folder: {top} holds {', '.join(sorted(names))}. Right: train and test, or train and val alone."
        )
    (test,) = names - {"train"}
    return [("train", top / "train"), ("test", top / test)]


def list_folders(folder: Path) -> list[Path]:
    folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    for path in folders:
        if not path.name.isprintable():  # bytes that are no UTF-8 among others
            raise UserError(f"data.folder: {folder} holds {path.name!a}, no readable name for a class. Rename it.")
    return folders


def list_images(folder: Path) -> list[str]:
    """Return image files at any depth below the folder, sorted by path; none twice where links lead back."""
    images, visited = [], set()
    for parent, below, names in os.walk(folder, followlinks=True):
        below.sort()
        status = os.stat(parent)
        if (status.st_dev, status.st_ino) in visited:
            below.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        images += [os.path.join(parent, n) for n in names if n.lower().endswith(SUFFIXES) and not n.startswith(".")]
    return sorted(images)


def _number_names(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(sorted(set(names)))}
