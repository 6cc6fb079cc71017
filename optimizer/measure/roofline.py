"""Roofline of a processor: the time that a kernel takes at least, by its operations and its bytes.

    attainable seconds = max(operations / rate of a large product, bytes / bandwidth)

(Williams, Waterman, Patterson 2009). Rates are those of ONNX Runtime's own kernels on this machine
with the threads of the model: a product of two large matrices of floats, or of 8-bit integers; an
addition of the smallest size that is not below the kernel's, because small arrays stay in a cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, prod
from typing import Any

from optimizer.harness.process.temporary import make_temporary_folder
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.lower import rates as graph
from optimizer.measure.ort_profile import Event, kernels, module_of, node_of

ROUNDS = 20
PRODUCTS = frozenset(
    {
        *("MatMul", "FusedMatMul", "Gemm", "FusedGemm", "MatMulNBits", "MatMulIntegerToFloat"),
        *("MatMulInteger", "DynamicQuantizeMatMul", "QLinearMatMul", "QGemm"),
    }
)
INTEGERS = frozenset({"MatMulNBits", "DynamicQuantizeMatMul"})
"""Products with float inputs that may be computed in 8-bit integers."""
CONVOLUTIONS = frozenset({"Conv", "FusedConv", "QLinearConv", "ConvInteger"})
UNCOUNTED = frozenset(
    {
        *(
            "Attention",
            "QAttention",
            "MultiHeadAttention",
            "GroupQueryAttention",
            "PackedAttention",
        ),
        *("DecoderMaskedMultiHeadAttention", "ConvTranspose", "Einsum", "LSTM", "GRU", "RNN"),
    }
)
"""Operators with products whose sizes are not those of their inputs."""
VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape"})
PARTIAL = frozenset({"Gather", "GatherND", "GatherBlockQuantized", "Slice"})
"""Operators that read no more than they write."""


@dataclass(frozen=True)
class Work:
    """Work that one kernel of an engine does.

    operations: multiplications and additions
    bytes: bytes read and written
    integers: True if its products are of 8-bit integers
    """

    operations: int
    bytes: int
    integers: bool = False


@dataclass(frozen=True)
class MachineRates:
    """Fastest rates of this machine, its roofline: multiplications and bandwidths.

    float32, int8: operations per second of a large product; one multiplication and addition is two
    bandwidth: {bytes of an addition: bytes per second}
    """

    float32: float
    int8: float
    bandwidth: Mapping[int, float]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def milliseconds(self, work: Work) -> float:
        """Return the milliseconds that a kernel takes at least."""
        larger = [size for size in self.bandwidth if size >= work.bytes]
        bandwidth = self.bandwidth[min(larger, default=max(self.bandwidth))]
        rate = self.int8 if work.integers else self.float32
        return 1000 * max(work.operations / rate, work.bytes / bandwidth)


def measure(threads: int) -> MachineRates:
    """Measure the roofline of this machine, its fastest rates: the shortest of several rounds, in
    about 5 seconds."""
    with make_temporary_folder("rates") as folder:
        arrays = graph.write(folder / "rates.onnx")
        with OrtRunner(folder / "rates.onnx", threads=threads) as runner:
            events = kernels(runner, arrays, ROUNDS)
    seconds: dict[str, float] = defaultdict(lambda: inf)
    for event in events:
        name = module_of(node_of(event))
        seconds[name] = min(seconds[name], max(event["dur"], 1) / 1e6)
    return MachineRates(
        graph.OPERATIONS / seconds[graph.FLOAT],
        graph.OPERATIONS / seconds[graph.INT8],
        {size: size / seconds[f"add {size}"] for size in graph.BYTES},
    )


def format_rates(rates: Mapping[str, Any]) -> list[str]:
    """Return lines that explain the percentages of the roofline beside each module, and the rates
    behind them."""
    bandwidth = ", ".join(f"{v / 1e9:.3g} GB/s" for v in rates["bandwidth"].values())
    sizes = ", ".join(f"{int(size) >> 20}" for size in rates["bandwidth"])
    return [
        "The second share is the time that the module's kernels take at least / their time, by",
        f"  {rates['float32'] / 1e9:.3g} GFLOP/s in float and {rates['int8'] / 1e9:.3g} in int8",
        f"  and {bandwidth} for {sizes} MiB.",
    ]


def work_of(event: Event) -> Work | None:
    """Return the work of a kernel by its event in the profile of a session without prepacking,
    whose events have the sizes of weights too; None where its operations are not known."""
    about = event["args"]
    operator, written = about["op_name"], int(about["output_size"])
    if operator in UNCOUNTED:
        return None
    inputs, (output, *_) = _shapes(about["input_type_shape"]), _shapes(about["output_type_shape"])
    read = int(about["activation_size"]) + int(about["parameter_size"])
    if operator in PRODUCTS:
        first = inputs[0][1]
        if len(first) > 1 and first[-2] != output[1][-2]:
            return None  # transposed
        operations = 2 * prod(output[1]) * first[-1]
    elif operator in CONVOLUTIONS:
        weight = [shape for _, shape in inputs if len(shape) > 2][1]
        operations = 2 * prod(output[1]) * prod(weight[1:])
    else:
        moved = 0 if operator in VIEWS else 2 * written if operator in PARTIAL else read + written
        return Work(0, moved)
    integers = operator in INTEGERS or inputs[0][0] in ("uint8", "int8")
    return Work(operations, read + written, integers)


def _shapes(entries: Sequence[Mapping[str, Sequence[int]]]) -> list[tuple[str, Sequence[int]]]:
    """Return (type, shape) of each input or output of a kernel's event in a profile."""
    return [pair for entry in entries for pair in entry.items()]
