"""Convert requests and answers of the Open Inference Protocol v2 from and to gRPC messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np

from ..http.connections import client_of
from ..refusals import RequestError
from ..tensors import (
    Array,
    InferRequest,
    OutputChoice,
    check_count,
    check_once,
    check_type,
    datatype,
    from_raw,
    to_raw,
)
from ..worker_threads import SMALL
from .size import check_message

if TYPE_CHECKING:
    from ..http.app import App

CONTENTS = {  # field of InferTensorContents by datatype; FP16 only comes raw
    "BOOL": "bool_contents",
    **{f"INT{n}": "int_contents" for n in (8, 16, 32)},
    "INT64": "int64_contents",
    **{f"UINT{n}": "uint_contents" for n in (8, 16, 32)},
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


async def parse(app: App, kind: Any, data: bytes, client: str) -> Any:
    """Parse the bytes of a gRPC message.

    kind: class of the message
    client: address of the client, for fairness among clients

    The size of a large message is checked first (size.py), and it is parsed outside of the event
    loop. Raises RequestError.
    """

    def work() -> Any:
        if len(data) > SMALL:
            check_message(data, app.security.values)
        try:
            return kind.FromString(data)
        except Exception:  # protobuf's implementations raise different classes
            raise RequestError(f"the body of the call is not a {kind.DESCRIPTOR.name}") from None

    return work() if len(data) <= SMALL else await app.worker_threads.run(client, work)


def client_of_call(context: Any) -> str:
    """Return the client of a gRPC call, as connections.client_of does.

    gRPC names the peer as ipv4:127.0.0.1:80 or ipv6:%5B::1%5D:80.
    """
    address = unquote(context.peer()).partition(":")[2].rpartition(":")[0]
    return client_of(address.strip("[]"))


def read_request(message: Any) -> InferRequest:
    """Read a gRPC client's ModelInferRequest. Raises RequestError for tensors that contradict their
    shape or datatype."""
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise RequestError(f"{len(raw)} raw_input_contents for {len(message.inputs)} inputs")
    inputs: dict[str, Array] = {}
    for i, tensor in enumerate(message.inputs):
        where = f"inputs[{i}]"
        kind, shape = check_type(tensor.datatype, list(tensor.shape), where)
        if tensor.name in inputs:
            raise RequestError(f"{where} has the name of another")
        if raw and tensor.HasField("contents"):
            raise RequestError(f"{where} has contents beside raw_input_contents")
        inputs[tensor.name] = (
            from_raw(raw[i], kind, shape, where)
            if raw
            else _from_contents(tensor, kind, shape, where)
        )
    outputs = [OutputChoice(o.name, True) for o in message.outputs] or None
    check_once([o.name for o in outputs or ()])
    return InferRequest(inputs, outputs, message.id, _parameters(message.parameters), True)


def _from_contents(tensor: Any, kind: str, shape: tuple[int, ...], where: str) -> Array:
    """Convert the typed contents of a gRPC request's tensor to an array.

    kind: datatype of the protocol
    where: name of the tensor, for errors
    """
    if kind not in CONTENTS:
        raise RequestError(f"{where} is {kind}, which only comes raw")
    contents = getattr(tensor.contents, CONTENTS[kind])
    check_count(len(contents), shape, where)  # before they become a list
    values = list(contents)
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


def build_response(
    kind: Any, message: Any, version: str, outputs: Sequence[tuple[str, Array]]
) -> Any:
    """Build the ModelInferResponse to a gRPC client.

    kind: class of the response
    message: request that is answered
    version: version of the model that answered
    outputs: (name, array) of each output
    """
    response = kind(model_name=message.model_name, model_version=version, id=message.id)
    for name, array in outputs:
        described = datatype(str(array.dtype))
        response.outputs.add(name=name, datatype=described, shape=array.shape)
        response.raw_output_contents.append(to_raw(array))
    return response
