"""What the server knows: a value that can be saved, and the only state a run has besides clients' memories."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fclmodels.backbones.spec import ModelSpec
from fclmodels.state import Tree


@dataclass(frozen=True)
class Server:
    """The global model after `task` (-1: none yet) and a method's own knowledge, a tree of tensors and JSON.

    refused: how often the replies of which client were refused.
    """

    spec: ModelSpec
    weights: dict[str, Tensor]
    task: int = -1
    knowledge: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)

    def to_tree(self) -> Tree:
        kept = {name: getattr(self, name) for name in ("weights", "task", "knowledge")}
        return {"spec": self.spec.to_json(), **kept, **({"refused": self.refused} if self.refused else {})}

    @classmethod
    def from_tree(cls, tree: Tree) -> "Server":
        """ValueError, LookupError or TypeError where the tree is no server's."""
        server = cls(**{**tree, "spec": ModelSpec.from_json(tree["spec"])})
        whole = all(isinstance(weight, Tensor) for weight in server.weights.values())
        counts = all(type(count) is int for count in (server.task, *server.refused.values()))
        if not (whole and counts and isinstance(server.knowledge, dict)):
            raise ValueError("a server has weights, the number of a task and knowledge by name")
        return server
