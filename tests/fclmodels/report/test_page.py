"""The page: complete, safe, and what each figure is made of."""

import base64
import hashlib
import json
import re
from urllib.parse import unquote

import polars as pl
import pytest
from run_folders import (
    HtmlLinks,
    HtmlTables,
    change_result,
    change_table,
    write_monitored_run,
    write_run,
)

from fclmodels.errors import UserError
from fclmodels.federation.monitors.rows import make_row
from fclmodels.report.comparison import (
    compare_folders,
)
from fclmodels.report.page import render_page, write_page


def test_page_is_well_formed_and_needs_no_network(text):
    parsed = HtmlTables(text)
    assert not re.search(r"https?://|\bsrc=|@import|url\(|javascript:", text)
    assert not parsed.tags & {"iframe", "link", "img", "object", "form", "base"}


def test_the_only_script_is_the_one_that_the_page_names_by_its_digest(text):
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'\"" in text
    assert "default-src 'none'" in text
    assert not re.search(r"<script\s|\son\w+=", text)


def test_page_shows_the_comparison(folders, text):
    rows = HtmlTables(text).headed("ACC ↑")[0]
    row = compare_folders(folders).filter(pl.col("method") == "fedavg").row(0, named=True)
    shown = next(cells for cells in rows if cells[0] == "fedavg")
    assert shown[1] == "3"
    assert shown[2] == f"{100 * row['acc']:.1f}± {100 * row['acc_std']:.1f}"
    assert next(cells for cells in rows if cells[0] == "joint")[3] == "–"  # Avg needs all rows


def test_forgetting_never_stands_without_the_accuracy_right_after_learning(text):
    parsed = HtmlTables(text)
    for column in ("FT ↓", "FGT ↓", "BWT ↑", "AF ↓", "PD ↓", "Worst drop ↓"):
        assert parsed.headed(column)
        assert parsed.headed(column) == parsed.headed("Just learned ↑")


def test_page_of_one_seed_shows_n_and_no_deviation(folders):
    one = render_page(folders[3:4])
    cells = [cell for table in HtmlTables(one).tables for row in table for cell in row]
    assert not [cell for cell in cells if "±" in cell]
    assert next(row for row in HtmlTables(one).headed("ACC ↑")[0] if row[0] == "fedavg")[1] == "1"
    assert "Only one seed of fedavg" in one
    assert 'class="best"' not in one


def test_the_best_is_bold_but_never_a_reference(folders, text):
    table = compare_folders(folders).filter(pl.col("reading") == "task_aware")
    bold = re.findall(r'<td class="best">([0-9.]+)<', text)
    federated = table.filter(pl.col("method") != "joint")["acc"].max()
    assert f"{100 * federated:.1f}" in bold
    assert table["acc"].max() > federated
    assert f"{100 * table['acc'].max():.1f}" not in bold


def test_each_figure_leads_to_the_runs_that_it_is_made_of(tmp_path, folders):
    monitor_rows = [make_row("rho", task, 0.5, 0) for task in range(3)]
    watched = write_monitored_run(tmp_path / "fot-7", "fot", 7, monitor_rows)
    text = render_page([*folders[:6], watched])
    anchors = HtmlLinks(text)
    assert all(anchors.figures)
    assert {link[1:] for link in anchors.links if link.startswith("#")} <= anchors.ids
    places = {f"#run-{number}": folder for number, folder in enumerate([*folders[3:6], watched, *folders[:3]])}
    for place, folder in places.items():
        table_row = text.partition(f'id="{place[1:]}"')[2].partition("</tr>")[0]
        assert str(folder) in table_row
        assert f"<code>fcl run --method {folder.name[:-2]} --seed {folder.name[-1]} --out {folder}</code>" in table_row
    rho = text.partition('aria-label="ρ')[2].partition("</figure>")[0]
    assert re.findall(r'from (\d+) run|href="(#run-\d)">(\d)<', rho) == [("1", "", ""), ("", "#run-3", "7")]


def test_run_folders_are_linked_from_where_the_page_lies(tmp_path):
    folder = write_run(tmp_path / "runs" / "a b?#", tasks=2, rounds=1)
    file = tmp_path / "report" / "index.html"
    write_page([folder], file)
    outward = [link for link in HtmlLinks(file.read_text("utf-8")).links if not link.startswith("#")]
    assert outward == ["../runs/a%20b%3F%23/"]
    assert (file.parent / unquote(outward[0]) / "result.json").is_file()
    assert all(link.startswith("#") for link in HtmlLinks(render_page([folder])).links)


HOSTILE = "</td><script>alert('x')</script>\"&{{ 7 * 7 }}"


def test_nothing_from_a_file_becomes_markup(tmp_path):
    folder = write_run(tmp_path / "<b>run", "fedavg", 0, tasks=2, rounds=2)
    change_table(
        "ledger.parquet", lambda t: t.with_columns(part=pl.lit(HOSTILE), kind=pl.lit(HOSTILE), least=pl.lit(HOSTILE))
    )(folder)
    change_table(
        "accuracy.parquet", lambda t: t.with_columns(reading=pl.lit(HOSTILE)).unique(["after", "task", "client"])
    )(folder)
    change_result(
        None,
        lambda result: (
            result
            | {
                "method": HOSTILE,
                "command": HOSTILE,
                "metrics": {HOSTILE: {"acc": 0.5, HOSTILE: 0.5}},
                "settings": {HOSTILE: HOSTILE, "data": {"source": HOSTILE}},
                "digests": {HOSTILE: HOSTILE},
                "versions": {HOSTILE: HOSTILE},
                "timings": {HOSTILE: 1.0},
            }
        ),
    )(folder)
    text = render_page([folder])
    assert text.count("<script") == 1
    assert "<b>run" not in text
    assert "&lt;script&gt;alert(" in text
    assert "{{ 7 * 7 }}" in text


def test_the_same_runs_give_the_same_bytes(folders, text):
    assert render_page(folders) == text


def test_an_old_page_stays_whole_until_the_new_one_is(tmp_path, folders):
    path = tmp_path / "report" / "index.html"
    write_page(folders[:1], path)
    old = path.read_bytes()
    with pytest.raises(UserError):
        write_page([tmp_path / "nowhere"], path)
    assert path.read_bytes() == old
    assert [p.name for p in path.parent.iterdir()] == ["index.html"]


def test_long_streams_and_long_trainings_stay_small(tmp_path):
    folder = write_run(tmp_path / "a", "fedavg", 0, tasks=20, rounds=100)
    text = render_page([folder])
    assert len(text) < 250_000
    loss = max(re.findall(r'class="line" d="([^"]+)"', text), key=len)
    assert loss.count(",") <= 120


@pytest.mark.browser
def test_a_click_or_a_key_on_a_columns_head_sorts_the_rows(browser, tmp_path, folders):
    preset = {
        "name": "one",
        "figures": [{"table": "T", "reading": "task_aware", "columns": ["acc"], "rows": {"fot": [1]}}],
    }
    path = tmp_path / "index.html"
    write_page([*folders[3:], write_run(tmp_path / "fot-0", "fot", 0, tasks=3, preset=preset)], path)
    rows = {row["method"]: row["acc"] for row in compare_folders([*folders[3:], tmp_path / "fot-0"]).head(3).to_dicts()}
    browser.open(path.as_uri())

    def state():
        """The first reading's rows, and how its columns say they are sorted."""
        body, heads = "const table = document.querySelector('#accuracy table');", "[...table.tHead.rows[0].cells]"
        names = browser.run(f"{body} return [...table.tBodies[0].rows].map(row => row.cells[0].innerText.trim())")
        return names, browser.run(f"{body} return {heads}.map(head => head.getAttribute('aria-sort')).filter(s => s)")

    (reading, *before, paper), sorted_by = state()
    assert (reading, sorted_by, paper[:5]) == ("Task-aware", [], "paper")
    ascending = sorted(rows, key=rows.__getitem__)
    assert before not in (ascending, ascending[::-1])
    browser.click("//section[@id='accuracy']//th/button[contains(., 'ACC')]")
    assert state() == ([reading, *ascending[::-1], paper], ["descending"])
    browser.press("\ue007")  # Enter: the focus is on the button
    assert state() == ([reading, *ascending, paper], ["ascending"])
    browser.press("\ue007")
    assert state() == ([reading, *before, paper], [])
    browser.press("\ue004")  # Tab: to the next head
    assert browser.run("return document.activeElement.parentElement.innerText").startswith("Avg")
    browser.click("//section[@id='cost']//th/button[starts-with(., 'Up')]")
    up = browser.run("return [...document.querySelectorAll('#cost tbody')][0].innerText")
    sent = {json.loads((f / "result.json").read_text())["method"]: f for f in (*folders[3:], tmp_path / "fot-0")}
    largest = sorted(sent, key=lambda m: -json.loads((sent[m] / "result.json").read_text())["bytes_up"])
    assert re.findall(r"^(fot|fedavg|fedprotip)", up, re.MULTILINE) == largest
