"""The hop `reduce`: is the smaller checkpoint made of the reference's own rows and columns?

Read with the safetensors library from both checkpoints, and cut here again by the indices of
reduced.json, with arithmetic that shares nothing with what wrote them:

 1. every tensor of the smaller model is the reference's on the kept units, bit for bit, but for
    those that a method adjusted;
 2. only what reads what was thinned is adjusted, weight and bias, by methods that adjust; of
    `fisher` each column is a multiple of the reference's own; all are finite; and they do what
    least squares promises (least_squares_laws.py);
 3. no tensor is missing or left over, and transformers builds and fills the model from it;
 4. kept units are in ascending order, each once, equally many in every block;
 5. where the hidden states lost channels, every tensor is the reference's on those that stay, and a
    norm's weights are the reference's times the root of how many there were for each of them.

What leaving out costs has no limit here: the gates of the task judge it.
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
from optimizer.foundation.reading import words
from optimizer.model.architectures.family_record import Family
from optimizer.model.checkpoint.checkpoint import open_checkpoint, read_json
from optimizer.model.checkpoint.model import auto_class, skeleton
from optimizer.reduce.structure.write import REDUCED
from optimizer.validate.ledger import trace
from optimizer.validate.ledger.entry import Entry
from optimizer.validate.ledger.laws.reduce import least_squares_laws
from optimizer.validate.materials import Materials

ADJUSTING = ("fisher", "second_order")  # importances whose method changes the reading weights
START = "reference torch"
WHY = "what is kept is the reference's, bit for bit; the task's gates judge what leaving out costs"


def reduce(m: Materials) -> Entry:
    """The smaller checkpoint against the reference."""
    assert m.smaller is not None
    document = read_json(m.smaller / REDUCED)
    with ExitStack() as files:
        whole, part = (
            _Files(folder / "checkpoint", m, files) for folder in (m.reference, m.smaller)
        )
        problems = [*_indices(document, whole, m), *_tensors(document, whole, part, m)]
        problems = problems or loaded(m)
        if problems:  # the model may not even build
            return Entry("reduce", START, None, None, False, WHY, tuple(problems))
        objectives = {
            name: _objective(name, origin, layer, (whole, part), m)
            for name, (origin, layer) in _origins(document, whole, m)
            if origin in layer.get("adjusted", ()) and origin.endswith(".weight")
        }
    problems = list(least_squares_laws.problems(m, document, objectives))
    before = [trace.traced(m.reference_model, b, m.outputs, ()) for b in m.batches]
    after = [trace.run(m.smaller_model, b, m.outputs) for b in m.batches]
    measured = m.output_distance(after, before)
    return Entry("reduce", START, None, measured, not problems, WHY, tuple(problems))


def _objective(
    name: str, origin: str, layer: Mapping[str, Any], files: tuple[_Files, _Files], m: Materials
) -> least_squares_laws.Objective:
    """Of an adjusted weight of the smaller checkpoint."""
    whole, part = files
    bias, before = (n.removesuffix("weight") + "bias" for n in (name, origin))
    moved = torch.zeros(len(part[name]))
    if bias in part.names:
        moved = part[bias].double() - whole[before].double()
    return least_squares_laws.Objective(
        part[name], _cut(origin, layer, whole, m), whole[origin], moved
    )


def _narrowed(name: str, value: Tensor, kept: Sequence[int], m: Materials) -> Tensor:
    """A tensor of the reference on the channels that stay (law 5)."""
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


def figures(m: Materials) -> dict[str, Any] | None:
    """What the report says of the smaller checkpoint; None where there is none."""
    if m.section.reduce is None or m.smaller is None:
        return None
    document = read_json(m.smaller / REDUCED)
    keys = ("importance", "methods", "sizes", "weights", "left_out", "compared", "student")
    return {k: document[k] for k in keys if k in document}


class _Files:
    """The tensors of a checkpoint folder as the safetensors library reads them."""

    def __init__(self, folder: Path, m: Materials, files: ExitStack) -> None:
        from safetensors import safe_open

        self._family = m.family
        self._files: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            opened = files.enter_context(safe_open(file, "pt"))
            self._files |= dict.fromkeys(opened.keys(), opened)

    @property
    def names(self) -> set[str]:
        return {*self._files}

    def __getitem__(self, name: str) -> Tensor:
        """Of a linear weight (out, in)."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor.t() if self._family.is_transposed(name) else tensor


def _indices(document: Mapping[str, Any], whole: _Files, m: Materials) -> Iterator[str]:
    """Law 4."""
    layers = document["layers"]
    blocks = [str(layer["of"]) for layer in layers]
    order = [int(b.rpartition(".")[2]) for b in blocks]
    channels = document.get("hidden")
    if channels is not None:
        there, written = document["sizes"]["hidden"]
        if channels != sorted(set(channels)) or not all(0 <= i < there for i in channels):
            yield f"{REDUCED}: channels are not in ascending order below {there}, each once"
        if len(channels) != written:
            yield f"{REDUCED}: {len(channels)} channels were kept, and {written} elsewhere"
    if order != sorted(set(order)):
        yield f"{REDUCED}: blocks {order} are not in the reference's order, each once"
    for layer in layers:
        for kind in ("ffn", "heads"):
            kept = layer.get(kind)
            if kept is None:
                continue
            there, written = _count(kind, layer["of"], whole, m), document["sizes"][kind][1]
            if kept != sorted(set(kept)) or not all(0 <= i < there for i in kept):
                yield f"{layer['of']}: {kind} are not in ascending order below {there}, each once"
            if len(kept) != written:
                yield f"{layer['of']}: {len(kept)} {kind} were kept, and {written} elsewhere"


def _count(kind: str, block: str, whole: _Files, m: Materials) -> int:
    """How many units of a kind the reference's block has."""
    if kind == "ffn":
        assert m.family.feed_forward is not None
        return int(whole[f"{block}.{m.family.feed_forward.down}.weight"].shape[1])
    assert m.family.attention is not None
    return int(whole[f"{block}.{m.family.attention.key}.weight"].shape[0]) // _head_size(m)


def _head_size(m: Materials) -> int:
    config = read_json(m.reference / "checkpoint" / "config.json")
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _tensors(
    document: Mapping[str, Any], whole: _Files, part: _Files, m: Materials
) -> Iterator[str]:
    """Laws 1 to 3 of the file."""
    origins = dict(_origins(document, whole, m))
    for name in sorted(origins.keys() - part.names):
        yield f"{name}: is not in the smaller checkpoint"
    for name in sorted(part.names - origins.keys()):
        yield f"{name}: is in the smaller checkpoint, and nothing of the reference belongs there"
    adjusted = {
        f"{layer['block']}{name.removeprefix(layer['of'])}": layer
        for layer in document["layers"]
        for name in layer["adjusted"]
    }
    for name in sorted(origins.keys() & part.names):
        origin, layer = origins[name]
        expected, value = _cut(origin, layer, whole, m), part[name]
        if "hidden" in document:
            expected = _narrowed(origin, expected, document["hidden"], m)
        if value.shape != expected.shape:
            yield f"{name}: {tuple(value.shape)}, and {tuple(expected.shape)} of {origin} were kept"
        elif name in adjusted:
            yield from _adjusted(name, value, expected, document, m)
        elif value.dtype != expected.dtype or not torch.equal(value, expected):
            rows = (value != expected).reshape(len(value), -1).any(1).nonzero()[:3].reshape(-1)
            yield (
                f"{name}: differs from {origin} on the units that {REDUCED} says were kept, first "
                f"in rows {rows.tolist()}"
            )


def _origins(
    document: Mapping[str, Any], whole: _Files, m: Materials
) -> Iterator[tuple[str, tuple[str, Mapping[str, Any]]]]:
    """{name in the smaller checkpoint: (name in the reference, its layer of reduced.json)}."""
    blocks = f"{m.family.prefix(m.task)}{m.family.blocks}."
    for name in whole.names:
        if not name.startswith(blocks):
            yield name, (name, {})
    for layer in document["layers"]:
        start = f"{layer['of']}."
        for name in sorted(n for n in whole.names if n.startswith(start)):
            yield f"{layer['block']}.{name.removeprefix(start)}", (name, layer)


def _cut(origin: str, layer: Mapping[str, Any], whole: _Files, m: Materials) -> Tensor:
    """A tensor of the reference on what a layer of reduced.json says was kept."""
    value = whole[origin]
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
        groups, kept = _count("heads", layer["of"], whole, m), layer["heads"]
        if module in (heads.query, heads.key, heads.value):
            value = value.reshape(groups, -1, *value.shape[1:])[kept].flatten(0, 1)
        elif module == heads.output and weight:
            value = value.reshape(len(value), groups, -1)[:, kept].flatten(1, 2)
    return value


def _adjusted(
    name: str, value: Tensor, reference: Tensor, document: Mapping[str, Any], m: Materials
) -> Iterator[str]:
    """Law 2."""
    ffn, heads = m.family.feed_forward, m.family.attention
    reads: Sequence[str] = [p for p in (ffn and ffn.down, heads and heads.output) if p]
    if not name.endswith(tuple(f".{r}.{p}" for r in reads for p in ("weight", "bias"))):
        yield f"{name}: was adjusted, and only what reads {', '.join(reads)} may be"
    if document["importance"] not in ADJUSTING:
        yield f"{name}: was adjusted, which importance {document['importance']} does not do"
    if not bool(torch.isfinite(value).all()):
        yield f"{name}: holds NaN or infinity"
    if document["importance"] == "fisher" and value.ndim == 2:
        rounding = 2 * torch.finfo(value.dtype).eps * value.abs().double().amax(0)
        v, r = value.double(), reference.double()
        factor = (v * r).sum(0) / r.square().sum(0).clamp(min=torch.finfo(torch.float64).tiny)
        if bool(((v - factor * r).abs() > rounding).any()):
            yield f"{name}: its columns are not multiples of the reference's, as fisher leaves them"


def loaded(m: Materials) -> list[str]:
    """What transformers' own loader says is missing or left over."""
    assert m.smaller is not None
    try:
        with quiet():
            _, loaded = auto_class(m.task).from_pretrained(
                m.smaller / "checkpoint", output_loading_info=True
            )
    except Exception as e:  # of many kinds: whatever it is, the checkpoint does not load
        return [f"transformers does not load the smaller checkpoint: {words(e)}"]
    named = skeleton(open_checkpoint(m.smaller), m.task).named_parameters(remove_duplicate=False)
    known = {name for name, _ in named}
    missing = sorted({*loaded["missing_keys"]} & known)
    return [
        *(f"{name}: transformers does not find it in the smaller checkpoint" for name in missing),
        *(
            f"{name}: transformers has no use for it in the smaller model"
            for name in sorted(loaded["unexpected_keys"])
        ),
    ]
