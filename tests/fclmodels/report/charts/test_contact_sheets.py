"""Contact sheets of synthetic images: which images a run's last task has, and how they are shown."""

import io
import json
from base64 import b64decode
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from run_folders import write_run

from fclmodels.errors import UserError
from fclmodels.report.charts.contact_sheets import draw_sheets, join_strips, load_strips, make_strips
from fclmodels.report.page import render_page
from fclmodels.storage import trees


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run whose second task left images of two classes and whose third none."""
    run = tmp_path / "run"
    write_run(run, tasks=3)
    (run / "model").mkdir(exist_ok=True)
    (run / "model" / "serving.json").write_text(json.dumps({"classes": ["cat & dog", "bird", "fish"]}))
    (run / "knowledge").mkdir()
    images = torch.arange(3 * 3 * 4 * 4, dtype=torch.uint8).view(3, 3, 4, 4)
    pool = {"images": images, "labels": torch.tensor([2, 0, 2])}
    for task, knowledge in enumerate(({"synthetic": pool}, {"synthetic": pool}, {"other": torch.zeros(1)})):
        trees.save(knowledge, run / "knowledge" / f"task-{task:02d}.safetensors")
    return run


def test_the_last_task_that_has_images_is_shown_class_by_class(folder: Path) -> None:
    task, strips = load_strips(folder)
    assert task == 1
    assert [(strip.name, strip.count, strip.pixels.shape) for strip in strips] == [
        ("cat & dog", 1, (4, 4, 3)),
        ("fish", 2, (4, 9, 3)),
    ]
    png = Image.open(io.BytesIO(b64decode(strips[1].source.partition(",")[2])))
    assert np.array_equal(np.asarray(png), strips[1].pixels)
    assert strips[0].pixels[0, 1].tolist() == [48 + 1, 48 + 16 + 1, 48 + 32 + 1]


def test_images_without_three_channels_are_grey() -> None:
    (strip,) = make_strips(np.full((1, 2, 4, 4), [[[[10]], [[30]]]], np.uint8), np.array([0]), ["a"])
    assert strip.pixels.tolist() == [[[20] * 3] * 4] * 4


def test_a_picture_of_all_has_a_row_a_class(folder: Path) -> None:
    joined = join_strips(load_strips(folder)[1])
    factor = 800 // 10
    assert joined.shape == (10 * factor, 9 * factor, 3)


def test_a_run_without_images_has_no_sheet(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    group = SimpleNamespace(label="x", runs=[SimpleNamespace(folder=tmp_path / "run")])
    assert draw_sheets([group]) == []


def test_the_page_shows_them_and_may(folder: Path) -> None:
    page = render_page([folder])
    assert page.count('<img src="data:image/png;base64,') == 2
    assert "img-src data:" in page
    assert "images of cat &amp; dog" in page


def test_a_broken_file_is_named(folder: Path) -> None:
    file = folder / "knowledge" / "task-01.safetensors"
    trees.save({"synthetic": {"images": torch.zeros(2), "labels": torch.zeros(2)}}, file)
    with pytest.raises(UserError, match=r"task-01\.safetensors holds no knowledge of a run"):
        load_strips(folder)
