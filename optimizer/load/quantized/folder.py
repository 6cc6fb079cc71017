"""Read checkpoints that are already quantized, exactly, as integers and as floats.

`find` reads the folders of GPTQ tools (gptqmodel, AutoGPTQ), AutoAWQ and llm-compressor. `stored`
has every parameter under its original name, de-quantized when it is read, so that the load stage
treats the folder as a float one; `state` has the same weights as integers, for lowering them
unchanged.

Errors of a folder, each a CheckpointError:
  1. quant_method or its variant is not covered (GEMV, Marlin, FP8, 2:4 ...)
  2. weights of other than 4 or 8 bits (also 3 in compressed-tensors)
  3. no tensor is packed, though the config declares quantization
  4. a tensor of a module is missing, or has an unexpected dtype or shape
  5. groups of another size than the config's, or that do not divide the inputs
  6. groups out of the order of inputs (desc_act without static groups): no runtime here reorders
  7. a zero point outside the range of its bits
  8. symmetric in the config but not in the zero points (a wrong checkpoint_format)
  9. a scale that is not positive and finite, or has more digits than float16 or bfloat16 hold
 10. a quantization of activations that CompressedState does not have
 11. transforms, sparsity or cache scales that must be applied at run time
 12. a quantized weight that is not a linear layer's
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from optimizer.foundation import state as compressed_state
from optimizer.foundation.errors import CheckpointError, LedgerError
from optimizer.foundation.qtensor import QTensor
from optimizer.foundation.state import CompressedState, Note, input_name
from optimizer.load.quantized import awq, compressed_tensors, gptq
from optimizer.load.quantized.parts import (
    ACCEPTED,
    FLOAT_INSTEAD,
    QuantizedTensors,
    QuantizedWeight,
)
from optimizer.load.source import shard_files
from optimizer.model.architectures.families import FAMILIES
from optimizer.model.checkpoint.checkpoint import (
    TensorPlace,
    open_checkpoint,
    read_header,
    read_json,
)

Reader = Callable[[Path, Mapping[str, Any], Mapping[str, TensorPlace]], QuantizedTensors]
READERS: dict[str, Reader] = {
    "gptq": gptq.read,
    "awq": awq.read,
    "compressed-tensors": compressed_tensors.read,
}
"""{quant_method of config.json: reader}."""


def find(folder: Path, *, float8: bool = False) -> QuantizedTensors | None:
    """QuantizedTensors of a folder, from its headers alone; None for a folder of float weights.
    Raises CheckpointError as listed above.

    float8: read FP8 tensors too, to read back a folder that was just written; its KV cache's scales
        are tensors like others
    """
    config = _quantization_config(folder)
    if config and float8:
        config = {**config, "kv_cache_scheme": None}
    if not config:
        return None
    method = str(config.get("quant_method"))
    if method not in READERS:
        raise CheckpointError(
            f"the checkpoint is quantized by {method}, which is not covered",
            where=f"{folder / 'config.json'}: quantization_config.quant_method",
            accepted=ACCEPTED,
            fix=FLOAT_INSTEAD,
        )
    checkpoint = READERS[method](folder, config, _entries(folder, float8))
    if not checkpoint.weights:
        raise CheckpointError(
            f"quantization_config declares {method}, but no tensor in the files is packed",
            where=str(folder),
            fix="Remove quantization_config from config.json if the weights are float.",
        )
    return checkpoint


def state(checkpoint: QuantizedTensors, names: Mapping[str, str]) -> CompressedState:
    """Return a quantized source's weights as integers, read one by one. names: {parameter of the
    model: name in the files}. Raises CheckpointError for a quantized weight that `names` lacks or
    that is not a linear's.
    """
    paired = {p: n for p, n in names.items() if n in checkpoint.weights}
    lost = sorted(set(checkpoint.weights) - set(paired.values()))
    model_type = str(read_json(checkpoint.folder / "config.json").get("model_type"))
    row = FAMILIES.get(model_type)
    lost += [n for p, n in paired.items() if row is not None and row.is_transposed(p)]
    if lost:
        raise CheckpointError(
            f"{lost[0]} is quantized but is not a linear layer of this model",
            where=str(checkpoint.folder),
            fix=FLOAT_INSTEAD,
        )
    module_of = {n.removesuffix(".weight"): p.removesuffix(".weight") for p, n in paired.items()}
    why = "its input is float in the checkpoint"
    return CompressedState(
        weights=_FolderWeights(checkpoint.weights, paired),
        ranges={input_name(module_of[m]): r for m, r in checkpoint.ranges.items()},
        activations=checkpoint.activations,
        notes=tuple(Note(module_of[m], "weight-only", why) for m in sorted(checkpoint.weight_only)),
    )


class _FolderWeights(Mapping[str, QTensor]):
    def __init__(self, weights: Mapping[str, QuantizedWeight], names: Mapping[str, str]) -> None:
        self._weights, self._names = weights, names

    def __getitem__(self, parameter: str) -> QTensor:
        return self._weights[self._names[parameter]].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def write_state(folder: Path, names: Mapping[str, str], out: Path) -> None:
    """Write out/quantized, the state of integers, and remove quantization_config from
    out/checkpoint; nothing for a float source. Raises LedgerError where the two differ."""
    checkpoint = find(folder)
    if checkpoint is None:
        return
    config = read_json(out / "checkpoint" / "config.json")
    config.pop("quantization_config", None)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (out / "checkpoint" / "config.json").write_text(text, encoding="utf-8")
    (out / "quantized").mkdir()
    compressed_state.write(state(checkpoint, names), out / "quantized")
    written, restored = open_checkpoint(out).tensors, compressed_state.read(out / "quantized")
    for parameter, q in restored.weights.items():
        if parameter not in written or not torch.equal(written[parameter], q.dequantize()):
            raise LedgerError(
                f"{parameter} in the checkpoint differs from its de-quantized integers",
                where="load: quantized source",
                accepted="equality",
            )


def _quantization_config(folder: Path) -> dict[str, Any]:
    """Read the object quantization_config of a quantized source, or the file that older tools
    wrote; {} for a float folder. Raises CheckpointError for a value that is not an object.
    """
    config = read_json(folder / "config.json").get("quantization_config")
    if config and not isinstance(config, dict):
        raise CheckpointError(
            f"{config!r:.80} is not an object",
            where=f"{folder / 'config.json'}: quantization_config",
            accepted="an object that names quant_method",
            fix="Remove it if the weights are float.",
        )
    if config:
        return dict(config)
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if (folder / name).is_file():
            return {"quant_method": method, **read_json(folder / name)}
    return {}


def _entries(folder: Path, float8: bool) -> dict[str, TensorPlace]:
    """Return {tensor: entry} of the folder's safetensors files, or of its shard index if there is
    one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = shard_files(folder, index)
        files = sorted(set(listed.values()))
        headers = {file: read_header(file, float8=float8) for file in files}
        missing = [name for name, file in listed.items() if name not in headers[file]]
        if missing:
            raise CheckpointError(
                f"{missing[0]!r} is listed in {index.name} but not in its file", where=str(folder)
            )
        return {name: headers[file][name] for name, file in listed.items()}
    entries: dict[str, TensorPlace] = {}
    for file in sorted(folder.glob("*.safetensors")):
        entries.update(read_header(file, float8=float8))
    if not entries:
        raise CheckpointError(
            "a quantized checkpoint without a *.safetensors file",
            where=str(folder),
            fix="Convert its pickle to safetensors with the tool that wrote it.",
        )
    return entries
