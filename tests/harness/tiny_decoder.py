"""Decoders for the generation loop: any family in torch, and a hand-written one in ONNX.

The ONNX one is two blocks of grouped-query attention with learned positions, in the two ways a
graph may treat its cache: "new" (Attention, each present a new array) and "shared"
(GroupQueryAttention, written in place), with the same weights; "one length" is "shared" as it was
lowered before, with one length for all rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from optimizer.harness.contract import Contract
from optimizer.harness.inputs.batch import Array
from optimizer.harness.runtimes.decoder import LastOfStep, check_step
from tests.conftest import heavy_tailed
from tests.decoders import HEADS, KV_HEADS, TEMPLATE, WIDTH

CONTEXT = 96
LAYERS = 2
SIZE = WIDTH // HEADS
NO_POSITIONS = ("opt",)  # it counts them from the mask
ALL_HEADS = ("gpt2", "opt")  # a key and a value for every query


def contract(vocabulary: int, kind: str = "llama", **generation: Any) -> Contract:
    """Of a decoder with the tokenizer of tests/decoders.py."""
    names = ["input_ids", "attention_mask"] + ["position_ids"] * (kind not in NO_POSITIONS)
    axes = {"attention_mask": ["batch", "total"]}
    document = {
        "task": "text-generation",
        "inputs": [
            {"name": n, "dtype": "int64", "axes": axes.get(n, ["batch", "sequence"])} for n in names
        ],
        "outputs": [
            {"name": "logits", "dtype": "float32", "axes": ["batch", "sequence", vocabulary]}
        ],
        "tokenizer": {
            "file": "tokenizer.json",
            "max_length": CONTEXT,
            "pad_id": 2,
            "pad_token": "<|im_end|>",
        },
        "generation": {
            "layers": LAYERS,
            "kv_heads": HEADS if kind in ALL_HEADS else KV_HEADS,
            "head_dim": SIZE,
            "vocabulary": vocabulary,
            "context": CONTEXT,
            "eos_ids": [2],
            "bos_id": 0,
            "chat_template": TEMPLATE,
            **generation,
        },
    }
    return Contract.from_json(json.loads(json.dumps(document)))


class TorchRunner:
    """A transformers model as a runner, its cache their own."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def decoder(self, contract: Contract, capacity: int = 0) -> TorchDecoder:
        return TorchDecoder(self._model)


class TorchDecoder(LastOfStep):
    def __init__(self, model: Any) -> None:
        from transformers import DynamicCache

        self._model, self._cache = model, DynamicCache()

    @property
    def past(self) -> int:
        return int(self._cache.get_seq_length())

    def step(self, arrays: Mapping[str, Array]) -> Array:
        check_step(arrays, [*arrays], self.past, len(arrays["input_ids"]))
        given = {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in arrays.items()}
        with torch.no_grad():
            out = self._model(**given, past_key_values=self._cache, use_cache=True)
        return np.asarray(out.logits.numpy())


class ScriptRunner(LastOfStep):
    """Says the same tokens to every prompt, and writes down what it was given."""

    def __init__(self, tokens: Sequence[int], vocabulary: int) -> None:
        self._tokens, self._vocabulary = tokens, vocabulary
        self.steps: list[dict[str, Array]] = []
        self.capacity = 0

    def decoder(self, contract: Contract, capacity: int = 0) -> ScriptRunner:
        self.capacity, self.said, self.past = capacity, 0, 0
        return self

    def step(self, arrays: Mapping[str, Array]) -> Array:
        batch, sequence = check_step(arrays, [*arrays], self.past, len(arrays["input_ids"]))
        self.steps.append(dict(arrays))
        self.past += sequence
        logits = np.full((batch, sequence, self._vocabulary), 1e-6, np.float32)
        logits[:, -1, self._tokens[min(self.said, len(self._tokens) - 1)]] = 9
        self.said += sequence == 1 or self.said == 0
        return logits


def write_onnx(path: Path, vocabulary: int, cache: str = "new", layers: int = LAYERS) -> Path:
    """model.onnx with the inputs and outputs of `contract`. cache: see the module."""
    rope = [heavy_tailed((CONTEXT, WIDTH), 7, 0.3)]
    constants: dict[str, Any] = {
        "embedding": heavy_tailed((vocabulary, WIDTH), 1, 0.7).numpy(),
        "places": rope[0].numpy(),
        "head": heavy_tailed((WIDTH, vocabulary), 2, 0.4).numpy(),
        "axes12": np.array([1, 2]),
        "axis0": np.array([0]),
        "axis1": np.array([1]),
        "one": np.array(1),
        "start": np.array(0),
        "hidden": np.float32(-1e9),
        "seen": np.float32(0),
    }
    nodes = [
        helper.make_node("Gather", ["embedding", "input_ids"], ["tokens"]),
        helper.make_node("Gather", ["places", "position_ids"], ["placed"]),
        helper.make_node("Add", ["tokens", "placed"], ["x0"]),
        *_mask(cache),
    ]
    kv = KV_HEADS * SIZE
    for i in range(layers):
        for j, (name, width) in enumerate((("q", WIDTH), ("k", kv), ("v", kv))):
            constants[f"{name}{i}.w"] = heavy_tailed((WIDTH, width), 10 * i + j + 20, 0.2).numpy()
            nodes.append(helper.make_node("MatMul", [f"x{i}", f"{name}{i}.w"], [f"{name}{i}"]))
        nodes += [
            _attention(i, cache),
            helper.make_node("Add", [f"x{i}", f"mixed{i}"], [f"sum{i}"]),
            helper.make_node("Tanh", [f"sum{i}"], [f"x{i + 1}"]),
        ]
    nodes.append(helper.make_node("MatMul", [f"x{layers}", "head"], ["logits"]))
    inputs = [("input_ids", "sequence"), ("attention_mask", "total"), ("position_ids", "sequence")]
    shaped = [
        helper.make_tensor_value_info(n, TensorProto.INT64, ["batch", axis]) for n, axis in inputs
    ]
    outputs = [_float("logits", ["batch", "sequence", vocabulary])]
    for i in range(layers):
        for part in ("key", "value"):
            shaped.append(_float(f"past_key_values.{i}.{part}", ["batch", KV_HEADS, "past", SIZE]))
            outputs.append(_float(f"present.{i}.{part}", ["batch", KV_HEADS, "kept", SIZE]))
    initializers = [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()]
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "decoder", shaped, outputs, initializers)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    if cache != "new":
        helper.set_model_props(model, {"kv_cache": "shared"})
    onnx.save(model, path)
    return path


def _float(name: str, shape: list[Any]) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _attention(i: int, cache: str) -> Any:
    past = [f"past_key_values.{i}.key", f"past_key_values.{i}.value"]
    made = [f"mixed{i}", f"present.{i}.key", f"present.{i}.value"]
    q, k, v = f"q{i}", f"k{i}", f"v{i}"
    if cache == "new":
        return helper.make_node(
            "Attention",
            [q, k, v, "bias", *past],
            made,
            q_num_heads=HEADS,
            kv_num_heads=KV_HEADS,
        )
    return helper.make_node(
        "GroupQueryAttention",
        [q, k, v, *past, "lengths", "total32", "", "", "", "bias"],
        made,
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
    )


def _mask(cache: str) -> list[Any]:
    """bias (batch, 1, sequence, total): very low where padded and, of "new", ahead; and lengths."""
    nodes = [
        helper.make_node("Shape", ["attention_mask"], ["total_axis"], start=1, end=2),
        helper.make_node("Squeeze", ["total_axis", "axis0"], ["total"]),
        helper.make_node("Shape", ["input_ids"], ["new_axis"], start=1, end=2),
        helper.make_node("Squeeze", ["new_axis", "axis0"], ["new"]),
        helper.make_node("Sub", ["total", "new"], ["past"]),
        helper.make_node("Range", ["past", "total", "one"], ["rows"]),
        helper.make_node("Range", ["start", "total", "one"], ["columns"]),
        helper.make_node("Unsqueeze", ["rows", "axis1"], ["rows2"]),
        helper.make_node("Unsqueeze", ["columns", "axis0"], ["columns2"]),
        helper.make_node("LessOrEqual", ["columns2", "rows2"], ["behind"]),
        helper.make_node("Cast", ["attention_mask"], ["real"], to=TensorProto.BOOL),
        helper.make_node("Unsqueeze", ["real", "axes12"], ["real4"]),
        helper.make_node("And", ["real4", "behind"], ["visible"]),
        helper.make_node("Where", ["visible", "seen", "hidden"], ["bias"]),
    ]
    if cache == "new":
        return nodes
    if cache == "shared":
        last = [
            helper.make_node("Mul", ["attention_mask", "columns"], ["numbered"]),
            helper.make_node("ReduceMax", ["numbered", "axis1"], ["last"], keepdims=0),
            helper.make_node("Cast", ["last"], ["lengths"], to=TensorProto.INT32),
        ]
    else:
        last = [
            helper.make_node("Sub", ["total", "one"], ["before"]),
            helper.make_node("Cast", ["before"], ["last"], to=TensorProto.INT32),
            helper.make_node("Shape", ["input_ids"], ["rows_axis"], start=0, end=1),
            helper.make_node("Expand", ["last", "rows_axis"], ["lengths"]),
        ]
    return [*nodes, helper.make_node("Cast", ["total"], ["total32"], to=TensorProto.INT32), *last]
