"""Contact sheets: synthetic images that a server has made or can draw, class by class, for a person to look at.

Any method whose knowledge has `synthetic` {images [n, C, H, W] uint8, labels [n]} gets one, of its last task that has.
"""

import io
import json
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from fclmodels.report.read_runs import Group
from fclmodels.report.sections.knowledge import name_broken_file
from fclmodels.storage.sealed_json import refuse_changed

KEY = "synthetic"
MOST = 100  # images that are shown
GAP, GREY = 1, 128  # pixels between images of a strip, and their value


@dataclass(frozen=True)
class Strip:
    """The images of one class side by side."""

    name: str
    pixels: np.ndarray  # [H, W, 3]
    count: int

    @property
    def source(self) -> str:
        """The strip as a PNG in a data URL."""
        buffer = io.BytesIO()
        Image.fromarray(self.pixels).save(buffer, "png", optimize=True)
        return f"data:image/png;base64,{b64encode(buffer.getvalue()).decode()}"


@dataclass(frozen=True)
class Sheet:
    """The strips of one run, in the order of labels."""

    index: int  # of the run's group
    title: str
    task: int  # after which they are what the server has
    strips: list[Strip]


def draw_sheets(groups: Sequence[Group]) -> list[Sheet]:
    """Draw those of the first run of each group whose server has some: another seed has other images."""
    sheets = [(index, group.label, load_strips(group.runs[0].folder)) for index, group in enumerate(groups)]
    return [Sheet(index, label, *loaded) for index, label, loaded in sheets if loaded]


def load_strips(folder: Path) -> tuple[int, list[Strip]] | None:
    """Return the last task whose knowledge has images, and its strips; None where no task has any."""
    for file in sorted((folder / "knowledge").glob("task-*.safetensors"), reverse=True):
        from fclmodels.storage import trees  # torch, which a table of runs does not need

        with name_broken_file(file):
            if KEY not in trees.load_shapes(file):
                continue
            refuse_changed(folder, f"knowledge/{file.name}")
            of = trees.load(file)[KEY]
            strips = make_strips(of["images"][:MOST].numpy(), of["labels"][:MOST].numpy(), read_names(folder))
        return int(file.stem.removeprefix("task-")), strips
    return None


def read_names(folder: Path) -> list[str]:
    """Return the names of the classes of a run's model."""
    refuse_changed(folder, "model/serving.json")
    names: list[str] = json.loads((folder / "model" / "serving.json").read_text("utf-8"))["classes"]
    return names


def make_strips(images: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> list[Strip]:
    """Return a strip for each label of images [n, C, H, W]; of other than three channels their mean is shown."""
    grey = images if images.shape[1] == 3 else images.mean(1, keepdims=True).repeat(3, axis=1)
    pixels = grey.astype(np.uint8).transpose(0, 2, 3, 1)
    strips = []
    for label in np.unique(labels).tolist():
        mine = pixels[labels == label]
        padded = np.pad(mine, ((0, 0), (0, 0), (0, GAP), (0, 0)), constant_values=GREY)
        strips.append(Strip(names[label], np.concatenate(list(padded), axis=1)[:, :-GAP], len(mine)))
    return strips


def join_strips(strips: Sequence[Strip]) -> np.ndarray:
    """Return one image [H, W, 3] with a strip a row, small images enlarged: for tools that show pictures alone."""
    width = max(strip.pixels.shape[1] for strip in strips)
    rows = [
        np.pad(pixels, ((0, GAP), (0, width - pixels.shape[1]), (0, 0)), constant_values=GREY)
        for pixels in (strip.pixels for strip in strips)
    ]
    joined = np.concatenate(rows)
    factor = max(1, 800 // max(joined.shape))
    return joined.repeat(factor, axis=0).repeat(factor, axis=1)
