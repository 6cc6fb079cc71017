"""A decoder in OpenVINO: what its states hold is what the portable model's cache holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from optimizer.harness.errors import BundleError, InputError
from optimizer.harness.inputs import kv_cache
from optimizer.harness.inputs.batch import Array
from optimizer.harness.runtimes.openvino.run import OpenVinoRunner, OpenVinoSettings, write_compiled
from optimizer.harness.runtimes.ort.run import OrtRunner
from tests.harness.tiny_decoder import LAYERS, contract, write_onnx

VOCABULARY = 50
CONTRACT = contract(VOCABULARY)
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_onnx(tmp_path_factory.mktemp("decoder") / "model.onnx", VOCABULARY)


@pytest.fixture(scope="module")
def runner(model: Path) -> OpenVinoRunner:
    return OpenVinoRunner(model, threads=1)


def text(start: int, end: int) -> dict[str, Array]:
    """Columns of two rows of eight tokens, the second padded by three."""
    ids = np.random.default_rng(0).integers(1, VOCABULARY, (2, 8))
    mask = (np.arange(8)[None] >= np.array([[0], [3]])).astype(np.int64)
    seen = mask[:, :end]
    return {
        "input_ids": ids[:, start:end],
        "attention_mask": seen,
        "position_ids": kv_cache.position_ids(seen, end - start),
    }


def real(logits: Array, start: int = 0) -> Array:
    return logits[text(0, 8)["attention_mask"][:, start:].astype(bool)]


def test_a_text_in_pieces_is_the_portable_models_text(model: Path, runner: OpenVinoRunner) -> None:
    with OrtRunner(model, threads=1) as portable:
        expected = portable.decoder(CONTRACT)
        logits = expected.step(text(0, 8))
        decoder = runner.decoder(CONTRACT)
        answers = [decoder.step(text(*piece)) for piece in ((0, 5), (5, 7), (7, 8))]
        np.testing.assert_allclose(real(np.concatenate(answers, 1)), real(logits), **ROUNDING)
        assert decoder.past == 8
        for name, array in decoder.cache().items():
            np.testing.assert_allclose(array[0], expected.cache()[name][0], **ROUNDING)


def test_two_texts_do_not_see_each_other(runner: OpenVinoRunner) -> None:
    first, second = runner.decoder(CONTRACT), runner.decoder(CONTRACT)
    first.step(text(0, 5))
    second.step(text(0, 7))
    alone = runner.decoder(CONTRACT)
    alone.step(text(0, 5))
    assert np.array_equal(first.step(text(5, 8)), alone.step(text(5, 8)))


def test_arrays_in_and_out_are_the_portable_models(model: Path, runner: OpenVinoRunner) -> None:
    with OrtRunner(model, threads=1) as portable:
        assert dict(runner.inputs) == portable.inputs
        assert runner.outputs == portable.outputs
        cache = portable.decoder(CONTRACT)
        cache.step(text(0, 5))
        past = {kv_cache.past_of(name): array for name, array in cache.cache().items()}
        expected, answer = (r.infer({**text(5, 8), **past}) for r in (portable, runner))
        for name in ("logits", *(p for _, p in kv_cache.list_names(LAYERS))):
            np.testing.assert_allclose(answer[name][0], expected[name][0], **ROUNDING)


def test_arrays_given_leave_nothing_behind(runner: OpenVinoRunner) -> None:
    """The request of the last call, whose states are full, serves the next."""
    empty = {
        name: np.zeros((2, *shape), np.float32)
        for name, shape in dict.fromkeys(
            (past for past, _ in kv_cache.list_names(LAYERS)), (2, 0, 16)
        ).items()
    }
    once, again = (runner.infer({**text(0, 8), **empty})["logits"] for _ in range(2))
    assert np.array_equal(once, again)


def test_a_compiled_decoder_continues_as_the_one_it_was_written_from(
    model: Path, runner: OpenVinoRunner, tmp_path: Path
) -> None:
    write_compiled(model, OpenVinoSettings(), 1, tmp_path / "compiled")
    with OpenVinoRunner(model, threads=1, compiled=tmp_path / "compiled") as opened:
        assert opened.inputs == runner.inputs
        steps = [r.decoder(CONTRACT).step(text(0, 8)) for r in (opened, runner)]
        assert np.array_equal(*steps)


def test_a_step_that_does_not_continue_what_is_kept_is_refused(runner: OpenVinoRunner) -> None:
    decoder = runner.decoder(CONTRACT)
    decoder.step(text(0, 5))
    with pytest.raises(InputError, match="attention_mask"):
        decoder.step({**text(5, 8), "attention_mask": text(0, 7)["attention_mask"]})


def test_a_contract_of_other_layers_is_refused(runner: OpenVinoRunner) -> None:
    with pytest.raises(BundleError, match="only one of the two has"):
        runner.decoder(contract(VOCABULARY, layers=LAYERS + 1))
