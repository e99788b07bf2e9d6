"""The served model against the same answers looked up sample by sample, with and without a router."""

import importlib.util
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mlflow.pyfunc import PythonModel, PythonModelContext

from fclmodels import state
from fclmodels.backbones.network import Network, build
from fclmodels.backbones.spec import ModelSpec
from fclmodels.data.tokens import Tokenizer
from fclmodels.numerics.relevance import Router, relevance
from tasks.tracked_artifacts import SERVED

WORDS = ("good", "bad", "warm", "cold", "not", "a", "plot")
CLASSES = ["ant", "bee", "cat", "dog", "elk"]
IMAGES = np.random.default_rng(0).integers(0, 256, (40, 1, 4, 4), dtype=np.uint8)

SPECS = {
    "growing head": ModelSpec({"backbone": "mlp", "hidden": 8}, (1, 4, 4), "growing", ((0, 1), (2,), (4, 3))),
    "a head a task": ModelSpec({"backbone": "mlp", "hidden": 8}, (1, 4, 4), "per-task", ((0, 1), (2,), (4, 3))),
    "a head a task, the same classes": ModelSpec(
        {"backbone": "mlp", "hidden": 8}, (1, 4, 4), "per-task", ((0, 1, 2, 3, 4), (3, 1, 0), (2, 1))
    ),
}


def router_of(network: Network, tasks: int) -> Router:
    """Each task's references are the relevances of one of the images: so every task is some sample's."""
    features = features_of(network)
    whole = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(1))).Q
    bases = tuple(whole[:, 2 * t : 2 * t + 2] for t in range(tasks))
    references = relevance(features[:tasks], bases)[None]
    return Router(bases, references, torch.ones(1, tasks, dtype=torch.bool))


@torch.inference_mode()
def features_of(network: Network) -> torch.Tensor:
    return network.backbone((torch.from_numpy(IMAGES) / 255 - 0.5) / 0.25)


def folder_of(path: Path, network: Network, router: Router | None) -> PythonModelContext:
    """A model folder as a run leaves it."""
    state.save(dict(network.state_dict()), path / "model" / "weights.safetensors")
    state.write_json(path / "model" / "spec.json", network.spec.to_json())
    if router:
        state.save(router.to_tree(), path / "model" / "router.safetensors")
    state.write_json(path / "stream.json", {"shape": [1, 4, 4], "mean": [0.5], "std": [0.25], "classes": CLASSES})
    artifacts = {"model": str(path / "model"), "stream": str(path / "stream.json")}
    return SimpleNamespace(artifacts=artifacts)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def served() -> PythonModel:
    """From its file, as MLflow loads it."""
    spec = importlib.util.spec_from_file_location("served_by_file", SERVED)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Served()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("routed", [False, True], ids=["no router", "router"])
def test_each_image_gets_the_best_class_of_the_tasks_that_may_answer(
    spec: ModelSpec, routed: bool, served: Any, tmp_path: Path
) -> None:
    network = build(spec, torch.Generator().manual_seed(0)).eval()
    router = router_of(network, len(spec.tasks)) if routed else None
    context = folder_of(tmp_path, network, router)
    served.load_context(context)
    answers = served.predict(context, IMAGES)
    told = set()
    for features, answer in zip(features_of(network), answers, strict=True):
        tasks = [int(router.sample_scores(features[None])[0].argmax())] if router else [*range(len(spec.tasks))]
        with torch.inference_mode():
            logits = {
                (task, label): logit
                for task in tasks
                for label, logit in zip(spec.tasks[task], network.logits(features[None], task)[0].tolist(), strict=True)
            }
        assert answer == CLASSES[max(logits, key=logits.__getitem__)[1]]
        told |= set(tasks)
    assert told == set(range(len(spec.tasks)))


def test_the_answer_to_an_image_does_not_depend_on_the_others(served: Any, tmp_path: Path) -> None:
    network = build(SPECS["growing head"], torch.Generator().manual_seed(0)).eval()
    context = folder_of(tmp_path, network, router_of(network, 3))
    served.load_context(context)
    together = served.predict(context, IMAGES)
    assert [served.predict(context, image[None])[0] for image in IMAGES] == together.tolist()
    assert (served.predict(context, IMAGES[::-1].copy()) == together[::-1]).all()


def test_texts_are_answered_from_their_token_ids(encoder: Path, served: Any, tmp_path: Path) -> None:
    tokenizer = Tokenizer(encoder, 12)
    texts = np.stack([tokenizer([f"the {' '.join(words)} film"]) for words in itertools.permutations(WORDS, 2)])
    torch.manual_seed(0)
    spec = ModelSpec({"backbone": "transformer", "folder": str(encoder)}, (2, 12), "per-task", ((0, 1), (2, 3)))
    network = build(spec, torch.Generator().manual_seed(0)).eval()
    torch.nn.init.normal_(network.get_parameter("backbone.embeddings.word_embeddings.weight"))  # apart from each other
    context = folder_of(tmp_path, network, None)
    state.write_json(tmp_path / "stream.json", {"shape": [2, 12], "mean": [], "std": [], "classes": CLASSES})
    served.load_context(context)
    with torch.inference_mode():
        expected = network(torch.from_numpy(texts)).argmax(1)
    assert len(expected.unique()) > 1
    assert served.predict(context, texts).tolist() == [CLASSES[label] for label in expected.tolist()]
