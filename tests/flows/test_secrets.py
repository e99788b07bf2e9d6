"""Marked secrets in settings and environment: none of them is in anything that a run writes or prints."""

import base64
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from fclmodels.errors import UserError, hide_passwords
from fclmodels.settings.load import load_params
from flows.cli.doctor import _is_exposed, _listens_to_all, _warn_of_open_servers
from flows.prefect import server as prefect_server

MARK = "hunter2-marked"
SECRETS = {
    "MLFLOW_TRACKING_USERNAME": "ann",
    "MLFLOW_TRACKING_PASSWORD": MARK,
    "MLFLOW_FLASK_SERVER_SECRET_KEY": MARK,
    "PREFECT_API_AUTH_STRING": f"ann:{MARK}",
    "PREFECT_SERVER_API_AUTH_STRING": f"ann:{MARK}",
    "AWS_SECRET_ACCESS_KEY": MARK,
    "PGPASSWORD": MARK,
}
SETTINGS = """
data: {source: digits}
stream: {kind: class-incremental, tasks: 2}
partition: {kind: iid, clients: 2, train_share: 0.2}
model: {backbone: mlp, hidden: 8}
federation: {rounds: 1, executor: processes, workers: 1}
device: cpu
"""
FORMS = [form.encode() for form in (MARK, base64.b64encode(MARK.encode()).decode()[2:-4])]
FORMS += [base64.b64encode(b" " * shift + MARK.encode())[4:-4] for shift in range(3)]


def find_leaks(folder: Path) -> list[str]:
    """Return the files that hold a secret, plain or as HTTP sends it."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return [str(file) for file in files if any(form in file.read_bytes() for form in FORMS)]


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    sent = base64.b64encode(f"ann:{MARK}".encode()).decode()
    for number, text in enumerate([f"password {MARK}.", f"Authorization: Basic {sent}"]):
        (tmp_path / str(number)).write_text(text)
    assert len(find_leaks(tmp_path)) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_secret_is_written_or_printed(
    tmp_path: Path, tool: Callable[..., str], start: Callable[..., subprocess.Popen]
) -> None:
    """A complete run, on the project's own Prefect server with a password; and runs whose store does not answer."""
    (tmp_path / "params.yaml").write_text(SETTINGS)
    tool(tmp_path, "fcl", "-v", "run", "--method", "fedavg", **SECRETS)
    settings = tmp_path / "elsewhere.yaml"
    settings.write_text(f"{SETTINGS}tracking: {{uri: 'postgresql://ann:{MARK}@127.0.0.1:9/x'}}\n")
    for command in (["run", "--method", "fedprox"], ["doctor"]):
        assert start(tmp_path, "fcl", *command, "--params", settings.name, **SECRETS).wait(200) is not None
    settings.unlink()
    assert (tmp_path / ".fcl" / "prefect" / "prefect.db").exists()
    assert (tmp_path / "runs" / "fedavg-0" / "result.json").exists()
    assert find_leaks(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://ann:hunter2@host:5000/x", "http://ann:***@host:5000/x"),
        ("postgresql://ann:hun@ter:2@host/x", "postgresql://ann:***@host/x"),
        ("postgresql://:hunter2@host/x", "postgresql://:***@host/x"),
        ("http://host:5000/x and a@b", "http://host:5000/x and a@b"),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
    ],
)
def test_an_address_is_shown_without_its_password(text: str, shown: str) -> None:
    assert hide_passwords(text) == shown


def test_a_password_in_the_settings_or_on_the_command_line_is_refused_without_being_told(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(f"tracking: {{uri: 'http://ann:{MARK}@host'}}\n")
    with pytest.raises(UserError, match=r"leave the password out, and set MLFLOW_TRACKING_USERNAME") as refusal:
        load_params(file)
    assert MARK not in str(refusal.value)
    file.write_text("")
    with pytest.raises(
        UserError, match=r"--set tracking\.uri=postgresql://ann:\*\*\*@host/x: a password does not belong here"
    ):
        load_params(file, [f"tracking.uri=postgresql://ann:{MARK}@host/x"])


@pytest.fixture
def start_server() -> Iterator[Callable[[str, int], int]]:
    """Return a function that starts a server, which answers every request with one status, and returns its port."""
    started: list[ThreadingHTTPServer] = []

    def serve(address: str, answer: int) -> int:
        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path.endswith("/health") else answer)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        started.append(ThreadingHTTPServer((address, 0), Answer))
        Thread(target=started[-1].serve_forever, daemon=True).start()
        return started[-1].server_port

    yield serve
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("bound", "answer", "host", "warned"),
    [
        ("0.0.0.0", 200, "127.0.0.1", True),
        ("0.0.0.0", 200, "0.0.0.0", True),
        ("0.0.0.0", 401, "127.0.0.1", False),
        ("127.0.0.1", 200, "127.0.0.1", False),
        ("127.0.0.1", 200, "localhost", False),
    ],
)
def test_doctor_warns_of_an_open_server(
    bound: str, answer: int, host: str, warned: bool, start_server: Callable[[str, int], int]
) -> None:
    rows = list(_warn_of_open_servers({f"http://{host}:{start_server(bound, answer)}": "api/2.0/x"}))
    assert [row["state"] for row in rows] == ["WARNING"] * warned


@pytest.mark.parametrize(
    ("url", "port"),
    [("https://localhost/api", 443), ("http://127.0.0.1", 80), ("https://127.0.0.1:5000", 5000)],
)
def test_an_address_without_a_port_has_that_of_its_scheme(url: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.cli.doctor._listens_to_all", lambda other: other == port)
    assert _is_exposed(url)


def test_a_server_that_wants_a_password_says_so_in_one_line(
    start_server: Callable[[str, int], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{start_server('127.0.0.1', 401)}/api"
    with pytest.raises(UserError, match=r"requires a password\. Set PREFECT_API_AUTH_STRING\."):
        prefect_server.wait_until_ready(url, tmp_path)
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "ann:x")
    prefect_server.wait_until_ready(url, tmp_path)


def test_the_own_server_is_told_to_listen_on_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr("prefect.cli.app", lambda: commands.append(sys.argv))
    monkeypatch.setattr(prefect_server, "_stop_when_idle", lambda *_: None)
    monkeypatch.setattr(sys, "argv", [])
    prefect_server._serve(tmp_path, 4200, 0)
    assert commands[0][commands[0].index("--host") + 1] == "127.0.0.1"


def test_what_listens_here_is_seen(start_server: Callable[[str, int], int]) -> None:
    assert _listens_to_all(start_server("0.0.0.0", 200))
    assert not _listens_to_all(start_server("127.0.0.1", 200))
