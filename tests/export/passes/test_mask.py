from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from optimizer.export.passes.clean import remove_dead
from optimizer.export.passes.mask import simplify_mask
from tests.export.graphs import answer, graph, operators

MASK = """
g (int64[b, s] mask) => (bool[b, 1, 1, s] y) {
  bit = Cast<to = 9>(mask)
  shape = Shape(mask)
  zero = Constant<value = int64 {0}>()  one = Constant<value = int64 {1}>()
  axis = Constant<value = int64[1] {0}>()  last = Constant<value = int64[1] {-1}>()
  b = Gather(shape, zero)  s = Gather(shape, one)
  rows = Range(START, b, one)  cols = Range(zero, s, one)
  r1 = Constant<value = int64[3] {1, 2, 3}>()  c1 = Constant<value = int64[3] {0, 1, 2}>()
  r = Unsqueeze(rows, r1)  c = Unsqueeze(cols, c1)
  both = Max(r, c)  full = Shape(both)
  re = Expand(r, full)  ce = Expand(c, full)
  ru = Unsqueeze(re, last)  cu = Unsqueeze(ce, last)
  index = Concat<axis = -1>(ru, cu)
  y = GatherND(bit, index)
}"""


def constants_as_initializers(model: ir.Model) -> ir.Model:
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    return model


def test_a_gather_over_all_positions_becomes_unsqueeze() -> None:  # case 1
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    model = constants_as_initializers(graph(MASK.replace("START", "zero")))
    wanted = answer(model, mask=mask)
    simplify_mask(model)
    remove_dead(model)
    assert operators(model) == ["Cast", "Unsqueeze"]
    assert np.array_equal(answer(model, mask=mask), wanted)


def test_a_gather_that_skips_a_row_stays() -> None:
    model = constants_as_initializers(graph(MASK.replace("START", "one")))
    simplify_mask(model)
    assert "GatherND" in operators(model)


@pytest.mark.parametrize(("first", "kept"), [("yes", False), ("no", True)])
def test_and_with_a_constant_goes_only_when_it_is_true(first: str, kept: bool) -> None:  # case 2
    model = constants_as_initializers(
        graph(
            "g (bool[n] m) => (bool[n] y) { yes = Constant<value = bool {1}>() "
            f"no = Constant<value = bool {{0}}>() a = And({first}, m) y = Not(a) }}"
        )
    )
    simplify_mask(model)
    remove_dead(model)
    assert ("And" in operators(model)) is kept
