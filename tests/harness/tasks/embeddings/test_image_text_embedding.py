"""Images and texts get transformers' vectors of their side, of unit length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.errors import BundleError, InputError
from optimizer.harness.tasks.answering import Answered, Predictor, Query, answer
from optimizer.harness.tasks.embeddings import image_or_text, image_text_embedding
from optimizer.load.stage import STAGE
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.recipe.schema import Model
from tests.load.test_pairs import LABELS, PADDED, PIXELS, images, write

TASK = image_text_embedding.TASK.name
MIXED = [LABELS[0], PIXELS[0], PIXELS[1], *LABELS[1:], PIXELS[2], "good " * 80]


@pytest.fixture(scope="module", params=["clip", "siglip"])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pair, and its two sides as load writes them."""
    root = tmp_path_factory.mktemp(request.param)
    model = Model(source=str(write(root / "pair", request.param)), task=TASK)
    for name, section in (("images", model), ("texts", model.of_texts)):
        (root / name).mkdir()
        STAGE.run(section, out=root / name)
    return root


@pytest.fixture(scope="module")
def predictor(pair: Path) -> Predictor:
    contract, texts = (contracts.read(pair / n / "contract.json") for n in ("images", "texts"))
    sides = [
        load_torch_model(open_checkpoint(pair / n), c.task)
        for n, c in (("images", contract), ("texts", texts))
    ]

    def infer(batch: Any) -> dict[str, Any]:
        with torch.no_grad():
            output = sides["input_ids" in batch](
                **{n: torch.from_numpy(a) for n, a in batch.items()}
            )
        return {"last_hidden_state": output.last_hidden_state.numpy()}

    tokenizer = tasks.look_up(texts).inputs.open(pair / "texts" / "checkpoint", texts)
    return Predictor(replace(contract, texts=texts), tokenizer, infer)


def ask(predictor: Predictor, inputs: list[Any], batch_size: int = 8) -> list[Answered]:
    queries = [Query(f"line {i}", one) for i, one in enumerate(inputs)]
    return list(answer(predictor, queries, batch_size))


def expected(pair: Path) -> dict[int, Any]:
    """{place in MIXED: transformers' vector}."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(pair / "pair")
    places = [i for i, one in enumerate(MIXED) if isinstance(one, str)]
    texts = AutoTokenizer.from_pretrained(pair / "pair")(
        [MIXED[i] for i in places], truncation=True, return_tensors="pt", **PADDED[pair.name[:-1]]
    )
    texts.pop("token_type_ids", None)
    with torch.no_grad():
        read = model.get_text_features(**texts).pooler_output
        seen = model.get_image_features(**images(pair / "pair")).pooler_output
    others = [i for i in range(len(MIXED)) if i not in places]
    vectors = zip([*places, *others], torch.cat([read, seen]), strict=True)
    return {i: (vector / vector.norm()).numpy() for i, vector in vectors}


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_each_input_of_a_mixed_list_gets_the_vector_of_its_side(
    pair: Path, predictor: Predictor, batch_size: int
) -> None:
    right = expected(pair)
    for i, one in enumerate(ask(predictor, MIXED, batch_size)):
        assert one.answer is not None
        np.testing.assert_allclose(one.answer["embedding"], right[i], atol=2e-6)
        assert one.truncated == (i == len(MIXED) - 1)


def test_a_text_that_has_no_token_does_not_stop_the_images(predictor: Predictor) -> None:
    empty, image = ask(predictor, ["", PIXELS[0]])
    assert "no token" in str(empty.error)
    assert image.answer == ask(predictor, [PIXELS[0]])[0].answer


def test_texts_are_refused_without_the_side_that_reads_them(predictor: Predictor) -> None:
    alone = replace(predictor, contract=replace(predictor.contract, texts=None))
    text, image = ask(alone, ["a text", PIXELS[0]])
    assert "this model reads images" in str(text.error)
    assert image.answer is not None
    with pytest.raises(InputError, match="do not share a run"):
        tasks.encode(predictor.contract, predictor.encoder, MIXED)


def test_a_side_of_texts_with_other_vectors_is_refused(predictor: Predictor) -> None:
    contract, texts = predictor.contract, predictor.contract.texts
    assert texts is not None
    image_text_embedding.check_texts(contract, texts, "texts")
    (output,) = texts.outputs
    narrow = replace(output, axes=(*output.axes[:2], 8))
    for other in ({"normalize": False}, {"outputs": (narrow,)}, {"task": "feature-extraction"}):
        with pytest.raises(BundleError, match="texts: "):
            image_text_embedding.check_texts(contract, replace(texts, **other), "texts")
    assert Contract.from_json(contract.to_json()).to_json() == contract.to_json()


def test_a_line_of_predict_is_a_path_or_an_object_with_one_input() -> None:
    assert image_or_text.parse("a photo.jpg") == Path("a photo.jpg")
    assert image_or_text.parse('{"image": "a.png"}') == Path("a.png")
    assert image_or_text.parse('{"text": "a.png"}') == "a.png"
    for line in ('{"text": 1}', "{}", '{"text": "a", "image": "b"}', "{"):
        with pytest.raises(InputError, match="another object"):
            image_or_text.parse(line)
