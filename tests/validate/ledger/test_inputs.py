"""The longest text and the batch of many rows catch faults that no other input shows; entries list
the other lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from optimizer.harness import tasks
from optimizer.recipe.schema import Shapes, TensorRTTarget
from optimizer.validate.ledger import hops, inputs, ledger
from optimizer.validate.materials import Materials
from tests.validate.ledger.faults import mutations as m
from tests.validate.ledger.faults.test_mutants import assert_caught
from tests.validate.runs import Run, damage

FAR = 40  # a position that none of the ledger's usual texts reaches


@pytest.fixture(scope="module")
def short(runs: dict[str, Run]) -> Materials:
    """A clean run whose texts are far shorter than what the model takes."""
    made = runs["static"].materials()
    made.texts = [t for t in made.texts if len(t.split()) < 20]
    assert max(b.real.shape[1] for b in made.batches) < FAR < tasks.longest(made.contract)
    return made


def every_later_position_is(position: int) -> Callable[[onnx.GraphProto], None]:
    def change(graph: onnx.GraphProto) -> None:
        node = next(n for n in graph.node if n.name.startswith("embeddings.position_embeddings"))
        graph.initializer.append(numpy_helper.from_array(np.array(position), "last"))
        graph.node.insert(
            list(graph.node).index(node), helper.make_node("Min", [node.input[1], "last"], ["near"])
        )
        node.input[1] = "near"

    return change


def test_the_longest_text_has_as_many_tokens_as_the_model_takes(short: Materials) -> None:
    many, longest = short.extremes
    assert longest.real.shape == (1, tasks.longest(short.contract))
    assert many.rows == inputs.ROWS
    assert len(set(many.real.sum(1))) > 8


@pytest.mark.parametrize("folder", ["graph", "model"])
def test_a_graph_that_reads_one_position_for_all_later_ones_is_caught(
    short: Materials, tmp_path: Path, folder: str
) -> None:
    assert ledger.run_hop(hops.export, short).ok
    made, first = damage(short, tmp_path, m.edit_onnx(folder, every_later_position_is(FAR)))
    assert_caught(made, "export" if folder == "graph" else "lower", first)


def test_an_engine_that_answers_large_batches_otherwise_is_caught(
    short: Materials, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optimizer.validate import target_runner

    fused = target_runner.run_fused

    def careless(*args: Any) -> Any:
        results = fused(*args)
        for one in results:
            for name, array in one.items():
                if len(array) > 8:
                    one[name] = np.concatenate([array[:8], array[:8], array[16:]])
        return results

    monkeypatch.setattr(target_runner, "run_fused", careless)
    assert_caught(short, "engine", first="engine")


def beyond(position: int) -> Callable[[Any], Any]:
    """Leave tokens from this position on out of the pooling."""

    def mask(inputs: Any) -> Any:
        kept = np.array(inputs["attention_mask"])
        kept[:, position:] = 0
        return kept

    return mask


def in_large_batches(inputs: Any) -> Any:
    """Pool padding where there are more than eight rows."""
    mask = inputs["attention_mask"]
    return mask if len(mask) <= 8 else np.ones_like(mask)


@pytest.mark.parametrize("mask", [beyond(FAR), in_large_batches])
def test_pooling_that_goes_wrong_far_out_or_in_large_batches_is_caught_at_the_harness(
    short: Materials, monkeypatch: pytest.MonkeyPatch, mask: Callable[[Any], Any]
) -> None:
    assert ledger.run_hop(hops.harness, short).ok
    decode = tasks.decode

    def careless(contract: Any, outputs: Any, inputs: Any) -> Any:
        return decode(contract, outputs, {**inputs, "attention_mask": mask(inputs)})

    monkeypatch.setattr(tasks, "decode", careless)
    assert_caught(short, "harness", first="engine")


def test_the_entry_lists_the_lengths_and_batches_that_are_not_tested(short: Materials) -> None:
    usual = max(int(b.real.sum(1).max()) for b in short.batches)
    unproven = ledger.run_hop(hops.export, short).unproven
    assert unproven == (
        f"not tested: texts of {usual + 1} to {tasks.longest(short.contract) - 1} tokens; "
        f"batches of more than {inputs.ROWS} texts"
    )


def test_an_engine_of_narrower_profiles_is_asked_what_they_take_and_the_rest_is_listed(
    short: Materials,
) -> None:
    shapes = Shapes(batch=(1, 4, 16), sequence=(4, 16, 50))
    limits = inputs.ExtremeSizes.of(TensorRTTarget(runtime="tensorrt-rtx", shapes=shapes))
    made = inputs.make_extreme_batches(short.texts, short.contract, short.encoder, 1, limits)
    assert [b.real.shape[i] for i, b in enumerate(made)] == [16, 50]
    unseen = inputs.list_untested(short.batches, made, short.contract)
    assert unseen.endswith("texts of 51 to 64 tokens; batches of more than 16 texts")
