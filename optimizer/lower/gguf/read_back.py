"""Read a GGUF file back with the gguf package and compare it with the model.

Rows are reordered by an independent inverse of tensors.order_rows, as readers do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.lower.gguf import architectures, vocabulary
from optimizer.lower.gguf.tensors import GgufModel
from optimizer.lower.gguf.vocabulary import Vocabulary


def describe_differences(file: Path, model: GgufModel, words: Vocabulary) -> Iterator[str]:
    """Describe each difference between file and model in a sentence."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(file)
    yield from _metadata(reader, model.config, words)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    entries = list(model.entries())
    for name in sorted(stored.keys() - {e.name for e in entries}):
        yield f"{name}: the file holds it and the model has no such parameter"
    for entry in entries:
        tensor = stored.get(entry.name)
        if tensor is None:
            yield f"{entry.parameter}: the file does not hold {entry.name}"
            continue
        shape = tuple(int(n) for n in reversed(tensor.shape))
        if tensor.tensor_type.name != entry.kind or shape != entry.shape:
            yield (
                f"{entry.parameter}: {entry.name} is {tensor.tensor_type.name} {shape}, not "
                f"{entry.kind} {entry.shape}"
            )
            continue
        values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        if entry.heads:
            half = shape[0] // entry.heads // 2
            pairs = values.reshape(entry.heads, half, 2, *shape[1:])
            values = pairs.swapaxes(1, 2).reshape(shape)
        if not np.array_equal(values, model.value(entry).numpy()):
            yield f"{entry.parameter}: {entry.name} reads back with other values than the model's"


def _metadata(reader: Any, config: Mapping[str, Any], words: Vocabulary) -> Iterator[str]:
    """Yield a sentence for each metadata key that the GGUF file lacks or holds with another
    value."""
    expected: dict[str, Any] = {
        "general.architecture": architectures.find_architecture(config).name,
        **architectures.build_metadata(config),
        **vocabulary.build_keys(words),
    }
    template = words.special.chat_template
    if isinstance(template, str):
        expected["tokenizer.chat_template"] = template
    for key, value in expected.items():
        if key not in reader.fields:
            yield f"{key} is missing"
            continue
        stored = reader.fields[key].contents()
        if isinstance(value, float):
            value = float(np.float32(value))  # what the format stores
        if stored != value:
            yield f"{key} is {str(stored)[:80]}, not {str(value)[:80]}"
