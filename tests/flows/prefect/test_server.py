"""One Prefect server for a project, which all commands share and which ends when nobody needs it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fclmodels.errors import UserError
from flows.prefect import server

ROOT = Path(__file__).parents[3]
COMMAND = """
import sys, time
from pathlib import Path
from flows.prefect import environment, server
environment.set_defaults()
url = server.connect(environment.HOME)
server.wait_until_ready(url, environment.HOME)
print(url, flush=True)
time.sleep(600)
"""


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


def test_a_given_server_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://example.invalid/api")
    assert server.connect(tmp_path) == "http://example.invalid/api"
    assert list(tmp_path.iterdir()) == []


def test_a_given_server_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(UserError, match=r"no Prefect server answers at http://127\.0\.0\.1:9/api"):
        server.wait_until_ready("http://127.0.0.1:9/api", tmp_path)
    assert time.monotonic() - started < 5


@pytest.mark.usefixtures("no_server")
def test_what_a_killed_server_left_behind_is_no_server(tmp_path: Path) -> None:
    folder = tmp_path / "prefect"
    folder.mkdir()
    (folder / "running").touch()
    (folder / "server.json").write_text('{"url": "http://127.0.0.1:9/api"}')
    assert server.find_running(tmp_path) is None


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("no_server")
def test_two_commands_at_once_share_one_server_which_outlives_neither_for_long(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    environment |= {"PYTHONPATH": str(ROOT), "FCL_SERVER_IDLE_SECONDS": "3"}
    commands = [
        subprocess.Popen(
            [sys.executable, "-c", COMMAND], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        urls = {command.stdout.readline().strip() for command in commands if command.stdout}
        assert len(urls) == 1
        assert urls == {server.find_running(tmp_path / ".fcl")}
        commands[0].send_signal(signal.SIGKILL)
        time.sleep(6)
        (url,) = urls
        assert server.is_healthy(url)
    finally:
        for command in commands:
            command.kill()
            command.communicate()
    end = time.monotonic() + 30
    while server.find_running(tmp_path / ".fcl") and time.monotonic() < end:
        time.sleep(0.2)
    assert server.find_running(tmp_path / ".fcl") is None
    while server.is_healthy(url) and time.monotonic() < end:
        time.sleep(0.2)
    assert not server.is_healthy(url)


def test_a_server_gets_the_port_of_the_last_one_unless_that_is_taken(tmp_path: Path) -> None:
    record = tmp_path / "server.json"
    port = server.choose_port(record)
    server.record_address(record, f"http://127.0.0.1:{port}/api")
    assert server.choose_port(record) == port
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        assert server.choose_port(record) != port
    record.write_text("damaged")
    assert server.choose_port(record) > 0
