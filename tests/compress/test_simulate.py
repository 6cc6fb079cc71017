"""A quantized linear computes the same from values and from integers."""

from __future__ import annotations

import pytest
import torch

from optimizer.compress import simulate
from optimizer.compress.methods.weights.rtn import rtn
from optimizer.compress.simulate import QuantLinear
from optimizer.foundation.qtensor import Scheme
from tests.conftest import heavy_tailed


@pytest.mark.parametrize(
    "scheme",
    [Scheme(4, True, "group", 32), Scheme(4, False, "group", 32), Scheme(8, False, "tensor")],
    ids=str,
)
@pytest.mark.parametrize("bias", [None, torch.arange(50.0)])
def test_codes_compute_what_their_values_do(
    scheme: Scheme, bias: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "AT_ONCE", 7 * 96)  # rows that do not divide the outputs
    q = rtn(heavy_tailed((50, 96), seed=1), scheme)
    x = heavy_tailed((3, 5, 96), seed=2)
    held = QuantLinear(q.dequantize(), bias, "token", None)
    coded = QuantLinear(q, bias, "token", None)
    assert not [n for n, p in coded.named_parameters() if p.shape == q.integers.shape]
    assert torch.allclose(coded(x), held(x), rtol=1e-5, atol=1e-4)
    assert torch.equal(coded.weight, held.weight)
    assert (coded.out_features, coded.in_features) == (50, 96)
    with torch.autocast("cpu", torch.bfloat16):
        assert coded(x).dtype == held(x).dtype
