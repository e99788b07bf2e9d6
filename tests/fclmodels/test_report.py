import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fclmodels import metrics
from fclmodels.errors import UserError
from fclmodels.federation.monitors.rows import row, table
from fclmodels.report import (
    accuracy_cells,
    accuracy_curves,
    bytes_by_task,
    comparison,
    page,
    read_run,
    read_runs,
    words,
    write_page,
)
from fclmodels.report.charts import BOTTOM, LEFT, RIGHT, TOP, Series, line_chart, ticks, ticks_above
from fclmodels.report.costs import against_accuracy
from fclmodels.report.numbers import duration, number, percent, points, size
from fclmodels.report.paired import interval
from fclmodels.report.runs import grouped
from fclmodels.report.tables import ledger, spread

CLIENTS, SAMPLES = 4, 50
# final accuracy lost a task later, gained in learning, and what each method sends up beside its update
METHODS = {
    "fedavg": (0.16, 0.93, []),
    "fedprox": (0.12, 0.91, []),
    "fot": (0.02, 0.84, [("sketch", "sketch", "sum", -1, 40_000)]),
    "fedprotip": (0.03, 0.86, [("basis", "basis", "each", -1, 60_000), ("reference", "reference", "each", -1, 900)]),
    "joint": (0.0, 0.95, []),
}
BASE = {"task_aware": 0.0, "task_agnostic": 0.25, "task_predicted": 0.15}


def write_run(folder, method="fedavg", seed=0, tasks=5, rounds=6, settings=None, splits="9f" * 32, **result):
    """A run folder as an experiment leaves it, with plausible figures and no training."""
    random = np.random.default_rng([seed, *method.encode()])
    folder.mkdir(parents=True)
    accuracy = _accuracy(random, method, tasks)
    accuracy.write_parquet(folder / "accuracy.parquet")
    ledger = _ledger(method, tasks, rounds)
    ledger.write_parquet(folder / "ledger.parquet")
    _rounds(random, tasks, rounds).write_parquet(folder / "rounds.parquet")
    content = {
        "format": 1,
        "method": method,
        "seed": seed,
        "label": f"{method}-{seed}",
        "metrics": metrics.summary(accuracy),
        "settings": SETTINGS | {"methods": {method: {"mu": 0.01} if method == "fedprox" else {}}} | (settings or {}),
        "digests": {"splits": splits, "prepared": "ab" * 32, "code": f"{METHODS[method][0]}".encode().hex() * 4}
        | {"model": random.bytes(32).hex()},
        "versions": {"fclflow": "0.1.0", "python": "3.11.7", "torch": "2.9.1", "polars": "2.1.0"},
        "seconds": float(np.round(random.normal(41, 2), 2)),
        "timings": {"training": 33.1, "evaluation": 4.2, "knowledge": 0.4},
        "bytes_up": ledger.filter(pl.col("direction") == "up")["bytes"].sum(),
        "bytes_down": ledger.filter(pl.col("direction") == "down")["bytes"].sum(),
        "bytes_kept": 0,
        "command": f"fcl run --method {method} --seed {seed} --out {folder}",
    }
    (folder / "result.json").write_text(json.dumps(content | result))
    return folder


SETTINGS = {
    "data": {"source": "digits", "size": None, "mean": [0.5], "std": [0.5]},
    "stream": {"kind": "class-incremental", "seed": 0, "tasks": 5},
    "partition": {"kind": "dirichlet", "clients": CLIENTS, "alpha": 0.5, "val": 0.1, "seed": 0},
    "model": {"backbone": "cnn", "head": "growing", "freeze": []},
    "federation": {"rounds": 6, "local_epochs": 1, "batch_size": 32, "executor": "auto", "workers": 2, "threads": 1},
    "optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.0, "weight_decay": 0.0},
    "device": "cpu",
}


def _accuracy(random, method, tasks):
    fall, learned, _ = METHODS[method]
    rows = []
    for reading, penalty in BASE.items():
        if reading == "task_predicted" and method == "joint":
            continue
        for after in range(tasks if method == "joint" else 0, tasks + 1):
            for task in range(after if reading == "task_aware" else tasks):
                age = after - task - 1
                level = learned * 0.95**task - fall * age * (1 + penalty) - penalty * min(after, 3) / 3
                level = level if age >= 0 else 0.0
                shares = np.clip(random.normal(level, 0.04 if age >= 0 else 0, CLIENTS), 0, 1)
                counts = np.round(shares * SAMPLES).astype(int).tolist()
                rows += [(reading, after, task, client, count, SAMPLES) for client, count in enumerate(counts)]
                rows.append((reading, after, task, None, sum(counts), SAMPLES * CLIENTS))
    return pl.DataFrame(
        rows,
        orient="row",
        schema={
            "reading": pl.String,
            "after": pl.Int16,
            "task": pl.Int16,
            "client": pl.Int32,
            "correct": pl.Int64,
            "total": pl.Int64,
        },
    )


def _ledger(method, tasks, rounds):
    weights = 102_400
    parts = [] if method == "joint" else [("weights", "weights", "down", "-", 0, weights)]
    parts += (
        []
        if method == "joint"
        else [("update", "update", "up", "sum", 0, weights), ("count", "count", "up", "sum", 0, 8)]
    )
    parts += [(part, kind, "up", least, end, size) for part, kind, least, end, size in METHODS[method][2]]
    rows = [
        (task, turn, client, direction, part, kind, least, size)
        for part, kind, direction, least, end, size in parts
        for task in range(tasks)
        for turn in (range(rounds) if end == 0 else [-1])
        for client in range(CLIENTS)
    ]
    return pl.DataFrame(
        rows,
        orient="row",
        schema={
            "task": pl.Int16,
            "round": pl.Int32,
            "client": pl.Int32,
            "direction": pl.String,
            "part": pl.String,
            "kind": pl.String,
            "least": pl.String,
            "bytes": pl.Int64,
        },
    )


def _rounds(random, tasks, rounds):
    step = np.arange(tasks * rounds)
    return pl.DataFrame(
        {
            "task": step // rounds,
            "round": step % rounds,
            "step": step,
            "clients": np.full(len(step), CLIENTS),
            "loss": 1.8 * np.exp(-(step % rounds) / 2) + 0.2 + random.uniform(0, 0.1, len(step)),
            "server_lr": np.ones(len(step)),
            "bytes_up": np.full(len(step), CLIENTS * 102_408),
            "bytes_down": np.full(len(step), CLIENTS * 102_400),
            "seconds": random.uniform(0.4, 0.6, len(step)),
        }
    )


class Tables(HTMLParser):
    """The page's tables as rows of cell texts, and whether every element that was opened is closed in its place."""

    VOID = ("meta", "br")

    def __init__(self, text):
        super().__init__()
        self.tables, self.open, self.tags = [], [], set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += " ".join(data.split())

    def headed(self, column):
        return [rows for rows in self.tables if column in rows[0]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [
        write_run(root / f"{m}-{s}", m, s, tasks=3, rounds=2)
        for m in ("joint", "fedavg", "fedprotip")
        for s in (0, 1, 2)
    ]


@pytest.fixture(scope="module")
def text(folders):
    return page(folders)


def results(folders):
    return [json.loads((folder / "result.json").read_text()) for folder in folders]


# the comparison


def test_comparison_is_mean_and_sample_deviation_over_seeds(folders):
    table = comparison(folders)
    row = table.row(by_predicate=(pl.col("reading") == "task_agnostic") & (pl.col("method") == "fedavg"), named=True)
    fedavg = [result for result in results(folders) if result["method"] == "fedavg"]
    for name in ("acc", "ft", "learning_acc", "worst_client_acc"):
        values = [result["metrics"]["task_agnostic"][name] for result in fedavg]
        assert (row[name], row[f"{name}_std"]) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    assert row["seconds_std"] == pytest.approx(np.std([result["seconds"] for result in fedavg], ddof=1))
    assert row["seeds"] == 3


def test_comparison_has_a_row_for_each_reading_that_a_method_has_and_references_last(folders):
    found = comparison(folders).select("reading", "method").rows()
    assert found == [
        ("task_aware", "fedavg"),
        ("task_aware", "fedprotip"),
        ("task_aware", "joint"),
        ("task_agnostic", "fedavg"),
        ("task_agnostic", "fedprotip"),
        ("task_agnostic", "joint"),
        ("task_predicted", "fedavg"),
        ("task_predicted", "fedprotip"),
    ]


def test_what_a_run_does_not_define_is_null(folders):
    joint = comparison(folders).filter(pl.col("method") == "joint").row(0, named=True)
    assert joint["acc"] > 0.5
    assert [joint[name] for name in ("learning_acc", "ft", "fgt", "bwt", "af", "pd", "worst_drop")] == [None] * 7


def test_one_seed_has_no_standard_deviation(folders):
    table = comparison(folders[3:4])
    assert table["seeds"].to_list() == [1, 1, 1]
    assert not table.select(pl.col("^.*_std$").is_not_null().any()).row(0).count(True)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0.2, 0.4], (0.3, np.sqrt(0.02))), ([0.2], (0.2, None)), ([0.2, None], (None, None)), ([], (None, None))],
)
def test_spread(values, expected):
    # (0.2 - 0.3)^2 + (0.4 - 0.3)^2 = 0.02, over n - 1 = 1
    assert spread(values) == (pytest.approx(expected) if None not in expected else expected)


def federation(**changed):
    return {"federation": SETTINGS["federation"] | changed}


@pytest.mark.parametrize(
    ("other", "labels"),
    [
        ({}, ["fedprox"]),
        ({"settings": federation(workers=7)}, ["fedprox"]),
        ({"settings": {"partition": SETTINGS["partition"] | {"seed": 5}}}, ["fedprox"]),
        ({"settings": federation(rounds=9)}, ["fedprox (rounds=6)", "fedprox (rounds=9)"]),
        ({"settings": {"methods": {"fedprox": {"mu": 1.0}}}}, ["fedprox (mu=0.01)", "fedprox (mu=1.0)"]),
        (
            {"digests": {"code": "ee" * 32, "prepared": "ab" * 32}},
            ["fedprox (code=302e3132)", "fedprox (code=eeeeeeee)"],
        ),
        (
            {"digests": {"code": "302e3132" * 4, "prepared": "cd" * 32}},
            ["fedprox (data=abababab)", "fedprox (data=cdcdcdcd)"],
        ),
        ({"tasks": 2}, ["fedprox (tasks=3)", "fedprox (tasks=2)"]),
        (
            {"settings": {"stream": {"kind": "permuted"}, "optimizer": {"kind": "adam"}}},
            None,  # both settings end in `kind`, so their whole names tell them apart
        ),
    ],
)
def test_runs_that_differ_in_more_than_seeds_are_not_averaged(tmp_path, other, labels):
    first = write_run(tmp_path / "a", "fedprox", 0, tasks=3)
    second = write_run(tmp_path / "b", "fedprox", 1, **{"tasks": 3, **other})
    found = [group.label for group in grouped(read_runs([first, second]))]
    if labels is None:
        assert "stream.kind=permuted" in found[1]
        assert "optimizer.kind=adam" in found[1]
    else:
        assert found == labels


def test_the_same_run_twice_is_refused(tmp_path):
    first = write_run(tmp_path / "a", "fedavg", 0)
    second = write_run(tmp_path / "b", "fedavg", 0)
    with pytest.raises(UserError, match=f"{second}: the same method, settings and seed as {first}"):
        comparison([first, second])


# the frames behind plots


def test_curves_end_at_acc_and_average_to_avg(folders):
    curves = accuracy_curves(folders)
    for result in results(folders):
        for reading, expected in result["metrics"].items():
            of = (pl.col("method") == result["method"], pl.col("seed") == result["seed"], pl.col("reading") == reading)
            line = curves.filter(*of)
            assert line["learned"].to_list() == [1, 2, 3]
            assert line["accuracy"][-1] == pytest.approx(expected["acc"])
            if expected["avg"] is not None:
                assert line["accuracy"].mean() == pytest.approx(expected["avg"])


def test_cells_are_the_accuracy_table(folders):
    cells = accuracy_cells(folders[3:4]).filter(pl.col("reading") == "task_agnostic")
    table = pl.read_parquet(folders[3] / "accuracy.parquet").filter(
        pl.col("reading") == "task_agnostic", pl.col("client").is_null()
    )
    assert cells.height == 4 * 3
    for after, task, correct, total in table.select("after", "task", "correct", "total").rows():
        cell = cells.filter(pl.col("learned") == after, pl.col("task") == task + 1)
        assert cell["accuracy"].item() == pytest.approx(correct / total)


def test_cells_that_were_not_measured_are_null(folders):
    cells = accuracy_cells(folders[:1])
    assert cells.filter(pl.col("learned") < 3)["accuracy"].is_null().all()
    assert cells.filter(pl.col("learned") == 3)["accuracy"].is_not_null().all()


def test_bytes_by_task_add_up_to_the_runs_traffic(folders):
    table = bytes_by_task(folders[3:])
    sums = table.group_by("method", "seed", maintain_order=True).agg(pl.col("bytes_up", "bytes_down").sum())
    for result, sent in zip(results(folders[3:]), sums.rows(named=True), strict=True):
        assert (sent["bytes_up"], sent["bytes_down"]) == (result["bytes_up"], result["bytes_down"])
    assert table["task"].unique().sort().to_list() == [1, 2, 3]


def test_ledger_by_hand(folders):
    group = next(group for group in grouped(read_runs(folders)) if group.label == "fedprotip")
    parts = {row["part"]: row for row in ledger(group).to_dicts()}
    assert list(parts) == ["update", "basis", "reference", "count", "weights"]  # up by size, then down
    # 4 clients, 3 tasks of 2 rounds; three equal runs
    assert parts["update"]["bytes"] == 4 * 3 * 2 * 102_400
    assert (parts["update"]["least"], parts["update"]["in_rounds"], parts["update"]["at_end"]) == ("sum", True, False)
    assert parts["basis"]["bytes"] == 4 * 3 * 60_000
    assert (parts["basis"]["least"], parts["basis"]["in_rounds"], parts["basis"]["at_end"]) == ("each", False, True)
    assert parts["basis"]["largest"] == 60_000


# predicted tasks


def write_confusion(folder, counts, reading="task_predicted", after=None, times=1):
    """How many samples of each task (rows) were taken for which, after as many tasks as there are unless told."""
    rows = [(reading, after or len(counts), task, predicted, int(n)) for (task, predicted), n in np.ndenumerate(counts)]
    columns = ["reading", "after", "task", "predicted", "count"]
    pl.DataFrame(rows * times, columns, orient="row").write_parquet(folder / "confusion.parquet")


@pytest.fixture
def predicting(tmp_path):
    """Two seeds of a method that predicts tasks, and one that does not."""
    confusions = ([[8, 2], [5, 5]], [[3, 1], [0, 4]])
    folders = [write_run(tmp_path / f"{s}", "fedprotip", s, tasks=2, rounds=1) for s in range(2)]
    for folder, counts in zip(folders, confusions, strict=True):
        write_confusion(folder, counts)
        accuracy, confusion = (pl.read_parquet(folder / f"{name}.parquet") for name in ("accuracy", "confusion"))
        edit("metrics", metrics.summary(accuracy, confusion))(folder)
    return [*folders, write_run(tmp_path / "fedavg", "fedavg", 0, tasks=2, rounds=1)]


def test_page_shows_which_task_was_taken_for_which(predicting):
    text = page(predicting)
    section = text[text.index('<section id="predicted">') : text.index('<section id="cost">')]
    (matrix,) = Tables(section).tables
    # seed 0: 80 and 20 of a task's hundred, 50 and 50; seed 1: 75 and 25, 0 and 100
    assert matrix == [["", "1", "2"], ["1", "78", "22"], ["2", "25", "75"]]
    # seed 0: (80 + 50) / 2 = 65 predicted right, seed 1: 87.5; their mean and deviation 22.5 / sqrt(2)
    caption = " ".join(re.sub("<.*?>", " ", re.search("<caption>(.*?)</caption>", section)[1]).split())
    assert caption == "Task predicted 76.2 ± 15.9 % right, n = 2"
    assert re.findall(r"<h3>.*?<span>(.*?)</span>", section) == ["fedprotip"]
    assert "fedavg" not in section


def test_a_page_without_predicted_tasks_has_no_place_for_them(text):
    assert "Predicted tasks" not in text


def test_comparison_has_the_task_prediction_where_there_is_one(predicting):
    found = comparison(predicting).select("reading", "method", "tip_acc", "tip_acc_std").rows()
    known = [row for row in found if row[2] is not None]
    assert known == [("task_predicted", "fedprotip", pytest.approx(0.7625), pytest.approx(0.225 / np.sqrt(2)))]
    assert len(found) > 1


# folders that are not what they should be


def edit(name, change):
    def damage(folder):
        path = folder / "result.json"
        path.write_text(
            json.dumps(
                change(json.loads(path.read_text())) if name is None else {**json.loads(path.read_text()), name: change}
            )
        )

    return damage


def cut(name):
    def damage(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return damage


def rewrite(name, change):
    def damage(folder):
        change(pl.read_parquet(folder / name)).write_parquet(folder / name)

    return damage


BROKEN = {
    "unfinished": (lambda folder: (folder / "result.json").unlink(), "{run}: no result.json"),
    "result cut short": (cut("result.json"), "{run}/result.json: not JSON, changed or cut short"),
    "result is no text": (lambda f: (f / "result.json").write_bytes(b"\xff\xfe\x00"), "{run}/result.json: not JSON"),
    "result is a list": (lambda f: (f / "result.json").write_text("[]"), "{run}/result.json: format None"),
    "deep result": (lambda f: (f / "result.json").write_text("[" * 100_000), "{run}/result.json: not JSON"),
    "later format": (edit("format", 2), "{run}/result.json: format 2, this fclflow reads 1"),
    "accuracy not a number": (
        edit("metrics", {"task_aware": {"acc": "high"}}),
        "{run}/result.json: metrics.task_aware.acc: input should be a valid number",
    ),
    "accuracy NaN": (
        edit("metrics", {"task_aware": {"acc": float("nan")}}),
        "{run}/result.json: metrics.task_aware.acc",
    ),
    "key missing": (
        edit(None, lambda r: {k: r[k] for k in r if k != "seed"}),
        "{run}/result.json: seed: field required",
    ),
    "no rounds": (lambda f: (f / "rounds.parquet").unlink(), "{run}: no rounds.parquet"),
    "parquet cut short": (cut("accuracy.parquet"), "{run}/accuracy.parquet: not readable"),
    "parquet empty": (lambda f: (f / "ledger.parquet").write_bytes(b""), "{run}/ledger.parquet: not readable"),
    "foreign parquet": (
        rewrite("ledger.parquet", lambda t: t.select("task")),
        "{run}/ledger.parquet: not readable or not fclflow's",
    ),
    "foreign type": (
        rewrite("ledger.parquet", lambda t: t.with_columns(bytes=pl.lit("many"))),
        "{run}/ledger.parquet: not readable or not fclflow's",
    ),
    "measured twice": (
        rewrite("accuracy.parquet", lambda t: pl.concat([t, t.head(1)])),
        "measures the same thing twice",
    ),
    "more right than there are": (
        rewrite("accuracy.parquet", lambda t: t.with_columns(correct=pl.col("total") + 1)),
        "{run}/accuracy.parquet: has impossible counts",
    ),
    "negative task": (rewrite("accuracy.parquet", lambda t: t.with_columns(pl.col("task") - 1)), "impossible counts"),
    "taken for a task to come": (
        lambda folder: write_confusion(folder, [[3, 0], [0, 3]], after=1),
        "{run}/confusion.parquet: has impossible counts",
    ),
    "more tasks than there are": (
        lambda folder: write_confusion(folder, np.eye(3)),
        "{run}/confusion.parquet: has impossible counts",
    ),
    "taken for it twice": (
        lambda folder: write_confusion(folder, [[3, 0], [0, 3]], times=2),
        "{run}/confusion.parquet: counts the same thing twice",
    ),
    "reading without rows": (
        edit("metrics", {"task_aware": {}, "paper_task_aware": {}}),
        "{run}/accuracy.parquet: no rows for paper_task_aware",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_is_named_in_one_line_with_a_way_out(tmp_path, name):
    damage, message = BROKEN[name]
    folder = write_run(tmp_path / "fedavg-0", tasks=2, rounds=1)
    damage(folder)
    with pytest.raises(UserError) as error:
        read_run(folder)
    line = str(error.value)
    assert message.format(run=folder) in line
    assert "leave it out" in line
    assert "\n" not in line


@pytest.mark.parametrize("given", [[], ["nowhere"]])
def test_no_folders_at_all(given, tmp_path):
    with pytest.raises(UserError, match=r"runs/fedavg-0"):
        page([tmp_path / name for name in given])


# the page


def test_page_is_well_formed_and_needs_no_network(text):
    parsed = Tables(text)
    assert not re.search(r"https?://|\bsrc=|@import|url\(|javascript:", text)
    assert not parsed.tags & {"iframe", "link", "img", "object", "form", "base"}


def test_the_only_script_is_the_one_that_the_page_names_by_its_digest(text):
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'\"" in text
    assert "default-src 'none'" in text
    assert not re.search(r"<script\s|\son\w+=", text)


def test_page_shows_the_comparison(folders, text):
    rows = Tables(text).headed("ACC ↑")[0]
    row = comparison(folders).filter(pl.col("method") == "fedavg").row(0, named=True)
    shown = next(cells for cells in rows if cells[0] == "fedavg")
    assert shown[1] == "3"
    assert shown[2] == f"{100 * row['acc']:.1f}± {100 * row['acc_std']:.1f}"
    assert next(cells for cells in rows if cells[0] == "joint")[3] == "–"  # Avg needs all rows


def test_forgetting_never_stands_without_the_accuracy_right_after_learning(text):
    parsed = Tables(text)
    for column in ("FT ↓", "FGT ↓", "BWT ↑", "AF ↓", "PD ↓", "Worst drop ↓"):
        assert parsed.headed(column)
        assert parsed.headed(column) == parsed.headed("Just learned ↑")


def test_page_of_one_seed_shows_n_and_no_deviation(folders):
    one = page(folders[3:4])
    cells = [cell for table in Tables(one).tables for row in table for cell in row]
    assert not [cell for cell in cells if "±" in cell]
    assert next(row for row in Tables(one).headed("ACC ↑")[0] if row[0] == "fedavg")[1] == "1"
    assert "Only one seed of fedavg" in one
    assert 'class="best"' not in one


def test_page_tells_what_a_method_remarks(tmp_path):
    told = write_run(tmp_path / "fot-0", "fot", tasks=2, remarks=["the bases fill 3 of 4 protected layers"])
    silent = write_run(tmp_path / "fedavg-0", "fedavg", tasks=2)
    assert page([told, silent]).count("fot: the bases fill 3 of 4 protected layers.") == 1
    assert "bases fill" not in page([silent])


def test_the_best_is_bold_but_never_a_reference(folders, text):
    table = comparison(folders).filter(pl.col("reading") == "task_aware")
    bold = re.findall(r'<td class="best">([0-9.]+)<', text)
    federated = table.filter(pl.col("method") != "joint")["acc"].max()
    assert f"{100 * federated:.1f}" in bold
    assert table["acc"].max() > federated
    assert f"{100 * table['acc'].max():.1f}" not in bold


def test_what_is_not_comparable_is_said(tmp_path):
    folders = [
        write_run(tmp_path / "a", "fedavg", 0, tasks=2),
        write_run(tmp_path / "b", "fedprox", 1, tasks=2, splits="00" * 32, versions={"torch": "3.0"}),
    ]
    text = page(folders)
    assert "Made on 2 different data splits" in text
    assert "not run with the same seeds" in text
    assert "different versions of" in text
    assert "Made on" not in page(folders[:1])


def test_methods_stand_side_by_side_on_each_task_with_their_differences_seed_by_seed(folders, text):
    shown = next(rows for rows in Tables(text).tables if rows[0] == ["Method", "1", "2", "3"])
    ends = {"fedavg": [], "fedprotip": [], "joint": []}
    for folder in folders:
        table = pl.read_parquet(folder / "accuracy.parquet")
        last = table.filter(pl.col("reading") == "task_aware", pl.col("after") == 3, pl.col("client").is_null())
        ends[folder.name[:-2]].append(
            last.sort("task").select(pl.col("correct") / pl.col("total")).to_series().to_numpy()
        )
    means = {method: np.mean(of_seeds, axis=0) for method, of_seeds in ends.items()}
    assert [cells[0] for cells in shown[1:]] == ["fedavg", "fedprotip", "joint", "less fedavg", "fedprotip", "joint"]
    differences = [means[method] - means["fedavg"] for method in ("fedprotip", "joint")]
    for cells, expected in zip(shown[1:4] + shown[5:], [*means.values(), *differences], strict=True):
        assert [int(cell.replace("−", "-")) for cell in cells[1:]] == pytest.approx(100 * expected, abs=0.501)
    seeds = np.array(ends["joint"])[:, 0] - np.array(ends["fedavg"])[:, 0]
    low, high = interval(seeds)
    told = f"joint, task 1: {percent(seeds.mean())}, {percent(low)} to {percent(high)} points, n = 3"
    assert re.search(rf'class="(better|worse)( clear)?"[^>]*title="{re.escape(told)}"', text)[2] == (
        " clear" if low > 0 or high < 0 else None
    )


# the runs behind it


class Anchors(HTMLParser):
    """What can be linked to, what is linked, and the texts of a page's figures with their links."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.figures = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids |= {attributes.get("id")}
        if tag in ("figure", "table") and (tag == "figure" or "matrix" in attributes.get("class", "")):
            self.figures.append([])
        if tag == "a":
            self.links.append(attributes["href"])
        if tag == "a" and "class" not in attributes and self.figures:
            self.figures[-1].append(attributes["href"])


def test_each_figure_leads_to_the_runs_that_it_is_made_of(tmp_path, folders):
    seen = [row("rho", task, 0.5, 0) for task in range(3)]
    watched = monitored(tmp_path / "fot-7", "fot", 7, seen)
    text = page([*folders[:6], watched])
    anchors = Anchors(text)
    assert all(anchors.figures)
    assert {link[1:] for link in anchors.links if link.startswith("#")} <= anchors.ids
    places = {f"#run-{number}": folder for number, folder in enumerate([*folders[3:6], watched, *folders[:3]])}
    for place, folder in places.items():
        told = text.partition(f'id="{place[1:]}"')[2].partition("</tr>")[0]
        assert str(folder) in told
        assert f"<code>fcl run --method {folder.name[:-2]} --seed {folder.name[-1]} --out {folder}</code>" in told
    rho = text.partition('aria-label="ρ')[2].partition("</figure>")[0]
    assert re.findall(r'from (\d+) run|href="(#run-\d)">(\d)<', rho) == [("1", "", ""), ("", "#run-3", "7")]


def test_run_folders_are_linked_from_where_the_page_lies(tmp_path):
    folder = write_run(tmp_path / "runs" / "a b?#", tasks=2, rounds=1)
    file = tmp_path / "report" / "index.html"
    write_page([folder], file)
    outward = [link for link in Anchors(file.read_text("utf-8")).links if not link.startswith("#")]
    assert outward == ["../runs/a%20b%3F%23/"]
    assert (file.parent / unquote(outward[0]) / "result.json").is_file()
    assert all(link.startswith("#") for link in Anchors(page([folder])).links)


def test_accuracy_is_drawn_against_what_it_costs(folders):
    known = {folder: json.loads((folder / "result.json").read_text()) for folder in folders}
    by_bytes, by_seconds, *_ = against_accuracy(grouped(read_runs(folders)))
    assert [spot.index for spot in by_bytes.spots] == [0, 1]  # joint sends nothing
    assert by_bytes.runs == tuple(folders[3:])
    assert by_seconds.runs == (*folders[3:], *folders[:3])
    fedavg = [known[folder] for folder in folders[3:6]]
    acc = 100 * np.mean([result["metrics"]["task_aware"]["acc"] for result in fedavg])
    seconds = np.mean([result["seconds"] for result in fedavg])
    assert by_seconds.spots[0].text == f"fedavg: ACC {acc:.1f} %, {seconds:.1f} s"
    assert len(by_seconds.spots[0].near) == 3
    assert against_accuracy(grouped(read_runs(folders[3:6]))) == []  # nothing to compare


def test_privacy_ledger_says_who_needs_single_replies(text):
    said = [row[0] for row in Tables(text).headed("The method needs")[0] if len(row) == 1]
    assert said == [
        "fedavg: needs nothing but sums over clients",
        "fedprotip: needs each client's own basis, reference",
        "joint: the ledger has no message to a server",
    ]


def test_privacy_ledger_tells_the_largest_epsilon_of_the_seeds(tmp_path, text):
    folders = [
        write_run(tmp_path / str(epsilon), "fot", seed, tasks=2, privacy=of | {"clip": 1.0})
        for seed, epsilon in enumerate((2.5, 7.25))
        for of in [{"epsilon": epsilon, "delta": 1e-5, "covers": "sketches. Not covered: updates"}]
    ]
    section = page(folders).partition('id="ledger"')[2].partition("</section>")[0]
    assert "epsilon 7.25 at delta 1e-05, for sketches. Not covered: updates." in section
    assert section.count("epsilon") == 1
    assert "epsilon" not in text


def test_what_became_of_clients_is_told_where_they_could_fail(tmp_path, text):
    counts = {"clients": 60, "missing": 7, "lost": 1, "late": 5, "refused": 2, "dropped": 3, "answers": 47}
    folders = [
        write_run(tmp_path / "fedavg-0", "fedavg", 0, tasks=2, faults=counts),
        write_run(tmp_path / "fedavg-1", "fedavg", 1, tasks=2, faults=counts | {"missing": 9, "answers": 45}),
        write_run(tmp_path / "joint-0", "joint", 0, tasks=2),
    ]
    (table,) = Tables(page(folders)).headed("Missing")
    assert table == [
        ["Method", "Sampled", "Missing", "Lost", "Late", "Refused", "Dropped", "Counted"],
        ["fedavg", "60± 0", "8± 1.41", "1± 0", "5± 0", "2± 0", "3± 0", "46± 1.41"],
    ]
    assert Tables(text).headed("Missing") == []


def test_the_papers_figures_are_rows_below_the_measured_ones(tmp_path):
    table = {"table": "Table 1", "reading": "task_aware", "columns": ["acc", "acc_std", "fgt"]}
    preset = {"name": "one", "figures": [table | {"rows": {"fot": [90.0, 0.06, 1.75], "ewc": [1, 1, 1]}}]}
    parsed = Tables(page([write_run(tmp_path / "fot", "fot", 0, tasks=2, preset=preset)]))
    accuracy, forgetting = parsed.headed("Avg ↑")[0], parsed.headed("FT ↓")[0]
    for rows, heads in (
        (accuracy, {"ACC ↑": "90.00 ± 0.06"}),
        (forgetting, {"ACC ↑": "90.00 ± 0.06", "FGT ↓": "1.75"}),
    ):
        assert [row[0] for row in rows[:5]] == [
            "Method",
            "Task-aware",
            "fot",
            "paper: fot, Table 1(one)",
            "Task-agnostic",
        ]
        expected = ["paper: fot, Table 1(one)", *([""] if rows is accuracy else ["", ""])]
        assert rows[3] == expected + [heads.get(name, "–") for name in rows[0][len(expected) :]]


def test_readings_of_whole_batches_name_the_batch(tmp_path):
    folder = write_run(tmp_path / "a", "fedprotip", 0, tasks=2, settings={"evaluation": {"batch_size": 48}})
    accuracy = pl.read_parquet(folder / "accuracy.parquet")
    names = {"task_predicted": "paper_task_predicted", "task_aware": "mixed_batch_task_predicted"}
    more = [accuracy.filter(pl.col("reading") == of).with_columns(reading=pl.lit(name)) for of, name in names.items()]
    accuracy = pl.concat([accuracy, *more])
    accuracy.write_parquet(folder / "accuracy.parquet")
    edit("metrics", metrics.summary(accuracy))(folder)
    heads = [row[0] for row in Tables(page([folder])).headed("Avg ↑")[0] if len(row) == 1]
    assert heads == [
        "Task-aware",
        "Task-agnostic",
        "Task predicted",
        "Task predicted, mixed batches (48 a batch)",
        "Task predicted, paper protocol (48 a batch)",
    ]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["task_aware", "task_predicted"], []),
        (["task_predicted", "mixed_batch_task_predicted"], ["mixed-batch: ", "others: per sample", "32 samples"]),
        (["paper_task_aware", "mixed_batch_task_predicted"], ["mixed-batch: ", "paper: batches of one task", "32"]),
    ],
)
def test_whole_batches_are_explained_where_they_are_shown(names, told):
    text = words.by_batch(names, "32")
    assert (text is None) == (told == [])
    assert all(part in text for part in told)
    assert text is None or ("paper:" in text) == ("paper_task_aware" in names)


def monitored(folder, method, seed, rows, **settings):
    folder = write_run(folder, method, seed, tasks=3, settings=settings)
    table(rows).write_parquet(folder / "monitors.parquet")
    return folder


def test_monitors_are_shown_where_a_run_has_them(tmp_path, folders):
    rows = [
        [row("used_share", task, share, layer=name) for task in range(3) for name in ("fc1", "fc2", None)]
        + [row("rho", 2, rho, round) for round, rho in enumerate((0.2, 0.4))]
        + [
            row("beta", 1, 0.5, 0, 0),
            row("beta", 2, 0.125, 0, 0),
            row("beta", 2, beta, 0, 1),
        ]
        + [row("loss_increase", 2, -0.25, about=0), row("loss_increase", 2, 1.5, about=1)]
        + [row("theorem_bound", 2, 8, about=0), row("theorem_bound", 2, bound, about=1)]
        for share, beta, bound in ((0.25, 0.75, 4), (0.75, 0.25, 6))
    ]
    momentum = {"optimizer": {"kind": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.0}}
    watched = [
        monitored(tmp_path / f"fot-{seed}", "fot", seed, of_seed, monitors={"every": seed + 1}, **momentum)
        for seed, of_seed in enumerate(rows)
    ]
    text = page([*folders[3:6], *watched])
    parsed = Tables(text)
    assert parsed.headed("Bound") == [
        [["Old task", "Loss increase", "Bound"], ["1", "−0.25± 0", "8± 0"], ["2", "1.5± 0", "5± 1.41"]]
    ]
    assert ["3", "12", "50"] in [row for rows in parsed.tables for row in rows]  # beta after task 3, in percent
    for point in ("fot, 1: 50.0 ± 35.4", "fot, 3: 30.0 ± 0.0", "fot, 2: 50.0 ± 0.0"):  # used share, rho, beta
        assert f"<title>{point}</title>" in text
    assert text.index("<summary>Each layer") < text.index('aria-label="fc1:') < text.index('aria-label="fc2:')
    assert "Outside of the theorem’s setting: optimizer.momentum: 0.9." in text
    assert "An oracle of the simulation" in text
    assert "fedavg, 1: 50.0" not in text
    legend = text.partition('id="monitors"')[2].partition("</ul>")[0]
    assert re.findall(r"<span>(\w+)</span></a> <span class=\"muted\">\((n = \d)\)", legend) == [("fot", "n = 2")]


def test_conflicts_between_gradients_are_shown_below_zero_and_above_one(tmp_path, folders):
    of_seeds = [
        [row("cosine_clients", 1, cosine, round) for round, cosine in ((0, -0.5), (5, 0.1))]
        + [row("negative_clients", 1, share, 0), row("divergence", 1, 2.5, 0), row("divergence", 2, 4.5, 0)]
        for share in (0.25, 0.75)
    ]
    watched = [monitored(tmp_path / f"fot-{seed}", "fot", seed, rows) for seed, rows in enumerate(of_seeds)]
    text = page([*folders[3:6], *watched])
    Tables(text)
    # Each run's mean over its rounds; cosines and shares in percent, divergence in lengths of the mean.
    for point in ("fot, 2: −20.0 ± 0.0", "fot, 2: 50.0 ± 35.4", "fot, 2: 2.5 ± 0.0", "fot, 3: 4.5 ± 0.0"):
        assert f"<title>{point}</title>" in text
    shown = text.partition("<h3>Conflicts between gradients</h3>")[2].partition("</div>")[0]
    assert "An oracle of the simulation" in shown
    assert re.findall(r'aria-label="([^"]+): [^"]+ against task"', shown) == [
        "Between clients, mean",
        "Between clients, in conflict",
        "Between clients, divergence",
    ]  # nothing was seen of tasks
    cosine, share, divergence = (re.findall(r'text-anchor="end">([^<]+)<', part) for part in shown.split("<svg")[1:])
    assert (cosine[0], cosine[-1]) == ("−20", "0")
    assert (share[0], share[-1]) == ("0", "100")
    assert (divergence[0], divergence[-1]) == ("0", "5")


def test_what_was_seen_round_by_round_is_shown_with_its_bound(tmp_path, folders):
    rows = [row("accuracy", task, 0.5, 5, about) for task in range(3) for about in (*range(task + 1), None)]
    rows += [row("drift", task, task / 2, 5) for task in (1, 2)] + [row("drift_bound", 2, 8, 5)]
    text = page([*folders[3:6], monitored(tmp_path / "fot-0", "fot", 0, rows)])
    parsed = Tables(text)
    assert parsed.headed("Its bound") == [[["Task", "Largest drift", "Its bound"], ["3", "1", "8"]]]
    assert text.index("While task 2 is learned") < text.index("<summary>Later tasks") < text.index("While task 3")
    assert text.count("</details>") == text.count("<details")
    assert "<title>fot, 6: 50.0</title>" in text
    assert "nothing was tuned or stopped by it" in text


def test_runs_that_differ_in_one_setting_make_a_curve(tmp_path, text):
    mus = (0.01, 0.1, 1.0)
    of_mu = [
        write_run(tmp_path / str(mu), "fedprox", tasks=3, settings={"methods": {"fedprox": {"mu": mu}}}) for mu in mus
    ]
    found = page(of_mu)
    Tables(found)
    assert found.count('<g class="dot">') == 3 * 3  # in each reading
    assert 'fedprox, by <span class="mono">methods.fedprox.mu</span>' in found
    assert 'class="dot"' not in text.replace('<span class="dot"', "")
    assert "by one setting" not in page(of_mu[:2])


def test_costs_tell_seconds_a_round_and_rounds_to_best_where_they_are_known(tmp_path, folders):
    watched = write_run(tmp_path / "fot-0", "fot", 0, tasks=3, rounds_to_best=11)
    table = comparison([*folders[3:6], watched])
    rows = {row["method"]: row for row in table.filter(pl.col("reading") == "task_aware").to_dicts()}
    assert (rows["fot"]["rounds_to_best"], rows["fedavg"]["rounds_to_best"]) == (11, None)
    means = [pl.read_parquet(folder / "rounds.parquet")["seconds"].mean() for folder in folders[3:6]]
    assert rows["fedavg"]["seconds_per_round"] == pytest.approx(np.mean(means))
    (costs,) = Tables(page([*folders[3:6], watched])).headed("To best")
    place = costs[0].index("To best")
    assert {cells[0]: cells[place] for cells in costs[1:]} == {"fedavg": "–", "fot": "11"}
    assert "To best" not in page(folders[3:6])


def test_without_monitors_the_page_does_not_speak_of_them(text):
    assert "onitor" not in text
    assert "oracle" not in text


@pytest.mark.parametrize(
    "wrong",
    [
        row("rho", 3, 0.5),
        row("beta", 1, 0.5, 0, -1),
        row("rho", 0, float("nan")),
        row("rho", 0, None),
    ],
)
def test_monitors_that_cannot_be_are_refused(wrong, tmp_path):
    folder = monitored(tmp_path / "fot-0", "fot", 0, [wrong])
    with pytest.raises(UserError, match=r"monitors\.parquet: has impossible values\. Delete"):
        read_run(folder)


def test_settings_that_differ_are_told_from_common_ones(tmp_path):
    folders = [
        write_run(tmp_path / str(mu), "fedprox", 0, tasks=2, settings={"methods": {"fedprox": {"mu": mu}}})
        for mu in (0.5, 2)
    ]
    differing = Tables(page(folders)).headed("Setting")[0]
    assert differing == [["Setting", "fedprox (mu=0.5)", "fedprox (mu=2)"], ["methods.fedprox.mu", "0.5", "2"]]


HOSTILE = "</td><script>alert('x')</script>\"&{{ 7 * 7 }}"


def test_nothing_from_a_file_becomes_markup(tmp_path):
    folder = write_run(tmp_path / "<b>run", "fedavg", 0, tasks=2, rounds=2)
    rewrite(
        "ledger.parquet", lambda t: t.with_columns(part=pl.lit(HOSTILE), kind=pl.lit(HOSTILE), least=pl.lit(HOSTILE))
    )(folder)
    rewrite("accuracy.parquet", lambda t: t.with_columns(reading=pl.lit(HOSTILE)).unique(["after", "task", "client"]))(
        folder
    )
    edit(
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
    text = page([folder])
    assert text.count("<script") == 1
    assert "<b>run" not in text
    assert "&lt;script&gt;alert(" in text
    assert "{{ 7 * 7 }}" in text


def test_the_same_runs_give_the_same_bytes(folders, text):
    assert page(folders) == text


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
    text = page([folder])
    assert len(text) < 250_000
    loss = max(re.findall(r'class="line" d="([^"]+)"', text), key=len)
    assert loss.count(",") <= 120


# charts and figures


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 12))
def test_ticks_are_few_round_and_inside(low, span, most):
    high = low + span
    found = ticks(low, high, most)
    assert len(found) <= most
    assert found == sorted(set(found))
    assert all(low - 1e-6 * span <= tick <= high + 1e-6 * span for tick in found)


@given(st.floats(1e-3, 1e6))
def test_ticks_above_start_at_zero_and_cover(high):
    found = ticks_above(high)
    assert found[0] == 0
    assert found[-1] >= high
    assert found[-1] - (found[1] - found[0]) <= high
    assert 2 <= len(found) <= 6


def test_known_ticks():
    assert ticks(1, 5, most=10) == [1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5]
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert ticks_above(2.04) == [0, 0.5, 1, 1.5, 2, 2.5]
    assert ticks_above(0) == [0, 1]


def test_a_line_keeps_its_place_and_breaks_where_values_are_missing():
    line = Series(2, "fot", [1, 2, 3, 4], [100.0, 0.0, None, 50.0], [0.0, 50.0, None, None])
    curve = line_chart("t", [line], "x", "y", [0, 50, 100]).curves[0]
    third = (RIGHT - LEFT) / 3
    assert curve.path == f"M{LEFT:.1f},{TOP:.1f} L{LEFT + third:.1f},{BOTTOM:.1f} M{RIGHT:.1f},{(TOP + BOTTOM) / 2:.1f}"
    # the band is cut at the plot's edge: 100 +- 0, then 0 +- 50 reaches from 50 down to 0
    middle = (TOP + BOTTOM) / 2
    right = LEFT + third
    assert (
        curve.band
        == f"M{LEFT:.1f},{TOP:.1f} L{right:.1f},{middle:.1f} L{right:.1f},{BOTTOM:.1f} L{LEFT:.1f},{TOP:.1f} Z"
    )
    assert [mark.text for mark in curve.marks] == ["fot, 1: 100.0 ± 0.0", "fot, 2: 0.0 ± 50.0", "fot, 4: 50.0"]


@pytest.mark.parametrize(
    ("function", "value", "shown"),
    [
        (percent, 0.1234, "12.3"),
        (percent, -0.05, "−5.0"),
        (percent, -0.0001, "0.0"),
        (percent, 1.0, "100.0"),
        (points, 0.126, "+13"),
        (points, -0.126, "−13"),
        (points, -0.001, "0"),
        (points, 0.1, "+10"),
        (number, -0.0123456, "−0.0123"),
        (number, 12345.6, "12,346"),
        (number, 2e6, "2e+06"),
        (size, 0, "0"),
        (size, 8, "8 B"),
        (size, 999.9, "1 kB"),
        (size, 102_400, "102 kB"),
        (size, 3_456_789_012_345, "3.46 TB"),
        (duration, 41.26, "41.3 s"),
        (duration, 180, "3.0 min"),
        (duration, 9000, "2.5 h"),
    ],
)
def test_figures_read_as_a_person_writes_them(function, value, shown):
    assert function(value) == shown


def test_page_shows_differences_seed_by_seed_from_three_seeds_on(tmp_path):
    folders = [tmp_path / f"{method}-{seed}" for seed in range(3) for method in ("fedavg", "fedprox")]
    for folder in folders:
        method, seed = folder.name.split("-")
        write_run(folder, method=method, seed=int(seed))
    assert "Seed by seed" in page(folders)
    assert "Seed by seed" not in page(folders[:4])


@pytest.mark.browser
def test_a_click_or_a_key_on_a_columns_head_sorts_the_rows(browser, tmp_path, folders):
    preset = {
        "name": "one",
        "figures": [{"table": "T", "reading": "task_aware", "columns": ["acc"], "rows": {"fot": [1]}}],
    }
    path = tmp_path / "index.html"
    write_page([*folders[3:], write_run(tmp_path / "fot-0", "fot", 0, tasks=3, preset=preset)], path)
    rows = {row["method"]: row["acc"] for row in comparison([*folders[3:], tmp_path / "fot-0"]).head(3).to_dicts()}
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
