"""Test on examples that a decoder's mask is causal; its nodes change with every exporter.

An operator without a mask input (GroupQueryAttention, paged attention) hides later tokens and the
padding of attention_mask, and nothing else.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from optimizer.lower.onnx.examine import DecoderExamples, evaluate

HIDDEN = -1e30  # upper bound of a mask's value at hidden columns, or half of its type's lowest
NOT_CAUSAL = "its mask is not causal with padding, up to the whole context"


def is_causal(model: ir.Model, mask: ir.Value, context: int) -> bool:
    """Test that `mask`, added to the scores, is 0 at each real column up to the row's own and hides
    all others, up to `context` tokens. A sliding window fails."""
    pads = np.array([[1, 1, 1], [0, 1, 1], [0, 0, 1]])
    continued = np.pad(pads, ((0, 0), (0, 2)), constant_values=1)
    longest = np.ones((1, context), int)
    for past, padding in ((0, pads), (2, continued), (context - 1, longest)):
        inputs = DecoderExamples(model, padding, past)
        bias = np.broadcast_to(evaluate(model, mask, inputs), inputs.causal.shape)
        hidden = max(HIDDEN, float(np.finfo(bias.dtype).min) / 2)
        seen, real = inputs.causal, inputs.padding[:, None, past:, None].astype(bool)
        if not (np.where(seen, bias == 0, bias < hidden) | ~real).all():
            return False
    return True
