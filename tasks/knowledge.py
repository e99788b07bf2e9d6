"""Extraction of a method's knowledge from a learned task, as a Prefect task: bases, prototypes, references."""

from tasks.caching import step_task

conclude = step_task("conclude", "Run the exchanges after the last round of a task.")
