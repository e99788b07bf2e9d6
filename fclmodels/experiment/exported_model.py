"""A trained model by itself: the folder `model/` of a run, and its answers to samples of no split.

The folder holds weights.safetensors, spec.json and, where there are, router.safetensors (task prediction),
fitted_head.safetensors (a head that the server has fitted), own_model.json and own_model.safetensors (a model of the
method's own, which answers in place of backbone and heads) and earlier.safetensors (the models of earlier tasks, where
each has its own); serving.json has classes, tasks, normalisation, pixel orders and notes for a person.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, FiniteFloat, PositiveFloat
from torch import Tensor, nn

from fclmodels.backbones.layers.norms import BUFFERS, depends_on_batch, drop_statistics
from fclmodels.backbones.model.network import Network, build_skeleton, find_misfit
from fclmodels.backbones.model.spec import ModelSpec
from fclmodels.data.augment import to_inputs
from fclmodels.data.batches import draw_pixel_order
from fclmodels.data.decoding import MOST_PIXELS, decode
from fclmodels.data.sample_kind import TEXTS, count_channels, find_kind
from fclmodels.errors import UserError
from fclmodels.federation.method import Method
from fclmodels.federation.prediction import Columns, FittedHead, OwnModel, Predictor
from fclmodels.federation.server import Server
from fclmodels.numerics.task_relevance import Router, relevance
from fclmodels.plugins import find
from fclmodels.storage import trees
from fclmodels.storage.sealed_json import refuse_changed, write_json
from fclmodels.storage.untrusted import Text, open_image, read_json, validate

FORMAT = 1
BATCH_SIZE = 256
PERSONAL = "Each client answers with a part of its own (running statistics or head); this model has the server's alone."
PERMUTED = "Pixels are taken as they stand; name the task, and an image in its natural order is put into the task's."
NORMALISED_APART = "Name the task: its data set has a mean and std of its own, and without it those of all are taken."
BY_BATCH = "An answer depends on the other samples that are asked about together with it."

Row = dict[str, Any]


def write_model(method: Method, server: Server, folder: Path) -> dict[str, Tensor]:
    """Write the model that a method ends with; returns its tensors by name."""
    splits, served = method.run.splits, method.serve(server)
    trees.save(served.weights, folder / "weights.safetensors")
    write_json(folder / "spec.json", served.spec.to_json())
    if router := method.make_router(server):
        trees.save(router.to_tree(), folder / "router.safetensors")
    if fitted := method.find_head(server):
        trees.save(fitted.to_tree(), folder / "fitted_head.safetensors")
    if earlier := method.list_earlier_models(server):
        trees.save({"models": earlier}, folder / "earlier.safetensors")
    if own := method.make_own_model(server):
        write_json(folder / "own_model.json", own.spec)
        trees.save(own.weights, folder / "own_model.safetensors")
    by_batch = depends_on_batch(method.networks.load(server.spec, server.weights))
    learned = splits.tasks[: len(server.spec.tasks)]
    permuted = any(task.permutation is not None for task in learned)
    apart = any(task.mean is not None for task in learned)
    notes = {PERSONAL: method.is_personal, BY_BATCH: by_batch, PERMUTED: permuted, NORMALISED_APART: apart}
    facts = {
        "format": FORMAT,
        "method": method.name,
        "classes": splits.classes,
        "tasks": [_ServedTask.model_validate(task, from_attributes=True).model_dump() for task in learned],
        "mean": splits.mean,
        "std": splits.std,
        "smaller": splits.smaller,
        "notes": [note for note, holds in notes.items() if holds],
    }
    write_json(folder / "serving.json", facts)
    return served.weights


class _ServedTask(BaseModel):
    name: Text
    permutation: int | None
    mean: tuple[FiniteFloat, ...] | None = None  # of its pixels, where data sets differ in it
    std: tuple[PositiveFloat, ...] | None = None


class _Serving(BaseModel):
    """Content of serving.json, as far as answers need it."""

    method: Text
    classes: list[Text]
    tasks: list[_ServedTask]
    mean: list[FiniteFloat]
    std: list[PositiveFloat]
    smaller: Literal["resize", "pad"] = "resize"
    notes: list[Text]


class ExportedModel:
    """A model read from its folder, ready to answer."""

    def __init__(self, folder: Path) -> None:
        try:
            self._open(folder)
        except FileNotFoundError as problem:
            raise UserError(f"{folder}: no model of a run here ({Path(problem.filename).name} is missing).") from None
        except Exception as problem:  # files that do not fit each other can raise nearly anything
            if isinstance(problem, UserError):
                raise
            reason = str(problem).strip().partition("\n")[0]
            raise UserError(
                f"{folder} holds no model that can be read ({reason}). Make it again: fcl run."
            ) from problem

    def _open(self, folder: Path) -> None:
        refuse_changed(folder.parent, f"{folder.name}/*")
        facts = validate(_Serving, read_json(folder / "serving.json"))
        self.spec = ModelSpec.from_json(read_json(folder / "spec.json"))
        self.classes, self.notes, self.mean, self.std = facts.classes, facts.notes, facts.mean, facts.std
        self.smaller = facts.smaller
        self.tasks: list[Row] = [task.model_dump() for task in facts.tasks]
        if len(self.tasks) != len(self.spec.tasks) or len(self.classes) < self.spec.label_count:
            raise ValueError("serving.json and spec.json have other tasks or classes")
        if math.prod(self.shape[1:]) > MOST_PIXELS:
            raise ValueError(f"samples of {self.shape} are too large")
        pairs = [(self.mean, self.std), *((t.mean, t.std) for t in facts.tasks if (t.mean, t.std) != (None, None))]
        if any(len(numbers or ()) != count_channels(self.shape) for pair in pairs for numbers in pair):
            raise ValueError("serving.json has not one mean and std for each channel")
        if find_kind(self.shape) is TEXTS and any(task.permutation is not None for task in facts.tasks):
            raise ValueError("the order of pixels is given for texts")
        earlier, router = folder / "earlier.safetensors", folder / "router.safetensors"
        before = trees.load(earlier)["models"] if earlier.exists() else []
        weights = [*before, trees.load(folder / "weights.safetensors")]
        if before and len(weights) != len(self.tasks):
            raise ValueError(f"there are {len(weights)} models for {len(self.tasks)} tasks")
        first = len(self.tasks) - len(before)
        self.networks = [_build_network(_take_first_tasks(self.spec, first + n), w) for n, w in enumerate(weights)]
        device = torch.device("cpu")
        self.columns = Columns.order_by_task(self.spec, device) if before else Columns.of(self.spec, device)
        self.of_task = self.columns.mask_tasks(self.spec.tasks)
        self.router = Router.from_tree(trees.load(router)) if router.exists() else None
        features = self.networks[0].backbone.features
        if self.router and self.router.sizes != (len(self.tasks), features):
            raise ValueError("router.safetensors is of other tasks or features")
        fitted = folder / "fitted_head.safetensors"
        self.fitted_head = FittedHead(**trees.load(fitted)) if fitted.exists() else None
        if self.fitted_head and self.fitted_head.sizes != (len(self.columns.labels), features):
            raise ValueError("fitted_head.safetensors is of other classes or features")
        own = folder / "own_model.json"
        self.own_model = _load_own_model(facts.method, own) if own.exists() else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample, [C, H, W] of an image."""
        return self.spec.shape

    def read_images(self, files: Sequence[Path | str]) -> np.ndarray:
        """Return image files as samples [B, C, H, W]: decoded as by `fcl prepare`, of the model's size."""
        if find_kind(self.shape) is TEXTS:
            raise UserError("this model reads texts, as token ids. It takes arrays of them, no files.")
        return np.stack([_read_image(Path(file), self.shape, self.smaller) for file in files])

    def parse_sample(self, numbers: Any) -> np.ndarray:
        """Return a nested list as a sample; ValueError where a number is not one of its type."""
        array, dtype = np.asarray(numbers), find_kind(self.shape).dtype
        with np.errstate(invalid="ignore"):  # a number outside of the type becomes another one
            typed = array.astype(dtype)
        if (array != typed).any():
            raise ValueError(f"its numbers are not all of {dtype}")
        return typed

    def answer(self, samples: np.ndarray, task: int | None = None) -> list[Row]:
        """Answer each sample, as prepared [B, *shape], by class, probability, task (from 1) and relevance to each task.

        A given task (from 1) puts pixels into its order, and only its classes compete. Else the task is the predicted
        one where the model has a router that is sure, with relevances (FedProTIP eq. 10); else the only one with that
        class.
        """
        kind = find_kind(self.shape)
        if samples.shape[1:] != self.shape or samples.dtype != kind.dtype:
            raise UserError(
                f"samples are {samples.dtype} {list(samples.shape)}. Right: {kind.dtype} [B, "
                f"{', '.join(map(str, self.shape))}]."
            )
        learned = len(self.tasks)
        if task is not None and not 1 <= task <= learned:
            raise UserError(f"task: {task}, and the model has learned {learned}. Right: 1 to {learned}.")
        with torch.inference_mode():
            batches = torch.from_numpy(np.ascontiguousarray(samples)).split(BATCH_SIZE)
            return [row for batch in batches if len(batch) for row in self._answer(batch, task)]

    def _answer(self, samples: Tensor, task: int | None) -> list[Row]:
        inputs = self._prepare_inputs(samples, task)
        features = [network.backbone(inputs) for network in self.networks]
        if self.own_model is not None:
            logits = self.own_model(inputs).logits
        elif len(self.networks) > 1:
            own = [
                network.compute_logits(f, t) for t, (network, f) in enumerate(zip(self.networks, features, strict=True))
            ]
            logits = torch.cat(own, dim=1)
        elif self.fitted_head is not None:
            logits = self.fitted_head.compute_logits(features[0])
        else:
            logits = torch.cat([head(features[0]) for head in self.networks[0].heads], dim=1)
        relevances: list[list[float] | None] = [None] * len(samples)
        routed: Tensor | None = None
        not_routed = torch.zeros(len(samples), dtype=torch.bool)
        if task is not None:
            routed = torch.full((len(samples),), task - 1)
        elif self.router is not None:
            routed = self.router.score_samples(features[0]).argmax(1)
            not_routed = self.router.find_unsure(features[0])
        if self.router is not None:
            relevances = relevance(features[0], self.router.bases).tolist()
        if routed is not None:
            logits = logits.masked_fill(~(self.of_task[routed] | not_routed[:, None]), -torch.inf)
        probabilities, columns = logits.softmax(1).max(1)
        tasks = self._find_only_task(columns)
        if routed is not None:
            tasks = [only if free else int(t) + 1 for only, t, free in zip(tasks, routed, not_routed, strict=True)]
        names = [self.classes[label] for label in self.columns.labels[columns].tolist()]
        values = zip(names, probabilities.tolist(), tasks, relevances, strict=True)
        return [dict(zip(("class", "probability", "task", "relevance"), row, strict=True)) for row in values]

    def _prepare_inputs(self, samples: Tensor, task: int | None) -> Tensor:
        """Return the network's inputs: pixels in a given task's order, normalised by its own mean and std if any."""
        own = {} if task is None else self.tasks[task - 1]
        return to_inputs(self.order_pixels(samples, task), own.get("mean") or self.mean, own.get("std") or self.std)

    def order_pixels(self, samples: Tensor, task: int | None) -> Tensor:
        """Return pixels in the order of a given task, where the stream permutes them."""
        permutation = None if task is None else self.tasks[task - 1]["permutation"]
        if permutation is None:
            return samples
        flat = samples.flatten(2)
        return flat[:, :, draw_pixel_order(permutation, flat.shape[2])].view_as(samples)

    def _find_only_task(self, columns: Tensor) -> list[int | None]:
        """Return the task (from 1) of each answer, None where several tasks share its class."""
        of_task = self.of_task[:, columns]
        only = of_task.sum(0) == 1
        return [int(t) + 1 if alone else None for t, alone in zip(of_task.int().argmax(0), only, strict=True)]


def _build_network(spec: ModelSpec, weights: dict[str, Tensor]) -> Network:
    has_statistics = any(name.endswith("running_mean") for name in weights)
    if tensor := find_misfit(spec, weights, lambda name: not has_statistics and name.endswith(BUFFERS)):
        raise ValueError(f"{tensor!a} does not fit spec.json")
    network = build_skeleton(spec)
    if not has_statistics:
        drop_statistics(network)
    network.load_state_dict(weights)
    return network.eval()


def _take_first_tasks(spec: ModelSpec, count: int) -> ModelSpec:
    return ModelSpec(spec.settings, spec.shape, spec.head, spec.tasks[:count], spec.adapter)


def _read_image(file: Path, shape: tuple[int, ...], smaller: str) -> np.ndarray:
    channels, height, width = shape
    try:
        # Of a damaged file, Pillow's warnings either come with an error or do not concern the pixels.
        with warnings.catch_warnings(action="ignore"), open_image(file) as image:
            return decode(image, (width, height), channels, smaller)
    except FileNotFoundError:
        raise UserError(f"{file}: no such file.") from None
    except Exception as problem:  # on a damaged file a decoder may raise anything
        raise UserError(f"{file} cannot be read as an image ({' '.join(str(problem).split())}).") from problem


def _load_own_model(method: str, file: Path) -> Predictor:
    """Return the predictor of a method's own model, from its spec and the weights beside it."""
    own = OwnModel(read_json(file), trees.load(file.with_suffix(".safetensors")))
    build: Callable[[Mapping[str, Any]], nn.Module] = find("method", method).build_own_model
    return own.load_into(build(own.spec))
