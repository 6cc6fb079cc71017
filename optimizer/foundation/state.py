"""The compressed state: the result of compression, independent of any runtime.

Byte specification (version 1)
------------------------------
A folder with two files.

tensors.safetensors, entries as safetensors_stream orders them (wider elements first, then names):
    <parameter>.codes        8 bits: int8 (out, in), see qtensor.py for convolutions  # prose: ok
                             4 bits: uint8 (out, ceil(in/2)); input 2j in the low nibble of byte
                             j, 2j+1 in the high nibble, two's complement; odd widths pad with 0
                             3 bits: as 4 bits (the runtime format decides the packing)
                             float8: float8_e4m3fn (out, in)
                             float4: uint8 (out, in / 2), rounding/float4.py
    <parameter>.scale        float32 (out, groups), or (1, 1) for one scale per tensor, or
                             (out / 128, in / 128) for one per block
    <parameter>.zero_point   int8, the shape of scale; absent when symmetric
    <parameter>              float32: a parameter replaced by another float value. A parameter
                             may have both: then this is its float value after folding (smoothing),
                             and the integers are those of this value
    <site>.factor            float32 (in,): see factors

state.json, keys sorted, UTF-8, no spaces after separators:
    version      1
    schemes      {parameter: {bits, symmetric, granularity, group_size, inputs}}, and full_range:
                 true where the scales may be negative; absent where they may not; and type:
                 "float8" | "float4"; absent for integers
    replaced     [parameter, ...] sorted
    ranges       {site: [low, high]}   site = "<module>:input", as in
                 "encoder.layer.0.output.dense:input"; range of the input after its factor. A module
                 without integers is an identity before a residual add or, below an attention's
                 `operands`, before one of its products: query, key, value, probabilities; below
                 a decoder's attention's `kv_cache` (key, value), float8 by Range.float8_scale on
                 the way into its cache
    factors      [site, ...] sorted: inputs multiplied per feature by <site>.factor before they
                 are quantized; the module's integers hold the inverse, its replaced weight does not
    activations  quantization of the inputs of quantized modules:
                 null              left in float
                 "tensor"          to int8 by one static range each (`ranges`)
                 "token"           to int8 per token, at run time
                 "float8 tensor"   to float8 by one static scale each, Range.float8_scale
                 "float8 token"    to float8 per token, at run time
                 "float8 group"    to float8 per 128 values of a token, at run time
                 "float4 group"    to float4 per 16 values of a token, at run time, with one static
                                   number for all scales, Range.float4_global_scale
                 a module that a note calls "weight-only" has its input left in float
    sparsity     {parameter: pattern}          "2:4" | "N:M" | "unstructured <amount>", as
                 optimizer/foundation/sparsity.py says; the mask is not stored: a pruned weight is
                 an integer that equals its zero point or, where the parameter has no integers, 0
                 in `replaced`
    notes        [{module, what, why}, ...] in walk order: fallbacks, modules left in float
A reader must refuse: another version; a tensor in one file and not in the other; a shape or
dtype other than above; a scale that is not finite, positive (with full_range: other than 0) and on
the scale grid; a parameter in sparsity without integers or a replaced value, or with a weight
other than zero that its pattern forbids (found when the parameter is opened). A writer refuses them
as well.

Laws: read(write(s)) == s.  write(read(folder)) == the same bytes.  The bytes do not depend on
the order in which parameters were added.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from optimizer.foundation import packing
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.qtensor import QTensor, Scheme, to_scale_grid
from optimizer.foundation.rounding import float4, float8
from optimizer.foundation.sparsity import Pattern, describe_violation

VERSION = 1
Mode = Literal["tensor", "token", "float8 tensor", "float8 token", "float8 group", "float4 group"]
Activations = Mode | None
PER_TOKEN: frozenset[Activations] = frozenset({"token", "float8 token", "float8 group"})
"""Modes whose scales are measured at run time."""
STATIC: frozenset[Activations] = frozenset({"tensor", "float8 tensor", "float4 group"})
"""Modes with a Range per input."""


@dataclass(frozen=True)
class Range:
    """Real interval that the 256 integers of a quantized activation cover.

        q = clamp(round(x / scale) + zero_point, 0, 255)      value = (q - zero_point) * scale

    low <= 0 <= high, so that 0 (padding) is exact. A runtime without zero points computes the same
    integers as clamp(round((x - offset) / scale), -128, 127) with offset = (128 - zero_point) *
    scale, and adds W offset to the bias. A symmetric range has zero_point 128 and offset 0.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        finite = math.isfinite(self.low) and math.isfinite(self.high)
        if not finite or not self.low <= 0 <= self.high:
            raise ValueError(f"range [{self.low}, {self.high}]: must be finite, low <= 0 <= high")

    @classmethod
    def symmetric(cls, absmax: float) -> Range:
        """Return the activation range whose zero point is 128 and whose integer 255 stands for at
        least absmax."""
        scale = _grid(absmax / 127.0)
        return cls(-128 * scale, 127 * scale)

    @cached_property
    def scale(self) -> float:
        """Size of one step of this activation range, on the scale grid."""
        return _grid((self.high - self.low) / 255.0)

    @property
    def zero_point(self) -> int:
        """Integer of a quantized activation that stands for 0, in 0..255."""
        return min(255, max(0, round(-self.low / self.scale)))

    @cached_property
    def float8_scale(self) -> float:
        """Scale, on the scale grid, with which E4M3 values cover this activation range of a
        compressed state."""
        return _grid(max(-self.low, self.high) / float8.LARGEST)

    @property
    def float4_global_scale(self) -> float:
        """Number by which scales of NVFP4 inputs are multiplied before they are rounded to E4M3:
        the largest power of two with which they cover the range."""
        largest = max(-self.low, self.high, self.scale)
        return float(2.0 ** math.floor(math.log2(float4.LARGEST * float8.LARGEST / largest)))

    @property
    def offset(self) -> float:
        """Number that a runtime without zero points subtracts from an input before it divides by
        `scale`."""
        return (128 - self.zero_point) * self.scale


def _grid(scale: float) -> float:
    return float(to_scale_grid(torch.tensor(scale)))


def weight_name(module: str) -> str:
    """Return the name of a module's weight, "<module>.weight"."""
    return f"{module}.weight"


def input_name(module: str) -> str:
    """Return the name of a module's input in a state, "<module>:input"."""
    return f"{module}:input"


def owner_of(name: str) -> str:
    """Return the module's name from the name of its weight or of its input."""
    return name.removesuffix(".weight").removesuffix(":input")


@dataclass(frozen=True)
class Note:
    """Note in a compressed state for the report: a fallback, or a module left in float."""

    module: str
    what: str  # "float" | "fallback" | "weight-only"
    why: str


@dataclass(frozen=True)
class CompressedState:
    """Result of compression, independent of any runtime; its mappings may read tensors from disk
    one by one (see `read`)."""

    weights: Mapping[str, QTensor]
    replaced: Mapping[str, Tensor] = field(default_factory=dict)
    ranges: Mapping[str, Range] = field(default_factory=dict)
    factors: Mapping[str, Tensor] = field(default_factory=dict)
    activations: Activations = None
    sparsity: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()

    @property
    def modules(self) -> list[str]:
        """Names of the modules whose weight is quantized."""
        return [owner_of(parameter) for parameter in self.weights]

    @property
    def summands(self) -> dict[str, Range]:
        """{identity: range} of quantized tensors that are not inputs of a quantized module:
        operands of residual adds, of products in an attention, and of a KV cache."""
        ranges = ((owner_of(site), covered) for site, covered in self.ranges.items())
        return {name: r for name, r in ranges if weight_name(name) not in self.weights}

    def scheme(self, parameter: str) -> Scheme:
        """Return the scheme of a quantized parameter, without reading its integers from disk."""
        if isinstance(self.weights, _LazyWeights):
            return self.weights.scheme(parameter)
        return self.weights[parameter].scheme

    def weight_of(self, module: str) -> QTensor:
        """Return the quantized weight of a module. Raises KeyError for a module without one."""
        return self.weights[weight_name(module)]

    def range_of(self, module: str) -> Range | None:
        """Return the static range of a module's input; None without one."""
        return self.ranges.get(input_name(module))

    def factor_of(self, module: str) -> Tensor | None:
        """Return the factor (in,) that multiplies a module's input before quantization; None
        without one."""
        return self.factors.get(input_name(module))

    def pattern_of(self, parameter: str) -> Pattern | None:
        """Return the sparsity pattern of a parameter; None for one that is not pruned."""
        text = self.sparsity.get(parameter)
        return None if text is None else Pattern.parse(text)

    @property
    def pruned_floats(self) -> list[str]:
        """Names of the parameters that are pruned and not quantized."""
        return [p for p in self.sparsity if p not in self.weights]

    def to(self, device: torch.device) -> CompressedState:
        """Return the state with every tensor read from disk and moved to a device."""
        return replace(
            self,
            weights={name: q.to(device) for name, q in self.weights.items()},
            replaced={name: t.to(device) for name, t in self.replaced.items()},
            factors={name: t.to(device) for name, t in self.factors.items()},
        )

    def activations_of(self, module: str) -> Activations:
        """Return the kind of quantization of the module's input: `activations`, or None if a note
        calls the module weight-only."""
        only = any(n.module == module and n.what == "weight-only" for n in self.notes)
        return None if only else self.activations


def _check_pattern(parameter: str, q: QTensor | Tensor, text: str | None) -> None:
    """Raise ValueError where a weight is not zero at a place where the parameter's pattern requires
    zero."""
    if text is None:
        return
    problem = describe_violation(
        q != 0 if isinstance(q, Tensor) else q.nonzero(), Pattern.parse(text)
    )
    if problem:
        raise ValueError(f"{parameter}: {problem}")


def pack_nibbles(integers: Tensor) -> Tensor:
    """Pack the 4-bit integers of a weight as the state's file has them (packing.pack4_rows)."""
    return torch.from_numpy(packing.pack4_rows(integers.numpy()))


def unpack_nibbles(packed: Tensor, inputs: int) -> Tensor:
    """Invert pack_nibbles for `inputs` columns."""
    return torch.from_numpy(packing.unpack4_rows(packed.numpy(), inputs))


def _packed(q: QTensor) -> Tensor:
    if q.scheme.type == "float4":
        return float4.pack(q.integers)
    return pack_nibbles(q.integers) if q.scheme.bits < 8 else q.integers


def tensors_of(parameter: str, q: QTensor) -> dict[str, Tensor]:
    """Return {entry: tensor} of one quantized parameter in tensors.safetensors, by the byte
    specification."""
    entries = {
        f"{parameter}.codes": _packed(q),
        f"{parameter}.scale": q.scale,
    }
    if q.zero_point is not None:
        entries[f"{parameter}.zero_point"] = q.zero_point
    return {name: t.contiguous() for name, t in entries.items()}


def write(state: CompressedState, folder: Path) -> None:
    """Write a compressed state, as state.json and tensors.safetensors, into an existing folder,
    with one tensor in memory at a time.

    Raises ValueError for a parameter that does not have its sparsity pattern.
    """
    from optimizer.foundation import safetensors_stream

    _check_pruned(state.sparsity, [*state.weights, *state.replaced])
    floats, schemes = set(state.pruned_floats), {}

    def entries() -> Iterator[tuple[str, Tensor]]:
        for parameter, q in state.weights.items():
            _check_pattern(parameter, q, state.sparsity.get(parameter))
            schemes[parameter] = scheme_entry(q.scheme, q.integers.shape[1])
            yield from tensors_of(parameter, q).items()
        for parameter, t in state.replaced.items():
            if parameter in floats:
                _check_pattern(parameter, t, state.sparsity[parameter])
            yield parameter, t.float().contiguous()
        for site, t in state.factors.items():
            yield f"{site}.factor", t.float().contiguous()

    safetensors_stream.write(entries(), folder / "tensors.safetensors")
    document = {
        "version": VERSION,
        "schemes": schemes,
        "replaced": sorted(state.replaced),
        "ranges": {site: [r.low, r.high] for site, r in state.ranges.items()},
        "factors": sorted(state.factors),
        "activations": state.activations,
        "sparsity": dict(state.sparsity),
        "notes": [{"module": n.module, "what": n.what, "why": n.why} for n in state.notes],
    }
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    (folder / "state.json").write_text(text, encoding="utf-8")


def scheme_entry(scheme: Scheme, inputs: int) -> dict[str, object]:
    """Return the entry of `schemes` in state.json for a weight with `inputs` columns."""
    entry = asdict(scheme) | {"inputs": inputs}
    defaults: dict[str, object] = {"full_range": False, "type": "int"}
    return {k: v for k, v in entry.items() if k not in defaults or v != defaults[k]}


def scheme_of(entry: Mapping[str, Any]) -> Scheme:
    """Return the scheme that an entry of `schemes` in state.json describes. Raises ValueError as
    Scheme does."""
    bits, symmetric, granularity, group_size = (
        entry[k] for k in ("bits", "symmetric", "granularity", "group_size")
    )
    more = {k: entry[k] for k in ("full_range", "type") if k in entry}
    return Scheme(bits, symmetric, granularity, group_size, **more)


class _LazyWeights(Mapping[str, QTensor]):
    """Mapping that reads one QTensor at a time from a safetensors file."""

    def __init__(self, file: Path, document: dict[str, Any]) -> None:
        self._file, self._sparsity = file, document["sparsity"]
        self._schemes: dict[str, dict[str, object]] = document["schemes"]

    def scheme(self, parameter: str) -> Scheme:
        return scheme_of(self._schemes[parameter])

    def __getitem__(self, parameter: str) -> QTensor:
        from safetensors import safe_open

        entry, scheme = self._schemes[parameter], self.scheme(parameter)
        with safe_open(self._file, "pt") as f:
            integers = f.get_tensor(f"{parameter}.codes")
            scale = f.get_tensor(f"{parameter}.scale")
            zero = None if scheme.symmetric else f.get_tensor(f"{parameter}.zero_point")
        if scheme.type == "float4":
            integers = float4.unpack(integers)
        elif scheme.bits < 8:
            integers = unpack_nibbles(integers, cast(int, entry["inputs"]))
        try:
            q = QTensor(integers, scale, zero, scheme)
            _check_pattern(parameter, q, self._sparsity.get(parameter))
            return q
        except ValueError as e:
            raise CheckpointError(str(e), where=f"{self._file}: {parameter}") from None

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._schemes

    def __iter__(self) -> Iterator[str]:
        return iter(self._schemes)

    def __len__(self) -> int:
        return len(self._schemes)


class _LazyFloats(Mapping[str, Tensor]):
    """Mapping that reads one float tensor at a time from a safetensors file."""

    def __init__(
        self,
        file: Path,
        names: list[str],
        suffix: str = "",
        sparsity: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._file, self._names, self._suffix, self._sparsity = file, names, suffix, sparsity

    def __getitem__(self, parameter: str) -> Tensor:
        from safetensors import safe_open

        if parameter not in self._names:
            raise KeyError(parameter)
        with safe_open(self._file, "pt") as f:
            values = cast(Tensor, f.get_tensor(parameter + self._suffix))
        try:
            _check_pattern(parameter, values, self._sparsity.get(parameter))
        except ValueError as e:
            raise CheckpointError(str(e), where=f"{self._file}: {parameter}") from None
        return values

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read(folder: Path) -> CompressedState:
    """Open a compressed state lazily. Raises CheckpointError for anything the specification
    refuses."""
    from safetensors import SafetensorError, safe_open

    file = folder / "tensors.safetensors"
    try:
        document = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        with safe_open(file, "pt") as f:
            slices = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118 (no mapping)
            stored = {n: (s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except (OSError, ValueError, SafetensorError) as e:
        raise CheckpointError(f"not a readable compressed state ({e})", where=str(folder)) from None
    if not isinstance(document, dict) or document.get("version") != VERSION:
        version = document.get("version") if isinstance(document, dict) else None
        raise CheckpointError(f"state version {version}", where=str(folder), accepted=str(VERSION))
    try:
        _check_tensors(document, stored)
        if document["activations"] not in (None, *get_args(Mode)):
            raise ValueError(f"activations {document['activations']!r}")
        sparsity = document["sparsity"]
        _check_pruned(sparsity, [*document["schemes"], *document["replaced"]])
        floats = {p: text for p, text in sparsity.items() if p not in document["schemes"]}
        return CompressedState(
            weights=_LazyWeights(file, document),
            replaced=_LazyFloats(file, document["replaced"], sparsity=floats),
            factors=_LazyFloats(file, document["factors"], ".factor"),
            ranges={site: Range(*pair) for site, pair in document["ranges"].items()},
            activations=document["activations"],
            sparsity=sparsity,
            notes=tuple(Note(**n) for n in document["notes"]),
        )
    except KeyError as e:
        raise CheckpointError(f"state.json has no {e}", where=str(folder)) from None
    except (ValueError, TypeError, AttributeError) as e:
        raise CheckpointError(str(e), where=str(folder)) from None


def _check_pruned(sparsity: Mapping[str, str], parameters: list[str]) -> None:
    """Raise ValueError for an unknown pattern, or a key of `sparsity` not in `parameters`."""
    for parameter, text in sparsity.items():
        Pattern.parse(text)
        if parameter not in parameters:
            raise ValueError(f"sparsity names {parameter}, which has neither integers nor a value")


def _check_tensors(
    document: dict[str, Any], stored: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """Raise ValueError unless the tensors have the names, dtypes and shapes of state.json."""
    floats = [*document["replaced"], *(f"{site}.factor" for site in document["factors"])]
    expected: dict[str, tuple[str, tuple[int, ...] | None]] = dict.fromkeys(floats, ("F32", None))
    for parameter, entry in document["schemes"].items():
        scheme = scheme_of(entry)
        out = stored.get(f"{parameter}.codes", ("", (0,)))[1][0]
        inputs = entry["inputs"]
        packed = ("I8", (out, inputs)) if scheme.bits == 8 else ("U8", (out, (inputs + 1) // 2))
        packed = ("F8_E4M3", (out, inputs)) if scheme.is_float8 else packed
        scales = scheme.shape_of_scale(out, inputs)
        expected[f"{parameter}.codes"] = packed
        expected[f"{parameter}.scale"] = ("F32", scales)
        if not scheme.symmetric:
            expected[f"{parameter}.zero_point"] = ("I8", scales)
    if stored.keys() != expected.keys():
        odd = sorted(stored.keys() ^ expected.keys())
        raise ValueError(f"state.json and tensors.safetensors disagree about {', '.join(odd[:5])}")
    for name, (dtype, shape) in expected.items():
        if stored[name][0] != dtype or shape not in (None, stored[name][1]):
            raise ValueError(f"{name} is {stored[name]}; by state.json it must be {(dtype, shape)}")
