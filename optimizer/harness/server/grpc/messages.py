"""Build the gRPC messages of the Open Inference Protocol v2 when the server starts.

Without generated code no version of protobuf is pinned. Names and numbers are the protocol's:
https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/open_inference_grpc.proto
ModelStreamInfer, ModelConfig and ModelStatistics are Triton's extensions, here with the fields that
are sent; an enumeration is its number:
https://github.com/triton-inference-server/common/blob/main/protobuf/grpc_service.proto
"""

from __future__ import annotations

from typing import Any, NamedTuple

PACKAGE = "inference"
SERVICE = "GRPCInferenceService"
TYPES = {"bool": 8, "int32": 5, "int64": 3, "uint32": 13, "uint64": 4, "float": 2, "double": 1}
TYPES |= {"string": 9, "bytes": 12}
MESSAGE = 11  # FieldDescriptorProto.Type of a message
OPTIONAL, REPEATED = 1, 3
TENSOR = "name string 1, datatype string 2, shape int64* 3"

# a field is "name type number"; * repeats it, % is a map from strings, / belongs to the oneof
MESSAGES: dict[str, str] = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live bool 1",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready bool 1",
    "ModelReadyRequest": "name string 1, version string 2",
    "ModelReadyResponse": "ready bool 1",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name string 1, version string 2, extensions string* 3",
    "ModelMetadataRequest": "name string 1, version string 2",
    "ModelMetadataResponse.TensorMetadata": TENSOR,
    "ModelMetadataResponse": "name string 1, versions string* 2, platform string 3, "
    "inputs .ModelMetadataResponse.TensorMetadata* 4, "
    "outputs .ModelMetadataResponse.TensorMetadata* 5",
    "InferParameter": "bool_param bool/ 1, int64_param int64/ 2, string_param string/ 3, "
    "double_param double/ 4, uint64_param uint64/ 5",
    "InferTensorContents": "bool_contents bool* 1, int_contents int32* 2, int64_contents int64* 3, "
    "uint_contents uint32* 4, uint64_contents uint64* 5, fp32_contents float* 6, "
    "fp64_contents double* 7, bytes_contents bytes* 8",
    "ModelInferRequest.InferInputTensor": f"{TENSOR}, parameters .InferParameter% 4, "
    "contents .InferTensorContents 5",
    "ModelInferRequest.InferRequestedOutputTensor": "name string 1, parameters .InferParameter% 2",
    "ModelInferRequest": "model_name string 1, model_version string 2, id string 3, "
    "parameters .InferParameter% 4, inputs .ModelInferRequest.InferInputTensor* 5, "
    "outputs .ModelInferRequest.InferRequestedOutputTensor* 6, raw_input_contents bytes* 7",
    "ModelInferResponse.InferOutputTensor": f"{TENSOR}, parameters .InferParameter% 4, "
    "contents .InferTensorContents 5",
    "ModelInferResponse": "model_name string 1, model_version string 2, id string 3, "
    "parameters .InferParameter% 4, outputs .ModelInferResponse.InferOutputTensor* 5, "
    "raw_output_contents bytes* 6",
    "ModelConfigRequest": "name string 1, version string 2",
    "ModelConfigResponse": "config .ModelConfig 1",
    "ModelConfig": "name string 1, platform string 2, max_batch_size int32 4, "
    "input .ModelInput* 5, output .ModelOutput* 6, instance_group .ModelInstanceGroup* 7, "
    "dynamic_batching .ModelDynamicBatching 11, response_cache .ModelResponseCache 24, "
    "model_transaction_policy .ModelTransactionPolicy 19",
    "ModelInput": "name string 1, data_type int32 2, dims int64* 4, optional bool 8",
    "ModelOutput": "name string 1, data_type int32 2, dims int64* 3",
    "ModelInstanceGroup": "name string 1, count int32 2, kind int32 4",
    "ModelDynamicBatching": "preferred_batch_size int32* 1, max_queue_delay_microseconds uint64 2",
    "ModelTransactionPolicy": "decoupled bool 1",
    "ModelResponseCache": "enable bool 1",
    "ModelStatisticsRequest": "name string 1, version string 2",
    "ModelStatisticsResponse": "model_stats .ModelStatistics* 1",
    "ModelStatistics": "name string 1, version string 2, last_inference uint64 3, "
    "inference_count uint64 4, execution_count uint64 5, inference_stats .InferStatistics 6, "
    "batch_stats .InferBatchStatistics* 7",
    "StatisticDuration": "count uint64 1, ns uint64 2",
    "InferStatistics": "success .StatisticDuration 1, fail .StatisticDuration 2, "
    "queue .StatisticDuration 3, compute_input .StatisticDuration 4, "
    "compute_infer .StatisticDuration 5, compute_output .StatisticDuration 6, "
    "cache_hit .StatisticDuration 7, cache_miss .StatisticDuration 8",
    "InferBatchStatistics": "batch_size uint64 1, compute_infer .StatisticDuration 3",
    "ModelStreamInferResponse": "error_message string 1, infer_response .ModelInferResponse 2",
}
METHODS = (
    *("ServerLive", "ServerReady", "ModelReady"),
    *("ServerMetadata", "ModelMetadata", "ModelConfig", "ModelStatistics", "ModelInfer"),
)
STREAM = "ModelStreamInfer"


class GrpcMethod(NamedTuple):
    """Message classes of a gRPC method: of its request and of its response."""

    request: Any
    response: Any


def methods() -> dict[str, GrpcMethod]:
    """Build the message classes of all gRPC methods: {method: GrpcMethod}."""
    from google.protobuf import (  # type: ignore[import-untyped]
        descriptor_pool,
        message_factory,
    )

    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file())
    names = {name: (f"{name}Request", f"{name}Response") for name in METHODS}
    names[STREAM] = ("ModelInferRequest", f"{STREAM}Response")

    def message_class(name: str) -> Any:
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))

    return {name: GrpcMethod(*map(message_class, pair)) for name, pair in names.items()}


def _file() -> Any:
    from google.protobuf import descriptor_pb2

    file = descriptor_pb2.FileDescriptorProto(
        name="open_inference.proto", package=PACKAGE, syntax="proto3"
    )
    messages: dict[str, Any] = {}
    for name in sorted(MESSAGES, key=lambda n: n.count(".")):  # a message before those inside it
        outer, _, inner = name.rpartition(".")
        where = messages[outer].nested_type if outer else file.message_type
        messages[name] = where.add(name=inner)
    for name, fields in MESSAGES.items():
        for field in filter(None, fields.split(", ")):
            _add_field(messages[name], name, *field.split(" "))
    return file


def _add_field(message: Any, path: str, name: str, kind: str, number: str) -> None:
    mark = kind[-1] if kind[-1] in "*%/" else ""
    kind = kind.removesuffix(mark)
    field = message.field.add(name=name, number=int(number))
    field.label = REPEATED if mark in ("*", "%") and mark else OPTIONAL
    if mark == "/":
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if mark == "%":
        entry = "".join(word.capitalize() for word in name.split("_")) + "Entry"
        nested = message.nested_type.add(name=entry)
        nested.options.map_entry = True
        _add_field(nested, f"{path}.{entry}", "key", "string", "1")
        _add_field(nested, f"{path}.{entry}", "value", kind, "2")
        kind = f".{path}.{entry}"
    if kind in TYPES:
        field.type = TYPES[kind]
    else:
        field.type, field.type_name = MESSAGE, f".{PACKAGE}{kind}"
