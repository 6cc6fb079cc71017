"""Checkpoints that are quantized already: read exactly, as codes and as the floats they stand for.

`find` understands what GPTQ tools (gptqmodel, AutoGPTQ), AutoAWQ and llm-compressor write; one
file per format says how (gptq.py, awq.py, compressed_tensors.py). To the
load stage such a folder looks like a float one: `stored` has every parameter under its original
name, and the de-quantized value of one is made when it is read. `state` gives the same weights
as codes, so that they can be lowered as they are.

Ways a folder can be wrong, each a CheckpointError that says what to do:
  1. quant_method is none of the three, or a variant that is not read (GEMV, Marlin, FP8, 2:4 ...)
  2. weights of other than 4 or 8 bits (3 as well in compressed-tensors)
  3. nothing in the files is packed, though the config says that it is
  4. a tensor of a module is missing, or has another dtype or shape than its neighbours say
  5. groups of another size than the config says, or that do not divide the inputs
  6. inputs in an order of their own (desc_act without static groups): no runtime here reorders
  7. a zero point that is no code of its bits
  8. the config says symmetric and the zero points do not (a wrong checkpoint_format)
  9. a scale that is not positive and finite, or has more digits than float16 or bfloat16 hold
 10. activations coded in a way that a CompressedState does not say
 11. transforms, sparsity or cache scales that a run would have to apply
 12. a weight that is quantized and that the model does not have as a linear layer
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
from optimizer.load.quantized.parts import ACCEPTED, FLOAT_INSTEAD, Quantized, QuantizedWeight
from optimizer.load.source import shard_files
from optimizer.model.architectures.families import FAMILIES
from optimizer.model.checkpoint.checkpoint import Entry, open_checkpoint, read_header, read_json

Reader = Callable[[Path, Mapping[str, Any], Mapping[str, Entry]], Quantized]
READERS: dict[str, Reader] = {
    "gptq": gptq.read,
    "awq": awq.read,
    "compressed-tensors": compressed_tensors.read,
}
"""By the quant_method of config.json."""


def find(folder: Path) -> Quantized | None:
    """What the folder holds, from its headers alone; None when it is not quantized.

    Raises CheckpointError as listed above.
    """
    config = _config(folder)
    if not config:
        return None
    method = str(config.get("quant_method"))
    if method not in READERS:
        raise CheckpointError(
            f"the checkpoint is quantized by {method}, which is not read",
            where=f"{folder / 'config.json'}: quantization_config.quant_method",
            accepted=ACCEPTED,
            fix=FLOAT_INSTEAD,
        )
    checkpoint = READERS[method](folder, config, _entries(folder))
    if not checkpoint.weights:
        raise CheckpointError(
            f"quantization_config says {method}, and no tensor in the files is packed",
            where=str(folder),
            fix="Remove quantization_config from config.json if the weights are float.",
        )
    return checkpoint


def state(checkpoint: Quantized, names: Mapping[str, str]) -> CompressedState:
    """The codes as they are, opened one by one. names: {parameter of the model: name in the files}
    (what the load stage paired).

    Raises CheckpointError for a coded weight that `names` leaves out or that is no linear layer's.
    """
    paired = {p: n for p, n in names.items() if n in checkpoint.weights}
    lost = sorted(set(checkpoint.weights) - set(paired.values()))
    model_type = str(read_json(checkpoint.folder / "config.json").get("model_type"))
    row = FAMILIES.get(model_type)
    lost += [n for p, n in paired.items() if row is not None and row.is_transposed(p)]
    if lost:
        raise CheckpointError(
            f"{lost[0]} is quantized and is no linear layer of this model",
            where=str(checkpoint.folder),
            fix=FLOAT_INSTEAD,
        )
    module_of = {n.removesuffix(".weight"): p.removesuffix(".weight") for p, n in paired.items()}
    why = "its input is float in the checkpoint"
    return CompressedState(
        weights=_Weights(checkpoint.weights, paired),
        ranges={input_name(module_of[m]): r for m, r in checkpoint.ranges.items()},
        activations=checkpoint.activations,
        notes=tuple(Note(module_of[m], "weight-only", why) for m in sorted(checkpoint.weight_only)),
    )


class _Weights(Mapping[str, QTensor]):
    def __init__(self, weights: Mapping[str, QuantizedWeight], names: Mapping[str, str]) -> None:
        self._weights, self._names = weights, names

    def __getitem__(self, parameter: str) -> QTensor:
        return self._weights[self._names[parameter]].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def keep(folder: Path, names: Mapping[str, str], out: Path) -> None:
    """Finish a load folder that was written from a quantized source; nothing for a float one.

    out/checkpoint, written from `stored`, becomes a float checkpoint (config.json loses
    quantization_config), and out/quantized holds the state as optimizer/foundation/state.py writes
    it. Raises LedgerError when the two do not hold the same numbers.
    """
    checkpoint = find(folder)
    if checkpoint is None:
        return
    config = read_json(out / "checkpoint" / "config.json")
    config.pop("quantization_config", None)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (out / "checkpoint" / "config.json").write_text(text, encoding="utf-8")
    (out / "quantized").mkdir()
    compressed_state.write(state(checkpoint, names), out / "quantized")
    written, kept = open_checkpoint(out).tensors, compressed_state.read(out / "quantized")
    for parameter, q in kept.weights.items():
        if parameter not in written or not torch.equal(written[parameter], q.dequantize()):
            raise LedgerError(
                f"{parameter} has other values in the checkpoint than its codes stand for",
                where="load: quantized source",
                accepted="equality",
            )


def _config(folder: Path) -> dict[str, Any]:
    """quantization_config, or what older tools wrote beside config.json; {} of a float folder."""
    config = read_json(folder / "config.json").get("quantization_config")
    if config:
        return dict(config)
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if (folder / name).is_file():
            return {"quant_method": method, **read_json(folder / name)}
    return {}


def _entries(folder: Path) -> dict[str, Entry]:
    """Every tensor of the folder's safetensors files, by the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = shard_files(folder, index)
        headers = {file: read_header(file) for file in sorted(set(listed.values()))}
        missing = [name for name, file in listed.items() if name not in headers[file]]
        if missing:
            raise CheckpointError(
                f"{missing[0]!r} is listed in {index.name} and not in its file", where=str(folder)
            )
        return {name: headers[file][name] for name, file in listed.items()}
    entries: dict[str, Entry] = {}
    for file in sorted(folder.glob("*.safetensors")):
        entries.update(read_header(file))
    if not entries:
        raise CheckpointError(
            "a quantized checkpoint without a *.safetensors file",
            where=str(folder),
            fix="Convert its pickle to safetensors with the tool that wrote it.",
        )
    return entries
