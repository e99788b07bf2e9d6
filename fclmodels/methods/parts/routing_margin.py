"""The margin from which on a predicted task is worth following, measured on features that clients keep.

A client counts, by the margin of the best task's mean cosine over the next one's, how many of its stored features are
answered right with routing and by all heads. The server takes the least margin at which routing pays over all clients,
and all heads answer samples below it (`tip_reject: calibrated`, ours).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fclmodels.federation.client import Client
from fclmodels.federation.engine.cohort import Cohort
from fclmodels.federation.exchange import Answer, Exchange, Form
from fclmodels.federation.messages import Part, Payload, make_outline
from fclmodels.federation.prediction import Columns
from fclmodels.federation.run_context import Run
from fclmodels.federation.server import Server
from fclmodels.numerics.task_relevance import Router

# Lower ends of the margins by which answers are counted; the first one has everything below the second.
MARGINS = torch.cat([torch.full((1,), -2.0), torch.zeros(1), torch.logspace(-6, 0, 37)]).double()


class RoutingMargin:
    """Asks clients how often routing would be right, and sets a router's least margin by it."""

    def __init__(self, run: Run, rule: str) -> None:
        self.run = run
        self.rule = rule
        self.exchange = Exchange("calibration", self.make_router_payload, self.count_answers, self.make_counts_form)

    def calibrate(self, server: Server, cohort: Cohort, router: Router, clients: Sequence[int]) -> Router:
        """Return the router with the least margin that pays on these clients' stored features."""
        counts = cohort.ask(self.exchange, server, router, clients=clients).sum("right")
        return replace(router, least_margin=find_least_margin(counts["routed"], counts["all"]))

    def make_router_payload(self, server: Server, router: Router) -> Payload:
        tensors = {"references": router.references, "known": router.has_reference.to(torch.uint8)}
        return {
            "weights": Part("weights", server.weights),
            "router": Part("reference", tensors),
            "features": Part("basis", {str(task): basis for task, basis in enumerate(router.bases)}),
        }

    def make_counts_form(self, task: int, round: int) -> Form:
        return {"right": make_outline("count", {"routed": (len(MARGINS),), "all": (len(MARGINS),)}, torch.int64)}

    def count_answers(self, client: Client, payload: Payload) -> Answer:
        """Return how many stored features are answered right with routing and by all heads, by margin [MARGINS]."""
        by_task, tensors = payload["features"].tensors, payload["router"].tensors
        bases = tuple(by_task[str(task)] for task in range(len(by_task)))
        router = Router(bases, tensors["references"], tensors["known"].bool(), self.rule)
        spec, weights = self.run.make_spec(client.task + 1), payload["weights"].tensors
        columns = Columns.of(spec, torch.device("cpu"))
        masks = columns.mask_tasks(task.classes for task in self.run.splits.tasks[: len(bases)])
        right = {name: torch.zeros(len(MARGINS), dtype=torch.int64) for name in ("routed", "all")}
        for task, features in client.memory["features"].items():
            heads = range(len(spec.head_labels))
            logits = torch.cat(
                [features @ weights[f"heads.{head}.weight"].T + weights[f"heads.{head}.bias"] for head in heads], dim=1
            )
            predicted = router.score_samples(features).argmax(1)
            places = torch.bucketize(router.measure_margins(features), MARGINS, right=True).sub(1).clamp(min=0)
            for name, answers in (("routed", logits.masked_fill(~masks[predicted], -torch.inf)), ("all", logits)):
                hits = columns.labels[answers.argmax(1)] == client.memory["labels"][task]
                right[name] += torch.bincount(places[hits], minlength=len(MARGINS))
        return Answer({"right": right}, client.memory)


def find_least_margin(routed: Tensor, by_all: Tensor) -> float:
    """Return the margin from which on routing answers most right, and all heads below, from counts by margin."""
    right = by_all.cumsum(0) - by_all + routed.flip(0).cumsum(0).flip(0)
    return float(MARGINS[int(right.argmax())]) if right.max() > by_all.sum() else 2 * float(MARGINS[-1])
