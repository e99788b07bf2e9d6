"""Embeddings of classes' names: files, drawn rows, and the features of an encoder."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from fclmodels.data.label_embeddings import draw_embeddings, embed_labels, read_embeddings, write_embeddings
from fclmodels.errors import UserError
from fclmodels.optional.transformers import import_transformers
from fclmodels.storage import trees


def test_drawn_rows_have_the_scale_and_the_angles_of_the_releases() -> None:
    """Of LANDER's file for CIFAR-100: mean square 0.184, cosine 0.78, 0.080 between classes."""
    rows = draw_embeddings(0, 40)
    assert rows.square().mean().item() == pytest.approx(0.184, rel=0.1)
    unit = rows / rows.norm(dim=1, keepdim=True)
    pairs = (unit @ unit.T)[~torch.eye(40, dtype=torch.bool)]
    assert pairs.mean().item() == pytest.approx(0.78, abs=0.03)
    assert torch.pdist(rows).square().mean().item() / 512 == pytest.approx(0.080, rel=0.05)
    assert torch.equal(draw_embeddings(0, 60)[:40], rows)  # more classes change no earlier one
    assert not torch.equal(draw_embeddings(1, 40), rows)


def test_a_file_gives_its_rows_by_name_or_says_what_it_lacks(tmp_path: Path) -> None:
    file, rows = tmp_path / "names.safetensors", torch.arange(6.0).view(3, 2)
    write_embeddings(file, ["cat", "dog", "bird"], rows, "A photo of a {}", "clip")
    assert torch.equal(read_embeddings(file, ["bird", "cat"]), rows[[2, 0]])
    with pytest.raises(UserError, match=r"has no embedding of the class bird s\. Did you mean bird\?"):
        read_embeddings(file, ["cat", "bird s"])
    with pytest.raises(UserError, match=r"is not there\. fcl embed-labels makes"):
        read_embeddings(tmp_path / "none", ["cat"])
    for wrong in (
        {"names": ["cat"], "embeddings": rows},
        {"names": ["cat"]},
        {"names": ["cat"], "embeddings": rows[:1] / 0},
    ):
        trees.save(wrong, file)
        with pytest.raises(UserError, match="holds no embeddings of labels"):
            read_embeddings(file, ["cat"])


def test_an_encoder_without_projection_gives_the_mean_of_its_states(encoder: Path, tmp_path: Path) -> None:
    library = import_transformers()
    torch.manual_seed(0)
    model = library.AutoModel.from_config(library.AutoConfig.from_pretrained(encoder)).eval()
    tokenizer = library.AutoTokenizer.from_pretrained(encoder)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ours = embed_labels(tmp_path, ["film", "a_cold_plot"], "the {}")
    with torch.no_grad():
        alone = [
            model(**tokenizer([t], return_tensors="pt")).last_hidden_state for t in ("the film", "the a cold plot")
        ]
    assert_close(ours, torch.cat([states.mean(1) for states in alone]))


def test_a_clip_gives_its_text_features(encoder: Path, tmp_path: Path) -> None:
    library = import_transformers()
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**small, "vocab_size": 21, "eos_token_id": 3, "bos_token_id": 2}
    config = library.CLIPConfig(text_config=text, vision_config={**small, "image_size": 4, "patch_size": 2})
    torch.manual_seed(0)
    model = library.CLIPModel(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer = library.AutoTokenizer.from_pretrained(encoder)
    tokenizer.save_pretrained(tmp_path)
    ours = embed_labels(tmp_path, ["film", "plot"], "the {}")
    tokens = tokenizer(["the film", "the plot"], return_tensors="pt")
    with torch.no_grad():
        states = model.text_model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        right = model.text_projection(states.pooler_output)
    assert_close(ours, right)
    assert ours.shape == (2, config.projection_dim)


def test_a_folder_without_an_encoder_is_named(encoder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no text encoder"):
        embed_labels(tmp_path / "nothing", ["cat"], "{}")
