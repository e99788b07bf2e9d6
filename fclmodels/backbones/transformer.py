"""A transformer encoder such as DistilBERT (SPECIAL sec. 5) or MiniLM, built from a local folder's config.json.

Its tensors are named as in the folder's model.safetensors, which `model.weights` may name; what stands there besides
the encoder (a pooler, a language model's head) is skipped. Blocks: `embeddings`, `encoder.layer.0` and so on.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from torch import Tensor, float32, nn

from fclmodels.backbones.base import Backbone, FeatureNet, digest_named_file
from fclmodels.data.sample_kind import TEXTS
from fclmodels.errors import UserError
from fclmodels.optional.transformers import import_transformers
from fclmodels.settings.schema import BackboneSettings


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
        encoder = self._build_encoder()
        longest = getattr(encoder.config, "max_position_embeddings", shape[1])
        if shape[1] > longest:
            raise UserError(f"data.length: {shape[1]} tokens are more than the {longest} of {self.settings.folder}.")
        return TransformerNet(encoder, self.settings.pooling)

    def list_dependencies(self) -> dict[str, str]:
        config = digest_named_file("model.folder", self.settings.folder / "config.json")
        return {**super().list_dependencies(), "config": config, "transformers": import_transformers().__version__}

    def _build_encoder(self) -> Any:
        folder, library = self.settings.folder, import_transformers()
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
    """Token ids [B, 2, L] (sample_kind.py) to features [B, F]: padding is neither attended to nor averaged."""

    def __init__(self, encoder: Any, pooling: str) -> None:
        super().__init__()
        encoder.pooler = None
        # Its children become this network's own, with the names in its file; a tuple hides the encoder from torch.
        self._encoder = (encoder,)
        for name, child in encoder.named_children():
            self.add_module(name, child)
        self.features: int = encoder.config.hidden_size
        self.blocks = tuple(_list_blocks(encoder))
        self.pooling = pooling
        self.segments: int = getattr(encoder.config, "type_vocab_size", 0)

    def forward(self, x: Tensor) -> Tensor:
        longest = max(1, int(x[:, 1].any(0).sum()))
        ids, text_numbers = x[..., :longest].long().unbind(1)
        inside = text_numbers > 0
        types = {"token_type_ids": (text_numbers - 1).clamp(0, self.segments - 1)} if self.segments else {}
        (encoder,) = self._encoder
        states: Tensor = encoder(input_ids=ids, attention_mask=inside.long(), **types).last_hidden_state
        if self.pooling == "cls":
            return states[:, 0]
        return (states * inside[..., None]).sum(1) / inside.sum(1, keepdim=True).clamp(min=1)

    def rename_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the encoder's tensors, without the prefix of a model with a head."""
        (encoder,) = self._encoder
        prefix = f"{encoder.base_model_prefix}."
        bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        unsaved = {name for name, _ in self.named_buffers()} - self.state_dict().keys()
        children = tuple(f"{name}." for name, _ in self.named_children())
        return {
            name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias"): tensor
            for name, tensor in bare.items()
            if name.startswith(children) and name not in unsaved
        }


def _list_blocks(encoder: nn.Module) -> Iterator[str]:
    """Yield the names of its children with parameters; those of the layers for a child with a list of layers."""
    for name, child in encoder.named_children():
        lists = [(path, m) for path, m in child.named_modules(prefix=name) if isinstance(m, nn.ModuleList)]
        if lists:
            path, layers = lists[0]
            yield from (f"{path}.{index}" for index in range(len(layers)))
        elif next(child.parameters(), None) is not None:
            yield name
