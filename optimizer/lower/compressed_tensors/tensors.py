"""Write a compressed-tensors folder, which transformers loads and vLLM serves.

Byte specification
------------------
model.safetensors, or model-0000i-of-0000n.safetensors with model.safetensors.index.json above
SHARD bytes. A quantized linear `m` (out, in) with g groups becomes, by its input:

    float ("pack-quantized")             quantized ("int-quantized"; 8 bits, one scale per row)
    m.weight_packed      int32           m.weight            int8 (out, in)
      (out, ceil(in*bits/32)): integers  m.weight_scale      float (out, 1)
      + 2**(bits-1), packing.pack32      m.input_scale       float (1,)   static ranges only
    m.weight_scale       float (out, g)  m.input_zero_point  int8 (1,)    asymmetric ones only
    m.weight_shape       int64 [out, in]
    m.weight_zero_point  int32 (ceil(out*bits/32), g): as the integers, packed along the rows;
                         asymmetric weights only

FP8 weights ("float-quantized"): m.weight float8_e4m3fn (out, in), m.weight_scale float (out, 1),
or (out / 128, in / 128) of blocks; m.input_scale float (1,) with static scales.

FP4 weights ("nvfp4-pack-quantized"): m.weight_packed uint8 (out, in / 2), m.weight_scale
float8_e4m3fn (out, in / 16), m.weight_global_scale fp32 (1,): value = E2M1 * scale / global scale;
with quantized inputs also m.input_global_scale fp32 (1,), over which each 16 of them have a scale.

KV caches in FP8: a.k_scale, a.v_scale float (1,) of each attention `a`.

One scale per tensor is repeated for each row. Every other parameter has its own name, and its
`replaced` value where the state has one. A quantized embedding is written as dequantized floats:
transformers 5.23 cannot load a packed one. Floats and scales are fp32, fp16 or bf16. config.json
gains quantization_config (config.py); the other files of the checkpoint are copied.

transformers 5.23 loads asymmetric packed weights, of any writer, only with
quantization_config=CompressedTensorsConfig(dequantize=True): its model on the meta device expects
zero points that are not packed.

Sources: compressed_tensors.compressors.pack_quantized and .naive_quantized (0.20); vLLM's
compressed_tensors_wNa16.py and compressed_tensors_w8a8_int8.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from optimizer.foundation import packing, safetensors_stream
from optimizer.foundation.errors import OptimizeError, RecipeError
from optimizer.foundation.qtensor import QTensor, is_exact_in
from optimizer.foundation.rounding import float4, float8
from optimizer.foundation.state import CompressedState, Range
from optimizer.lower.compressed_tensors import config
from optimizer.model.architectures.families import FAMILIES
from optimizer.model.architectures.operands import find_cache, select_caches
from optimizer.model.checkpoint.checkpoint import Checkpoint

FloatType = Literal["fp32", "fp16", "bf16"]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SHARD = 5_000_000_000  # maximum bytes of a file, as in Hugging Face's tools
INDEX = "model.safetensors.index.json"


def write(
    checkpoint: Checkpoint, state: CompressedState, out: Path, float: FloatType
) -> dict[str, Any]:
    """Write the compressed-tensors folder into `out`, which exists. Returns the document
    lowering.json:

    exact    true where every scale is stored exactly, so that integer * scale is the state's value
    error    maximum relative change of a scale
    modules  {module: {weight: "int4 group 64", activation: null | "int8 token" | "int8 tensor"}}
    float    [module, ...] with a matrix that stays float
    float8_cache  true where the KV cache is in FP8
    decoded  [module, ...] quantized in the state and written as float: an embedding
    notes    sentences for readers of the folder

    One tensor is in memory at a time. Raises RecipeError as config.py, OptimizeError where the
    state does not belong to the checkpoint or a value does not fit.
    """
    own_head, table = find_untied_head(checkpoint, state), find_embedding(checkpoint)
    schemes = config.list_module_schemes(checkpoint, state, table)
    floats = config.list_float_modules(checkpoint, schemes, find_head(checkpoint))
    entries = _Entries(checkpoint, state, DTYPES[float], own_head)
    _shards(iter(entries), out)
    _copy(checkpoint.folder, out)
    document = dict(checkpoint.config)
    document.pop("dtype", None)
    document["torch_dtype"] = str(DTYPES[float]).removeprefix("torch.")
    ignored = [*floats, *config.list_absent_patterns(schemes, find_head(checkpoint))]
    caches = bool(collect_cache_scales(state))
    document["quantization_config"] = config.build_quantization_config(
        schemes, ignored, caches=caches
    )
    if own_head:
        document["tie_word_embeddings"] = False
    _write_json(out / "config.json", document)
    return {
        "format": "compressed-tensors",
        "float_type": float,
        "exact": entries.error == 0,
        "error": entries.error,
        "modules": {m: c.describe() for m, c in sorted(schemes.items())},
        "float": floats,
        "float8_cache": caches,
        "decoded": [table.removesuffix(".weight")] if table in state.weights else [],
        "notes": [*config.write_notes(schemes, caches=caches), *config.write_sparsity_notes(state)],
    }


class _Entries:
    """Tensors of the folder in the checkpoint's order, then the scales of KV caches.

    error: maximum relative change of a scale by rounding to `dtype`; complete after the iteration
    own_head: parameter name of an untied head that the checkpoint lacks; "" for none
    """

    def __init__(
        self, checkpoint: Checkpoint, state: CompressedState, dtype: torch.dtype, own_head: str
    ) -> None:
        self.checkpoint, self.state, self.dtype, self.own_head = checkpoint, state, dtype, own_head
        self.error = 0.0

    def __iter__(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield a list of named tensors per parameter."""
        names = [*self.checkpoint.tensors, *([self.own_head] if self.own_head else [])]
        unknown = sorted({*self.state.weights, *self.state.replaced} - set(names))
        if unknown:
            raise OptimizeError(
                f"the state holds {unknown[0]}, which the checkpoint does not have",
                where="lower: compressed-tensors",
            )
        table = find_embedding(self.checkpoint)
        for name in names:
            if name in self.state.weights and name != table:
                yield list(self._quantized(name))
            else:
                yield [(name, self._float(name))]
        scales = collect_cache_scales(self.state)
        yield from ([(name, self._scale(name, value))] for name, value in scales.items())

    def _float(self, name: str) -> Tensor:
        """Return a float parameter for the lowered folder in `dtype`; OptimizeError where it does
        not hold the values."""
        if name in self.state.weights:
            value = self.state.weights[name].dequantize()
        else:
            value = read_float_value(self.checkpoint, self.state, name)
        if not value.is_floating_point():
            return value
        stored = value.to(self.dtype)
        if not bool(torch.isfinite(stored).all()):
            raise OptimizeError(
                f"{name} has values that {self.dtype} does not hold",
                where="targets: compressed-tensors: float",
                accepted="bf16, fp32",
            )
        return stored

    def _quantized(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield {name in the folder: tensor} of a quantized weight, by the byte specification of
        the format."""
        module, q = name.removesuffix(".weight"), self.state.weights[name]
        if q.scheme.type == "float4":
            yield f"{module}.weight_packed", float4.pack(q.integers)
            yield f"{module}.weight_scale", float8.nearest(q.scale * float4.GLOBAL_SCALE)
            yield f"{module}.weight_global_scale", torch.tensor([float4.GLOBAL_SCALE])
            covered = self.state.range_of(module)
            if covered is not None and self.state.activations_of(module) is not None:
                yield f"{module}.input_global_scale", torch.tensor([covered.float4_global_scale])
            return
        scale = self._scale(name, expand_to_rows(q).scale)
        if q.scheme.is_float8:
            yield f"{module}.weight", q.integers
            covered = self.state.range_of(module)
            if covered is not None and self.state.activations_of(module) == "float8 tensor":
                value = torch.tensor([covered.float8_scale])
                yield f"{module}.input_scale", self._scale(module, value)
        elif self.state.activations_of(module) is None:
            yield f"{module}.weight_packed", pack(q.integers, q.scheme.bits)
            yield f"{module}.weight_shape", torch.tensor(q.integers.shape)
            if q.zero_point is not None:
                zero = expand_to_rows(q).zero_point
                assert zero is not None
                yield f"{module}.weight_zero_point", pack(zero.t(), q.scheme.bits).t()
        else:
            yield f"{module}.weight", q.integers
            covered = self.state.range_of(module)
            if covered is not None and self.state.activations_of(module) == "tensor":
                yield from self._input(module, covered)
        yield f"{module}.weight_scale", scale

    def _input(self, module: str, covered: Range) -> Iterator[tuple[str, Tensor]]:
        yield f"{module}.input_scale", self._scale(module, torch.tensor([covered.scale]))
        if not config.has_symmetric_inputs(self.state):
            zero = torch.tensor([covered.zero_point - 128], dtype=torch.int8)
            yield f"{module}.input_zero_point", zero

    def _scale(self, name: str, scale: Tensor) -> Tensor:
        """Round a scale to the folder's float type `dtype`, and raise `error`, the largest relative
        change of a scale so far."""
        stored = scale.to(self.dtype)
        if not is_exact_in(scale, self.dtype):
            ratio = stored.float() / scale
            if not bool((torch.isfinite(ratio) & (ratio > 0)).all()):
                raise OptimizeError(
                    f"{name} has a scale that {self.dtype} does not hold",
                    where="targets: compressed-tensors: float",
                    accepted="fp32",
                )
            self.error = max(self.error, float((ratio - 1).abs().max()))
        return stored


def collect_cache_scales(state: CompressedState) -> dict[str, Tensor]:
    """Return {name of a KV cache's scale in the folder: its value, float32 (1,)}."""
    return {
        f"{find_cache(name)}.{name.rpartition('.')[2][0]}_scale": torch.tensor([r.float8_scale])
        for name, r in sorted(select_caches(state).items())
    }


def read_float_value(checkpoint: Checkpoint, state: CompressedState, name: str) -> Tensor:
    """Read the float value that the lowered folder gets of a parameter before quantization, from
    the state's replaced ones, else the checkpoint; for an untied head the embedding's."""
    if name in state.replaced:
        return state.replaced[name]
    if name in checkpoint.tensors:
        return checkpoint.tensors[name]
    return read_float_value(checkpoint, state, find_embedding(checkpoint))


def expand_to_rows(q: QTensor) -> QTensor:
    """Repeat one scale per tensor for each row, as vLLM and transformers read compressed-tensors;
    return other weights unchanged."""
    if q.scheme.granularity != "tensor":
        return q
    rows = len(q.integers)
    zero = None if q.zero_point is None else q.zero_point.expand(rows, 1)
    scheme = config.expand_scheme(q.scheme)
    return QTensor(q.integers, q.scale.expand(rows, 1), zero, scheme)


def are_equal(a: QTensor, b: QTensor) -> bool:
    """Test for the lowered folder that both weights have equal integers, scales and zero points."""
    if (a.zero_point is None) != (b.zero_point is None) or a.integers.shape != b.integers.shape:
        return False
    zeros = a.zero_point is None or b.zero_point is None or torch.equal(a.zero_point, b.zero_point)
    if a.scheme.dtype != b.scheme.dtype:
        return False
    one, other = (q.integers.view(torch.int8) for q in (a, b))  # torch.equal takes no FP8
    return zeros and torch.equal(one, other) and torch.equal(a.scale, b.scale)


def pack(integers: Tensor, bits: int) -> Tensor:
    """Pack int8 (rows, columns) as compressed-tensors does, into int32 (rows, ceil(columns * bits /
    32))."""
    return torch.from_numpy(packing.pack32(packing.to_unsigned(integers.numpy(), bits), bits))


def find_head(checkpoint: Checkpoint) -> str:
    """Return, for the compressed-tensors folder, the module name of a decoder's output projection;
    "" for an encoder."""
    row = FAMILIES.get(str(checkpoint.config.get("model_type")))
    if row is not None:
        return row.head
    classes = checkpoint.config.get("architectures") or [""]
    return "lm_head" if str(classes[0]).endswith("ForCausalLM") else ""


def find_untied_head(checkpoint: Checkpoint, state: CompressedState) -> str:
    """Return the parameter name of a head that is tied to the embedding in the checkpoint and must
    be written as its own tensor, because the state changes it or quantizes the embedding. Returns
    "" for other heads."""
    module = find_head(checkpoint)
    name = f"{module}.weight"
    if not module or name in checkpoint.tensors:
        return ""
    changed = {*state.weights, *state.replaced}
    if name in changed:
        return name
    return name if find_embedding(checkpoint) in state.weights else ""


def find_embedding(checkpoint: Checkpoint) -> str:
    """Return, for the compressed-tensors folder, the parameter name of a known decoder's token
    embedding; "" for others."""
    row = FAMILIES.get(str(checkpoint.config.get("model_type")))
    if row is None or row.kind != "decoder":
        return ""
    return f"{row.base_prefix}{row.embeddings}.weight"


def _shards(parts: Iterator[list[tuple[str, Tensor]]], out: Path) -> None:
    """Write the tensors of a compressed-tensors folder to safetensors files of at most SHARD bytes,
    with an index if there are several."""
    files: list[Path] = []
    places: dict[str, int] = {}
    total = 0
    waiting: list[tuple[str, Tensor]] = []

    def one() -> Iterator[tuple[str, Tensor]]:
        nonlocal waiting, total
        size = 0
        while waiting:
            for name, tensor in waiting:
                places[name] = len(files)
                size += tensor.nbytes
                yield name, tensor
            waiting = next(parts, [])
            if size and size + sum(t.nbytes for _, t in waiting) > SHARD:
                break
        total += size

    waiting = next(parts, [])
    while waiting:
        file = out / f"shard-{len(files)}"
        safetensors_stream.write(one(), file, {"format": "pt"})
        files.append(file)
    if not files:
        raise RecipeError("the checkpoint has no tensors", where="lower: compressed-tensors")
    if len(files) == 1:
        files[0].rename(out / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for file, name in zip(files, names, strict=True):
        file.rename(out / name)
    where = {name: names[i] for name, i in sorted(places.items())}
    _write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _copy(folder: Path, out: Path) -> None:
    """Copy the checkpoint's files but config and weights into the compressed-tensors folder:
    tokenizer, chat template, settings, licence."""
    for file in sorted(folder.iterdir()):
        weights = file.suffix == ".safetensors" or file.name.endswith(".safetensors.index.json")
        if file.is_file() and not weights and file.name != "config.json":
            shutil.copyfile(file, out / file.name)


def _write_json(file: Path, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
