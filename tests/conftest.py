"""What every test stands on: an environment of its own, and no way out to the network."""

import importlib
import importlib.util
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

MEMORY, ROOM = Path("/dev/shm"), 4 * 2**30


def write_into_memory() -> None:
    """Let tests write into memory where it has room: many small files on a disk took a quarter of the suite's time."""
    if "TMPDIR" in os.environ or not MEMORY.is_dir():
        return
    facts = os.statvfs(MEMORY)
    if facts.f_bavail * facts.f_frsize > ROOM and not facts.f_flag & os.ST_NOEXEC and os.access(MEMORY, os.W_OK):
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


write_into_memory()
# Prefect and MLflow read their environment when they are imported, so it is set before any test module is.
HOME = tempfile.TemporaryDirectory(prefix="fclflow-tests-", ignore_cleanup_errors=True)
os.environ |= {
    "DO_NOT_TRACK": "true",
    "PREFECT_HOME": f"{HOME.name}/prefect",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_LOGGING_TO_API_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
    "MLFLOW_TRACKING_URI": f"sqlite:///{HOME.name}/mlflow.db",
    "RAY_USAGE_STATS_ENABLED": "0",
    "DVC_NO_ANALYTICS": "1",
    "DVC_GLOBAL_CONFIG_DIR": f"{HOME.name}/dvc",
    "DVC_SYSTEM_CONFIG_DIR": f"{HOME.name}/dvc",
    "DVC_SITE_CACHE_DIR": f"{HOME.name}/dvc",
    "XDG_CACHE_HOME": f"{HOME.name}/cache",
    "MPLCONFIGDIR": f"{HOME.name}/matplotlib",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "test",
    "GIT_AUTHOR_EMAIL": "test@localhost",
    "GIT_COMMITTER_NAME": "test",
    "GIT_COMMITTER_EMAIL": "test@localhost",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "FCL_SERVER_IDLE_SECONDS": "5",
}
for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID"):
    os.environ.pop(name, None)

DAILY_SECONDS = 60  # of the processor, for a test that is not slow

settings.register_profile("fclflow", deadline=None, derandomize=True)
settings.register_profile("others", deadline=None)  # other examples each time
settings.load_profile("fclflow")


@pytest.fixture(autouse=True)
def processor_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a daily test that takes a minute of this process's processor; the clock's depends on what else runs."""
    if request.node.get_closest_marker("slow"):
        yield
        return

    def fail(*_: object) -> None:
        pytest.fail(f"more than {DAILY_SECONDS} s of the processor", pytrace=False)

    before = signal.signal(signal.SIGPROF, fail)
    signal.setitimer(signal.ITIMER_PROF, DAILY_SECONDS)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


@pytest.fixture(autouse=True, scope="session")
def leave_files_to_the_cache() -> Iterator[None]:
    """What tests of this process write need not outlive the machine: waiting for the disk took a tenth of the suite."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def stay_on_this_machine() -> Iterator[None]:
    """A test that asks for another machine's name or address fails, whatever catches its exceptions."""
    resolve, connect = socket.getaddrinfo, socket.socket.connect

    def resolve_here(host: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_others(host)
        return resolve(host, *args, **kwargs)

    def connect_here(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            refuse_others(address[0])
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolve_here)
        patch.setattr(socket.socket, "connect", connect_here)
        yield


def refuse_others(host: str | bytes | None) -> None:
    name = host.decode() if isinstance(host, bytes) else host
    if name in (None, "", "localhost", "0.0.0.0", "::", socket.gethostname()):
        return
    try:
        here = ipaddress.ip_address(name).is_loopback
    except ValueError:
        here = False
    if not here:
        pytest.fail(f"reached out to {name}")


SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("a", "the", "film", "plot", "was", "is", "good", "bad", "warm", "cold", "not", "##s", ",", ".", '"')
ENCODER = {
    "model_type": "bert",
    "vocab_size": len(SPECIAL_TOKENS + WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Hugging Face lays it out: a tiny BERT's config and its WordPiece vocabulary. Do not change it."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed (extra text)")
    folder = tmp_path_factory.mktemp("encoder")
    (folder / "config.json").write_text(json.dumps(ENCODER))
    (folder / "vocab.txt").write_text("\n".join(SPECIAL_TOKENS + WORDS))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return folder


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps of experiments that were really done, not only looked up."""
    from fclmodels.experiment.stages import Step  # after the environment is set

    done: list[str] = []
    run = Step.run

    def noted(step: Step) -> dict[str, Any]:
        done.append(f"{step.stage} {step.task}")
        return run(step)

    monkeypatch.setattr(Step, "run", noted)
    return done


def forget_plugins() -> None:
    """Forget what was imported and read of plugins from outside of fclmodels, as a new process does."""
    from fclmodels import source_digest

    for name in [name for name in sys.modules if name.partition(".")[0] == "plugins"]:
        del sys.modules[name]
    for cached in (source_digest._digest_code, source_digest._list_imports, source_digest._find_path):
        cached.cache_clear()
    importlib.invalidate_caches()


@pytest.fixture
def write_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """A function that writes a file below plugins/ of the current folder; afterwards a new process would begin."""
    monkeypatch.chdir(tmp_path)
    # Python takes a compiled file for that of another text of the same length which is written within a second.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(path: str, text: str) -> Path:
        file = tmp_path / "plugins" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        forget_plugins()
        return file

    forget_plugins()
    yield write
    forget_plugins()


class TwoNodes:
    """A Ray cluster of this machine: two nodes of one CPU each, on addresses of the loopback interface."""

    def __init__(self) -> None:
        cluster = pytest.importorskip("ray.cluster_utils").Cluster
        self.small = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
        head = {"node_ip_address": "127.0.0.2", "_system_config": {"health_check_period_ms": 500}}
        self.cluster = cluster(initialize_head=True, head_node_args=head | self.small)
        self.last = 2
        self.add()

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> None:
        self.last += 1
        self.second = self.cluster.add_node(node_ip_address=f"127.0.0.{self.last}", **self.small)

    def kill(self) -> None:
        """The node that is not the head, with all that runs there."""
        self.cluster.remove_node(self.second, allow_graceful=False)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[TwoNodes]:
    """A cluster that RAY_ADDRESS names; its files go with it."""
    # Ray's sockets lie below this folder, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="fcl-ray-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        os.mkdir(f"{folder}/ray")
        nodes = TwoNodes()
        patch.setenv("RAY_ADDRESS", nodes.address)
        yield nodes
        nodes.cluster.shutdown()


class Browser:
    """Headless Chromium, driven by Selenium."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script that ends with `return` gives."""
        return self.driver.execute_script(script, *arguments)

    def drawn(self, script: str, seconds: float = 90) -> Any:
        """What it gives as soon as that is something."""
        end = time.monotonic() + seconds
        while not (given := self.run(script)) and time.monotonic() < end:
            time.sleep(0.3)
        return given

    def click(self, xpath: str) -> None:
        self.driver.find_element("xpath", xpath).click()

    def press(self, key: str) -> None:
        """On whatever has the focus."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(key).perform()

    def text(self, *expected: str, seconds: float = 90) -> str:
        """What the page says, as soon as it says all that is expected."""
        end = time.monotonic() + seconds
        while True:
            said = self.run("return document.body.innerText")
            missing = [words for words in expected if words not in said]
            if not missing:
                return said
            assert time.monotonic() < end, f"{missing} not in:\n{said}"
            time.sleep(0.3)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    binary, service = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or service is None:
        pytest.skip("chromium or chromedriver is not installed")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1600,1200"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(service))
    yield Browser(driver)
    driver.quit()


@pytest.fixture(scope="session")
def serving() -> Callable[..., Any]:
    """A context: `mlflow models serve` for a model of a store until its end."""
    return contextmanager(_serving)


def _serving(model: str, tracking_uri: str, log: Path) -> Iterator[Callable[[dict[str, Any]], list[dict[str, Any]]]]:
    """The server on a free port of 127.0.0.1; gives a function from a request's JSON to the predictions."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", model, "--env-manager", "local"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": tracking_uri, "PYTHONPATH": os.pathsep.join(sys.path)}

    def ask(content: dict[str, Any]) -> list[dict[str, Any]]:
        address, kind = f"http://127.0.0.1:{port}/invocations", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(address, json.dumps(content).encode(), kind)) as answer:
            return json.loads(answer.read())["predictions"]

    with log.open("wb") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        end = time.monotonic() + 120
        while not answers(f"http://127.0.0.1:{port}/ping"):
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.3)
        yield ask
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except OSError:
        return False
