"""The limitless task pool: each client has its own sequence of tasks, two may never share one (STAMP sec. 2.1, E.1).

A client's sequence is its own random order of all classes, cut into tasks; with `recurring` each task is drawn anew
from all classes, so that a class may come again, with its images divided anew. How a class's images reach the clients
that meet it is the partition's choice: `class-share` with eta 1 and shared samples gives everyone all of them, as the
release does; every other way gives an image to one client, of a class that does not recur for good.
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
        recurring: bool = Field(False, description="draw each task from all classes, so that a class may come again")

    settings: Settings

    def lay_out(self, samples: SampleTable, clients: int) -> Layout:
        tasks, width, classes = self.settings.tasks, self.settings.classes_per_task, len(samples.classes)
        if self.settings.recurring and width > classes:
            raise UserError(f"stream.classes_per_task: {width}, the source has {classes} classes. Use fewer.")
        if not self.settings.recurring and tasks * width > classes:
            raise UserError(
                f"stream: {tasks} tasks of {width} classes need {tasks * width} classes, the source has {classes}. "
                f"Use stream.tasks: {classes // width} or fewer, or fewer classes a task."
            )
        sequences = np.stack([self._draw_sequence(client, classes) for client in range(clients)])
        planned = tuple(_plan_task(t, sequences[:, t]) for t in range(tasks))
        if self.settings.recurring:
            return Layout(planned, tuple(_plan_pool(samples, t, task) for t, task in enumerate(planned)))
        pool = Pool(
            "the task pool",
            np.arange(len(samples.labels)),
            tuple(range(classes)),
            invert_sequences(sequences, classes),
            key=0,
            promised=True,
        )
        return Layout(planned, (pool,))

    def _draw_sequence(self, client: int, classes: int) -> np.ndarray:
        """Return a client's classes by task [tasks, width]."""
        tasks, width = self.settings.tasks, self.settings.classes_per_task
        random = self.make_generator("sequence", client)
        if self.settings.recurring:
            return np.stack([random.permutation(classes)[:width] for _ in range(tasks)])
        return random.permutation(classes)[: tasks * width].reshape(tasks, width)


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


def _plan_pool(samples: SampleTable, t: int, task: PlannedTask) -> Pool:
    """Return the samples of a task's classes, for the clients that meet them then."""
    assert task.classes_by_client is not None
    rows = task.classes_by_client.values()
    task_of = np.array([[t if c in own else -1 for c in task.classes] for own in rows])
    return Pool(f"task {t} ({task.name})", samples.find_rows(task.classes), task.classes, task_of, key=t, promised=True)
