"""The pages that `fcl ui` prints, in a browser: what was run is there, without a click and without set-up."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

Start = Callable[..., "subprocess.Popen[str]"]
RUNS = [("fedavg", "0"), ("fedavg", "1"), ("fedprox", "0")]


@pytest.fixture(scope="module")
def folder(tiny_settings: str, tool: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with the runs of two methods."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "params.yaml").write_text(tiny_settings)
    for method, seed in RUNS:
        tool(folder, "fcl", "run", "-m", method, "-s", seed, "-q")
    return folder


@pytest.fixture
def open_ui(folder: Path, start: Start, wait_for: Callable[..., Any]) -> Callable[[], dict[str, str]]:
    """Return a function that starts `fcl ui` and returns the addresses that it prints, by the first words."""

    def begin() -> dict[str, str]:
        start(folder, "fcl", "ui")
        log = folder / "fcl-00.log"
        lines = wait_for(lambda: "Ctrl-C" in log.read_text() and log.read_text().splitlines(), folder)
        return {words[0]: words[-1] for words in map(str.split, lines[:-1])}

    return begin


def test_mlflows_pages_open_on_the_runs_with_their_figures_by_method_and_have_charts_over_tasks(
    open_ui: Callable[[], dict[str, str]], browser: Any, tmp_path: Path
) -> None:
    addresses = open_ui()
    browser.open(addresses["MLflow"])
    browser.text("Group: fedavg", "Group: fedprox", "fedavg seed 1", "total/seconds")
    visible = """
        const place = element => element.getBoundingClientRect()
        const edge = place(document.querySelector('.ag-header-viewport')).right
        return [...document.querySelectorAll(".ag-header-cell[col-id^='metrics.']")]
            .filter(head => place(head).right <= edge)
            .sort((a, b) => place(a).left - place(b).left)
            .map(head => head.innerText)"""
    names = ["acc/task_agnostic", "forgetting_fgt/task_agnostic", "total/bytes_up", "total/bytes_down", "total/seconds"]
    assert browser.run(visible) == names
    browser.driver.save_screenshot(str(tmp_path / "table.png"))

    browser.open(addresses["charts"])
    text = browser.text("Accuracy and forgetting over tasks", "Bytes and seconds", "fedprox (acc/task_agnostic)")
    assert text.index("Accuracy and forgetting") < text.index("Bytes and seconds") < text.index("backward_transfer")
    points = "return document.querySelectorAll('.scatterlayer .trace .point').length"
    assert browser.drawn(points)
    browser.driver.save_screenshot(str(tmp_path / "charts.png"))


def test_prefects_pages_show_runs_their_tasks_artifacts_and_the_schedule(
    folder: Path,
    open_ui: Callable[[], dict[str, str]],
    start: Start,
    stream_settings: str,
    browser: Any,
    tmp_path: Path,
) -> None:
    (folder / "stream.yaml").write_text(stream_settings)
    pages = open_ui()["Prefect"]
    start(folder, "fcl", "stream", "--serve", "--cron", "0 2 * * *", "--params", "stream.yaml")

    def open_page(address: str, *expected: str) -> None:
        browser.open(address)
        browser.text(*expected)
        browser.driver.save_screenshot(str(tmp_path / f"{len(list(tmp_path.glob('*.png')))}.png"))

    open_page(pages, "Flow Runs", "Task Runs")
    open_page(f"{pages}/v2/runs", *("-".join(run) for run in RUNS))
    browser.click("//a[contains(@href, '/flow-run/')][contains(., 'fedprox-0')]")
    browser.text("Job Variables")
    browser.click("//*[@role='tab'][contains(., 'Task Runs')]")
    browser.text("fedprox-0: learn task 1", "fedprox-0: evaluate after 2 tasks")
    open_page(f"{pages}/v2/artifacts", "accuracy-fedprox-0", "fedprox-0: accuracy, task-agnostic")
    open_page(f"{pages}/v2/deployments", "arrivals", "At 02:00 AM")
