"""STAMP's presets against Table 4 of the paper, and against what its coresets take."""

from pathlib import Path

import pytest

from fclmodels.methods.stamp import Stamp
from fclmodels.settings import load as reading
from fclmodels.settings.schema import Params

PRESETS = Path(__file__).parents[3] / "presets"
TABLE_4 = {  # pixels, tasks, batch, learning rate, Dirichlet's alpha, rounds a task
    "scifar100-c2": ((3, 32), 50, 128, 0.005, None, 25),
    "scifar100-c20": ((3, 32), 5, 128, 0.005, None, 25),
    "simagenet": ((3, 224), 500, 128, 0.005, None, 25),
    "cifar10": ((3, 32), 5, 64, 0.01, 0.1, 80),
    "cifar100": ((3, 32), 10, 64, 0.01, 10.0, 100),
    "digit10": ((1, 28), 4, 64, 0.001, 0.1, 60),
    "office31": ((3, 300), 3, 32, 0.01, 1.0, 60),
}
ALWAYS_SO = {"cifar10": (3, 32), "cifar100": (3, 32)}  # sources without a choice of channels and size


def load(name: str) -> Params:
    return reading.load_params(PRESETS / f"stamp-{name}.yaml", (), "stamp")


def settings_of(name: str) -> Stamp.Settings:
    return Stamp.Settings.model_validate(load(name).methods["stamp"])


def count_tasks(params: Params) -> int:
    settings = params.data.model_dump() | params.stream.model_dump()
    if params.stream.kind == "domain-incremental":
        return len(settings.get("parts") or settings["domains"])
    return int(settings["tasks"])


def test_each_column_of_table_4_has_a_preset() -> None:
    assert {file.stem.removeprefix("stamp-") for file in PRESETS.glob("stamp-*.yaml")} == TABLE_4.keys()


@pytest.mark.parametrize("name", TABLE_4)
def test_a_preset_has_its_column_of_table_4(name: str) -> None:
    """Ten clients, of which all take part, and five local epochs, in all of them."""
    shape, tasks, batch, lr, alpha, rounds = TABLE_4[name]
    params = load(name)
    assert (params.federation.batch_size, params.optimizer.lr, params.federation.rounds) == (batch, lr, rounds)
    data = params.data.model_dump()
    assert (data.get("channels"), data.get("size")) == shape or ALWAYS_SO.get(params.data.source) == shape
    assert count_tasks(params) == tasks
    assert getattr(params.partition, "alpha", None) == alpha
    assert params.partition.clients == 10
    assert params.federation.clients_per_round is None
    assert params.federation.local_epochs == 5


@pytest.mark.parametrize("name", TABLE_4)
def test_a_preset_is_the_papers_algorithm(name: str) -> None:
    """Algorithm 1 with eq. 2's step, F.4's radius, normalisation and solver, and eq. 6."""
    settings = settings_of(name)
    assert settings.temporal == "algorithm1"
    assert settings.returning == "restyle"
    assert settings.normalise
    assert settings.clients.normalise
    for side in (settings, settings.clients):
        assert (side.kappa, side.rescale, side.solver_lr, side.solver_step_size) == (0.5, "none", 25, 30)
    assert (settings.clients.solver_rounds, settings.clients.solver_momentum) == (25, 0.1)
    assert (settings.solver_rounds, settings.solver_momentum) == (100, 0.5)


def test_a_coreset_takes_no_more_than_the_papers_disk() -> None:
    """16.3 MB and 152.6 MB a client (Tables 1 and 5), in bytes of pixels."""
    for name, classes, most in (
        ("scifar100-c2", 100, 16.3e6),
        ("scifar100-c20", 100, 16.3e6),
        ("simagenet", 1000, 152.6e6),
    ):
        channels, side = TABLE_4[name][0]
        assert settings_of(name).budget * classes * channels * side**2 <= most
    assert (
        settings_of("office31").budget * 31 < 0.5 * 4110 / 3 / 10
    )  # Office-31's 4,110 images in 3 tasks of 10 clients
