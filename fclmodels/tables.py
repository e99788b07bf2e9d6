"""Columns and types of the tables that a run writes, and the names of the readings of an accuracy."""

import polars as pl

HONEST = ("task_aware", "task_agnostic", "task_predicted")  # of samples whose batches do not tell their task
MIXED_BATCH = "mixed_batch_task_predicted"
PAPER = ("paper_task_aware", "paper_task_agnostic", "paper_task_predicted")  # batches of one task each
# Of clients' own models on the classes that each has had, where the server's model answers too.
PERSONAL = {"task_aware": "personal_task_aware", "task_agnostic": "personal_task_agnostic"}
READINGS = (*HONEST, MIXED_BATCH, *PAPER, *PERSONAL.values())  # in the order in which they are shown

ACCURACY = pl.Schema(
    {
        "reading": pl.String,
        "after": pl.Int16,  # tasks learned
        "task": pl.Int16,
        "client": pl.Int32,  # null: all test samples of the task
        "correct": pl.Int64,
        "total": pl.Int64,
    }
)
CONFUSION = pl.Schema(
    {
        "reading": pl.String,
        "after": pl.Int16,
        "task": pl.Int16,
        "predicted": pl.Int16,
        "count": pl.Int64,
    }
)
ROUNDS = pl.Schema(
    {
        "task": pl.Int16,
        "round": pl.Int32,
        "step": pl.Int32,  # rounds of all tasks before this one
        "clients": pl.Int32,
        "answers": pl.Int32,
        "late": pl.Int32,
        "missing": pl.Int32,
        "lost": pl.Int32,
        "refused": pl.Int32,
        "median": pl.Float64,
        "farthest": pl.Float64,
        "loss": pl.Float64,
        "server_lr": pl.Float64,
        "bytes_up": pl.Int64,
        "bytes_down": pl.Int64,
        "seconds": pl.Float64,
    }
)
LEDGER = pl.Schema(
    {
        "task": pl.Int16,
        "round": pl.Int32,  # -1, -2, ...: exchanges after a task's rounds; -1001, -1002, ...: before them
        "client": pl.Int32,
        "direction": pl.String,
        "part": pl.String,
        "kind": pl.String,
        "least": pl.String,  # of a part that goes up: whether its sum over clients would do, or each one is needed
        "bytes": pl.Int64,
        "base_round": pl.Int32,  # of a late reply, the round that it answers
    }
)
MONITORS = pl.Schema(
    {
        "monitor": pl.String,
        "task": pl.Int16,  # being learned, or just learned where there is no round
        "round": pl.Int32,
        "about": pl.Int16,  # the task whose accuracy, gradient or loss it is
        "layer": pl.String,
        "value": pl.Float64,
    }
)
COSTS = pl.Schema(
    {
        "task": pl.Int16,
        "stage": pl.String,  # the step in which the server trained: learn or conclude
        "work": pl.String,
        "steps": pl.Int64,
        "loss": pl.Float64,  # of the last step
        "seconds": pl.Float64,
        "peak_bytes": pl.Int64,
        "device": pl.String,
        "threads": pl.Int32,
    }
)
