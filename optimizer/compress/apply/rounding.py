"""Choose the codes of a segment's modules: to nearest, or with the calibration data's help.

With gptq the modules are rounded in the order in which they run, each on the inputs it gets once
everything before it is rounded; modules that read one tensor share its statistic. What the float
model's module reads at the same place is kept in a buffer and gives the target (see
methods/hessian.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from optimizer.compress.methods.autoround import Learned
from optimizer.compress.methods.gptq import gptq
from optimizer.compress.methods.hessian import counted, leading
from optimizer.compress.methods.rtn import rtn
from optimizer.compress.methods.scale_search import output_searched
from optimizer.compress.simulate import QuantLinear
from optimizer.compress.walk import blocks as walk
from optimizer.compress.walk import freed_memory
from optimizer.compress.walk.activation_buffer import Budget, Buffer
from optimizer.errors import CheckpointError
from optimizer.qtensor import QTensor, Scheme
from optimizer.recipe.quantize import Gptq, Quantize
from optimizer.state import Activations, Range

HELD = 1 << 22  # values of a weight that are de-quantized once, not at every use
ALONE = 1 << 23  # values of a weight that is not rounded in one go with others


@dataclass(frozen=True)
class Inputs:
    """How the inputs of quantized modules are coded, by module."""

    mode: Activations = None
    ranges: Mapping[str, Range] = field(default_factory=dict)
    factors: Mapping[str, Tensor] = field(default_factory=dict)

    def quantized(self, name: str, linear: nn.Linear, q: QTensor) -> QuantLinear:
        """The module that computes what the state will say."""
        covered, factor = self.ranges.get(name), self.factors.get(name)
        values = q.dequantize() if q.codes.numel() <= HELD else q
        return QuantLinear(values, linear.bias, self.mode, covered, factor)

    def weight(self, name: str, linear: nn.Linear) -> Tensor:
        """What is coded: the weight without the factor its input gets."""
        factor = self.factors.get(name)
        return linear.weight if factor is None else linear.weight / factor


@dataclass
class Rounded:
    """weights: {module: codes}; said: {module: what the report says}."""

    weights: dict[str, QTensor] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)

    def take(self, learned: Learned) -> None:
        """Codes that were learned from these."""
        self.weights |= learned.weights
        share = learned.after / learned.before if learned.before else 1.0
        words = f"learned: the block's error is {share:.3f} of what it was"
        for name in learned.weights:
            self.said[name] = "; ".join(filter(None, (self.said.get(name), words)))


def choose(
    model: nn.Module,
    schemes: Mapping[str, Scheme],
    quantize: Quantize,
    inputs: Inputs,
    stream: walk.Stream,
    segment: range,
    scratch: Path,
) -> Rounded:
    """model: its blocks hold the float weights. scratch: a folder for what memory has no room for.

    Moves stream.exact on where the method compares with it. Raises CheckpointError naming a
    weight or input that holds NaN, or a module whose statistic cannot be inverted.
    """
    if stream.exact is not None and "gptq" not in quantize.rounders:
        walk.run(model, stream, segment, _look_away, (), advance=True, exact=True)
    if not _by_statistic(quantize):
        return nearest(model, schemes, inputs)
    order = walk.sharing(model, stream, segment, tuple(schemes))
    unused = [n for n in schemes if n not in order]
    if unused:
        raise CheckpointError(
            "never ran on the calibration data, so there is nothing to round it by",
            where=unused[0],
            fix="Add it to keep_float.",
        )
    targets: dict[str, Buffer] = {}
    if stream.exact is not None and "gptq" in quantize.rounders:
        targets = _float_inputs(model, set(order.values()), stream, segment, scratch)
    made = Rounded()
    with ExitStack() as swaps:
        for leader in dict.fromkeys(order.values()):
            group = {
                n: cast(nn.Linear, model.get_submodule(n)) for n in order if order[n] == leader
            }
            if max(m.weight.numel() for m in group.values()) > ALONE:
                freed_memory.give_back()
            floats = targets.get(leader)
            found = _together(model, group, schemes, quantize, inputs, stream, segment, floats)
            made.weights |= found.weights
            made.said |= found.said
            swapped = {n: inputs.quantized(n, group[n], q) for n, q in found.weights.items()}
            swaps.enter_context(walk.swapped(model, swapped))
    return made


def _together(
    model: nn.Module,
    group: Mapping[str, nn.Linear],
    schemes: Mapping[str, Scheme],
    quantize: Quantize,
    inputs: Inputs,
    stream: walk.Stream,
    segment: range,
    floats: Iterable[Tensor] | None,
) -> Rounded:
    """Modules that read one tensor, with one statistic. floats: what they read in the float model,
    batch by batch, where the method makes up for the difference."""
    made, (leader, first) = Rounded(), next(iter(group.items()))
    # x^T (x W^T) is less work than x^T x then, and smaller
    tall = len(group) == 1 and 2 * first.out_features <= first.in_features
    narrow = inputs.weight(leader, first) if tall else None
    hessian, drift = _statistic(
        model, leader, inputs, stream, segment, floats, narrow, quantize.gptq
    )
    stacks = _alike(group, schemes)
    for names in stacks:
        weights = [inputs.weight(n, group[n]) for n in names] if narrow is None else [narrow]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        pull = drift if drift is None or tall else drift @ weight.T
        sums = hessian if names is stacks[-1] else hessian.clone()
        q, said = coded(names[0], weight, sums, pull, schemes[names[0]], quantize, in_place=True)
        parts = _unstacked(q, [len(w) for w in weights])
        made.weights |= zip(names, parts, strict=True)
        made.said |= dict.fromkeys(names, said)
    return made


def nearest(model: nn.Module, schemes: Mapping[str, Scheme], inputs: Inputs) -> Rounded:
    """Every weight by itself."""
    made = Rounded()
    for name, scheme in schemes.items():
        linear = cast(nn.Linear, model.get_submodule(name))
        made.weights[name] = nearest_one(name, inputs.weight(name, linear), scheme)
    return made


def nearest_one(name: str, weight: Tensor, scheme: Scheme) -> QTensor:
    """rtn; CheckpointError naming the weight when it holds NaN."""
    try:
        return rtn(weight, scheme)
    except ValueError as e:
        raise _damaged(name, e) from e


def _damaged(name: str, error: ValueError) -> CheckpointError:
    return CheckpointError(
        str(error).removeprefix("weight: "),
        where=f"{name}.weight",
        accepted="finite numbers",
        fix="The checkpoint is damaged or was trained to NaN: get it again.",
    )


def _alike(group: Mapping[str, nn.Linear], schemes: Mapping[str, Scheme]) -> list[list[str]]:
    """Modules of one input that are rounded in one go: rows do not see each other, unless one
    scale serves them all. Large ones go alone, which saves a copy."""
    found: dict[object, list[str]] = {}
    for name, linear in group.items():
        scheme = schemes[name]
        alone = scheme.granularity == "tensor" or linear.weight.numel() > ALONE
        found.setdefault(name if alone else scheme, []).append(name)
    return list(found.values())


def _unstacked(q: QTensor, rows: Sequence[int]) -> list[QTensor]:
    if len(rows) == 1:
        return [q]
    zeros = q.zero_point.split(rows) if q.zero_point is not None else [None] * len(rows)
    parts = zip(q.codes.split(rows), q.scale.split(rows), zeros, strict=True)
    return [QTensor(codes.clone(), scale.clone(), zero, q.scheme) for codes, scale, zero in parts]


def _by_statistic(quantize: Quantize) -> bool:
    """Whether codes are chosen with the inputs' second moments."""
    clips = "awq" in quantize.transforms and quantize.awq.clip
    return "gptq" in quantize.rounders or clips


def _look_away(_name: str, _rows: Tensor, _real: Tensor) -> None:
    return None


def coded(
    name: str,
    weight: Tensor,
    hessian: Tensor,
    pull: Tensor | None,
    scheme: Scheme,
    quantize: Quantize,
    *,
    in_place: bool = False,
) -> tuple[QTensor, str]:
    """The codes of one weight, and what the report says of them. in_place: as in gptq."""
    asked = quantize.gptq
    try:
        if "gptq" not in quantize.rounders:
            return output_searched(weight, hessian, scheme), "ranges by output error"
        made = gptq(
            weight,
            hessian,
            scheme,
            pull=pull,
            act_order=asked.act_order,
            damping=asked.damping,
            widest=asked.max_scale_ratio,
            in_place=in_place,
        )
    except ValueError as e:
        if str(e).startswith("weight"):
            raise _damaged(name, e) from e
        raise CheckpointError(
            str(e),
            where=f"{name}:input",
            accepted="inputs whose second moments can be inverted",
            fix="Calibrate on more and more varied text, or add the module to keep_float.",
        ) from e
    said = f"gptq, damping {made.damping:g}"
    return made.q, said + ("" if made.damping == asked.damping else f" (asked: {asked.damping:g})")


def _float_inputs(
    model: nn.Module,
    leaders: Iterable[str],
    stream: walk.Stream,
    segment: range,
    scratch: Path,
) -> dict[str, Buffer]:
    """What each leader reads in the float model, batch by batch; stream.exact moves on."""
    budget = Budget(stream.spare)
    kept = {n: Buffer(budget, scratch / str(i)) for i, n in enumerate(sorted(leaders))}

    def see(name: str, rows: Tensor, _real: Tensor) -> None:
        kept[name].append(rows)

    walk.run(model, stream, segment, see, kept, advance=True, exact=True)
    return kept


def _statistic(
    model: nn.Module,
    leader: str,
    inputs: Inputs,
    stream: walk.Stream,
    segment: range,
    floats: Iterable[Tensor] | None,
    weight: Tensor | None,
    asked: Gptq,
) -> tuple[Tensor, Tensor | None]:
    """H of methods/hessian.py (in, in), and x_q^T (x_f - x_q) (in, in), times weight^T (in, out)
    if that is given: sums over the real tokens, with the inputs as coded. The median length that
    token_limit refers to is each batch's own."""
    linear = cast(nn.Linear, model.get_submodule(leader))
    coder = QuantLinear(
        torch.empty(0, linear.in_features),
        None,
        inputs.mode,
        inputs.ranges.get(leader),
        inputs.factors.get(leader),
    )
    hessian = torch.zeros(linear.in_features, linear.in_features)
    columns = linear.in_features if weight is None else len(weight)
    drift = None if floats is None else torch.zeros(linear.in_features, columns)
    wanted: Iterator[Tensor] = iter(floats or ())
    factor = inputs.factors.get(leader)

    def see(_name: str, rows: Tensor, real: Tensor) -> None:
        coded = coder.code(rows)
        share = counted(coded, asked.token_limit)
        first = leading(real, asked.first_token)
        if len(first) == len(rows):  # else they are no tokens
            share = share * first
        coded = coded * share
        with stream.sums():
            hessian.addmm_(coded.T, coded)
            if drift is not None:
                exact = next(wanted) * share
                missed = (exact if factor is None else exact * factor) - coded
                drift.addmm_(coded.T, missed if weight is None else missed @ weight.T)

    walk.run(model, stream, segment, see, (leader,), stop=True)
    return hessian, drift
