"""A served model against the same answers looked up sample by sample, and against what evaluation counted."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fclmodels.backbones.model.network import Network, build_network
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.data.sample_kind import count_channels
from fclmodels.data.splits.split_reader import Splits
from fclmodels.data.tokens import Tokenizer
from fclmodels.errors import UserError
from fclmodels.experiment.experiment import Experiment
from fclmodels.experiment.exported_model import ExportedModel
from fclmodels.numerics.task_relevance import Router, relevance
from fclmodels.storage import trees
from fclmodels.storage.sealed_json import write_json
from fclmodels.testing.served_answers import compare_with_evaluation

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


def folder_of(path: Path, network: Network, router: Router | None, permutation: int | None = None) -> Path:
    """A model folder as a run leaves it."""
    trees.save(dict(network.state_dict()), path / "weights.safetensors")
    write_json(path / "spec.json", network.spec.to_json())
    if router:
        trees.save(router.to_tree(), path / "router.safetensors")
    tasks = [{"name": f"task {t}", "permutation": permutation} for t in range(len(network.spec.tasks))]
    channels = count_channels(network.spec.shape)
    facts = {
        "method": "fedavg",
        "classes": CLASSES,
        "tasks": tasks,
        "mean": [0.5] * channels,
        "std": [0.25] * channels,
        "notes": [],
    }
    write_json(path / "serving.json", facts)
    return path


def draw_network(spec: ModelSpec) -> Network:
    return build_network(spec, torch.Generator().manual_seed(0)).eval()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("number", [None, 1, 2, 3])
@pytest.mark.parametrize("routed", [False, True], ids=["no router", "router"])
def test_each_image_gets_the_best_class_of_the_tasks_that_may_answer(
    spec: ModelSpec, routed: bool, number: int | None, tmp_path: Path
) -> None:
    network = draw_network(spec)
    router = router_of(network, len(spec.tasks)) if routed else None
    rows, predicted_tasks = ExportedModel(folder_of(tmp_path, network, router)).answer(IMAGES, number), set()
    for features, row in zip(features_of(network), rows, strict=True):
        tasks = [*range(len(spec.tasks))]
        if number or router:
            tasks = [number - 1 if number else int(router.score_samples(features[None])[0].argmax())]  # type: ignore[union-attr]
        with torch.inference_mode():
            logits = {
                (task if spec.head == "per-task" else 0, label): logit
                for task in tasks
                for label, logit in zip(
                    spec.tasks[task], network.compute_logits(features[None], task)[0].tolist(), strict=True
                )
            }
        (task, label), best = max(logits.items(), key=lambda entry: entry[1])
        assert row["class"] == CLASSES[label]
        assert row["probability"] == pytest.approx(np.exp(best) / np.exp([*logits.values()]).sum(), rel=1e-5)
        if number or router:
            assert row["task"] == tasks[0] + 1
        else:  # in a head that tasks share, only the one task that has the class
            owners = [task for task, classes in enumerate(spec.tasks) if label in classes]
            assert row["task"] == 1 + (task if spec.head == "per-task" else owners[0])
        assert row["relevance"] == (
            pytest.approx(relevance(features[None], router.bases)[0].tolist(), abs=1e-6) if router else None
        )
        predicted_tasks |= set(tasks)
    assert predicted_tasks == ({number - 1} if number else set(range(len(spec.tasks))))


def test_a_class_of_several_tasks_that_share_a_head_tells_no_task(tmp_path: Path) -> None:
    network = draw_network(ModelSpec({"backbone": "mlp", "hidden": 8}, (1, 4, 4), "growing", ((0, 1, 2), (2, 1, 0))))
    assert {row["task"] for row in ExportedModel(folder_of(tmp_path, network, None)).answer(IMAGES)} == {None}


def test_the_answer_to_an_image_does_not_depend_on_the_others(tmp_path: Path) -> None:
    network = draw_network(SPECS["growing head"])
    model = ExportedModel(folder_of(tmp_path, network, router_of(network, 3)))
    together = [row["class"] for row in model.answer(IMAGES)]
    assert [model.answer(image[None])[0]["class"] for image in IMAGES] == together
    assert [row["class"] for row in model.answer(IMAGES[::-1])] == together[::-1]


def test_texts_are_answered_from_their_token_ids(encoder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(encoder, 12)
    texts = np.stack([tokenizer([f"the {' '.join(words)} film"]) for words in itertools.permutations(WORDS, 2)])
    torch.manual_seed(0)
    network = draw_network(
        ModelSpec({"backbone": "transformer", "folder": str(encoder)}, (2, 12), "per-task", ((0, 1), (2, 3)))
    )
    torch.nn.init.normal_(network.get_parameter("backbone.embeddings.word_embeddings.weight"))  # apart from each other
    model = ExportedModel(folder_of(tmp_path, network, None))
    with torch.inference_mode():
        expected = network(torch.from_numpy(texts)).argmax(1)
    assert len(expected.unique()) > 1
    assert [row["class"] for row in model.answer(texts)] == [CLASSES[label] for label in expected.tolist()]
    with pytest.raises(UserError, match="reads texts"):
        model.read_images(["film.png"])


def test_a_file_is_decoded_as_it_was_prepared(tmp_path: Path) -> None:
    model = ExportedModel(folder_of(tmp_path, draw_network(SPECS["growing head"]), None))
    Image.fromarray(IMAGES[3, 0]).save(tmp_path / "exact.png")
    Image.fromarray(IMAGES[3, 0].repeat(8, 0).repeat(8, 1)).convert("RGB").save(tmp_path / "large.png")
    exact, large = model.read_images([tmp_path / "exact.png", tmp_path / "large.png"])
    assert (exact == IMAGES[3]).all()
    assert large.shape == (1, 4, 4)
    assert abs(large.astype(int) - IMAGES[3]).mean() < 60


@pytest.mark.parametrize(
    ("samples", "task", "message"),
    [
        (IMAGES.astype(float), None, "Right: uint8 \\[B, 1, 4, 4\\]"),
        (IMAGES[:, :, :3], None, "Right: uint8"),
        (IMAGES, 4, "task: 4, and the model has learned 3. Right: 1 to 3"),
        (IMAGES, 0, "Right: 1 to 3"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    samples: np.ndarray, task: int | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        ExportedModel(folder_of(tmp_path, draw_network(SPECS["growing head"]), None)).answer(samples, task)


def test_what_is_no_model_or_no_image_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no model of a run here \(serving.json is missing\)"):
        ExportedModel(tmp_path)
    model = ExportedModel(folder_of(tmp_path, draw_network(SPECS["growing head"]), None))
    (tmp_path / "text.png").write_text("not an image")
    with pytest.raises(UserError, match=r"text.png cannot be read as an image"):
        model.read_images([tmp_path / "text.png"])
    with pytest.raises(UserError, match=r"there.png: no such file"):
        model.read_images([tmp_path / "there.png"])


def test_a_task_with_a_mean_and_std_of_its_own_is_answered_by_them(tmp_path: Path) -> None:
    """The same as pixels so shifted that the mean and std of all make the same inputs of them."""
    folder = folder_of(tmp_path, draw_network(SPECS["a head a task"]), None)
    plain = ExportedModel(folder)
    serving = json.loads((folder / "serving.json").read_text())
    for task, mean in zip(serving["tasks"], (0.5, 0.5 + 40 / 255, 0.5), strict=True):
        task |= {"mean": [mean], "std": [0.25]}
    write_json(folder / "serving.json", serving)
    apart, images = ExportedModel(folder), IMAGES // 2 + 40
    for task, shift in enumerate((0, 40, 0), start=1):
        answers = (model.answer(pixels, task) for model, pixels in ((apart, images), (plain, images - np.uint8(shift))))
        for one, other in zip(*answers, strict=True):
            assert (one["class"], one["probability"]) == (other["class"], pytest.approx(other["probability"], abs=1e-5))


@pytest.mark.parametrize("name", ["fedavg", "fedprotip", "nearest-prototype", "pip-dualp", "icarl", "ridge"])
def test_a_model_of_permuted_tasks_answers_as_often_right_as_evaluation(
    name: str, experiment_of: Callable[..., Experiment], splits_of: Callable[..., Splits], tmp_path: Path
) -> None:
    splits = splits_of(same_classes=True, permuted=True)
    experiment_of("federation.rounds=1", method=name, splits=splits).run(tmp_path / "run")
    compare_with_evaluation(tmp_path / "run", splits)


def test_what_stays_with_clients_or_hangs_on_the_batch_is_told(
    experiment_of: Callable[..., Experiment], tmp_path: Path
) -> None:
    def notes(policy: str) -> list[str]:
        settings = ("model.backbone=resnet18", "federation.rounds=1", f"methods.fedavg.batch_norm={policy}")
        experiment_of(*settings).run(tmp_path / policy)
        return json.loads((tmp_path / policy / "model" / "serving.json").read_text())["notes"]

    assert notes("average") == []
    assert "Each client answers with a part of its own" in notes("local")[0]
    assert "depends on the other samples" in notes("batch")[0]
