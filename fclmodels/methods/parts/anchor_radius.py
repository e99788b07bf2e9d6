"""The radius D within which a task may move the model away from the last task's: SPECIAL's `lambda: auto`.

Ours; the paper tunes lambda by hand. SPECIAL's step with lambda_r = ||W~ - W*|| / D - 1 is the projection onto the
ball of radius D around W*: lambda is the multiplier of ||w - W*|| <= D. Forgetting cannot be measured without old data,
but D bounds it, and the cost of a smaller D for the current task can be measured on its val rows. So D is searched: the
smallest at which the val loss L_r of the model at the start of round r is within a tolerance of the task's best so far,

    L_r <= L_best + tolerance * (ln C - L_best),

where ln C is the loss of guessing among the C classes of the loss. The tolerance is thus a share of the information
about labels that the model has gained, so that easy and hard tasks and any number of classes are treated alike.

First there is no anchor (D infinite), until a tenth of the task's rounds has lowered the best loss by no more than that
tolerance: then the best reachable loss is clear. From then on D is the drift d_r of the model whose loss was measured,
times exp(-step) where it is within the tolerance, exp(step) where it is not; as in Rprop (Riedmiller and Braun 1993)
the step grows while the verdict stays the same and is halved when it turns. A task's last round tries nothing smaller.

Where a round samples some of the clients only, each L_r is about other clients, and a lucky round would set L_best: so
special.py smooths losses over as many rounds as reach all of them. One limit: new classes' rows of a growing head have
no anchor by default, and push old classes out of the answers over all classes.
"""

import math
from dataclasses import dataclass, replace

FIRST_STEP, GROWTH, CUT = 0.1, 1.2, 0.5


@dataclass(frozen=True)
class Search:
    """The state of the search in one task."""

    losses: tuple[float, ...] = ()  # L_0 to L_r of the rounds
    step: float = FIRST_STEP
    within: bool | None = None  # whether the last loss was within the tolerance; None: D is still infinite

    def find_best_loss(self, but_last: int = 0) -> float:
        """Return the smallest loss, without the last so many rounds."""
        return min(self.losses[: max(0, len(self.losses) - but_last)], default=math.inf)

    def add_round(self, loss: float, guessing: float, tolerance: float, rounds: float) -> "Search":
        """Return the search after one more round with this loss; guessing: ln C, rounds: of the task."""
        search = replace(self, losses=(*self.losses, loss))
        slack = tolerance * max(guessing - search.find_best_loss(), 0.0)
        if (
            self.within is None
            and search.find_best_loss(but_last=math.ceil(rounds / 10)) - search.find_best_loss() > slack
        ):
            return search
        within = loss <= search.find_best_loss() + slack
        turned = within != (self.within is not False)
        return replace(search, within=within, step=self.step * (CUT if turned else GROWTH))

    def compute_radius(self, drift: float, last: bool) -> float:
        """Return D, given the drift of the model whose loss was measured; last: in the last round of the task."""
        if self.within is None:
            return math.inf
        if self.within:
            return drift if last else drift * math.exp(-self.step)
        return drift * math.exp(self.step)


def share_within(radius: float, distance: float) -> float:
    """Return lambda / (1 + lambda), the share of W* that brings a model at this distance within the radius."""
    return max(0.0, 1 - radius / distance) if distance else 0.0
