"""Rewrite a decoder so that OpenVINO holds its KV cache as states of an infer request.

Each pair past_key_values.{i}, present.{i} of the file (inputs/kv_cache.py) becomes a variable of
the model, initially empty and read through `beam_idx` (the row of the last step that each row
continues). The CPU plugin fuses this form with its attention, so that the cache grows in place.
OpenVINO GenAI opens the same form.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from ...errors import BundleError
from ...inputs import kv_cache

ROWS = "beam_idx"
EXPECTED = {"where": "OpenVINO", "accepted": "keys and values of each layer, from layer 0"}


def is_decoder(names: Iterable[str]) -> bool:
    """Return True if any of these input names belongs to a KV cache, which OpenVINO keeps as
    states."""
    return any(map(kv_cache.is_past, names))


def variable(past: str, present: str) -> str:
    """Return the name of the OpenVINO state that joins an input `past` and an output `present`."""
    return past + present


def list_state_pairs(states: Collection[str]) -> list[tuple[str, str]]:
    """Return (past, present) of each state of a model that OpenVINO compiled, in the order of
    kv_cache.names.

    Raises BundleError for states that are not a KV cache.
    """
    names = kv_cache.list_names(len(states) // len(kv_cache.PARTS))
    if {variable(*pair) for pair in names} != set(states):
        raise BundleError(f"the model's states are {', '.join(sorted(states)[:4])}", **EXPECTED)
    return names


def make_stateful(ov: Any, model: Any) -> None:
    """Replace the KV cache inputs and outputs of an ov.Model by states, in place.

    ov: the openvino package

    Raises BundleError if the KV cache is not named as in kv_cache.py.
    """
    from openvino._offline_transformations import apply_make_stateful_transformation

    ops = ov.opset13
    pasts = {str(p.any_name): p for p in model.inputs if kv_cache.is_past(str(p.any_name))}
    outputs = {name for port in model.outputs for name in port.get_names()}
    names = dict(kv_cache.list_names(len(pasts) // len(kv_cache.PARTS)))
    if set(names) != set(pasts) or not set(names.values()) <= outputs:
        raise BundleError(f"the model's KV cache is {', '.join(sorted(pasts)[:4])}", **EXPECTED)
    rows = ops.parameter([-1], ov.Type.i32, name=ROWS)
    rows.output(0).set_names({ROWS})
    model.add_parameters([rows])
    for port in pasts.values():
        readers = port.get_target_inputs()
        continued = ops.gather(port.get_node(), rows, ops.constant(np.int32(0)))
        for reader in readers:
            reader.replace_source_output(continued.output(0))
    model.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(model, names)
    _start_empty(ov, model)
    model.validate_nodes_and_infer_types()


def _start_empty(ov: Any, model: Any) -> None:
    """Let generation start with an empty KV cache: initialize every state in OpenVINO as (rows of
    input_ids, kv_heads, 0, head_dim)."""
    ops = ov.opset13
    shape_of_ids = ops.shape_of(model.input("input_ids"), output_type="i64")
    batch = ops.gather(shape_of_ids, ops.constant(np.array([0])), ops.constant(np.int64(0)))
    for node in model.get_ops():
        if node.get_type_name() != "ReadValue":
            continue
        _, heads, _, width = node.get_output_partial_shape(0)
        sizes = [np.array([n], np.int64) for n in (heads.get_length(), 0, width.get_length())]
        shape = ops.concat([batch, *map(ops.constant, sizes)], axis=0)
        zero = ops.constant(0.0, dtype=node.get_output_element_type(0))
        node.set_arguments([ops.broadcast(zero, shape)])
