"""Requests and answers of the Open Inference Protocol v2 as messages of gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .refusals import RequestError
from .tensors import Array, OutputChoice, Request, checked_type, datatype, from_raw, to_raw

CONTENTS = {  # of InferTensorContents, by datatype; FP16 only comes raw
    "BOOL": "bool_contents",
    **{f"INT{n}": "int_contents" for n in (8, 16, 32)},
    "INT64": "int64_contents",
    **{f"UINT{n}": "uint_contents" for n in (8, 16, 32)},
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def request_of(message: Any) -> Request:
    """What a ModelInferRequest holds. Raises RequestError for tensors that are not as they say."""
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise RequestError(f"{len(raw)} raw_input_contents for {len(message.inputs)} inputs")
    inputs: dict[str, Array] = {}
    for i, tensor in enumerate(message.inputs):
        where = f"inputs[{i}]"
        kind, shape = checked_type(tensor.datatype, list(tensor.shape), where)
        if tensor.name in inputs:
            raise RequestError(f"{where} has the name of another")
        if raw and tensor.HasField("contents"):
            raise RequestError(f"{where} has contents beside raw_input_contents")
        inputs[tensor.name] = (
            from_raw(raw[i], kind, shape, where) if raw else _typed(tensor, kind, shape, where)
        )
    outputs = [OutputChoice(o.name, True) for o in message.outputs] or None
    return Request(inputs, outputs, message.id, _parameters(message.parameters), True)


def _typed(tensor: Any, kind: str, shape: tuple[int, ...], where: str) -> Array:
    """A tensor from its typed contents, by way of its bytes."""
    if kind not in CONTENTS:
        raise RequestError(f"{where} is {kind}, which only comes raw")
    values = list(getattr(tensor.contents, CONTENTS[kind]))
    if kind == "BYTES":
        array = np.empty(len(values), object)
        array[:] = values
    else:
        try:
            array = np.array(values, kind.lower().replace("fp", "float"))
        except OverflowError:
            raise RequestError(f"{where} has numbers that {kind} does not hold") from None
    return from_raw(to_raw(array), kind, shape, where)


def _parameters(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: getattr(value, value.WhichOneof("parameter_choice") or "string_param")
        for key, value in entries.items()
    }


def response_of(kind: Any, message: Any, version: str, outputs: Sequence[tuple[str, Array]]) -> Any:
    """A ModelInferResponse. kind: its class. message: the request. version: that answered."""
    response = kind(model_name=message.model_name, model_version=version, id=message.id)
    for name, array in outputs:
        described = datatype(str(array.dtype))
        response.outputs.add(name=name, datatype=described, shape=array.shape)
        response.raw_output_contents.append(to_raw(array))
    return response
