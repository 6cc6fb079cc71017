"""The attention of a single query."""

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from optimizer.model.checkpoint.one_query import attention


@pytest.mark.parametrize("queries", [1, 5])
def test_attention_is_torchs_own_where_heads_share_keys(queries: int) -> None:
    q, k, v = (torch.randn(2, heads, 5, 8) for heads in (6, 2, 2))
    q = q[:, :, :queries]
    module = nn.Module()
    module.num_key_value_groups = 3  # type: ignore[assignment]
    found, _ = attention(module, q, k, v, None, scaling=0.3)
    wanted, _ = sdpa_attention_forward(module, q, k, v, None, scaling=0.3)
    assert torch.allclose(found, wanted, atol=1e-6)
