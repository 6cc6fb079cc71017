"""The hop `reduce`: check that a smaller checkpoint is made of the reference's own rows and
columns.

compared   both checkpoints, read by the safetensors library; the reference is cut here again by
           the indices in reduced.json, with code that is independent of the stage's
limit      none: equal to the bit. Columns that `fisher` scaled: two roundings of the stored type
caught     shifted rows, another head's keys, an index off by one, a block used twice:
           test_a_planted_fault_is_named, test_an_index_off_by_one_is_named,
           test_a_block_used_twice_is_named

 1. tensors   Each tensor is the reference's on the kept units, except those that a method
              adjusted.
 2. adjusted  Only layers that read pruned units are adjusted, weight and bias, by methods that
              adjust. `fisher` multiplies each of the reference's columns. All values are finite
              and satisfy least_squares_laws.py.
 3. complete  No tensor is missing or left over, and transformers builds and fills the model from
              them.
 4. indices   Kept units are in ascending order, each once, equally many in every block.
 5. channels  Where hidden channels were removed, each tensor is the reference's on the others, and
              a norm's weights are the reference's times sqrt(channels before / channels after).

The loss in accuracy has no limit here: the gates of the task judge it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.reading import quote_error
from optimizer.model.architectures.family_record import Family
from optimizer.model.checkpoint.checkpoint import open_checkpoint, read_json
from optimizer.model.checkpoint.model import build_skeleton, choose_auto_class
from optimizer.reduce.structure.write import REDUCED
from optimizer.validate.ledger import trace
from optimizer.validate.ledger.entry import LedgerEntry
from optimizer.validate.ledger.laws.reduce import least_squares_laws
from optimizer.validate.materials import Materials

ADJUSTING = ("fisher", "second_order")  # importances whose method changes the reading weights
START = "reference torch"
WHY = "kept tensors are the reference's, bit for bit; the task's gates judge the loss in accuracy"


def reduce(m: Materials) -> LedgerEntry:
    """Hop `reduce`: compare the checkpoint that stage reduce made smaller with the reference, by
    laws 1 to 5."""
    assert m.smaller is not None
    document = read_json(m.smaller / REDUCED)
    with ExitStack() as files:
        reference, smaller = (_StepTensors(folder, m, files) for folder in (m.reference, m.smaller))
        problems = [*_indices(document, reference, m), *_tensors(document, reference, smaller, m)]
        problems = problems or find_unloaded(m)
        if problems:  # the model may not even build
            return LedgerEntry("reduce", START, None, None, False, WHY, tuple(problems))
        objectives = {
            name: _objective(name, origin, layer, (reference, smaller), m)
            for name, (origin, layer) in _origins(document, reference, m)
            if origin in layer.get("adjusted", ()) and origin.endswith(".weight")
        }
    problems = list(least_squares_laws.find_problems(m, document, objectives))
    before = [trace.trace_run(m.reference_model, b, m.outputs, ()) for b in m.batches]
    after = [trace.run(m.smaller_model, b, m.outputs) for b in m.batches]
    measured = m.output_distance(after, before)
    return LedgerEntry("reduce", START, None, measured, not problems, WHY, tuple(problems))


def _objective(
    name: str,
    origin: str,
    layer: Mapping[str, Any],
    files: tuple[_StepTensors, _StepTensors],
    m: Materials,
) -> least_squares_laws.Objective:
    """Make the law's empty objective of the adjusted weight `name`.

    origin: name of the weight in the reference
    layer: entry of the layer in reduced.json
    files: tensors of (reference, smaller checkpoint)
    """
    reference, smaller = files
    bias, before = (n.removesuffix("weight") + "bias" for n in (name, origin))
    moved = torch.zeros(len(smaller[name]))
    if bias in smaller.names:
        moved = smaller[bias].double() - reference[before].double()
    return least_squares_laws.Objective(
        smaller[name], _cut(origin, layer, reference, m), reference[origin], moved
    )


def _narrowed(name: str, value: Tensor, kept: Sequence[int], m: Materials) -> Tensor:
    """Return the tensor that a law expects where hidden channels were removed: a norm's weights are
    multiplied by sqrt(channels before / after).

    value: the reference's tensor, already cut to the kept units
    kept: indices of the kept hidden channels
    """
    family, prefix = m.family, m.family.prefix(m.task)
    module, _, parameter = name.rpartition(".")
    inner = module.removeprefix(f"{prefix}{family.blocks}.").partition(".")[2]
    if module in (f"{prefix}{family.embeddings}", family.head):
        return value[:, kept]
    if inner in family.writes:
        return value[kept]
    if inner in family.linears:
        return value[:, kept] if parameter == "weight" else value
    if module == f"{prefix}{family.final_norm}" or inner in family.norms:
        grown: Tensor = (value[kept].double() * math.sqrt(len(value) / len(kept))).to(value.dtype)
        return grown
    return value


def collect_figures(m: Materials) -> dict[str, Any] | None:
    """Collect the report's section `reduced`; None where the model was not made smaller."""
    if m.section.reduce is None or m.smaller is None:
        return None
    document = read_json(m.smaller / REDUCED)
    keys = ("importance", "methods", "sizes", "weights", "left_out", "compared", "student")
    return {k: document[k] for k in keys if k in document}


def open_tensors(folder: Path, files: ExitStack) -> dict[str, Any]:
    """Open for the ledger the files of a step's checkpoint by the safetensors library: {tensor:
    open file with it}.

    files: stack that closes them
    """
    from safetensors import safe_open

    tensors: dict[str, Any] = {}
    for file in sorted((folder / "checkpoint").glob("*.safetensors")):
        handle = files.enter_context(safe_open(file, "pt"))
        tensors |= dict.fromkeys(handle.keys(), handle)
    return tensors


class _StepTensors:
    """The tensors of a judged step's checkpoint, linear weights as (out, in)."""

    def __init__(self, folder: Path, m: Materials, files: ExitStack) -> None:
        self._family, self._files = m.family, open_tensors(folder, files)

    @property
    def names(self) -> set[str]:
        return {*self._files}

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor.t() if self._family.is_transposed(name) else tensor


def _indices(document: Mapping[str, Any], reference: _StepTensors, m: Materials) -> Iterator[str]:
    """Check law 4: yield a problem where the indices of kept units are out of order or range, or of
    another number than the sizes in reduced.json."""
    layers = document["layers"]
    blocks = [str(layer["of"]) for layer in layers]
    order = [int(b.rpartition(".")[2]) for b in blocks]
    channels = document.get("hidden")
    if channels is not None:
        available, written = document["sizes"]["hidden"]
        if channels != sorted(set(channels)) or not all(0 <= i < available for i in channels):
            yield f"{REDUCED}: channels are not in ascending order below {available}, each once"
        if len(channels) != written:
            yield f"{REDUCED}: {len(channels)} channels are listed, its sizes say {written}"
    if order != sorted(set(order)):
        yield f"{REDUCED}: blocks {order} are not in the reference's order, each once"
    for layer in layers:
        for kind in ("ffn", "heads"):
            block, kept = layer["of"], layer.get(kind)
            if kept is None:
                continue
            available, written = _count(kind, block, reference, m), document["sizes"][kind][1]
            if kept != sorted(set(kept)) or not all(0 <= i < available for i in kept):
                yield f"{block}: {kind} are not in ascending order below {available}, each once"
            if len(kept) != written:
                yield f"{block}: {len(kept)} {kind} are listed, its sizes say {written}"


def _count(kind: str, block: str, reference: _StepTensors, m: Materials) -> int:
    """Count the units of a block of the ledger's reference.

    kind: "ffn" for neurons, "heads" for key heads
    """
    if kind == "ffn":
        assert m.family.feed_forward is not None
        return int(reference[f"{block}.{m.family.feed_forward.down}.weight"].shape[1])
    assert m.family.attention is not None
    return int(reference[f"{block}.{m.family.attention.key}.weight"].shape[0]) // _head_size(m)


def _head_size(m: Materials) -> int:
    config = read_json(m.reference / "checkpoint" / "config.json")
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _tensors(
    document: Mapping[str, Any], reference: _StepTensors, smaller: _StepTensors, m: Materials
) -> Iterator[str]:
    """Check laws 1, 3 and 5: yield a problem for each tensor of the smaller checkpoint that is
    missing, left over, or other than the reference's kept part."""
    origins = dict(_origins(document, reference, m))
    for name in sorted(origins.keys() - smaller.names):
        yield f"{name}: is not in the smaller checkpoint"
    for name in sorted(smaller.names - origins.keys()):
        yield f"{name}: is in the smaller checkpoint, but not in the reference"
    adjusted = {
        f"{layer['block']}{name.removeprefix(layer['of'])}": layer
        for layer in document["layers"]
        for name in layer["adjusted"]
    }
    for name in sorted(origins.keys() & smaller.names):
        origin, layer = origins[name]
        expected, value = _cut(origin, layer, reference, m), smaller[name]
        if "hidden" in document:
            expected = _narrowed(origin, expected, document["hidden"], m)
        if value.shape != expected.shape:
            yield f"{name}: shape {tuple(value.shape)}; kept of {origin}: {tuple(expected.shape)}"
        elif name in adjusted:
            yield from _adjusted(name, value, expected, document, m)
        elif value.dtype != expected.dtype or not torch.equal(value, expected):
            rows = (value != expected).reshape(len(value), -1).any(1).nonzero()[:3].reshape(-1)
            yield (
                f"{name}: differs from {origin} on the units that {REDUCED} lists, first "
                f"in rows {rows.tolist()}"
            )


def _origins(
    document: Mapping[str, Any], reference: _StepTensors, m: Materials
) -> Iterator[tuple[str, tuple[str, Mapping[str, Any]]]]:
    """Yield, for each tensor that the smaller checkpoint must have, (its name, (its name in the
    reference, entry of its layer in reduced.json; {} for none))."""
    blocks = f"{m.family.prefix(m.task)}{m.family.blocks}."
    for name in reference.names:
        if not name.startswith(blocks):
            yield name, (name, {})
    for layer in document["layers"]:
        start = f"{layer['of']}."
        for name in sorted(n for n in reference.names if n.startswith(start)):
            yield f"{layer['block']}.{name.removeprefix(start)}", (name, layer)


def _cut(origin: str, layer: Mapping[str, Any], reference: _StepTensors, m: Materials) -> Tensor:
    """Compute the expected tensor: cut tensor `origin` of the reference to the units that `layer`,
    an entry of reduced.json, keeps."""
    value = reference[origin]
    module = origin.removeprefix(f"{layer.get('of')}.").rpartition(".")[0]
    family: Family = m.family
    ffn, heads = family.feed_forward, family.attention
    weight = origin.endswith(".weight")
    if ffn is not None and "ffn" in layer:
        if module in ffn.up:
            value = value.reshape(ffn.parts, -1, *value.shape[1:])[:, layer["ffn"]].flatten(0, 1)
        elif module == ffn.down and weight:
            value = value[:, layer["ffn"]]
    if heads is not None and "heads" in layer:
        groups, kept = _count("heads", layer["of"], reference, m), layer["heads"]
        if module in (heads.query, heads.key, heads.value):
            value = value.reshape(groups, -1, *value.shape[1:])[kept].flatten(0, 1)
        elif module == heads.output and weight:
            value = value.reshape(len(value), groups, -1)[:, kept].flatten(1, 2)
    return value


def _adjusted(
    name: str, value: Tensor, reference: Tensor, document: Mapping[str, Any], m: Materials
) -> Iterator[str]:
    """Check law 2: yield sentences on tensor `name`, which a method adjusted.

    value: tensor in the smaller checkpoint
    reference: tensor that was expected before the adjustment
    """
    ffn, heads = m.family.feed_forward, m.family.attention
    reads: Sequence[str] = [p for p in (ffn and ffn.down, heads and heads.output) if p]
    if not name.endswith(tuple(f".{r}.{p}" for r in reads for p in ("weight", "bias"))):
        yield f"{name}: was adjusted, but only {', '.join(reads)} may be"
    if document["importance"] not in ADJUSTING:
        yield f"{name}: was adjusted, but importance {document['importance']} adjusts nothing"
    if not bool(torch.isfinite(value).all()):
        yield f"{name}: holds NaN or infinity"
    if document["importance"] == "fisher" and value.ndim == 2:
        rounding = 2 * torch.finfo(value.dtype).eps * value.abs().double().amax(0)
        v, r = value.double(), reference.double()
        factor = (v * r).sum(0) / r.square().sum(0).clamp(min=torch.finfo(torch.float64).tiny)
        if bool(((v - factor * r).abs() > rounding).any()):
            yield f"{name}: its columns are not multiples of the reference's, as with fisher"


def find_unloaded(m: Materials) -> list[str]:
    """Return a problem for each tensor that transformers' own loader reports missing or left
    over."""
    assert m.smaller is not None
    try:
        with quiet():
            _, loaded = choose_auto_class(
                m.task, m.checkpoint.config.get("model_type")
            ).from_pretrained(m.smaller / "checkpoint", output_loading_info=True)
    except Exception as e:  # of many classes; the checkpoint does not load
        return [f"transformers does not load the smaller checkpoint: {quote_error(e)}"]
    named = build_skeleton(open_checkpoint(m.smaller), m.task).named_parameters(
        remove_duplicate=False
    )
    known = {name for name, _ in named}
    missing = sorted({*loaded["missing_keys"]} & known)
    return [
        *(f"{name}: transformers does not find it in the smaller checkpoint" for name in missing),
        *(
            f"{name}: transformers does not use it in the smaller model"
            for name in sorted(loaded["unexpected_keys"])
        ),
    ]
