"""The limitless task pool: each client has its own sequence of tasks, two may never share one (STAMP sec. 2.1, E.1).

A client's sequence is its own random order of all classes, cut into tasks. How a class's images reach the clients
that meet it is the partition's choice: `class-share` with eta 1 and shared samples gives everyone all of them, as the
release does; every other way gives an image to one client for good.
"""

import numpy as np
from pydantic import Field, PositiveInt

from fclmodels.data.streams.base import Layout, PlannedTask, Pool, SampleTable, Stream
from fclmodels.errors import UserError
from fclmodels.settings.schema import StreamSettings


class TaskPool(Stream):
    """each client meets the classes in an order of its own (limitless task pool)"""

    name = "task-pool"

    class Settings(StreamSettings):
        tasks: PositiveInt = Field(5, description="number of tasks that each client goes through")
        classes_per_task: PositiveInt = Field(2, description="classes of a client's task")

    settings: Settings

    def lay_out(self, samples: SampleTable, clients: int) -> Layout:
        tasks, width, classes = self.settings.tasks, self.settings.classes_per_task, len(samples.classes)
        if tasks * width > classes:
            raise UserError(
                f"stream: {tasks} tasks of {width} classes need {tasks * width} classes, the source has {classes}. "
                f"Use stream.tasks: {classes // width} or fewer, or fewer classes a task."
            )
        orders = np.stack([self._draw_sequence(client, classes) for client in range(clients)])
        sequences = orders[:, : tasks * width].reshape(clients, tasks, width)
        pool = Pool(
            "the task pool",
            np.arange(len(samples.labels)),
            tuple(range(classes)),
            invert_sequences(sequences, classes),
            key=0,
            promised=True,
        )
        return Layout(tuple(_plan_task(t, sequences[:, t]) for t in range(tasks)), (pool,))

    def _draw_sequence(self, client: int, classes: int) -> np.ndarray:
        return self.generator("sequence", client).permutation(classes)


def invert_sequences(sequences: np.ndarray, classes: int) -> np.ndarray:
    """Return each class's task [clients, classes], -1 for none, from each task's classes [clients, tasks, width]."""
    clients, tasks, width = sequences.shape
    task_of = np.full((clients, classes), -1)
    np.put_along_axis(task_of, sequences.reshape(clients, -1), np.repeat(np.arange(tasks), width)[None], axis=1)
    return task_of


def _plan_task(t: int, classes: np.ndarray) -> PlannedTask:
    by_client = {client: tuple(int(c) for c in row) for client, row in enumerate(classes)}
    return PlannedTask(
        f"step {t}", tuple(dict.fromkeys(c for row in by_client.values() for c in row)), classes_by_client=by_client
    )
