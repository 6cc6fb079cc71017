"""Laws of pruned weights. The mask is derived: what is 0, or the zero point, is pruned.

1. who       what the recipe prunes is pruned, in its pattern, and nothing else
2. pattern   no group keeps more than the pattern says
3. choice    magnitude: what is not 0 is what the weights alone say is kept. Of floats, and where
             integers are the nearest: no kept weight is lost (magnitude), no more weights of a
             group are than it prunes (others); one that rounds to 0 by itself is not lost
4. kept      a float weight that is kept has the checkpoint's value, where the method adjusts none
             (integers have the laws of their rounding method, state_laws.py)
5. output    where the mask follows from activations, the output error is judged against what
             pruning by magnitude gives (rounding_laws.py), and so is how much is kept of |W| |x|,
             beside the most that the pattern can keep of it: a mask that is shifted by a group, or
             another row's, keeps its pattern and loses what counts. A module or row beyond the
             screen is pruned again on resampled texts (validate/ledger/limits/resampled.py)
"""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from optimizer.compress.methods.pruning.magnitude import magnitude
from optimizer.compress.methods.pruning.masks import keep_highest
from optimizer.foundation.qtensor import QTensor
from optimizer.foundation.sparsity import Pattern, broken
from optimizer.foundation.state import owner_of
from optimizer.recipe.compression.sparsity import Sparsity
from optimizer.validate.ledger.limits.resampled import Statistic, Suspect
from optimizer.validate.ledger.limits.rounding_limits import HALF_STEP, SCREEN
from optimizer.validate.materials import Materials


def problems(m: Materials) -> list[str]:
    """Laws 1 to 4, with the checkpoint's names."""
    sparsity = m.section.sparsity
    faults = _who(m, sparsity)
    for name in m.state.sparsity:
        if sparsity is not None and name in m.parameters:
            q = m.state.weights[name] if name in m.state.weights else m.state.replaced[name]
            nearest = name not in m.state.weights or m.rounding(name).nearest
            fault = _one(q, m.rounded_weight(name), sparsity, nearest)
            faults += [f"{name}: {fault}"] if fault else []
    return faults


def _who(m: Materials, sparsity: Sparsity | None) -> list[str]:
    expected, pruned = set(parameters(m, sparsity)), set(m.state.sparsity)
    wrong = [f"{n}: is dense, and the recipe prunes it" for n in sorted(expected - pruned)]
    more = sorted(pruned - expected)
    wrong += [f"{n}: is pruned, and the recipe does not say so" for n in more]
    for name, text in m.state.sparsity.items():
        if sparsity is not None and text != str(sparsity.shape):
            wrong.append(f"{name}: pattern {text}, and the recipe says {sparsity.shape}")
    return wrong


def parameters(m: Materials, sparsity: Sparsity | None) -> list[str]:
    """The parameters that the recipe prunes: of the linear layers inside the blocks, those that
    sparsity.modules names, keep_dense does not, and keep_float leaves."""
    if sparsity is None:
        return []
    around = m.family.blocks.partition("*")[0] if m.family.uneven else f"{m.family.blocks}."
    inside = f"{m.family.prefix(m.task)}{around}"
    dense = (*sparsity.keep_dense, *m.section.quantize.keep_float)
    names = [
        name
        for name in m.parameters
        if name.startswith(inside)
        and any(name.endswith(f".{linear}.weight") for linear in m.family.linears)
        and _matches(owner_of(name), sparsity.modules)
        and not _matches(owner_of(name), dense)
    ]
    return names


def _matches(module: str, patterns: Collection[str]) -> bool:
    """Whether a pattern names the module, or one around it."""
    parts = module.split(".")
    around = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatchcase(name, pattern) for name in around for pattern in patterns)


def _one(q: QTensor | Tensor, weight: Tensor, sparsity: Sparsity, nearest: bool) -> str:
    """What is wrong with one pruned weight: the first of laws 2 to 4; "" where nothing is. nearest:
    no rounding method may make a weight that is kept 0 but where that is the nearest."""
    pattern = sparsity.shape
    stored = q if isinstance(q, Tensor) else q.integers
    if stored.shape != weight.shape:
        return f"{tuple(stored.shape)} for {tuple(weight.shape)}"
    nonzero = q != 0 if isinstance(q, Tensor) else q.nonzero()
    fault = broken(nonzero, pattern)
    if fault:
        return fault
    if sparsity.record.law == "adjusted":
        return ""
    largest_pruned, least_kept = _thresholds(weight, pattern)
    if sparsity.record.law == "recomputed":
        let_back = nonzero & (weight.abs() < least_kept)
        fault = _first(let_back, f"is not zero, and {pattern} by {sparsity.method} prunes it")
    if not nearest:
        return fault
    half = 0.0 if isinstance(q, Tensor) else _half_step(q)
    lost = ~nonzero & (weight.abs() > half)
    if sparsity.record.law == "recomputed":
        wrong = lost & (weight.abs() > largest_pruned)
        fault = fault or _first(wrong, f"is zero, and {pattern} by {sparsity.method} keeps it")
    changed = nonzero & (q != weight) if isinstance(q, Tensor) else torch.zeros_like(nonzero)
    return (
        fault
        or _more_lost(lost, pattern)
        or _first(changed, "is kept, and has another value than the checkpoint")
    )


def _first(wrong: Tensor, what: str) -> str:
    """wrong (out, in) bool: the first that is, or ""."""
    if not bool(wrong.any()):
        return ""
    row, column = divmod(int(wrong.int().argmax()), wrong.shape[1])
    return f"row {row} input {column} {what}"


def _half_step(q: QTensor) -> Tensor:
    """(out, in): below it a weight that is kept is 0 all the same, rounded to nearest."""
    out, inputs = q.integers.shape
    scale = q.scale.expand(out, -1)
    return HALF_STEP * scale.repeat_interleave(inputs // scale.shape[1], 1)


def _more_lost(lost: Tensor, pattern: Pattern) -> str:
    counts, most = pattern.grouped(lost).sum(-1), pattern.zeros(lost.shape[1])
    if bool((counts <= most).all()):
        return ""
    row = int((counts > most).any(1).int().argmax())
    return f"row {row} lost {int(counts[row].max())} weights of a group; {pattern} prunes {most}"


def _thresholds(weight: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """(out, in) each: in a weight's group the largest of the sizes that magnitude prunes (below 0
    where it prunes none), and the smallest that it keeps."""
    sizes = pattern.grouped(weight.abs())
    zeros = pattern.zeros(weight.shape[1])
    kept = sizes.kthvalue(zeros + 1, dim=-1, keepdim=True).values
    lost = sizes.kthvalue(max(zeros, 1), dim=-1, keepdim=True).values if zeros else 0 * kept - 1
    one, other = (t.expand_as(sizes).reshape(weight.shape) for t in (lost, kept))
    return one, other


def kept_suspects(
    name: str, q: QTensor | Tensor, weight: Tensor, norms: Tensor, pattern: Pattern
) -> list[Suspect]:
    """The module, and the row that keeps least, where it is beyond the screen. weight (out, in):
    what was pruned; norms (in,): of its inputs on held-out texts."""
    by_row, by_all = (_kept_share(norms, pattern, whole) for whole in (False, True))
    each = by_row(q, weight, torch.arange(len(weight)))
    together = float(by_all(q, weight, torch.arange(len(weight))))
    row, suspects = int(each.argmin()), []
    what = "of what its mask could keep of its weights times their inputs"
    if together < SCREEN.kept_module:
        suspects.append(Suspect(name, None, by_all, f"{name}: keeps {together:.2f} {what}", 1))
    if float(each[row]) < SCREEN.kept:
        message = f"{name}: row {row} keeps {float(each[row]):.2f} {what}"
        suspects.append(Suspect(name, row, by_row, message, len(each)))
    return suspects


def _kept_share(norms: Tensor, pattern: Pattern, whole: bool) -> Statistic:
    """Of each row, or of all together."""

    def statistic(q: QTensor | Tensor, weight: Tensor, _rows: Tensor) -> Tensor:
        scores = weight.abs() * norms
        kept = (scores * (q != 0 if isinstance(q, Tensor) else q.nonzero())).sum(1)
        most = (scores * keep_highest(scores, pattern)).sum(1)
        if whole:
            kept, most = kept.sum()[None], most.sum()[None]
        return kept / most.clamp(min=1e-30)

    return statistic


def plain(weight: Tensor, pattern: Pattern | None) -> Tensor:
    """What every method is compared with: pruned by magnitude, where it is pruned."""
    return weight if pattern is None else weight * magnitude(weight, pattern)
