"""A transformer encoder such as DistilBERT (SPECIAL sec. 5) or MiniLM, built from a local folder's config.json.

Its tensors are named as in the folder's model.safetensors, which `model.weights` may name; what stands there besides
the encoder (a pooler, a language model's head) is passed over. Blocks: `embeddings`, `encoder.layer.0` and so on.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from torch import Tensor, float32, nn

from fclmodels.backbones.base import Backbone, FeatureNet
from fclmodels.errors import UserError
from fclmodels.fingerprint import digest_of_file
from fclmodels.kinds import TEXTS
from fclmodels.settings import BackboneSettings
from fclmodels.transformers_guard import transformers


class Transformer(Backbone):
    """An encoder of texts from a local folder, through the library transformers (extra text)."""

    name = "transformer"
    reads = TEXTS

    class Settings(BackboneSettings):
        folder: Path = Field(Path("data/raw/encoder"), description="folder of the encoder's config.json")
        pooling: Literal["mean", "cls"] = Field(
            "mean", description="features: the mean over a text's last states, or the state of its first token"
        )

    settings: Settings

    def build(self, shape: tuple[int, ...]) -> FeatureNet:
        encoder = self._encoder()
        longest = getattr(encoder.config, "max_position_embeddings", shape[1])
        if shape[1] > longest:
            raise UserError(f"data.length: {shape[1]} tokens are more than the {longest} of {self.settings.folder}.")
        return TransformerNet(encoder, self.settings.pooling)

    def depends_on(self) -> dict[str, str]:
        config = digest_of_file("model.folder", self.settings.folder / "config.json")
        return {**super().depends_on(), "config": config, "transformers": transformers().__version__}

    def _encoder(self) -> Any:
        folder, library = self.settings.folder, transformers()
        if not (folder / "config.json").is_file():
            raise UserError(f"model.folder: {folder} holds no config.json. Name the folder of an encoder.")
        try:
            config = library.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            if config.is_encoder_decoder:
                raise ValueError(f"{config.model_type} is an encoder with a decoder")
            return library.AutoModel.from_config(config, dtype=float32)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            reason = str(problem).strip().partition("\n")[0]
            raise UserError(f"model.folder: {folder}/config.json makes no encoder ({reason}).") from problem


class TransformerNet(FeatureNet):
    """Token ids [B, 2, L] (kinds.py) to features [B, F]: padding is neither attended to nor averaged."""

    def __init__(self, encoder: Any, pooling: str) -> None:
        super().__init__()
        encoder.pooler = None
        # Its children become this network's own, with the names of its files; the whole is kept out of sight.
        self._whole = (encoder,)
        for name, child in encoder.named_children():
            self.add_module(name, child)
        self.features: int = encoder.config.hidden_size
        self.blocks = tuple(_blocks(encoder))
        self.pooling = pooling
        self.segments: int = getattr(encoder.config, "type_vocab_size", 0)

    def forward(self, x: Tensor) -> Tensor:
        longest = max(1, int(x[:, 1].any(0).sum()))
        ids, which = x[..., :longest].long().unbind(1)
        inside = which > 0
        types = {"token_type_ids": (which - 1).clamp(0, self.segments - 1)} if self.segments else {}
        (encoder,) = self._whole
        states: Tensor = encoder(input_ids=ids, attention_mask=inside.long(), **types).last_hidden_state
        if self.pooling == "cls":
            return states[:, 0]
        return (states * inside[..., None]).sum(1) / inside.sum(1, keepdim=True).clamp(min=1)

    def own_names(self, read: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Without the prefix that a model with a head gives them, and what is not of the encoder."""
        (encoder,) = self._whole
        prefix = f"{encoder.base_model_prefix}."
        bare = {name.removeprefix(prefix): tensor for name, tensor in read.items()}
        unsaved = {name for name, _ in self.named_buffers()} - self.state_dict().keys()
        children = tuple(f"{name}." for name, _ in self.named_children())
        return {
            name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias"): tensor
            for name, tensor in bare.items()
            if name.startswith(children) and name not in unsaved
        }


def _blocks(encoder: nn.Module) -> Iterator[str]:
    """Its children with parameters; in place of one that holds a list of layers, these."""
    for name, child in encoder.named_children():
        lists = [(path, found) for path, found in child.named_modules(prefix=name) if isinstance(found, nn.ModuleList)]
        if lists:
            path, layers = lists[0]
            yield from (f"{path}.{index}" for index in range(len(layers)))
        elif next(child.parameters(), None) is not None:
            yield name
