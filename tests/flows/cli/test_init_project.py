"""`fcl init`: settings for a folder of images and a machine."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fclmodels.backbones.model.network import build_skeleton
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.backbones.weights.published_weights import PUBLISHERS
from fclmodels.data.splits.make_splits import make_splits
from fclmodels.data.splits.split_reader import Splits
from fclmodels.experiment.experiment import Experiment
from fclmodels.settings.load import load_params
from fclmodels.storage import trees
from flows.cli import init_choices
from flows.cli.init_choices import choose_settings, find_offer
from flows.cli.init_folder import FolderSummary, inspect_folder
from flows.cli.init_machine import Machine, look_at_machine, measure_pixel_seconds
from flows.cli.init_project import write_params

Fcl = Callable[..., int]
EPYC = 7e-7  # of a core for a pixel
LAPTOP, GPU = Machine(2, None, EPYC), Machine(8, "a GPU", EPYC)


@pytest.fixture(autouse=True)
def nothing_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No weights of ImageNet are on this machine."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


def write_images(
    folder: Path, domains: tuple[str, ...], classes: tuple[str, ...], count: int, side: int, mode: str
) -> None:
    random = np.random.default_rng(0)
    shape = (side, side) if mode == "L" else (side, side, 3)
    for number in range(count):
        for domain in domains:
            for place, name in enumerate(classes):
                (folder / domain / name).mkdir(parents=True, exist_ok=True)
                pixels = (random.integers(0, 90, shape) + 40 * place).astype(np.uint8)
                Image.fromarray(pixels).save(folder / domain / name / f"{number}.png")


def test_init_looks_and_writes_settings_that_load(
    fcl: Fcl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_images(Path("photos of 'us'"), ("indoors", "outdoors"), ("cat", "dog", "elk"), 4, 40, "RGB")
    assert fcl("init", "photos of 'us'", "--json") == 0
    assert json.loads(capsys.readouterr().out)["domains"] == "indoors, outdoors"
    params = load_params("params.yaml")
    assert params.data.root == (tmp_path / "photos of 'us'").resolve()
    assert (params.data.size, params.data.channels, params.data.domains) == (32, 3, True)  # type: ignore[attr-defined]
    assert (params.stream.kind, params.partition.clients) == ("domain-incremental", 2)
    assert fcl("init", "photos of 'us'") == 2
    assert "params.yaml exists already" in capsys.readouterr().err


def test_init_tells_classes_from_domains_and_grey_from_colour(tmp_path: Path) -> None:
    write_images(tmp_path / "grey" / "train", ("",), ("a", "b", "c", "d"), 30, 12, "L")
    write_images(tmp_path / "grey" / "test", ("",), ("a", "b", "c", "d"), 2, 12, "L")
    (tmp_path / "grey" / "train" / "a" / "broken.png").write_text("no image")
    summary = inspect_folder(tmp_path / "grey")
    assert (summary.domains, list(summary.classes), summary.count) == ((), ["a", "b", "c", "d"], 129)
    assert (summary.side, summary.tasks, summary.unreadable, summary.grey) == (12, 2, 1, 128)
    assert (choose_settings(summary, LAPTOP)["size"].value, summary.channels) == ("8", 1)


def photographs(count: int, domains: int = 4, side: int = 64) -> FolderSummary:
    names = tuple(f"domain {number}" for number in range(domains))
    return FolderSummary(Path("photos"), names, dict.fromkeys("abcdefghij", count // 10), (side,) * 9, 0, 0)


def test_init_chooses_by_the_machine(tmp_path: Path) -> None:
    found = {}
    for machine in (LAPTOP, GPU):
        choices = choose_settings(photographs(2500), machine)
        file = tmp_path / f"{machine.cores}.yaml"
        write_params(photographs(2500), machine, choices, None, file)
        params = load_params(file)
        found[machine] = (params.model.backbone, params.data.size)  # type: ignore[attr-defined]
        spec = ModelSpec(params.model.model_dump(mode="json"), (3, *2 * found[machine][1:]), "growing", ((0, 1),))
        assert sum(p.numel() for p in build_skeleton(spec).parameters()) < {LAPTOP: 2e5, GPU: 2e7}[machine]
        assert all(choice.why in file.read_text() for choice in choices.values())
        assert str(machine) in file.read_text().splitlines()[0]
    assert found == {LAPTOP: ("cnn", 32), GPU: ("resnet18", 64)}


def test_init_chooses_rounds_and_epochs_for_a_clients_steps_and_the_time_at_hand() -> None:
    def rounds(count: int, machine: Machine = LAPTOP, domains: int = 4) -> tuple[int, int]:
        choices = choose_settings(photographs(count, domains), machine)
        return int(choices["rounds"].value), int(choices["local_epochs"].value)

    assert rounds(2500) == (15, 4)  # two steps of a client in an epoch: 120 of a task
    assert rounds(10_000) == (15, 3)  # eight: 360
    assert rounds(1_000_000) == (5, 1)
    assert rounds(40_000, Machine(1, None, EPYC), 16) == (15, 1)
    assert rounds(40_000, Machine(4, None, EPYC), 16) == (15, 2)
    assert rounds(40_000, Machine(1, None, EPYC / 4), 16) == (15, 2)
    assert rounds(40_000, GPU, 16) == (15, 3)


def test_the_machines_speed_is_measured() -> None:
    """Twice within a factor of three; training what a core does in a minute is expected to take it a minute."""
    machine = look_at_machine()
    assert machine.pixel_seconds / 3 < measure_pixel_seconds() < 3 * machine.pixel_seconds
    assert 1e-9 < machine.pixel_seconds < 1e-4
    choice = choose_settings(photographs(2500), Machine(1, None, 60 / (15 * 2500 * 32**2)))["local_epochs"]
    assert choice.value == "4"
    assert "some 4 min on 1 core" in choice.why


def test_init_names_methods_that_fit_the_stream() -> None:
    with_domains, without = (choose_settings(photographs(2500, domains), LAPTOP)["methods"] for domains in (4, 0))
    assert "fot" in with_domains.value.split(", ")
    assert "fot" not in without.value.split(", ")
    assert {"er", "fedprotip"} <= {*with_domains.value.split(", ")} & {*without.value.split(", ")}


def load_offered(fcl: Fcl, capsys: pytest.CaptureFixture[str]) -> tuple[object, object]:
    """Return the data and model of the settings that the printed command runs with."""
    assert fcl("init", "photos") == 0
    command = capsys.readouterr().err.partition("From pretrained weights: ")[2]
    assert command.strip() in Path("params.yaml").read_text()
    params = load_params("params.yaml", [word for word in shlex.split(command) if "=" in word])
    return params.data, params.model


def test_init_offers_weights_of_imagenet_where_they_are(fcl: Fcl, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(Path("photos"), ("indoors", "outdoors"), ("cat", "dog"), 3, 80, "RGB")
    assert find_offer(inspect_folder(Path("photos"))) is None
    file = Path(torch.hub.get_dir(), "checkpoints", PUBLISHERS["torchvision"].files["resnet18"])
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    data, model = load_offered(fcl, capsys)
    assert (data.size, data.mean[0], model.backbone) == (64, 0.485, "resnet18")  # type: ignore[attr-defined]
    assert str(model.weights) == "torchvision"  # type: ignore[attr-defined]


def test_init_offers_the_projects_own_weights_that_fit(fcl: Fcl, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(Path("photos"), ("indoors", "outdoors"), ("cat", "dog"), 3, 40, "RGB")
    for name, channels in (("a", 1), ("b", 3), ("c", 3)):
        folder = init_choices.PRETRAINED / name
        folder.mkdir(parents=True)
        model = {"backbone": "vit", "patch": 4, "width": 32, "attention_heads": 4, "weights": None}
        card = {"shape": [channels, 16, 16], "backbone": "vit", "source": "letters", "mean": [0.4], "std": [0.3]}
        (folder / "card.json").write_text(json.dumps({**card, "settings": {"model": model}} if name != "c" else [1]))
    data, model = load_offered(fcl, capsys)
    assert (data.size, data.mean, model.patch, model.width) == (16, (0.4,), 4, 32)  # type: ignore[attr-defined]
    assert model.weights == init_choices.PRETRAINED / "b" / "weights.safetensors"  # type: ignore[attr-defined]


def write_photographs(folder: Path, count: int) -> None:
    """Write pictures with the spectrum of photographs, which falls with frequency; a domain has its colours."""
    random = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(64)[:, None], np.fft.fftfreq(64)) + 1 / 64
    for domain, name, number in ((d, c, n) for d in range(2) for c in range(2) for n in range(count)):
        waves = np.fft.ifft2(np.fft.fft2(random.standard_normal((3, 64, 64))) / frequency).real
        waves = waves / waves.std() * 40 + 128
        waves[domain, :, 20 * name :: 8] += 60
        (folder / f"domain{domain}" / f"class{name}").mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(waves.clip(0, 255).astype(np.uint8).transpose(1, 2, 0))
        picture.save(folder / f"domain{domain}" / f"class{name}" / f"{number}.png")


def test_fedprotip_has_room_to_learn_by_the_settings_of_init(fcl: Fcl, tmp_path: Path) -> None:
    """On photographs most layers have room after the last task."""
    write_photographs(Path("photos"), 100)
    assert fcl("init", "photos", "--quiet") == 0
    params = load_params("params.yaml", ["federation.rounds=2", "federation.executor=serial"])
    assert params.partition.clients == 5
    splits = Splits.open(make_splits(params, tmp_path / "data"))
    with Experiment(params, "fedprotip", 0, splits, tmp_path / "home") as experiment:
        assert "remarks" not in experiment.run(tmp_path / "run")
    knowledge = trees.load(max((tmp_path / "run" / "knowledge").glob("*.safetensors")))
    shares = {name: knowledge["ranks"][name][-1] / len(basis) for name, basis in knowledge["bases"].items()}
    assert sum(shares.values()) / len(shares) < 0.5, shares


@pytest.mark.parametrize("classes", [(), ("one",)])
def test_init_refuses_a_folder_without_classes(classes: tuple[str, ...], fcl: Fcl, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    if classes:
        write_images(tmp_path / "images", ("",), classes, 2, 8, "L")
    assert fcl("init", str(tmp_path / "images"), "--params", str(tmp_path / "p.yaml")) == 2
    assert not (tmp_path / "p.yaml").exists()
