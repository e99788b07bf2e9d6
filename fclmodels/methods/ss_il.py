"""SS-IL+FL: separated softmax in every client by itself, averaged by FedAvg (Ahn et al. 2021).

A batch of new rows goes through the network together with some exemplars, a stream of its own. The loss is

    (sum_new H over the new columns + sum_replayed H over the old ones) / (N + R) + sum_t T^2 KL_t(teacher || student)

H the cross entropy, KL_t inside the columns of one old task t, mean over all N + R samples; the teacher is the last
task's model. Answers are the largest logit of all. A client that has no exemplars yet has the new part alone.

The release stores a class's first samples instead of herding: `selection: random` (by default) is the same, up to their
order. Its learning rate falls as 1/(t+1) with the tasks; federation.server_lr_schedule: 1/t does that to the updates.
"""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from fclmodels.data.batches import Batch
from fclmodels.federation.messages import Payload
from fclmodels.federation.training.local_training import LocalTraining
from fclmodels.methods.parts.joined_heads import list_old_groups, list_task_columns
from fclmodels.methods.parts.rehearsal import LastModel, Rehearsed
from fclmodels.methods.parts.replay_memory import Replay, unpack_samples
from fclmodels.numerics.exemplar_losses import distil_by_task, separated_cross_entropy


class SsIl(Rehearsed):
    """Clients never compare scores of new classes with those of old ones in a softmax."""

    name = "ss-il"
    paper = "SS-IL: Separated Softmax for Incremental Learning"

    class Settings(Rehearsed.Settings):
        selection: Literal["herding", "random"] = Field(
            "random", description="of a class's samples: any (like the release's first ones); herding: near its mean"
        )
        replay: PositiveInt = Field(
            32, le=100_000, description="exemplars beside each batch of new samples; the paper's beside 128"
        )
        temperature: PositiveFloat = Field(2.0, le=1e6, description="T, of the distillation inside each old task")

    settings: Settings

    def equip(self, training: LocalTraining, payload: Payload) -> None:
        if (samples := unpack_samples(training.client.memory)) is not None:
            training.add(Replay(training.client, samples))

    def join_epochs(self, training: LocalTraining) -> Iterator[Iterator[Batch]]:
        return training.client.yield_epochs()

    def compute_loss(self, training: LocalTraining, batch: Batch) -> Tensor:
        if replay := training.find_added(Replay):
            batch = Batch.concatenate([batch, replay.draw(self.settings.replay)])
        logits, labels = self.score(training, batch)
        *_, new = columns = list_task_columns(training.network.spec, logits.device)
        loss = separated_cross_entropy(logits, labels, new)
        if (teacher := training.find_added(LastModel)) is None:
            return loss
        answers = teacher.answer(batch.inputs)[1]
        return loss + distil_by_task(logits, answers, list_old_groups(columns), self.settings.temperature)
