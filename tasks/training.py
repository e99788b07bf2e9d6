"""The federated training of one task of the stream, as Prefect tasks."""

from tasks.caching import step_task

begin = step_task("begin", "Create the state before the first task: the model and the server's knowledge.")
learn = step_task("learn", "Run all rounds of one task, from the last checkpoint if there is one.")
