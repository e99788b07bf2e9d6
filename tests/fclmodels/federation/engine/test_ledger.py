"""The ledger: real bytes of every part, in an order that does not depend on who answered first."""

from pathlib import Path

import polars as pl
import torch

from fclmodels.federation.engine.journal import Log
from fclmodels.federation.engine.ledger import Ledger, make_ledger_table
from fclmodels.federation.executors.base import Job
from fclmodels.federation.messages import Part, Reply

PAYLOAD = {
    "weights": Part("weights", {"w": torch.ones(10)}),
    "mask": Part("reference", {"m": torch.ones(3, dtype=torch.bool)}),
}


def reply(client: int) -> Reply:
    basis = Part("basis", {"b": torch.ones(client + 1, dtype=torch.float64)}, "each")
    return Reply({"update": Part("update", {"w": torch.ones(10)}), "basis": basis})


def table_of(tmp_path: Path, order: list[int]) -> pl.DataFrame:
    memory = tmp_path / "memory"
    memory.write_bytes(b"x" * 123)
    log = Log(tmp_path / f"{order}.jsonl")
    for round in (0, 1):
        ledger = Ledger(log)
        job = Job("train", 2, round, PAYLOAD, tmp_path)
        ledger.note_payload(job, order)
        for client in order:
            ledger.note_reply(job, client, reply(client))
            ledger.note_memory(job, client, memory if client == 4 else None)
        assert ledger.bytes_down == len(order) * (40 + 3)
        assert ledger.bytes_up == sum(40 + 8 * (client + 1) for client in order)
    return make_ledger_table(log)


def test_every_part_both_ways_is_counted_for_every_client(tmp_path: Path) -> None:
    table = table_of(tmp_path, [1, 4])
    rows = set(table.filter(pl.col("round") == 1).drop("task", "round", "base_round").rows())
    assert rows == {
        (1, "down", "weights", "weights", "-", 40),
        (4, "down", "weights", "weights", "-", 40),
        (1, "down", "mask", "reference", "-", 3),
        (4, "down", "mask", "reference", "-", 3),
        (1, "up", "update", "update", "sum", 40),
        (4, "up", "update", "update", "sum", 40),
        (1, "up", "basis", "basis", "each", 16),
        (4, "up", "basis", "basis", "each", 40),
        (4, "kept", "memory", "memory", "-", 123),
    }
    assert set(table["task"]) == {2}
    assert table["base_round"].null_count() == len(table) == 18


def test_the_table_does_not_depend_on_the_order_of_answers(tmp_path: Path) -> None:
    assert table_of(tmp_path, [0, 4, 9]).equals(table_of(tmp_path, [9, 0, 4]))


def test_exchanges_before_and_after_the_rounds_stand_in_the_order_in_which_they_were(tmp_path: Path) -> None:
    """Whoever asks for the last row of a client gets its last memory."""
    log = Log(tmp_path / "log.jsonl")
    in_time = [-1001, -1002, 0, 1, 2, -1, -2, -3]
    for round in in_time:
        Ledger(log).note_payload(Job("bases", 0, round, PAYLOAD, tmp_path), [0])
    assert make_ledger_table(log)["round"].unique(maintain_order=True).to_list() == in_time


def test_what_is_downloaded_once_a_task_is_not_sent_again_in_its_next_step(tmp_path: Path) -> None:
    once = {"anchor": Part("weights", {"w": torch.ones(5)}, once=True), **PAYLOAD}
    first = Ledger(Log(tmp_path / "learn.jsonl"))
    first.note_payload(Job("train", 1, 0, once, tmp_path), [3, 1])
    held = first.list_holders(once)
    assert held == {"anchor": [1, 3]}
    last = Ledger(Log(tmp_path / "conclude.jsonl"), held)
    last.note_payload(Job("bases", 1, -1, once, tmp_path), [1, 2, 3])
    assert last.bytes_down == 3 * (40 + 3) + 20
    assert last.list_holders(once) == {"anchor": [1, 2, 3]}
