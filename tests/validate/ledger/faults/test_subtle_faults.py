"""Faults of a thousandth or a single step: caught at the hop where they are planted, and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.compress.apply.weights import bias_correction
from optimizer.foundation.qtensor import QTensor, to_scale_grid
from optimizer.validate.ledger import hops, ledger
from optimizer.validate.materials import Materials
from tests.validate.ledger.faults import mutations as m
from tests.validate.ledger.faults import subtle_faults as s
from tests.validate.ledger.faults.subtle_faults import CONTEXT, DENSE, QUERY, UP
from tests.validate.runs import Run, damaged

HOPS = {"graph": hops.export, "model": hops.lower}
STATIC = ("static", "tensorrt")


# fault: (the part of the model that must be named, edit, dialects)
LOWERED: dict[str, tuple[str, s.Change, tuple[str, ...]]] = {
    "one channel's weight scale": (
        DENSE, s.weight_scale_of_one_channel(DENSE), (*STATIC, "token")),
    "one group's weight scale": (DENSE, s.scale_of_one_group(DENSE), ("w4", "w4a8")),
    "two channels swapped": (DENSE, s.channels_swapped(DENSE), STATIC),
    "an activation scale": (DENSE, s.activation_scale(DENSE), (*STATIC, "w4a8")),
    "a scale where integers are read back": (
        DENSE, s.scale_of_the_integers_read_back(DENSE), (*STATIC, "w4a8")),
    "a zero point": (DENSE, s.zero_point(DENSE), ("static", "w4a8")),
    "a zero point where integers are read back": (
        DENSE, s.zero_point_of_the_integers_read_back(DENSE), ("static", "w4a8")),
    "an offset by half a step": (DENSE, s.offset_by_half_a_step(DENSE), ("tensorrt",)),
    "ties away from zero": (CONTEXT, s.ties_away_from_zero(CONTEXT), STATIC),
    "saturation one early": (QUERY, s.saturation_one_early(QUERY), (*STATIC, "w4a8")),
    "the largest for the largest magnitude": (
        DENSE, s.largest_for_largest_magnitude(DENSE), ("token",)),
    "127 steps called 128": (DENSE, s.steps_of_128(DENSE), ("token",)),
    "rows scaled back by more": (DENSE, s.rows_scaled_back_by_more(DENSE), ("token",)),
    "the quantized added as the residual": (UP, s.residual_of_the_quantized, STATIC),
}  # fmt: skip
BOTH: dict[str, tuple[str, s.Change]] = {
    "a bias in float16": (DENSE, s.bias_in_float16(DENSE)),
    "one channel's bias by a step": (DENSE, s.bias_of_one_channel_by_a_step(DENSE)),
    "one GELU by tanh": (f"{s.BLOCK}.intermediate", s.gelu_by_tanh),
    "one LayerNorm's epsilon": (s.NORM, s.epsilon_of_one_norm),
    "scores scaled by 1/sqrt(d + 1)": (CONTEXT, s.scores_scaled_for_one_more(s.BLOCK)),
    "two heads swapped": (
        CONTEXT, s.two_heads_swapped(f"{s.BLOCK}.attention.self/Transpose:0")),
    "one padded column seen": (
        "attention.output.dense:input", s.one_padded_column_seen(left=False)),
    "positions off by one": ("encoder.layer.0.attention.self", s.positions_off_by_one),
}  # fmt: skip
CASES = [
    *((name, "model", dialect) for name, (_, _, some) in LOWERED.items() for dialect in some),
    *((name, "model", dialect) for name in BOTH for dialect in STATIC),
    *((name, "graph", "static") for name in BOTH),
]


@pytest.mark.parametrize(("fault", "folder", "dialect"), CASES)
def test_a_subtle_fault_of_a_graph_is_caught_at_its_hop_and_named(
    proven: Callable[[str], Materials], tmp_path: Path, fault: str, folder: str, dialect: str
) -> None:
    part, change = BOTH[fault] if fault in BOTH else LOWERED[fault][:2]
    materials = damaged(proven(dialect), tmp_path, m.edit_onnx(folder, change))
    entry = ledger.run_hop(HOPS[folder], materials)
    assert entry.ok is False
    assert part in entry.problems[0]


def a_step_wider(q: QTensor) -> QTensor:
    """Widen one channel, or one group: scales are on the grid of bfloat16."""
    scale = q.scale.clone()
    scale[3, -1] *= 1.01
    return replace(q, scale=to_scale_grid(scale))


def rows_swapped(q: QTensor) -> QTensor:
    order = [0, 1, 2, 4, 3, *range(5, len(q.integers))]
    return replace(q, integers=q.integers[order], scale=q.scale[order])


def range_of(other: str) -> m.Edit:
    """Give CONTEXT of block 0 another module's range."""
    own = "encoder.layer.0.attention.output.dense:input"
    return m.edit_state(
        lambda state: replace(state, ranges={**state.ranges, own: state.ranges[f"{other}:input"]})
    )


def one_hundredth_more(values: torch.Tensor) -> torch.Tensor:
    return torch.cat([values[:1] * 1.01, values[1:]])


STATES: dict[str, tuple[str, str, str, m.Edit]] = {
    "one channel's scale a step wider": (
        "static", "compress", DENSE, m.weight(DENSE, a_step_wider)),
    "one group's scale a step wider": ("w4", "compress", DENSE, m.weight(DENSE, a_step_wider)),
    "one group's scale a step wider, beside ranges": (
        "w4a8", "compress", DENSE, m.weight(DENSE, a_step_wider)),
    "two rows swapped": ("static", "compress", QUERY, m.weight(QUERY, rows_swapped)),
    "two rows of groups swapped": ("w4", "compress", QUERY, m.weight(QUERY, rows_swapped)),
    "a neighbour's range": (
        "static", "compress", "encoder.layer.0.attention.output.dense",
        range_of("encoder.layer.0.attention.self.key")),
    "a factor not undone in one channel": (
        "smooth", "compress", "encoder.layer.0.attention.self.key",
        m.factor(one_hundredth_more)),
    "a fold not undone in one row": (
        "smooth", "fold", "last_hidden_state",
        m.replaced("value.weight", one_hundredth_more)),
}  # fmt: skip


@pytest.mark.parametrize("fault", STATES)
def test_a_subtle_fault_of_the_state_is_caught_at_its_hop_and_named(
    loaded: Callable[[str], Materials], tmp_path: Path, fault: str
) -> None:
    scheme, hop, part, edit = STATES[fault]
    entry = ledger.run_hop(getattr(hops, hop), damaged(loaded(scheme), tmp_path, edit))
    assert entry.ok is False
    assert part in entry.problems[0]


def test_one_bias_corrected_the_wrong_way_is_caught_at_compress(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    """The correction was subtracted in place of added."""
    run, name = runs["smooth"].copy(tmp_path), f"{UP}.bias"
    folder = run.folder("state")
    added = {n: value.clone() for n, value in bias_correction.read(folder).items()}
    bias_correction.write({**added, name: -added[name]}, folder)
    m.edit_state(
        lambda state: replace(
            state, replaced={**state.replaced, name: state.replaced[name] - 2 * added[name]}
        )
    )(run)
    entry = ledger.run_hop(hops.compress, run.materials())
    assert entry.ok is False
    assert name in entry.problems[0]


NORMALIZERS: dict[str, dict[str, Any]] = {
    "accents kept": {"strip_accents": False},
    "control characters kept": {"clean_text": False},
    "Chinese characters not apart": {"handle_chinese_chars": False},
}


@pytest.mark.parametrize("fault", NORMALIZERS)
def test_another_normalizer_is_caught_at_the_harness(
    runs: dict[str, Run], tmp_path: Path, fault: str
) -> None:
    bundle = m.bundle_of(runs["static"], tmp_path / "bundle")
    m.edit_bundle("tokenizer.json", lambda d: d["normalizer"].update(NORMALIZERS[fault]))(bundle)
    entry = ledger.run_hop(hops.harness, runs["static"].materials(bundle))
    assert entry.ok is False
    assert "input_ids" in entry.problems[0]
