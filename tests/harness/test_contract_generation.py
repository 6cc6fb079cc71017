"""The contract of a decoder: KV cache, ends of texts, and refused values."""

from typing import Any

import pytest

from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.errors import BundleError
from tests.harness.small_model import GENERATION, contract

INPUTS = contract()["inputs"]


def refused(where: str, **changes: Any) -> None:
    with pytest.raises(BundleError, match=where):
        tasks.check(Contract.from_json(contract("text-generation", **changes)))


def test_a_decoder_may_take_position_ids() -> None:
    positions = {**INPUTS[0], "name": "position_ids"}
    made = Contract.from_json(contract("text-generation", inputs=[*INPUTS, positions]))
    assert tasks.check(made).output == "logits"
    assert made.generation is not None
    assert made.generation.eos_ids == (3, 0)
    refused("inputs", inputs=[*INPUTS, {**INPUTS[0], "name": "token_type_ids"}])


def test_the_generation_document_goes_with_text_generation_alone() -> None:
    refused("generation", generation=None)
    with pytest.raises(BundleError, match="generation"):
        tasks.check(Contract.from_json(contract("sentence-embedding", generation=GENERATION)))


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 0},
        {"head_dim": 1.5},
        {"eos_ids": []},
        {"eos_ids": [GENERATION["vocabulary"]]},
        {"eos_ids": ["</s>"]},
        {"bos_id": -1},
        {"chat_template": ["a"]},
        {"defaults": {"top_z": 1}},
        {"defaults": {"temperature": "hot"}},
        {"defaults": {"do_sample": 1}},
        {"beams": 4},
    ],
)
def test_a_generation_document_that_cannot_be_meant_is_refused(changes: dict[str, Any]) -> None:
    refused(next(iter(changes)), generation={**GENERATION, **changes})


def test_each_key_that_has_no_default_is_needed() -> None:
    for key in ("layers", "kv_heads", "head_dim", "vocabulary", "context", "eos_ids"):
        refused(key, generation={k: v for k, v in GENERATION.items() if k != key})
