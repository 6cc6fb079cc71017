"""Time of three variants of a graph with LoRA adapters on ONNX Runtime, beside the base alone.

    OMP_NUM_THREADS=1 python -m benchmarks.decoders.hot_adapters

The graph is the linear layers of six blocks of SmolLM2-135M in INT4 with random weights, all seven
products adapted by rank 16. Times are processor time of the one thread that runs, in turns, so that
other processes change them little.

    inputs    A and B of a product are inputs that a run may leave out, then of rank 0: as
              optimizer/lower/onnx/optional/adapters.py builds them
    left      such inputs on the left of a transposed product, of rank 1 where they are left out, so
              that each text is a product of its own
    index     A and B of four adapters are weights, and each row has the number of one; 0: zeros
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

WIDTH, KEYS, INNER, BLOCKS, RANK, ADAPTERS = 576, 192, 1536, 6, 16, 4
PRODUCTS = (
    ("q", WIDTH, WIDTH),
    ("k", WIDTH, KEYS),
    ("v", WIDTH, KEYS),
    ("o", WIDTH, WIDTH),
    ("gate", WIDTH, INNER),
    ("up", WIDTH, INNER),
    ("down", INNER, WIDTH),
)
SHAPES, ROUNDS = ((1, 1), (4, 1), (1, 128)), 40
Arrays = dict[str, np.ndarray[Any, Any]]


class Graph:
    """A graph being built. variant: base, inputs, left or index."""

    def __init__(self, variant: str, seed: int = 0) -> None:
        self.variant, self.random = variant, np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.weights: Arrays = {}
        self.inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", "s", WIDTH])]
        if variant == "index":
            self.inputs.append(helper.make_tensor_value_info("adapter", TensorProto.INT64, ["b"]))

    def node(self, op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, list(inputs), [output], **attributes))
        return output

    def product(self, name: str, x: str, k: int, n: int) -> str:
        draw = np.random.default_rng(len(name) * k + n)
        self.weights[f"{name}_w"] = draw.integers(0, 255, (n, k // 32, 16), dtype=np.uint8)
        self.weights[f"{name}_s"] = draw.random(n * (k // 32), dtype=np.float32) * 0.003
        options = {"K": k, "N": n, "bits": 4, "block_size": 32, "accuracy_level": 4}
        parts = (x, f"{name}_w", f"{name}_s")
        y = self.node("MatMulNBits", parts, f"{name}_y", domain="com.microsoft", **options)
        if self.variant == "base":
            return y
        if self.variant == "left":
            return self._left(name, x, y, k, n)
        sides = {f"{name}_A": (k, RANK), f"{name}_B": (RANK, n)}
        for side, shape in sides.items():
            if self.variant == "inputs":
                free = tuple(0 if size == RANK else size for size in shape)
                axes = ["rank" if size == RANK else size for size in shape]
                self.weights[side] = np.zeros(free, np.float32)
                port = helper.make_tensor_value_info(side, TensorProto.FLOAT, axes)
                self.inputs.append(port)
            else:
                own = self.random.standard_normal((ADAPTERS, *shape)) * 0.02
                all_ = np.concatenate([np.zeros((1, *shape)), own]).astype(np.float32)
                self.weights[f"{side}s"] = all_
                self.node("Gather", (f"{side}s", "adapter"), side)
        small = self.node("MatMul", (x, f"{name}_A"), f"{name}_m")
        change = self.node("MatMul", (small, f"{name}_B"), f"{name}_d")
        return self.node("Add", (y, change), f"{name}_z")

    def _left(self, name: str, x: str, y: str, k: int, n: int) -> str:
        sides = {f"{name}_A": ((1, k), ["rank", k]), f"{name}_B": ((n, 1), [n, "rank"])}
        for side, (shape, axes) in sides.items():
            self.weights[side] = np.zeros(shape, np.float32)
            self.inputs.append(helper.make_tensor_value_info(side, TensorProto.FLOAT, axes))
        turned = f"{x}_turned"
        if not any(turned in node.output for node in self.nodes):
            self.node("Transpose", (x,), turned, perm=[0, 2, 1])
        small = self.node("MatMul", (f"{name}_A", turned), f"{name}_m")
        change = self.node("MatMul", (f"{name}_B", small), f"{name}_d")
        again = self.node("Transpose", (change,), f"{name}_t", perm=[0, 2, 1])
        return self.node("Add", (y, again), f"{name}_z")


def session(variant: str) -> Any:
    """A session of one thread, whose output is called y."""
    graph, x = Graph(variant), "x"
    for block in range(BLOCKS):
        at = {n: (f"{block}_{n}", k, size) for n, k, size in PRODUCTS}

        def run(name: str, x: str, at: dict[str, tuple[str, int, int]] = at) -> str:
            label, k, n = at[name]
            return graph.product(label, x, k, n)

        q, k, v = (run(name, x) for name in "qkv")
        joined = graph.node("Concat", (k, v, k), f"{block}_joined", axis=-1)
        o = run("o", graph.node("Add", (q, joined), f"{block}_attended"))
        gated = graph.node("Mul", (run("gate", o), run("up", o)), f"{block}_gated")
        last = "y" if block == BLOCKS - 1 else f"{block}_out"
        x = graph.node("Tanh", (run("down", gated),), last)
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", "s", WIDTH])
    weights = [numpy_helper.from_array(array, name) for name, array in graph.weights.items()]
    proto = helper.make_graph(graph.nodes, "linear", graph.inputs, [output], weights)
    versions = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(proto, opset_imports=versions, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def bound(opened: Any, x: np.ndarray[Any, Any]) -> Callable[[], Any]:
    """A run with an adapter as inputs that stay bound."""
    draw, binding = np.random.default_rng(1), opened.io_binding()
    for port in opened.get_overridable_initializers():
        shape = [size if isinstance(size, int) else RANK for size in port.shape]
        array = (draw.standard_normal(shape) * 0.02).astype(np.float32)
        binding.bind_ortvalue_input(port.name, ort.OrtValue.ortvalue_from_numpy(array))
    binding.bind_cpu_input("x", x)
    binding.bind_output("y")
    return partial(opened.run_with_iobinding, binding)


def main() -> None:
    base, inputs, left, index = map(session, ("base", "inputs", "left", "index"))
    for rows, tokens in SHAPES:
        x = np.random.default_rng(2).standard_normal((rows, tokens, WIDTH)).astype(np.float32)
        none, each = np.zeros(rows, np.int64), np.arange(rows) % ADAPTERS + 1
        runs: dict[str, Callable[[], Any]] = {
            "base": partial(base.run, None, {"x": x}),
            "inputs left out": partial(inputs.run, None, {"x": x}),
            "inputs": bound(inputs, x),
            "left, left out": partial(left.run, None, {"x": x}),
            "left": bound(left, x),
            "index 0": partial(index.run, None, {"x": x, "adapter": none}),
            "index": partial(index.run, None, {"x": x, "adapter": each}),
        }
        for name in ("inputs left out", "left, left out", "index 0"):
            assert np.array_equal(runs["base"]()[0], runs[name]()[0]), name
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS):
            for name, run in runs.items():
                start = time.thread_time()
                run()
                times[name].append(time.thread_time() - start)
        medians = {name: float(np.median(values)) for name, values in times.items()}
        ratios = {n: f"{1e3 * t:.2f} ms, {t / medians['base']:.2f}" for n, t in medians.items()}
        print(f"{rows} x {tokens}: {ratios}")


if __name__ == "__main__":
    main()
