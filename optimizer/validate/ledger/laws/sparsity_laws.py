"""Check pruned weights: the mask is where a weight is 0 or its integer is the zero point.

compared   the mask and the kept values, with the recipe's pattern and the checkpoint's weights
limit      the definition of the pattern and the method; for a mask chosen by activations, the
           comparison of rounding_laws.py
caught     a wrong mask of floats or integers, a kept weight changed, a mask chosen before folding:
           test_a_wrong_mask_of_integers_is_named, test_a_weight_that_is_kept_and_changed_is_named,
           test_a_mask_chosen_before_folding_is_named

 1. names     Exactly the weights that the recipe names are pruned, in its pattern.
 2. pattern   No group keeps more weights than the pattern allows.
 3. choice    By magnitude: weights that are not 0 are those that the pattern keeps. Of float
              weights, and where integers are the nearest: no kept weight is lost (magnitude), no
              group loses more weights than the pattern prunes (other methods). A weight that
              rounds to 0 is not lost.
 4. kept      A kept float weight has the checkpoint's value, unless the method adjusts it.
              Integers have the laws of their rounding method (state_laws.py).
 5. output    Where the mask depends on activations, the output error is compared with that of
              magnitude pruning (rounding_laws.py), and so is the kept part of |W| |x|, as a share
              of the most that the pattern can keep. A mask shifted by a group, or of another row,
              keeps its pattern and loses that share. A module or row beyond the screen is pruned
              again on resampled texts (limits/resampled.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimizer.compress.methods.pruning.magnitude import magnitude
from optimizer.compress.methods.pruning.masks import keep_highest
from optimizer.compress.selection import matches
from optimizer.foundation.qtensor import QTensor
from optimizer.foundation.sparsity import Pattern, describe_violation
from optimizer.foundation.state import owner_of
from optimizer.recipe.compression.sparsity import Sparsity
from optimizer.validate.ledger.limits.resampled import Statistic, Suspect
from optimizer.validate.ledger.limits.rounding_limits import HALF_STEP, SCREEN
from optimizer.validate.materials import Materials


def find_problems(m: Materials) -> list[str]:
    """Check laws 1 to 4: return a problem for each pruned weight with a wrong name, pattern, mask
    or kept value."""
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
    expected, pruned = set(list_parameters(m, sparsity)), set(m.state.sparsity)
    wrong = [f"{n}: is dense, but the recipe prunes it" for n in sorted(expected - pruned)]
    more = sorted(pruned - expected)
    wrong += [f"{n}: is pruned, but the recipe does not say so" for n in more]
    for name, text in m.state.sparsity.items():
        if sparsity is not None and text != str(sparsity.shape):
            wrong.append(f"{name}: pattern {text}; the recipe says {sparsity.shape}")
    return wrong


def list_parameters(m: Materials, sparsity: Sparsity | None) -> list[str]:
    """List the parameters that the recipe prunes: weights of the blocks' linear layers that
    sparsity.modules names, without those of keep_dense and quantize.keep_float.

    sparsity: section of the recipe; None: nothing is pruned
    """
    if sparsity is None:
        return []
    around = m.family.blocks.partition("*")[0] if m.family.uneven else f"{m.family.blocks}."
    around = around.partition("{")[0]
    inside = f"{m.family.prefix(m.task)}{around}"
    dense = (*sparsity.keep_dense, *m.section.quantize.keep_float)
    names = [
        name
        for name in m.parameters
        if name.startswith(inside)
        and any(name.endswith(f".{linear}.weight") for linear in m.family.linears)
        and matches(owner_of(name), sparsity.modules)
        and not matches(owner_of(name), dense)
    ]
    return names


def _one(q: QTensor | Tensor, weight: Tensor, sparsity: Sparsity, nearest: bool) -> str:
    """Return the first problem of one pruned weight by laws 2 to 4; "" for none.

    q: the quantized weight, or the pruned float weight
    weight: float weight (out, in) before pruning
    nearest: True where every integer is the nearest one, so that a kept weight may become 0 only
        where 0 is its nearest integer
    """
    pattern = sparsity.shape
    stored = q if isinstance(q, Tensor) else q.integers
    if stored.shape != weight.shape:
        return f"{tuple(stored.shape)} for {tuple(weight.shape)}"
    nonzero = q != 0 if isinstance(q, Tensor) else q.nonzero()
    fault = describe_violation(nonzero, pattern)
    if fault:
        return fault
    if sparsity.record.judged_by == "adjusted":
        return ""
    largest_pruned, least_kept = _thresholds(weight, pattern)
    if sparsity.record.judged_by == "recomputed":
        let_back = nonzero & (weight.abs() < least_kept)
        fault = _first(let_back, f"is not zero, but {pattern} by {sparsity.method} prunes it")
    if not nearest:
        return fault
    half = 0.0 if isinstance(q, Tensor) else _half_step(q)
    lost = ~nonzero & (weight.abs() > half)
    if sparsity.record.judged_by == "recomputed":
        wrong = lost & (weight.abs() > largest_pruned)
        fault = fault or _first(wrong, f"is zero, but {pattern} by {sparsity.method} keeps it")
    changed = nonzero & (q != weight) if isinstance(q, Tensor) else torch.zeros_like(nonzero)
    return (
        fault
        or _more_lost(lost, pattern)
        or _first(changed, "is kept, but differs from the checkpoint")
    )


def _first(wrong: Tensor, what: str) -> str:
    """Describe the first place of a pruned weight where `wrong` (out, in) is True; "" where none
    is.

    what: text before the place
    """
    if not bool(wrong.any()):
        return ""
    row, column = divmod(int(wrong.int().argmax()), wrong.shape[1])
    return f"row {row} input {column} {what}"


def _half_step(q: QTensor) -> Tensor:
    """Compute for the law the magnitudes (out, in) below which a weight rounds to the integer 0:
    half a step of its scale."""
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
    """Return, for the group of each judged weight, (largest magnitude that is pruned, smallest that
    is kept), (out, in) each; the first is below 0 where nothing is pruned."""
    sizes = pattern.grouped(weight.abs())
    zeros = pattern.zeros(weight.shape[1])
    kept = sizes.kthvalue(zeros + 1, dim=-1, keepdim=True).values
    lost = sizes.kthvalue(max(zeros, 1), dim=-1, keepdim=True).values if zeros else 0 * kept - 1
    one, other = (t.expand_as(sizes).reshape(weight.shape) for t in (lost, kept))
    return one, other


def find_suspects(
    name: str, q: QTensor | Tensor, weight: Tensor, norms: Tensor, pattern: Pattern
) -> list[Suspect]:
    """Return the suspects of one pruned weight: the module, and the row with the smallest kept
    share of |W| |x|, where they are below SCREEN.

    q: the quantized weight, or the pruned float weight
    weight: float weight (out, in) before pruning
    norms: norms (in,) of the module's inputs on held-out texts
    """
    by_row, by_all = (_kept_share(norms, pattern, pooled) for pooled in (False, True))
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


def _kept_share(norms: Tensor, pattern: Pattern, pooled: bool) -> Statistic:
    """Return the statistic that divides the kept |W| |x| of each row by the most that the pattern
    can keep.

    norms: norms (in,) of the inputs
    pooled: True for one value over all rows
    """

    def statistic(q: QTensor | Tensor, weight: Tensor, _rows: Tensor) -> Tensor:
        scores = weight.abs() * norms
        kept = (scores * (q != 0 if isinstance(q, Tensor) else q.nonzero())).sum(1)
        most = (scores * keep_highest(scores, pattern)).sum(1)
        if pooled:
            kept, most = kept.sum()[None], most.sum()[None]
        return kept / most.clamp(min=1e-30)

    return statistic


def prune_by_magnitude(weight: Tensor, pattern: Pattern | None) -> Tensor:
    """Return the expected `weight`, pruned by magnitude; unchanged where `pattern` is None."""
    return weight if pattern is None else weight * magnitude(weight, pattern)
