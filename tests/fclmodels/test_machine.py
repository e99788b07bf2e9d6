"""What the system says of memory, by its files and by a process that takes some."""

import subprocess
import sys
from pathlib import Path

import pytest

from fclmodels import machine

STATUS = "Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc and a container's limits of our own."""
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "cgroup")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "proc"


def test_entries_of_a_process_are_in_bytes(proc: Path) -> None:
    (proc / "self" / "status").write_text(STATUS)
    assert (machine.read_status("VmRSS"), machine.read_peak_memory()) == (2**20, 2**21)
    assert machine.read_status("VmData") is None


def test_free_memory_is_the_systems_or_the_containers(proc: Path, tmp_path: Path) -> None:
    assert machine.read_available_memory() is None
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    assert machine.read_available_memory() == 8000 * 1024
    for name, value in (("memory.max", "max"), ("memory.current", "1000")):
        (tmp_path / "cgroup" / name).write_text(value)
    assert machine.read_available_memory() == 8000 * 1024
    (tmp_path / "cgroup" / "memory.max").write_text("5000\n")
    assert machine.read_available_memory() == 4000


def test_kills_are_counted_where_the_kernel_does(proc: Path) -> None:
    assert machine.count_memory_kills() == 0
    (proc / "vmstat").write_text("nr_free_pages 5\noom_kill 3\n")
    assert machine.count_memory_kills() == 3


def test_a_process_that_takes_memory_has_a_higher_peak() -> None:
    code = "from fclmodels import machine; before = machine.read_peak_memory(); x = b'1' * 2**26;"
    code += "print(machine.read_peak_memory() - before, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdin
        assert 2**26 <= int(process.stdout.readline()) < 2**27
        peak = machine.read_status("VmHWM", process.pid)
        assert peak is not None
        assert 2**26 < peak <= machine.read_peak_memory_of_children()
        process.stdin.write(b"\n")
