"""What a folder of data was made from, and whether settings still ask for it."""

from pathlib import Path

import pytest

from fclmodels.params import load
from fclmodels.settings import Params
from tasks.data import origin_of_prepared, origin_of_splits


@pytest.fixture
def settings(tmp_path: Path) -> Params:
    (tmp_path / "params.yaml").write_text(f"data: {{source: digits, root: {tmp_path}/raw}}\nstream: {{tasks: 5}}\n")
    return load(tmp_path / "params.yaml")


def changed(settings: Params, block: str, **values: object) -> Params:
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
def test_a_folder_tells_in_which_settings_it_differs(
    settings: Params, tmp_path: Path, block: str, values: dict[str, object], names: list[str]
) -> None:
    origin_of_splits(settings).note(tmp_path / "splits")
    assert origin_of_splits(changed(settings, block, **values)).differs_from(tmp_path / "splits") == names


def test_prepared_data_do_not_depend_on_how_they_are_split(settings: Params) -> None:
    assert origin_of_prepared(settings) == origin_of_prepared(changed(settings, "stream", tasks=2))


def test_other_raw_files_are_other_data(settings: Params, tmp_path: Path) -> None:
    embedded, settings = origin_of_prepared(settings), changed(settings, "data", source="image-folder")
    before = origin_of_prepared(settings)
    (tmp_path / "raw" / "cats").mkdir(parents=True)
    (tmp_path / "raw" / "cats" / "1.png").write_bytes(b"cat")
    with_a_cat = origin_of_prepared(settings)
    (tmp_path / "raw" / "cats" / "1.png").write_bytes(b"another cat")
    assert len({before.name, with_a_cat.name, origin_of_prepared(settings).name}) == 3
    assert origin_of_prepared(changed(settings, "data", source="digits")) == embedded  # which reads none of them


def test_a_folder_without_a_note_is_not_trusted(settings: Params, tmp_path: Path) -> None:
    assert origin_of_splits(settings).differs_from(tmp_path) == ["no made-from.json"]
    for spoilt in ("{", "[1]", "3"):
        (tmp_path / "made-from.json").write_text(spoilt)
        assert origin_of_splits(settings).differs_from(tmp_path) == ["no made-from.json"]
