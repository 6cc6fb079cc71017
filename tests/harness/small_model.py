"""A model, a tokenizer and a contract small enough to make in milliseconds.

hidden = tanh(embedding[input_ids] @ weight + bias): rows and tokens do not mix, except that a
"mixing" model adds the masked mean of the row, as attention would.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from optimizer.harness.contract import Contract
from tests.conftest import WORDS

WIDTH = 32
MODULE = "encoder.dense"
CODES = f"{MODULE}.weight.codes"
LETTERS = "abcdefghijklmnopqrstuvwxyz.,"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{c}" for c in LETTERS), *WORDS]
VOCABULARY = list(dict.fromkeys(VOCABULARY))
GENERATION = {
    "layers": 2,
    "kv_heads": 2,
    "head_dim": 16,
    "vocabulary": len(VOCABULARY),
    "context": 64,
    "eos_ids": [3, 0],
    "bos_id": 2,
    "chat_template": "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}",
    "defaults": {"do_sample": True, "temperature": 0.7, "top_k": 20},
}


def contract(task: str = "sentence-embedding", **changes: Any) -> dict[str, Any]:
    """The document of contract.json."""
    if task.startswith("image-"):
        return {**_of_images(task), **changes}
    embeds = task in ("sentence-embedding", "feature-extraction")
    axes: list[Any] = ["batch", "sequence", WIDTH]
    document = {
        "version": 1,
        "task": task,
        "inputs": [
            {"name": n, "dtype": "int64", "axes": ["batch", "sequence"]}
            for n in ("input_ids", "attention_mask")
        ],
        "outputs": [
            {
                "name": "last_hidden_state" if embeds else "logits",
                "dtype": "float32",
                "axes": {"text-classification": ["batch", WIDTH], "text-ranking": ["batch", 1]}.get(
                    task, axes
                ),
            }
        ],
        "tokenizer": {
            "file": "tokenizer.json",
            "max_length": 32,
            "pad_id": 0,
            "pad_token": "[PAD]",
            "pad_type_id": 0,
        },
        "pooling": "mean" if task == "sentence-embedding" else None,
        "normalize": True if task == "sentence-embedding" else None,
        "labels": ["O", "B-x", "I-x"] if task.endswith("classification") else None,
        "generation": GENERATION if task == "text-generation" else None,
    }
    if task == "sparse-embedding":
        document["outputs"][0]["axes"][-1] = len(VOCABULARY)
        document["sparse"] = {"pooling": "max", "activation": "relu"}
    if task == "text-ranking":
        document |= {"labels": ["LABEL_0"], "activation": "sigmoid"}
    return {**document, **changes}


def _of_images(task: str) -> dict[str, Any]:
    labels = ["cat", "dog", "bird"] if task.endswith("classification") else None
    output = ("logits", ["batch", 3]) if labels else ("last_hidden_state", ["batch", 17, WIDTH])
    axes = ["batch", 3, 32, 24]
    return {
        "version": 3,
        "task": task,
        "input_kind": "image",
        "inputs": [{"name": "pixel_values", "dtype": "float32", "axes": axes}],
        "outputs": [{"name": output[0], "dtype": "float32", "axes": output[1]}],
        "tokenizer": None,
        "image": {
            "channels": 3,
            "height": 32,
            "width": 24,
            "resize": {"height": 32, "width": 24},
            "resample": "bilinear",
            "crop": None,
            "rescale": 1 / 255,
            "offset": 0.0,
            "mean": [0.4, 0.5, 0.6],
            "std": [0.2, 0.25, 0.3],
            "divide": None,
        },
        "pooling": None if labels else "cls",
        "normalize": None,
        "labels": labels,
        "generation": None,
    }


def tokenizer(folder: Path) -> Path:
    """tokenizer.json with the padding and truncation that published files often carry."""
    made = Tokenizer(WordPiece({w: i for i, w in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    made.normalizer = BertNormalizer(lowercase=True)
    made.pre_tokenizer = BertPreTokenizer()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.enable_padding(length=128)
    made.enable_truncation(128)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def model(
    path: Path, *, dialect: str = "float", mixing: bool = True, positions: int | None = None
) -> Path:
    """model.onnx. dialect: "float", "ort_qdq" (uint8, zero point 128) or "trt_qdq" (int8).

    positions: longest sequence, as a learned position table of that length would impose.
    """
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) * 0.2
    scale = (np.abs(weight).max(0) / 127).astype(np.float32)
    unsigned = dialect == "ort_qdq"
    constants = {
        "embedding": rng.standard_normal((len(VOCABULARY), WIDTH)).astype(np.float32) * 0.5,
        "bias": rng.standard_normal(WIDTH).astype(np.float32) * 0.1,
        "axis1": np.array([1], np.int64),
        "axis2": np.array([2], np.int64),
    }
    nodes = [helper.make_node("Gather", ["embedding", "input_ids"], ["tokens"], name="embed")]
    hidden = "tokens"
    if mixing:
        nodes += _mixing()
        hidden = "mixed"
    if positions is not None:
        constants["table"] = rng.standard_normal((1, positions, WIDTH)).astype(np.float32)
        constants["zero"] = np.array([0], np.int64)
        nodes += [
            helper.make_node("Shape", ["input_ids"], ["length"], start=1, end=2),
            helper.make_node("Slice", ["table", "zero", "length", "axis1"], ["places"]),
            helper.make_node("Add", [hidden, "places"], ["placed"], name="places"),
        ]
        hidden = "placed"
    if dialect == "float":
        constants["weight"] = weight
        operands = [hidden, "weight"]
    else:
        constants |= {
            CODES: np.round(weight / scale).astype(np.int8),
            "scale": scale,
            "step": np.float32(3 / 127),
        }
        zero = ["zero_point"] if unsigned else []
        if unsigned:
            constants["zero_point"] = np.uint8(128)
        coded = TensorProto.UINT8 if unsigned else TensorProto.INT8
        nodes += [
            helper.make_node("DequantizeLinear", [CODES, "scale"], ["w"], axis=1, name="w"),
            helper.make_node(
                "QuantizeLinear", [hidden, "step", *zero], ["q"], output_dtype=coded, name="q"
            ),
            helper.make_node("DequantizeLinear", ["q", "step", *zero], ["x"], name="x"),
        ]
        operands = ["x", "w"]
    nodes += [
        _of_module(helper.make_node("MatMul", operands, ["product"], name=MODULE)),
        _of_module(helper.make_node("Add", ["product", "bias"], ["sum"], name="add")),
        helper.make_node("Tanh", ["sum"], ["last_hidden_state"], name="tanh"),
    ]
    return save(path, nodes, constants)


def _of_module(node: Any) -> Any:
    """The node with what the export stage notes of where it comes from."""
    node.metadata_props.add(key="module", value=MODULE)
    return node


def save(path: Path, nodes: list[Any], constants: dict[str, Any]) -> Path:
    """Write a graph from input_ids and attention_mask to last_hidden_state."""
    ids = [
        helper.make_tensor_value_info(n, TensorProto.INT64, ["batch", "sequence"])
        for n in ("input_ids", "attention_mask")
    ]
    out = helper.make_tensor_value_info(
        "last_hidden_state", TensorProto.FLOAT, ["batch", "sequence", WIDTH]
    )
    initializers = [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()]
    graph = helper.make_graph(nodes, "small", ids, [out], initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.example", 1)]
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def lowered(folder: Path, dialect: str = "ort_qdq", **options: Any) -> Path:
    """Write the files of the lower stage: model.onnx and lowering.json."""
    model(folder / "model.onnx", dialect=dialect, **options)
    coded = "uint8" if dialect == "ort_qdq" else "int8"
    modules = {MODULE: {"weight": "int8 channel", "activation": coded, "codes": CODES}}
    document = {"dialect": dialect, "exact": True, "float": [], "modules": modules}
    (folder / "lowering.json").write_text(json.dumps(document))
    return folder


def opened(folder: Path, task: str = "sentence-embedding", **changes: Any) -> tuple[Contract, Any]:
    """The contract and the tokenizer, as the harness reads them."""
    from optimizer.harness.inputs.text import load_tokenizer

    made = Contract.from_json(contract(task, **changes))
    tokenizer(folder)
    return made, load_tokenizer(folder, made)


def _mixing() -> list[Any]:
    """tokens + the mean of the row's tokens that are not padding."""
    return [
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "axis2"], ["mask3"]),
        helper.make_node("Mul", ["tokens", "mask3"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "axis1"], ["total"]),
        helper.make_node("ReduceSum", ["mask3", "axis1"], ["count"]),
        helper.make_node("Div", ["total", "count"], ["mean"]),
        helper.make_node("Add", ["tokens", "mean"], ["mixed"], name="mix"),
    ]
