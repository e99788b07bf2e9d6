"""The server's state: a value that can be saved, and the only state of a run besides the clients' memories."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.storage.trees import Tree


@dataclass(frozen=True)
class Server:
    """The global model and what the server knows besides."""

    spec: ModelSpec
    weights: dict[str, Tensor]
    task: int = -1  # the last task that it has begun to learn; -1: none yet
    knowledge: dict[str, Any] = field(default_factory=dict)  # the method's own: a tree of tensors and JSON
    refused: dict[str, int] = field(default_factory=dict)  # how many replies of a client were refused
    networks: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # beside the model (auxiliary_networks.py)

    def to_tree(self) -> Tree:
        """Return the state as a tree that can be written."""
        always = {name: getattr(self, name) for name in ("weights", "task", "knowledge")}
        further = {name: value for name in ("refused", "networks") if (value := getattr(self, name))}
        return {"spec": self.spec.to_json(), **always, **further}

    @classmethod
    def from_tree(cls, tree: Tree) -> "Server":
        """Return the state that a tree holds; raise ValueError, LookupError or TypeError where it holds none."""
        server = cls(**{**tree, "spec": ModelSpec.from_json(tree["spec"])})
        has_weights = all(isinstance(weight, Tensor) for weight in server.weights.values())
        has_counts = all(type(count) is int for count in (server.task, *server.refused.values()))
        if not (has_weights and has_counts and isinstance(server.knowledge, dict)):
            raise ValueError("a server has weights, the number of a task and knowledge by name")
        return server
