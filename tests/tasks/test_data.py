"""The origin of a folder of data, and whether it matches settings."""

from pathlib import Path

import pytest

from fclmodels.settings.load import follow_seed, load_params
from fclmodels.settings.schema import Params
from tasks.data import get_prepared_origin, get_splits_origin


@pytest.fixture
def settings(tmp_path: Path) -> Params:
    (tmp_path / "params.yaml").write_text(f"data: {{source: digits, root: {tmp_path}/raw}}\nstream: {{tasks: 5}}\n")
    return load_params(tmp_path / "params.yaml")


def change(settings: Params, block: str, **values: object) -> Params:
    return settings.model_copy(update={block: getattr(settings, block).model_copy(update=values)})


@pytest.mark.parametrize(
    ("block", "values", "names"),
    [
        ("data", {"size": 4}, ["data.size"]),
        ("stream", {"tasks": 2}, ["stream.tasks"]),
        ("partition", {"clients": 3, "seed": 9}, ["partition.clients", "partition.seed"]),
        ("federation", {"rounds": 99}, []),
    ],
)
def test_the_settings_in_which_a_folder_differs_are_listed(
    settings: Params, tmp_path: Path, block: str, values: dict[str, object], names: list[str]
) -> None:
    get_splits_origin(settings).write_note(tmp_path / "splits")
    assert get_splits_origin(change(settings, block, **values)).list_differences(tmp_path / "splits") == names


def test_prepared_data_do_not_depend_on_how_they_are_split(settings: Params) -> None:
    assert get_prepared_origin(settings) == get_prepared_origin(change(settings, "stream", tasks=2))


def test_other_raw_files_are_other_data(settings: Params, tmp_path: Path) -> None:
    embedded, settings = get_prepared_origin(settings), change(settings, "data", source="image-folder")
    before = get_prepared_origin(settings)
    (tmp_path / "raw" / "cats").mkdir(parents=True)
    (tmp_path / "raw" / "cats" / "1.png").write_bytes(b"cat")
    with_a_cat = get_prepared_origin(settings)
    (tmp_path / "raw" / "cats" / "1.png").write_bytes(b"another cat")
    assert len({before.name, with_a_cat.name, get_prepared_origin(settings).name}) == 3
    assert get_prepared_origin(change(settings, "data", source="digits")) == embedded  # which reads none of them


def test_a_folder_without_a_note_is_not_trusted(settings: Params, tmp_path: Path) -> None:
    assert get_splits_origin(settings).list_differences(tmp_path) == ["no made-from.json"]
    for text in ("{", "[1]", "3"):
        (tmp_path / "made-from.json").write_text(text)
        assert get_splits_origin(settings).list_differences(tmp_path) == ["no made-from.json"]


def test_splits_vary_with_the_runs_seed_unless_they_have_one_of_their_own(settings: Params) -> None:
    def name(run: int, **own: int) -> str:
        fixed = change(change(settings, "partition", **own), "stream", **own)
        return get_splits_origin(follow_seed(fixed, run)).name

    assert len({name(0), name(1), name(0, seed=5)}) == 3
    assert name(0, seed=5) == name(1, seed=5)
    assert settings.partition.seed is settings.stream.seed is None
