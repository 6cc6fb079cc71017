"""Describe a served model as Triton's model configuration does, with the fields that apply here.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_configuration.md
https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .scheduling.batching import BatchLimits

TYPES = (  # DataType of model_config.proto, by its number; BF16 is not served
    *("TYPE_INVALID", "TYPE_BOOL"),
    *(f"TYPE_UINT{bits}" for bits in (8, 16, 32, 64)),
    *(f"TYPE_INT{bits}" for bits in (8, 16, 32, 64)),
    *(f"TYPE_FP{bits}" for bits in (16, 32, 64)),
    "TYPE_STRING",
)
KINDS = ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL")  # ModelInstanceGroup.Kind, by number


def model_config(
    metadata: Mapping[str, Any],
    *,
    rows: int,
    batches: BatchLimits | None,
    shares: bool,
    device: str,
    cached: bool,
    optional: Sequence[str] = (),
) -> dict[str, Any]:
    """Build Triton's model configuration of a served model.

    metadata: the protocol's metadata of the model
    rows: maximum rows of a request; 0 for a model without a batch axis
    batches: limits of its batches; None for text generation, which sends several responses per
        request
    shares: True if rows of several requests may run as one batch
    device: device of the engine
    cached: True if equal requests are answered from a cache
    optional: names of inputs that a request may leave out
    """

    def tensor(entry: Mapping[str, Any]) -> dict[str, Any]:
        dims = entry["shape"][1:] if rows else entry["shape"]
        name = "STRING" if entry["datatype"] == "BYTES" else entry["datatype"]
        return {"name": entry["name"], "data_type": f"TYPE_{name}", "dims": dims}

    name, low = str(metadata["name"]), device.lower()
    kind = "KIND_CPU" if low == "cpu" else "KIND_GPU"
    group = {"name": f"{name}_0", "kind": "KIND_MODEL" if low.startswith("npu") else kind}
    document = {
        "name": name,
        "platform": metadata["platform"],
        "max_batch_size": rows,
        "input": [
            tensor(i) | ({"optional": True} if i["name"] in optional else {})
            for i in metadata["inputs"]
        ],
        "output": [tensor(o) for o in metadata["outputs"]],
        "instance_group": [{**group, "count": 1 if batches is None else batches.workers}],
        "model_transaction_policy": {"decoupled": batches is None},
        "response_cache": {"enable": cached},
    }
    if batches is not None and shares and batches.rows > 1:
        document["dynamic_batching"] = {
            "preferred_batch_size": [batches.rows],
            "max_queue_delay_microseconds": round(1e6 * batches.delay),
        }
    return document


def number_enumerations(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replace, in a model's configuration for gRPC, names of enumerations by their numbers."""

    def tensors(name: str) -> list[dict[str, Any]]:
        return [{**t, "data_type": TYPES.index(t["data_type"])} for t in config[name]]

    groups = [{**g, "kind": KINDS.index(g["kind"])} for g in config["instance_group"]]
    return {
        **config,
        "input": tensors("input"),
        "output": tensors("output"),
        "instance_group": groups,
    }
