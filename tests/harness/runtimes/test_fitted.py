"""An engine sees only shapes of its profiles, and answers of any shape equal the model's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.harness.contract import Contract, TensorSpec
from optimizer.harness.errors import BundleError, InputError
from optimizer.harness.runtimes.fitted import FittedRunner
from optimizer.harness.runtimes.ort.run import OrtRunner
from tests.harness import small_model

ONE = [{"batch": [2, 4, 4], "sequence": [6, 8, 16]}]
TWO = [{"batch": [1, 1, 1], "sequence": [1, 8, 8]}, {"batch": [4, 8, 8], "sequence": [6, 8, 16]}]


class Narrow:
    """Model that refuses shapes outside its profiles, as an engine does."""

    def __init__(self, runner: OrtRunner, profiles: list[dict[str, list[int]]]) -> None:
        self._runner, self._profiles = runner, profiles
        self.inputs, self.outputs = runner.inputs, runner.outputs
        self.decoder, self.close = runner.decoder, runner.close
        self.asked: list[tuple[int, int]] = []

    def infer(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        rows, tokens = arrays["input_ids"].shape
        self.asked.append((rows, tokens))
        for p in self._profiles:
            inside = p["batch"][0] <= rows <= p["batch"][2]
            if inside and p["sequence"][0] <= tokens <= p["sequence"][2]:
                return self._runner.infer(arrays)
        raise InputError(f"{rows} x {tokens}", where="profile")


def arrays(rows: int, tokens: int) -> dict[str, Any]:
    rng = np.random.default_rng(rows * 100 + tokens)
    mask = np.ones((rows, tokens), np.int64)
    mask[-1, max(tokens // 2, 1) :] = 0
    return {"input_ids": rng.integers(1, 40, (rows, tokens)), "attention_mask": mask}


@pytest.mark.parametrize("profiles", [ONE, TWO], ids=["one", "two"])
def test_every_shape_gives_the_models_answer(
    profiles: list[dict[str, list[int]]], tmp_path: Path
) -> None:
    contract = Contract.from_json(small_model.contract())
    with OrtRunner(small_model.model(tmp_path / "m.onnx"), threads=1) as model:
        fitted = FittedRunner(Narrow(model, profiles), contract, profiles)
        for rows in range(1, 10):
            for tokens in (1, 2, 5, 6, 9, 16):
                given = arrays(rows, tokens)
                wanted = model.infer(given)["last_hidden_state"]
                got = fitted.infer(given)["last_hidden_state"]
                assert got.shape == wanted.shape
                real = given["attention_mask"].astype(bool)
                np.testing.assert_allclose(got[real], wanted[real], atol=1e-6)


def test_a_longer_text_than_every_profile_is_refused_by_the_engine(tmp_path: Path) -> None:
    contract = Contract.from_json(small_model.contract())
    with OrtRunner(small_model.model(tmp_path / "m.onnx"), threads=1) as model:
        fitted = FittedRunner(Narrow(model, ONE), contract, ONE)
        with pytest.raises(InputError, match="2 x 17"):
            fitted.infer(arrays(2, 17))


def test_an_output_the_contract_does_not_name_is_refused_at_once(tmp_path: Path) -> None:
    contract = Contract.from_json(small_model.contract())
    with OrtRunner(small_model.model(tmp_path / "m.onnx"), threads=1) as model:
        narrow = Narrow(model, ONE)
        narrow.outputs = [*narrow.outputs, "pooled"]
        with pytest.raises(BundleError, match="does not name: pooled"):
            FittedRunner(narrow, contract, ONE)


def test_nothing_is_padded_or_split_that_need_not_be(tmp_path: Path) -> None:
    contract = Contract.from_json(small_model.contract())
    with OrtRunner(small_model.model(tmp_path / "m.onnx"), threads=1) as model:
        narrow = Narrow(model, TWO)
        fitted = FittedRunner(narrow, contract, TWO)
        fitted.infer(arrays(1, 3))
        fitted.infer(arrays(8, 7))
        fitted.infer(arrays(2, 3))
        assert narrow.asked == [(1, 3), (8, 7), (4, 6)]


def test_images_are_padded_along_the_batch_alone() -> None:
    seen: list[tuple[int, ...]] = []

    class Engine:
        outputs = ("logits",)

        def infer(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
            seen.append(arrays["pixel_values"].shape)
            return {"logits": arrays["pixel_values"].sum((1, 2, 3))[:, None]}

    contract = Contract(
        "image-classification",
        (TensorSpec("pixel_values", "float32", ("batch", 3, 4, 4)),),
        (TensorSpec("logits", "float32", ("batch", 1)),),
        input_kind="image",
        labels=("one",),
    )
    engine: Any = Engine()
    images = np.random.default_rng(0).standard_normal((5, 3, 4, 4)).astype(np.float32)
    logits = FittedRunner(engine, contract, ONE).infer({"pixel_values": images})["logits"]
    assert seen == [(4, 3, 4, 4), (2, 3, 4, 4)]
    np.testing.assert_array_equal(logits[:, 0], images.sum((1, 2, 3)))
