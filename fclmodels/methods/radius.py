"""How far a task may move the model away from the last task's: SPECIAL's `lambda: auto`. Ours; the paper tunes by hand.

SPECIAL's step with lambda_r = ||W~ - W*|| / D - 1 is the projection onto the ball of radius D around W*: lambda is the
multiplier of ||w - W*|| <= D. Forgetting cannot be seen without old data, but D bounds it, and what a smaller D costs
the current task can be seen on its val rows. So D is searched: the smallest at which the val loss L_r of the model that
round r begins with is within a tolerance of the best so far in this task,

    L_r <= L_best + tolerance * (ln C - L_best),

where ln C is the loss of guessing among the C classes of the loss: a share of the information that the model has
gained of a label, so that easy and hard tasks and any number of classes are treated alike.

First there is no anchor (D infinite), until a tenth of the task's rounds has lowered the best loss by no more than that
tolerance: what the task can have is then known. From then on D is the drift d_r of the model that was measured, times
exp(-step) where it is within the tolerance, exp(step) where it is not; as in Rprop (Riedmiller and Braun 1993) the step
grows while the verdict stays the same and is halved when it turns. The last round of a task tries nothing smaller.

What it does not see: of a head that grows, the new classes' rows, which have no anchor and push old classes out of the
answers over all classes; and, where a round samples some clients only, that L_r is of others each time, so that a lucky
round sets L_best. Once a task is learned D then comes out too large, in the end FedAvg's; before, it becomes finite too
early and grows too slowly for what is still to be learned (docs/results/anchors.md, digits).
"""

import math
from dataclasses import dataclass, replace

FIRST_STEP, GROWTH, CUT = 0.1, 1.2, 0.5


@dataclass(frozen=True)
class Search:
    """Where it stands: the losses L_0 to L_r of the task's rounds, and since D is finite the last step and verdict."""

    losses: tuple[float, ...] = ()
    step: float = FIRST_STEP
    within: bool | None = None

    def best(self, but_last: int = 0) -> float:
        return min(self.losses[: len(self.losses) - but_last], default=math.inf)

    def after(self, loss: float, guessing: float, tolerance: float, rounds: int) -> "Search":
        """With one more round's loss."""
        seen = replace(self, losses=(*self.losses, loss))
        slack = tolerance * max(guessing - seen.best(), 0.0)
        if self.within is None and seen.best(but_last=math.ceil(rounds / 10)) - seen.best() > slack:
            return seen
        within = loss <= seen.best() + slack
        turned = within != (self.within is not False)
        return replace(seen, within=within, step=self.step * (CUT if turned else GROWTH))

    def radius(self, drift: float, last: bool) -> float:
        """D for a model that has drifted so far when it was measured; last: in the last round of the task."""
        if self.within is None:
            return math.inf
        if self.within:
            return drift if last else drift * math.exp(-self.step)
        return drift * math.exp(self.step)


def share_within(radius: float, distance: float) -> float:
    """lambda / (1 + lambda), the share of W* with which a model at this distance comes to lie within the radius."""
    return max(0.0, 1 - radius / distance) if distance else 0.0
