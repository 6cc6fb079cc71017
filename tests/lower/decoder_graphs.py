"""Small decoder graphs as the export stage makes them, and their generation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import transformers

from optimizer.export import names, onnx_file, stage
from optimizer.export.weights import Values
from optimizer.model.architectures.families import FAMILIES
from optimizer.recipe.schema import Export
from tests.conftest import heavy_tailed
from tests.lower.running import session

CONTEXT, VOCABULARY, KV_HEADS, WIDTH = 96, 120, 2, 32
Arrays = dict[str, np.ndarray]

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 4 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
}
ROTATED = {
    **COMMON,
    "intermediate_size": 192,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**ROTATED),
    "heads normed": lambda: transformers.Qwen3Config(**{**ROTATED, "num_hidden_layers": 1}),
    "learned positions": lambda: transformers.GPT2Config(**{**COMMON, "num_hidden_layers": 1}),
    "flattened": lambda: transformers.OPTConfig(
        **{**COMMON, "num_hidden_layers": 1}, ffn_dim=192, word_embed_proj_dim=4 * WIDTH
    ),
    "window": lambda: transformers.MistralConfig(
        **{**ROTATED, "num_hidden_layers": 1}, sliding_window=64
    ),
}


@dataclass(frozen=True)
class Decoder:
    """A folder with model.onnx and names.json, as the export stage writes them."""

    folder: Path

    @property
    def model(self) -> ir.Model:
        return onnx_file.load(self.folder / "model.onnx")

    @property
    def names(self) -> names.GraphNames:
        return names.from_dict(json.loads((self.folder / "names.json").read_text()))


def decoder(kind: str, folder: Path) -> Decoder:
    """A random model, traced and paired by the export stage's own functions."""
    config = CONFIGS[kind]()
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    values = {}
    for i, (name, parameter) in enumerate(model.named_parameters()):
        value = heavy_tailed(tuple(parameter.shape), i, 0.15)
        values[name] = 1 + value if ("norm" in name or "ln_" in name) else value
    cache = {
        "layers": config.num_hidden_layers,
        "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "head_dim": WIDTH,
        "context": CONTEXT,
    }
    axes = {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "total"],
        "position_ids": ["batch", "sequence"],
    }
    if not FAMILIES[config.model_type].position_ids:
        del axes["position_ids"]
    logits = {
        "name": "logits", "dtype": "float32", "axes": ["batch", "sequence", VOCABULARY]
    }  # fmt: skip
    contract = {
        "inputs": [{"name": n, "dtype": "int64", "axes": a} for n, a in axes.items()],
        "outputs": [logits],
        "generation": cache,
    }
    held = Values(model, values, {})
    linear = stage.list_linear_modules(model)
    graph = stage.trace_float_graph(model, held, contract, Export(float="fp32"))[0]
    onnx_file.save(graph, folder / "model.onnx")
    written = onnx_file.load(folder / "model.onnx")
    paired = names.pair(written, held, linear, (), held.first, stage.list_embeddings(model))
    (folder / "names.json").write_text(json.dumps(paired.as_dict()))
    return Decoder(folder)


@dataclass(frozen=True)
class Text:
    """Tokens [batch, length] and their attention_mask; rows are padded on the left."""

    ids: np.ndarray
    mask: np.ndarray


def text(length: int, pads: tuple[int, ...] = (0,), seed: int = 0) -> Text:
    ids = np.random.default_rng(seed).integers(1, VOCABULARY, (len(pads), length))
    return Text(ids, (np.arange(length)[None] >= np.array(pads)[:, None]).astype(np.int64))


def answers(model: ir.Model, given: Text, pieces: tuple[int, ...], room: int = 0) -> np.ndarray:
    """Logits of the real tokens [tokens, vocabulary], the text given in pieces.

    room: columns of one buffer that is past and present at once; 0: each step makes a new cache.
    """
    run = session(ir.to_proto(model).SerializeToString())
    positions = np.maximum(given.mask.cumsum(1) - 1, 0)
    pasts = [i for i in run.get_inputs() if i.name.startswith("past_key_values.")]
    import onnxruntime as ort

    shape = (len(given.ids), pasts[0].shape[1], room, pasts[0].shape[3])
    kind = np.float16 if pasts and pasts[0].type == "tensor(float16)" else np.float32
    cache = {p.name: ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, kind)) for p in pasts}
    done, logits = 0, []
    for size in pieces:
        until = done + size
        binding = run.io_binding()
        binding.bind_cpu_input("input_ids", np.ascontiguousarray(given.ids[:, done:until]))
        binding.bind_cpu_input("attention_mask", np.ascontiguousarray(given.mask[:, :until]))
        if any(i.name == "position_ids" for i in run.get_inputs()):
            binding.bind_cpu_input("position_ids", np.ascontiguousarray(positions[:, done:until]))
        binding.bind_output("logits", "cpu")
        for name, held in cache.items():
            present = name.replace("past_key_values", "present")
            binding.bind_ortvalue_input(name, held)
            if room:
                binding.bind_ortvalue_output(present, held)
            else:
                binding.bind_output(present, "cpu")
        run.run_with_iobinding(binding)
        outputs = binding.get_outputs()
        logits.append(outputs[0].numpy())
        if not room:
            cache = dict(zip(cache, outputs[1:], strict=True))
        done = until
    return np.concatenate(logits, 1)[given.mask[:, :done].astype(bool)]
