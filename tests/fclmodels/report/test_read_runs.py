"""Run folders: which runs are one experiment, and what is refused."""

import numpy as np
import polars as pl
import pytest
from run_folders import (
    SETTINGS,
    change_result,
    change_table,
    cut_short,
    write_confusion,
    write_monitored_run,
    write_run,
)

from fclmodels.errors import UserError
from fclmodels.federation.monitors.rows import make_row
from fclmodels.report.comparison import (
    compare_folders,
)
from fclmodels.report.page import render_page
from fclmodels.report.read_runs import group_runs, read_run, read_runs


def federation_settings(**changed):
    return {"federation": SETTINGS["federation"] | changed}


@pytest.mark.parametrize(
    ("other", "labels"),
    [
        ({}, ["fedprox"]),
        ({"settings": federation_settings(workers=7)}, ["fedprox"]),
        ({"settings": {"partition": SETTINGS["partition"] | {"seed": 5}}}, ["fedprox"]),
        ({"settings": federation_settings(rounds=9)}, ["fedprox (rounds=6)", "fedprox (rounds=9)"]),
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
    group_labels = [group.label for group in group_runs(read_runs([first, second]))]
    if labels is None:
        assert "stream.kind=permuted" in group_labels[1]
        assert "optimizer.kind=adam" in group_labels[1]
    else:
        assert group_labels == labels


def test_the_same_run_twice_is_refused(tmp_path):
    first = write_run(tmp_path / "a", "fedavg", 0)
    second = write_run(tmp_path / "b", "fedavg", 0)
    with pytest.raises(UserError, match=f"{second}: the same method, settings and seed as {first}"):
        compare_folders([first, second])


BROKEN = {
    "unfinished": (lambda folder: (folder / "result.json").unlink(), "{run}: no result.json"),
    "result cut short": (cut_short("result.json"), "{run}/result.json: not JSON, changed or cut short"),
    "result is no text": (lambda f: (f / "result.json").write_bytes(b"\xff\xfe\x00"), "{run}/result.json: not JSON"),
    "result is a list": (lambda f: (f / "result.json").write_text("[]"), "{run}/result.json: format None"),
    "deep result": (lambda f: (f / "result.json").write_text("[" * 100_000), "{run}/result.json: not JSON"),
    "later format": (change_result("format", 2), "{run}/result.json: format 2, this fclflow reads 1"),
    "accuracy not a number": (
        change_result("metrics", {"task_aware": {"acc": "high"}}),
        "{run}/result.json: metrics.task_aware.acc: input should be a valid number",
    ),
    "accuracy NaN": (
        change_result("metrics", {"task_aware": {"acc": float("nan")}}),
        "{run}/result.json: metrics.task_aware.acc",
    ),
    "key missing": (
        change_result(None, lambda r: {k: r[k] for k in r if k != "seed"}),
        "{run}/result.json: seed: field required",
    ),
    "no rounds": (lambda f: (f / "rounds.parquet").unlink(), "{run}: no rounds.parquet"),
    "parquet cut short": (cut_short("accuracy.parquet"), "{run}/accuracy.parquet: not readable"),
    "parquet empty": (lambda f: (f / "ledger.parquet").write_bytes(b""), "{run}/ledger.parquet: not readable"),
    "foreign parquet": (
        change_table("ledger.parquet", lambda t: t.select("task")),
        "{run}/ledger.parquet: not readable or not fclflow's",
    ),
    "foreign type": (
        change_table("ledger.parquet", lambda t: t.with_columns(bytes=pl.lit("many"))),
        "{run}/ledger.parquet: not readable or not fclflow's",
    ),
    "measured twice": (
        change_table("accuracy.parquet", lambda t: pl.concat([t, t.head(1)])),
        "measures the same thing twice",
    ),
    "more right than there are": (
        change_table("accuracy.parquet", lambda t: t.with_columns(correct=pl.col("total") + 1)),
        "{run}/accuracy.parquet: has impossible counts",
    ),
    "negative task": (
        change_table("accuracy.parquet", lambda t: t.with_columns(pl.col("task") - 1)),
        "impossible counts",
    ),
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
        change_result("metrics", {"task_aware": {}, "paper_task_aware": {}}),
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


@pytest.mark.parametrize("names", [[], ["nowhere"]])
def test_no_folders_at_all(names, tmp_path):
    with pytest.raises(UserError, match=r"runs/fedavg-0"):
        render_page([tmp_path / name for name in names])


@pytest.mark.parametrize(
    "wrong",
    [
        make_row("rho", 3, 0.5),
        make_row("beta", 1, 0.5, 0, -1),
        make_row("rho", 0, float("nan")),
        make_row("rho", 0, None),
    ],
)
def test_monitors_that_cannot_be_are_refused(wrong, tmp_path):
    folder = write_monitored_run(tmp_path / "fot-0", "fot", 0, [wrong])
    with pytest.raises(UserError, match=r"monitors\.parquet: has impossible values\. Delete"):
        read_run(folder)
