"""Where Prefect and MLflow write."""

import os
from pathlib import Path

import pytest
from prefect.settings import Settings

from flows.prefect import environment


def test_where_dvc_experiments_in_a_copy_steps_and_runs_are_kept_in_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / ".dvc" / "tmp" / "exps" / "tmp1"
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert environment.find_project() == tmp_path
    environment.set_defaults(environment.find_project() / ".fcl")
    assert {path.name: path.readlink() for path in copy.iterdir()} == {
        name: tmp_path / name for name in environment.TRACKING_PATHS
    }
    assert (tmp_path / ".fcl").is_dir()
    monkeypatch.chdir(tmp_path)
    assert environment.find_project() == Path()
    environment.set_defaults()
    assert not (tmp_path / "mlflow.db").exists()


def test_prefects_pages_look_for_their_server_where_they_are_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    environment.set_defaults(tmp_path)
    assert Settings().server.ui.api_url == "/api"
