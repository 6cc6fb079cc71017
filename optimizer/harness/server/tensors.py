"""Read and write tensors of the Open Inference Protocol v2 (REST), with the binary extension.

A body is a JSON document. Raw little-endian tensors follow it where the header
Inference-Header-Content-Length gives the length of the document; `parameters.binary_data_size` is
the number of bytes of a raw tensor. An element of BYTES is its length as uint32 and its bytes. In
JSON `data` is row-major, nested or flat; FP16 is only raw.
https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol ;
Triton's extension_binary_data.md
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from ..trust.verify import parse, parse_shallow
from .json_size import check_size
from .options import VALUES
from .refusals import RequestError
from .worker_threads import SMALL

Array = NDArray[Any]
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("bool"),
    **{f"UINT{8 * n}": np.dtype(f"<u{n}") for n in (1, 2, 4, 8)},
    **{f"INT{8 * n}": np.dtype(f"<i{n}") for n in (1, 2, 4, 8)},
    **{f"FP{8 * n}": np.dtype(f"<f{n}") for n in (2, 4, 8)},
    "BYTES": np.dtype(object),
}
NAMES = {str(dtype.newbyteorder("=")): name for name, dtype in DTYPES.items()}
AXES = 8  # maximum axes of a tensor
JSON_NUMBER = 26  # maximum bytes of a number in JSON, with its comma: -2.2250738585072014e-308
CHUNK = 1 << 16  # elements written as JSON at once, about 1 ms in which no other thread runs
Parameters = Mapping[str, Any]


@dataclass(frozen=True)
class OutputChoice:
    """Output that a client's request names.

    binary: True returns raw bytes, False JSON
    """

    name: str
    binary: bool


@dataclass(frozen=True)
class InferRequest:
    """Tensors of a client's request.

    inputs: arrays by name; BYTES as an array of bytes objects
    outputs: outputs to return; None for all
    binary: true for raw outputs where `outputs` is None
    textual: names of inputs that came in JSON, whose BYTES were strings
    """

    inputs: Mapping[str, Array]
    outputs: Sequence[OutputChoice] | None = None
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
    binary: bool = False
    textual: frozenset[str] = frozenset()


def check_once(outputs: Sequence[str]) -> None:
    """Raise RequestError for an output that a request names twice, which would multiply the
    answer."""
    if len(set(outputs)) < len(outputs):
        raise RequestError("an output comes twice in outputs")


def datatype(dtype: str) -> str:
    """Return the Open Inference Protocol's name of a numpy dtype, e.g. FP32 for float32."""
    return NAMES[dtype]


def read(body: bytes, document_length: int | None, values: int = VALUES) -> InferRequest:
    """Read the body of a client's request for inference. Raises RequestError naming the input that
    is wrong.

    document_length: bytes of the JSON where raw tensors follow it; None for JSON alone
    values: maximum values in the JSON
    """
    length = len(body) if document_length is None else document_length
    if not 0 <= length <= len(body):
        raise RequestError(
            f"Inference-Header-Content-Length is {length} and the body has {len(body)} bytes"
        )
    document = read_object(body[:length], values)
    parameters = _parameters(document, "request")
    raw, at = memoryview(body), length
    inputs: dict[str, Array] = {}
    textual = set[str]()
    for i, tensor in enumerate(_list(document, "inputs", "request")):
        name = _name(tensor, f"inputs[{i}]")
        where = f"input '{name}'"
        if name in inputs:
            raise RequestError(f"{where} comes twice")
        size = _parameters(tensor, where).get("binary_data_size")
        if size is None:
            inputs[name] = _from_json(tensor, where)
            textual.add(name)
            continue
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(raw) - at:
            raise RequestError(
                f"{where} has binary_data_size {_show(size)}, and {len(raw) - at} bytes are left"
            )
        inputs[name] = from_raw(bytes(raw[at : at + size]), *_type(tensor, where), where)
        at += size
    if at != len(body):
        raise RequestError(f"{len(body) - at} bytes follow the last tensor")
    binary = parameters.get("binary_data_output", False) is True
    requested = None
    if document.get("outputs"):
        requested = [
            OutputChoice(
                name, _parameters(o, f"output '{name}'").get("binary_data", binary) is True
            )
            for i, o in enumerate(_list(document, "outputs", "request"))
            for name in [_name(o, f"outputs[{i}]")]
        ]
        check_once([o.name for o in requested])
    request_id = document.get("id", "")
    if not isinstance(request_id, str):
        raise RequestError("id is not a string")
    return InferRequest(inputs, requested, request_id, parameters, binary, frozenset(textual))


def write(
    document: Mapping[str, Any], outputs: Sequence[tuple[str, Array, bool]]
) -> tuple[bytes, int | None]:
    """Encode the server's answer: (body, bytes of its JSON if raw tensors follow it, else None).

    document: all fields but `outputs`
    outputs: (name, array, True for raw bytes) of each output
    """
    described, tensors = [], []
    for name, array, binary in outputs:
        kind = datatype(str(array.dtype))
        tensor: dict[str, Any] = {"name": name, "datatype": kind, "shape": list(array.shape)}
        if binary:
            tensors.append(to_raw(array))
            tensor["parameters"] = {"binary_data_size": len(tensors[-1])}
            described.append(tensor)
        elif array.dtype == np.float16:
            raise RequestError(f"output '{name}' is FP16, which is only raw: set binary_data")
        else:
            described.append({**tensor, "data": write_elements(array.reshape(-1))})
    head = write_json({**document, "outputs": described})
    return b"".join([head, *tensors]), len(head) if tensors else None


def answer_bytes(kind: str, count: int, binary: bool) -> int:
    """Return the maximum bytes of `count` elements in a server's answer.

    kind: datatype; of BYTES only the 4-byte lengths of elements are counted
    binary: True for raw bytes, False for JSON
    """
    if kind == "BYTES":
        return 4 * count
    return count * (DTYPES[kind].itemsize if binary else JSON_NUMBER)


def write_json(document: Any) -> bytes:
    """Write the JSON of a server's answer without spaces."""
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def write_elements(flat: Array) -> orjson.Fragment:
    """Write a flat array of a server's answer as a JSON list, CHUNK elements at a time: writing
    blocks other threads.

    Numbers are written as float64, the numbers that `predict` prints.
    """
    if flat.dtype == np.object_:
        return orjson.Fragment(write_json([_as_text(element) for element in flat]))
    if flat.dtype.kind == "f":
        flat = flat.astype(np.float64)
    parts = (flat[i : i + CHUNK] for i in range(0, len(flat), CHUNK))
    return orjson.Fragment(b"[" + b",".join(write_json(part)[1:-1] for part in parts) + b"]")


def _as_text(element: Any) -> Any:
    return element.decode("utf-8", "replace") if isinstance(element, bytes) else element


def from_raw(data: bytes, kind: str, shape: tuple[int, ...], where: str) -> Array:
    """Decode a request's tensor from raw bytes.

    kind: datatype of the protocol
    where: name of the tensor, for errors

    Raises RequestError for bytes that do not match datatype and shape.
    """
    count = prod(shape)
    if kind == "BYTES":
        return _object_array(_elements(data, where, count), shape, where)
    dtype = DTYPES[kind]
    if len(data) != count * dtype.itemsize:
        raise RequestError(
            f"{where} has {len(data)} bytes, and {kind} of shape {list(shape)} has "
            f"{count * dtype.itemsize}"
        )
    if kind == "BOOL" and data.strip(b"\0\1"):
        raise RequestError(f"{where} is BOOL and has bytes other than 0 and 1")
    return np.frombuffer(data, dtype).reshape(shape)


def to_raw(array: Array) -> bytes:
    """Encode a tensor of an answer as raw bytes, as the Open Inference Protocol has them; the
    inverse of `from_raw`."""
    if array.dtype == object:
        return b"".join(struct.pack("<I", len(e)) + e for e in array.reshape(-1))
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


def check_type(kind: object, shape: object, where: str) -> tuple[str, tuple[int, ...]]:
    """Check the datatype and shape of a request's tensor; return them. Raises RequestError for
    others than the protocol has.

    where: name of the tensor, for errors
    """
    if not isinstance(kind, str) or kind not in DTYPES:
        raise RequestError(f"{where} has datatype {_show(kind)}; accepted: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > AXES:
        raise RequestError(f"{where} has a shape that is not a list of at most {AXES} sizes")
    for size in shape:
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 1 << 31:
            raise RequestError(f"{where} has size {_show(size)} in its shape")
    return kind, tuple(shape)


def check_count(elements: int, shape: tuple[int, ...], where: str) -> None:
    """Raise RequestError unless `elements` is the number of elements of a request's tensor of this
    shape."""
    if elements != prod(shape):
        raise RequestError(
            f"{where} has {elements} elements, and its shape {list(shape)} has {prod(shape)}"
        )


def read_object(data: bytes, values: int = VALUES) -> dict[str, Any]:
    """Parse a request's body that must be a JSON object.

    values: maximum values, see json_size.py

    Raises RequestError, whose message repeats no text of the body.
    """
    try:
        if len(data) > SMALL:
            check_size(data, values)
            document = parse_shallow(data.decode("utf-8"))
        else:
            document = parse(data)
    except UnicodeDecodeError as e:
        raise RequestError(f"byte {e.start + 1} of the body is not UTF-8") from None
    except json.JSONDecodeError as e:
        raise RequestError(f"the body is not JSON: {e.msg} at character {e.pos + 1}") from None
    except (ValueError, RecursionError) as e:
        raise RequestError(f"the body is not JSON: {str(e)[:100]}") from None
    if not isinstance(document, dict):
        raise RequestError("the body is not a JSON object")
    return document


def _type(tensor: Mapping[str, Any], where: str) -> tuple[str, tuple[int, ...]]:
    return check_type(tensor.get("datatype"), tensor.get("shape"), where)


def _from_json(tensor: Mapping[str, Any], where: str) -> Array:
    kind, shape = _type(tensor, where)
    if kind == "FP16":
        raise RequestError(f"{where} is FP16, which only comes binary")
    flat = _flatten(tensor.get("data"), where)
    check_count(len(flat), shape, where)
    if kind == "BYTES":
        if not all(isinstance(e, str) for e in flat):
            raise RequestError(f"{where} is BYTES and has elements that are not strings")
        return _object_array([e.encode() for e in flat], shape, where)
    dtype = DTYPES[kind]
    accepted = {"b": (bool,), "f": (int, float)}.get(dtype.kind, (int,))
    if not all(isinstance(e, accepted) and (dtype.kind == "b") == (type(e) is bool) for e in flat):
        raise RequestError(f"{where} is {kind} and has elements of another type")
    try:
        with np.errstate(over="ignore"):  # 1e300 as FP32 is infinite, which is refused later
            return np.array(flat, dtype).reshape(shape)
    except OverflowError:
        raise RequestError(f"{where} has numbers that {kind} does not hold") from None


def _flatten(data: object, where: str) -> list[Any]:
    """Return the elements of nested lists in a request, row by row; json_size.py bounds the
    depth."""
    if not isinstance(data, list):
        raise RequestError(f"{where} has neither data nor binary_data_size")
    while any(isinstance(e, list) for e in data):
        if not all(isinstance(e, list) for e in data):
            raise RequestError(f"{where} mixes lists and elements")
        data = [e for part in data for e in part]
    return data


def _elements(data: bytes, where: str, count: int) -> list[bytes]:
    """Decode the elements of a BYTES tensor in a request. Raises RequestError for more than
    `count`."""
    elements, at = list[bytes](), 0
    while at < len(data):
        if len(elements) == count:
            raise RequestError(f"{where} has more elements than its shape, which has {count}")
        length = int.from_bytes(data[at : at + 4], "little")
        if at + 4 + length > len(data):
            raise RequestError(f"{where}: element {len(elements) + 1} is longer than the tensor")
        elements.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return elements


def _object_array(elements: Sequence[bytes], shape: tuple[int, ...], where: str) -> Array:
    check_count(len(elements), shape, where)
    array = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(shape)


def _list(document: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    value = document.get(key)
    if not isinstance(value, list) or not all(isinstance(e, dict) for e in value):
        raise RequestError(f"'{key}' of {where} is not a list of objects")
    return value


def _name(tensor: Mapping[str, Any], where: str) -> str:
    name = tensor.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= 200:
        raise RequestError(f"the name of {where} is not a string of 1 to 200 characters")
    return name


def _parameters(document: Mapping[str, Any], where: str) -> Parameters:
    value = document.get("parameters", {})
    if not isinstance(value, dict):
        raise RequestError(f"parameters of {where} are not an object")
    return value


def _show(value: object) -> str:
    """Format a number or None for the server's message to a client; other values by type, because
    messages repeat no text."""
    if isinstance(value, int | float) or value is None:
        return str(value)[:40]
    return f"of type {type(value).__name__}"
