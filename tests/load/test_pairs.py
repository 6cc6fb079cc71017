"""CLIP and SigLIP: the vectors of each side, and labels that load encodes, are transformers'."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from optimizer.export.reference import lend
from optimizer.foundation.errors import CheckpointError, RecipeError
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.errors import BundleError
from optimizer.load import text_inputs
from optimizer.load.config import image_processor
from optimizer.load.providers import pairs
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.recipe.answers import ZeroShot, check
from optimizer.validate.ledger.laws import answer_fields, answer_laws
from tests import vision
from tests.conftest import heavy_tailed, write_tokenizer
from tests.load.conftest import Load, edit_json
from tests.vision import picture

LABELS = ("a good film", "bad food", "the phone")
ZERO_SHOT, FEATURES = "zero-shot-image-classification", "image-feature-extraction"
PICTURES = [picture(30 + i, 40, seed=i) for i in range(3)]
PIXELS = [np.asarray(image) for image in PICTURES]


def write(folder: Path, kind: str) -> Path:
    """A random pair with a tokenizer of words and its image processor."""
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    folder.mkdir()
    shape: dict[str, Any] = {"intermediate_size": 64, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "hidden_size": 32}
    text = {**shape, "vocab_size": write_tokenizer(folder), "max_position_embeddings": 64}
    text |= {"projection_dim": 16, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    image = {**shape, "image_size": 32, "patch_size": 8}
    if kind == "clip":
        config: Any = transformers.CLIPConfig(
            text_config=text, vision_config=image, projection_dim=16
        )
        model: Any = transformers.CLIPModel(config)
        reader: Any = CLIPImageProcessorPil(
            size={"shortest_edge": 36}, crop_size={"height": 32, "width": 32}
        )
    else:
        edit_json(folder / "tokenizer_config.json", model_input_names=["input_ids"])
        both = transformers.SiglipConfig(text_config=text, vision_config=image)
        model = transformers.SiglipModel(both)
        reader = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            values = heavy_tailed(tuple(parameter.shape), i, 0.15)
            gain = parameter.ndim == 1 and "norm" in name and name.endswith("weight")
            parameter.copy_(values + 1 if gain else values + 2 if "logit" in name else values)
    model.save_pretrained(folder)
    reader.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pairs")
    return {kind: write(root / kind, kind) for kind in ("clip", "siglip")}


def answered(loaded: Path, inputs: list[Any]) -> Any:
    """(contract, the harness's values of inputs, its answers), of the checkpoint in torch."""
    contract = contracts.read(loaded / "contract.json")
    encoder = tasks.look_up(contract).inputs.open(loaded / "checkpoint", contract)
    batch = tasks.encode(contract, encoder, inputs)
    model, name = (
        load_torch_model(open_checkpoint(loaded), contract.task),
        tasks.look_up(contract).output,
    )
    with torch.no_grad():
        output = model(**{n: torch.from_numpy(a) for n, a in batch.items()})[name].numpy()
    values = tasks.decode(contract, {name: output}, batch)
    return contract, values, tasks.build_answers(contract, values, batch)


def images(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    reader = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return reader(images=PICTURES, return_tensors="pt")


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_the_vectors_of_images_are_those_of_the_pair(
    load: Load, folders: dict[str, Path], kind: str
) -> None:
    from transformers import AutoModel

    _, values, _ = answered(load(folders[kind], FEATURES), PIXELS)
    with torch.no_grad():
        model = AutoModel.from_pretrained(folders[kind])
        expected = model.get_image_features(**images(folders[kind])).pooler_output.numpy()
    np.testing.assert_allclose(values, expected, atol=2e-5)


PADDED = {"clip": {"padding": True}, "siglip": {"padding": "max_length", "max_length": 64}}
SIDES = {"clip": "CLIPTextModelWithProjection", "siglip": "SiglipTextModel"}


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_the_vectors_of_texts_are_those_of_the_pair_and_of_one_side(
    load: Load, folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    import transformers

    side, texts = tmp_path / "side", [*LABELS, "good " * 80]
    getattr(transformers, SIDES[kind]).from_pretrained(folders[kind]).save_pretrained(side)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[kind])
    tokenizer.save_pretrained(side)
    batch = tokenizer(texts, truncation=True, return_tensors="pt", **PADDED[kind])
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        model = transformers.AutoModel.from_pretrained(folders[kind])
        expected = model.get_text_features(**batch).pooler_output.numpy()
    for folder in (folders[kind], side):
        _, values, _ = answered(load(folder, "sentence-embedding"), texts)
        np.testing.assert_allclose(values, expected, atol=2e-5)


def test_a_side_of_texts_that_reads_its_padding_is_read_at_one_length(
    load: Load, folders: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="padded to 64 tokens"):
        load(folders["siglip"], "sentence-embedding", max_length=32)
    left = Path(shutil.copytree(folders["siglip"], tmp_path / "left"))
    edit_json(left / "tokenizer_config.json", padding_side="left")
    with pytest.raises(CheckpointError, match="pads on the left"):
        load(left, "sentence-embedding")
    edit_json(
        left / "tokenizer_config.json",
        padding_side="right",
        model_input_names=["input_ids", "attention_mask"],
    )
    with pytest.raises(CheckpointError, match="would hide the padding"):
        load(left, "sentence-embedding")
    contract = contracts.read(load(folders["siglip"], "sentence-embedding") / "contract.json")
    assert Contract.from_json(contract.to_json()) == contract
    with pytest.raises(BundleError, match="padded_to"):
        replace(contract.text, max_length=32)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_labels_are_chosen_as_by_transformers_pipeline(
    load: Load,
    folders: dict[str, Path],
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoImageProcessor, pipeline

    chosen = ZeroShot(candidate_labels=LABELS)
    loaded = load(folders[kind], ZERO_SHOT, zero_shot=chosen)
    assert "8 images have the logits of transformers'" in capsys.readouterr().err
    contract, values, answers = answered(loaded, PIXELS)
    reader = AutoImageProcessor.from_pretrained(folders[kind], backend="pil")
    judge = pipeline(ZERO_SHOT, model=str(folders[kind]), image_processor=reader)
    reference = answer_laws.ReferencePipeline(contract, loaded / "checkpoint")
    for image, row, one in zip(PICTURES, values, answers, strict=True):
        listed = judge(image, candidate_labels=list(LABELS))
        assert one["label"] == listed[0]["label"]
        scores = {n["label"]: pytest.approx(n["score"], rel=1e-4) for n in listed}
        assert one["scores"] == scores
        expected = answer_laws.EXPECTED[ZERO_SHOT](reference, image, row, None)  # type: ignore[arg-type]
        assert not list(answer_fields.differ(one, expected))
        assert list(answer_fields.differ({**one, "score": one["score"] * 1.01}, expected))


@pytest.mark.parametrize(("kind", "place"), [("clip", 0), ("siglip", 0), ("siglip", 1)])
def test_labels_that_are_encoded_otherwise_are_refused(
    load: Load,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    place: int,
) -> None:
    right = pairs._encode_labels

    def wrong(*given: Any) -> Any:
        parts = list(right(*given))
        parts[place] = parts[place] * 1.001
        return parts

    monkeypatch.setattr(pairs, "_encode_labels", wrong)
    with pytest.raises(CheckpointError, match="in transformers "):
        load(folders[kind], ZERO_SHOT, zero_shot=ZeroShot(candidate_labels=LABELS))


def test_texts_and_images_that_are_read_otherwise_are_refused(
    load: Load,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load(folders["siglip"], "sentence-embedding")
    load(folders["siglip"], "image-text-embedding")
    told = capsys.readouterr().err
    assert "5 texts have the vectors of transformers' siglip_text_model" in told
    assert "8 images have the vectors of transformers' siglip_vision_model" in told
    monkeypatch.setattr(text_inputs, "_padded_to", lambda *_: None)
    with pytest.raises(CheckpointError, match=r"text \d gets the vector .* in transformers"):
        load(folders["siglip"], "sentence-embedding")
    right = image_processor.read_settings
    monkeypatch.setattr(
        image_processor, "read_settings", lambda *given: replace(right(*given), rescale=1 / 256)
    )
    with pytest.raises(CheckpointError, match=r"image \d gets the vector .* in transformers"):
        load(folders["siglip"], "image-text-embedding")


def test_what_a_pair_does_not_give_is_refused_with_what_it_does(
    load: Load, folders: dict[str, Path], tmp_path: Path
) -> None:
    import transformers

    with pytest.raises(CheckpointError, match="image-classification does not read the vector"):
        load(folders["clip"], "image-classification")
    both = "image-text-embedding"
    with pytest.raises(CheckpointError, match="'vit' has no side of texts"):
        load(vision.write(tmp_path / "vit"), both)
    images_alone = transformers.CLIPVisionModelWithProjection
    images_alone.from_pretrained(folders["clip"], projection_dim=16).save_pretrained(
        tmp_path / "side"
    )
    with pytest.raises(CheckpointError, match="its texts need the other side"):
        load(tmp_path / "side", both)
    with pytest.raises(RecipeError, match="two labels or more"):
        load(folders["clip"], ZERO_SHOT, zero_shot=ZeroShot(candidate_labels=("one",)))
    long = ZeroShot(candidate_labels=("one", "good " * 80))
    with pytest.raises(RecipeError, match="more than the 64 tokens"):
        load(folders["clip"], ZERO_SHOT, zero_shot=long)
    with pytest.raises(ValueError, match="zero_shot is missing"):
        check(tasks.find_task(ZERO_SHOT), (), ())


def test_an_output_layer_that_attention_does_not_call_has_its_weights() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    values = {n: p.detach() for n, p in attention.named_parameters()}
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        expected = attention(x, x, x)[0]
        lend(attention.to("meta"), values)
        assert torch.equal(attention(x, x, x)[0], expected)
