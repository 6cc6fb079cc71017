"""Write the checkpoint, the state and the tokenizer as one GGUF file for llama.cpp.

Writes out/model.gguf and out/lowering.json:
    exact    true where every value of the file is the state's; false for asymmetric weights
    error    maximum error of a minimum in fp16, in steps of its scale
    modules  {module: {weight: "int4 group 32", type: "Q4_0", activation: null}}
    float    [module, ...] with a matrix that stays float
    notes    sentences for readers of the file
Every tensor and key is then read back by the gguf package and compared.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from optimizer.foundation import state as compressed_state
from optimizer.foundation.errors import LedgerError, MachineError
from optimizer.foundation.state import owner_of
from optimizer.load.config.config import read_complete_config
from optimizer.lower.gguf import architectures, blocks, read_back, vocabulary
from optimizer.lower.gguf.tensors import FLOATS, GgufModel, GgufTensor
from optimizer.lower.gguf.vocabulary import Vocabulary
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.recipe.targets import GgufTarget
from optimizer.store import Estimate, Shapes

FILE = "model.gguf"
QUANTIZATION_VERSION = 2  # general.quantization_version of ggml's blocks since 2023
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}


def lower(section: GgufTarget, source: Path, state: Path, _graph: Path, out: Path) -> None:
    """Write model.gguf and lowering.json into `out`; no graph is read.

    source, state: folders of the compressed checkpoint and of the compress stage
    Raises RecipeError for a model or weight that GGUF cannot hold, MachineError without the gguf
    package, LedgerError where the file reads back differently.
    """
    if not find_spec("gguf"):
        raise MachineError(
            "writing GGUF needs the package gguf, which is not installed",
            where="targets: gguf",
            fix="Run: pip install 'optimize-toolchain[gguf]'",
        )
    model, words = read_model(source, state, section.float)
    entries = list(model.entries())
    _write(model, entries, words, out / FILE)
    for difference in read_back.describe_differences(out / FILE, model, words):
        raise LedgerError(difference, where=f"lower: state -> {FILE}", accepted="equality")
    text = json.dumps(_document(model, entries, words), indent=1, sort_keys=True)
    (out / "lowering.json").write_text(text, encoding="utf-8")


def read_model(source: Path, state: Path, float_type: str) -> tuple[GgufModel, Vocabulary]:
    """Read what becomes a GGUF file: model and tokenizer from the stages' folders. Raises
    RecipeError for a tokenizer that GGUF cannot hold.

    float_type: "fp32", "fp16" or "bf16", the type of matrices that stay float
    """
    checkpoint = open_checkpoint(source)
    config = read_complete_config(checkpoint.folder)
    model = GgufModel(checkpoint, compressed_state.read(state), config, float_type)
    return model, vocabulary.read(checkpoint.folder, int(config["vocab_size"]))


def _write(model: GgufModel, entries: list[GgufTensor], words: Vocabulary, file: Path) -> None:
    """Write the GGUF file: metadata, vocabulary, and the tensors, with one in memory at a time."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quant_shape_to_byte_shape

    writer = GGUFWriter(file, architectures.find_architecture(model.config).name)
    for key, value in architectures.build_metadata(model.config).items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(key, value)
    matrices = Counter(e.kind for e in entries if len(e.shape) == 2)
    writer.add_file_type(FILE_TYPES[matrices.most_common(1)[0][0]])
    writer.add_quantization_version(QUANTIZATION_VERSION)
    vocabulary.write(words, writer)
    for entry in entries:
        kind = GGMLQuantizationType[entry.kind]
        shape = quant_shape_to_byte_shape(entry.shape, kind)
        writer.add_tensor_info(entry.name, shape, np.dtype(np.uint8), prod(shape), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in entries:
        writer.write_tensor_data(model.bytes_of(entry))
    writer.close()


def _document(model: GgufModel, entries: list[GgufTensor], words: Vocabulary) -> dict[str, Any]:
    """Build the content of lowering.json for a GGUF file."""
    quantized = [e for e in entries if e.kind in blocks.TYPES]
    weights = model.state.weights
    error = max(
        (blocks.measure_minimum_error(weights[e.parameter]) for e in quantized), default=0.0
    )
    floats = [e for e in entries if e.kind not in blocks.TYPES and len(e.shape) == 2]
    return {
        "format": "gguf",
        "float_type": model.float,
        "exact": error == 0,
        "error": error,
        "modules": {
            owner_of(e.parameter): {
                "weight": str(model.state.scheme(e.parameter)),
                "type": e.kind,
                "activation": None,
            }
            for e in quantized
        },
        "float": sorted(owner_of(e.parameter) for e in floats),
        "notes": [
            *architectures.write_notes(model.config),
            *words.notes,
            *_notes(model, error, bool(quantized)),
        ],
    }


def _notes(model: GgufModel, error: float, quantized: bool) -> Iterator[str]:
    """Yield sentences on what users of the GGUF file should know, for lowering.json.

    error: as in lowering.json
    """
    if quantized:
        yield (
            "llama.cpp also quantizes the inputs of these weights' products to 8 bits, in blocks "
            f"of {blocks.BLOCK}; the ledger's answers are computed without that"
        )
    if error:
        yield (
            "asymmetric weights: Q4_1 stores -(zero point + 8) * scale in fp16, which shifts the "
            f"values of a block by up to {error:.2g} of a step"
        )
    if any(model.state.scheme(name).bits == 3 for name in model.state.weights):
        yield "3 bits are stored as 4, so they make the file no smaller"
    if model.state.sparsity:
        yield f"{len(model.state.sparsity)} weights are sparse, and stored dense"


def estimate(section: GgufTarget, shapes: Shapes) -> Estimate:
    """Estimate, for stage lower with a GGUF target, memory from one tensor at a time, and disk as
    if every weight stayed float."""
    width = 4 if FLOATS[section.float] == "F32" else 2
    sizes = [width * prod(shape) for shape in shapes.values()]
    return Estimate(
        memory=(250 << 20) + 6 * max(sizes, default=0),
        disk=sum(sizes),
        seconds=2 + sum(sizes) / 60e6,
    )
