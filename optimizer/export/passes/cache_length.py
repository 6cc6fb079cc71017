"""Read the length of the KV cache from the first block's, whichever block the exporter took."""

from __future__ import annotations

import onnx_ir as ir

from optimizer.harness.inputs.kv_cache import is_past


def read_first_cache(model: ir.Model) -> None:
    """Simplify an exported graph: make each Shape of a KV cache input read the first block's cache,
    in place.

    All blocks' caches have one length.
    """
    caches = [v for v in model.graph.inputs if is_past(str(v.name))]
    for value in caches[1:]:
        for user, i in list(value.uses()):
            if user.op_type == "Shape":
                user.replace_input_with(i, caches[0])


def reads_first_cache(model: ir.Model) -> bool:
    """Test that no Shape of the exported graph reads the cache of a later block."""
    caches = [v for v in model.graph.inputs if is_past(str(v.name))]
    return not any(user.op_type == "Shape" for v in caches[1:] for user, _ in v.uses())
