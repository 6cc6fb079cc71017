"""Traces hold the inputs and outputs of linear modules as they were when the module ran."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from optimizer.harness.inputs.batch import Batch
from optimizer.validate.ledger import trace

TOKENS, WIDTH, POSITIONS = (2, 3), 4, 5
WINDOW = 8


class Model(nn.Module):
    """A model that adds to a module's output in place, as Falcon does, and projects relative
    positions by the module that projects tokens, as DeBERTa does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("positions", torch.randn(1, POSITIONS, WIDTH))

    def forward(self, hidden: Tensor, attention_mask: Tensor, return_dict: bool) -> Any:
        del return_dict
        projected = self.shared(hidden)
        kept = projected.clone()
        projected += self.shared(self.positions).mean()
        result = SimpleNamespace(first=kept, last=self.last(projected))
        return {**vars(result), "mask": attention_mask}


def batch() -> Batch:
    mask = np.array([[1, 1, 1], [1, 1, 0]])
    hidden = np.random.default_rng(0).standard_normal((*TOKENS, WIDTH)).astype(np.float32)
    arrays = {"hidden": hidden, "attention_mask": mask}
    return Batch(arrays, (), (), real=mask.astype(bool))


def test_what_is_added_later_in_place_is_not_in_a_modules_output() -> None:
    kept = trace.trace_run(Model(), batch(), ("first", "last"), ("shared", "last"))
    assert np.array_equal(kept.outputs["shared", 0], kept.result["first"])
    assert not np.array_equal(kept.inputs["last", 0], kept.result["first"])


def test_rows_that_are_no_tokens_have_no_padding() -> None:
    rows: list[tuple[str, tuple[int, ...]]] = []
    trace.observe(
        Model(), batch(), ("shared", "last"), lambda name, x: rows.append((name, tuple(x.shape)))
    )
    assert rows == [("shared", (5, WIDTH)), ("shared", (POSITIONS, WIDTH)), ("last", (5, WIDTH))]


def test_the_cache_of_a_layer_with_a_window_holds_the_whole_text() -> None:
    config = transformers.MistralConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=WINDOW,
    )
    model = transformers.MistralForCausalLM(config).eval()
    ids = np.arange(WINDOW)[None]
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    answers = trace.run(model, batch, ["logits", "present.0.key"])
    assert answers["present.0.key"].shape[2] == WINDOW
