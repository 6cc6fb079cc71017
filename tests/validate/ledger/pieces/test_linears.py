"""The reference of each linear module follows the state, the dialect and the kernel."""

from __future__ import annotations

import numpy as np
import torch

from optimizer.foundation.state import Range
from optimizer.validate.ledger.pieces import linears
from optimizer.validate.ledger.pieces.quantizer import compute_reference
from optimizer.validate.ledger.pieces.roundoff import UNIT
from optimizer.validate.materials import Materials
from tests.conftest import heavy_tailed
from tests.validate.ledger.faults.mutations import OUTPUT, QUERY
from tests.validate.runs import Run


def test_both_dialects_have_the_same_integers_a_constant_apart() -> None:
    covered = Range(-0.17, 4.9)
    x = heavy_tailed((50, 64), 1, 1.0).numpy()
    unsigned, signed = (linears.static(covered, None, s, "fp32") for s in (False, True))
    first, second = compute_reference(x, unsigned).integers, compute_reference(x, signed).integers
    clear = np.abs(compute_reference(x, signed).real % 1 - 0.5) > 1e-3  # of a tie
    assert set(np.unique((first - second)[clear])) == {128}


def test_what_stands_before_a_quantizer_is_computed_in_float32() -> None:
    centred, moved = Range(-1.28, 1.27), Range(-0.17, 4.9)
    assert centred.offset == 0
    assert linears.static(centred, None, True, "fp16").unit == UNIT["fp16"]
    assert linears.static(centred, torch.ones(4), True, "fp16").unit == UNIT["fp32"]
    assert linears.static(moved, None, True, "fp16").unit == UNIT["fp32"]


def materials(run: Run, **lowering: str) -> Materials:
    made = run.materials()
    made.__dict__["lowering"] = {**made.lowering, **lowering}
    return made


def test_a_bias_takes_up_what_the_offset_leaves_out(runs: dict[str, Run]) -> None:
    m = materials(runs["static"], dialect="trt_qdq")
    offset = m.state.ranges[f"{OUTPUT}:input"].offset
    assert offset != 0
    weight = m.state.weights[f"{OUTPUT}.weight"].dequantize().double().sum(1).numpy()
    plain = linears.compute_stored_bias(materials(runs["static"]), OUTPUT)
    found = linears.compute_stored_bias(m, OUTPUT)
    assert plain is not None
    assert found is not None
    np.testing.assert_allclose(found, plain + offset * weight, rtol=1e-6)


def test_integer_kernels_sum_exactly_but_for_those_that_ran_in_float(runs: dict[str, Run]) -> None:
    m = runs["static"].materials()
    m.__dict__["inspected"] = {"inspected": {"wider": [QUERY]}}
    fused, written = linears.read_lowered_graph(m, True), linears.read_lowered_graph(m, False)
    assert fused(OUTPUT).product.integer
    assert not fused(QUERY).product.integer
    assert not written(OUTPUT).product.integer


def test_inputs_that_stay_float_have_no_quantizer_but_the_kernels_own_blocks(
    runs: dict[str, Run],
) -> None:
    m = runs["w4"].materials()
    fused, written = linears.read_lowered_graph(m, True), linears.read_lowered_graph(m, False)
    assert fused(OUTPUT).quantizer is None
    assert fused(OUTPUT).product.block == 32
    assert written(OUTPUT).product.block == 0


def test_a_factor_is_undone_in_the_weight(runs: dict[str, Run]) -> None:
    """x factor times the stored weight is x times the float one, but for the integers' steps."""
    m = runs["smooth"].materials()
    linear = linears.read_lowered_graph(m, False)(OUTPUT)
    assert linear.quantizer is not None
    factor = linear.quantizer.factor
    assert factor is not None
    scale = m.state.weights[f"{OUTPUT}.weight"].scale.numpy()
    exact = m.folded_parameters[f"{OUTPUT}.weight"].numpy() / factor
    assert (np.abs(linear.product.weight[:] - exact) <= 0.501 * scale).all()


def test_a_float_graph_holds_parameters_in_its_own_type(runs: dict[str, Run]) -> None:
    m = runs["static"].materials()
    linear = linears.read_float_graph(m)(QUERY)
    assert linear.quantizer is None
    np.testing.assert_array_equal(linear.product.weight, m.parameters[f"{QUERY}.weight"].numpy())


def test_every_token_has_a_step_of_its_own() -> None:
    x = heavy_tailed((20, 64), 2, 1.0).numpy()
    found = compute_reference(x, linears.per_token(None))
    np.testing.assert_allclose(found.step[:, 0], np.abs(x).max(1) / 127, rtol=1e-6)
    assert (np.abs(found.integers - 128).max(1) == 127).all()
