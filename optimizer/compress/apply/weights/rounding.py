"""Choose the integers of a segment's modules, by whichever rounding method the recipe names, and
what is pruned, where its sparsity section says so: a weight is pruned and then rounded, by one
statistic of its inputs.

A method that rounds by second moments gets the modules in the order in which they run, each on the
inputs it has once everything before it is rounded; modules that read one tensor share its
statistic. What the float model's module reads at the same place is kept in a buffer and gives the
target (see methods/weights/hessian.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from optimizer.compress.apply.pruning.pruning import Prunable, pruned
from optimizer.compress.methods.weights.hessian import first_token_weights, token_weights
from optimizer.compress.methods.weights.tuned import Tuned
from optimizer.compress.module_rows import joined
from optimizer.compress.simulate import QuantLinear
from optimizer.compress.walk import blocks as walk
from optimizer.compress.walk.activation_buffer import Budget, Buffer
from optimizer.compress.walk.blocks import BlockGroup
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.process import freed_memory
from optimizer.foundation.qtensor import QTensor, Scheme
from optimizer.foundation.references import resolve
from optimizer.foundation.sections.method_options import HessianOptions
from optimizer.foundation.state import Activations, Range, input_name
from optimizer.recipe.compression.methods import Method
from optimizer.recipe.compression.quantize import Quantize
from optimizer.recipe.compression.sparsity import Sparsity

HELD = 1 << 22  # values of a weight that are de-quantized once, not at every use
ALONE = 1 << 23  # values of a weight that is not rounded in one go with others


@dataclass(frozen=True)
class FloatWeight:
    """What a rounding method gets: one weight, or several that read one input, row below row.

    name: of the module, or the first. values: W (out, in). second_moments: H (in, in) of
    methods/weights/hessian.py, and cross_moment: P (in, out), where the method compares with the
    float model; both only for a method that rounds by them. in_place: they may be overwritten.
    sparsity: the recipe's section, of a weight that is pruned. mask: (out, in), False where it was;
    a method that takes it leaves the zero point there.
    """

    name: str
    values: Tensor
    scheme: Scheme
    second_moments: Tensor | None = None
    cross_moment: Tensor | None = None
    in_place: bool = False
    sparsity: Sparsity | None = None
    mask: Tensor | None = None

    @property
    def kept(self) -> Tensor:
        """W (out, in) with 0 where it was pruned."""
        return self.values if self.mask is None else self.values * self.mask


@dataclass(frozen=True)
class Inputs:
    """How the inputs of quantized modules are coded, by module."""

    mode: Activations = None
    ranges: Mapping[str, Range] = field(default_factory=dict)
    factors: Mapping[str, Tensor] = field(default_factory=dict)

    def quantized(self, name: str, linear: nn.Linear, q: QTensor | Tensor) -> QuantLinear:
        """The module that computes what the state will say. q: float values of a weight that is
        pruned only."""
        if isinstance(q, Tensor):
            return QuantLinear(q, linear.bias, None, None)
        covered, factor = self.ranges.get(name), self.factors.get(name)
        values = q.dequantize() if q.integers.numel() <= HELD else q
        return QuantLinear.of(linear, values, self.mode, covered, factor)

    def weight(self, name: str, linear: nn.Linear) -> Tensor:
        """What is coded, a matrix: the weight without the factor its input gets."""
        factor = self.factors.get(name)
        return linear.weight.flatten(1) if factor is None else linear.weight / factor


@dataclass
class Rounded:
    """weights: {module: its integers}; floats: {module: its float values}, of those that are pruned
    and not quantized; remarks: {module: what the report says}."""

    weights: dict[str, QTensor] = field(default_factory=dict)
    floats: dict[str, Tensor] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)

    @property
    def all(self) -> dict[str, QTensor | Tensor]:
        """Of every module."""
        return {**self.weights, **self.floats}

    def update(self, other: Rounded) -> None:
        """Take those of other modules."""
        self.weights |= other.weights
        self.floats |= other.floats
        self.remarks |= other.remarks

    def tune(self, tuned: Tuned, remark: str) -> None:
        """Take what was learned from these."""
        self.weights |= tuned.weights
        for name in tuned.weights:
            self.remarks[name] = joined(self.remarks.get(name), remark)


def rounded(weight: FloatWeight, method: Method, quantize: Quantize) -> tuple[QTensor, str]:
    """The integers that the method chooses, and what the report says of them. CheckpointError
    naming a weight that holds NaN, or inputs whose statistic cannot be inverted."""
    with _named(weight.name, weight.second_moments):
        remark = ""
        if weight.sparsity is not None:
            sparse = pruned(prunable(weight, weight.sparsity, quantize, method))
            weight, remark = replace(weight, mask=sparse.mask), sparse.note
        result: tuple[QTensor, str] = resolve(method.apply)(weight, quantize)
        return result[0], joined(remark, result[1])


def left_float(weight: Prunable, method: Method) -> tuple[Tensor, str]:
    """The values of a weight that is pruned only. Raises as `rounded`."""
    with _named(weight.name, weight.second_moments):
        result: tuple[Tensor, str] = resolve(method.apply)(weight)
        return result


def prunable(
    weight: FloatWeight, sparsity: Sparsity, quantize: Quantize, method: Method
) -> Prunable:
    """What is pruned before `method` rounds it: the statistic is needed again."""
    options = hessian_options(quantize, sparsity)
    return Prunable(
        weight.name,
        weight.values,
        sparsity,
        options.damping,
        options.act_order,
        weight.second_moments,
        weight.cross_moment,
        in_place=weight.in_place and not method.second_moments,
    )


def hessian_options(quantize: Quantize, sparsity: Sparsity | None) -> HessianOptions:
    """What the statistic of a module's inputs is made with, once for pruning and rounding."""
    if sparsity is not None and quantize.leaves_float:
        return sparsity.sparsegpt
    return quantize.gptq


@contextmanager
def _named(name: str, moments: Tensor | None) -> Iterator[None]:
    """Errors of methods become those of the weight or of its inputs."""
    try:
        yield
    except ValueError as e:
        if moments is None or str(e).startswith("weight"):
            raise CheckpointError(
                str(e).removeprefix("weight: "),
                where=f"{name}.weight",
                accepted="finite numbers",
                fix="The checkpoint is damaged or was trained to NaN: get it again.",
            ) from e
        raise CheckpointError(
            str(e),
            where=input_name(name),
            accepted="inputs whose second moments can be inverted",
            fix="Calibrate on more and more varied text, or add the module to keep_float.",
        ) from e


def choose(group: BlockGroup, inputs: Inputs, quantize: Quantize, scratch: Path) -> Rounded:
    """scratch: a folder for what memory has no room for.

    Moves the float reference on where a method compares with it. Raises CheckpointError naming a
    weight or input that holds NaN, or a module whose statistic cannot be inverted.
    """
    aims_at_float = group.stream.float_reference is not None and float_target(
        quantize, next(iter(group.sparsity.values()), None)
    )
    if group.stream.float_reference is not None and not aims_at_float:
        walk.advance_float_reference(group)
    looks = quantize.block_rounding.second_moments
    if not looks and not any(s.record.calibrated for s in group.sparsity.values()):
        return _alone(group, inputs, quantize)
    leader = walk.sharing_of_all(group, "there is nothing to round it by")
    float_inputs: Mapping[str, Buffer] = {}
    if aims_at_float:
        float_inputs = _float_inputs(group, set(leader.values()), scratch)
    whole = Rounded()
    with ExitStack() as swaps:
        for first in dict.fromkeys(leader.values()):
            linears = {n: group.linear(n) for n in leader if leader[n] == first}
            if max(m.weight.numel() for m in linears.values()) > ALONE:
                freed_memory.give_back()
            part = _together(group, linears, inputs, quantize, float_inputs.get(first))
            whole.update(part)
            swapped = {n: inputs.quantized(n, linears[n], q) for n, q in part.all.items()}
            swaps.enter_context(walk.swapped(group.model, swapped))
    return whole


def float_target(quantize: Quantize, sparsity: Sparsity | None) -> bool:
    """Whether the walk aims at the float model's output at the same place."""
    if quantize.leaves_float:
        return sparsity is not None and sparsity.float_target
    return quantize.aims_at_float(quantize.block_rounding)


def _alone(group: BlockGroup, inputs: Inputs, quantize: Quantize) -> Rounded:
    """Every weight by itself."""
    whole = Rounded()
    for name in group.modules:
        values = inputs.weight(name, group.linear(name))
        scheme, sparsity = group.schemes.get(name), group.sparsity.get(name)
        by_itself(whole, (name, values), scheme, sparsity, quantize)
    return whole


def by_itself(
    whole: Rounded,
    named: tuple[str, Tensor],
    scheme: Scheme | None,
    sparsity: Sparsity | None,
    quantize: Quantize,
) -> None:
    """Add to `whole` a weight, (module, values), that nothing else is known of. scheme None: it
    stays float."""
    name, values = named
    if scheme is not None:
        weight = FloatWeight(name, values, scheme, sparsity=sparsity)
        whole.weights[name], whole.remarks[name] = rounded(
            weight, quantize.block_rounding, quantize
        )
        return
    assert sparsity is not None
    options = hessian_options(quantize, sparsity)
    alone = Prunable(name, values, sparsity, options.damping, options.act_order)
    whole.floats[name], whole.remarks[name] = left_float(alone, quantize.of_kind("float")[0])


def _together(
    group: BlockGroup,
    linears: Mapping[str, nn.Linear],
    inputs: Inputs,
    quantize: Quantize,
    float_inputs: Iterable[Tensor] | None,
) -> Rounded:
    """Modules that read one tensor, with one statistic. float_inputs: what they read in the float
    model, batch by batch, where the method makes up for the difference."""
    part, (first, linear) = Rounded(), next(iter(linears.items()))
    # x^T (x W^T) is less work than x^T x then, and smaller
    tall = len(linears) == 1 and 2 * linear.out_features <= linear.in_features
    narrow = inputs.weight(first, linear) if tall else None
    options = hessian_options(quantize, group.sparsity.get(first))
    hessian, drift = statistic(group, first, inputs, options, float_inputs, narrow)
    stacks = _alike(linears, group)
    for names in stacks:
        weights = [inputs.weight(n, linears[n]) for n in names] if narrow is None else [narrow]
        values = torch.cat(weights) if len(weights) > 1 else weights[0]
        H = hessian if names is stacks[-1] else hessian.clone()
        P = drift if drift is None or tall else drift @ values.T
        rows = [len(w) for w in weights]
        scheme, sparsity = group.schemes.get(names[0]), group.sparsity.get(names[0])
        if scheme is None:
            assert sparsity is not None
            alone = Prunable(
                names[0], values, sparsity, options.damping, options.act_order, H, P, in_place=True
            )
            left, remark = left_float(alone, quantize.of_kind("float")[0])
            part.floats |= zip(names, map(torch.clone, left.split(rows)), strict=True)
        else:
            weight = FloatWeight(names[0], values, scheme, H, P, True, sparsity)
            q, remark = rounded(weight, quantize.block_rounding, quantize)
            part.weights |= zip(names, _unstacked(q, rows), strict=True)
        part.remarks |= dict.fromkeys(names, remark)
    return part


def _alike(linears: Mapping[str, nn.Linear], group: BlockGroup) -> list[list[str]]:
    """Modules of one input that are rounded in one go: rows do not see each other, unless one
    scale serves them all. Large ones go alone, which saves a copy."""
    stacks: dict[object, list[str]] = {}
    for name, linear in linears.items():
        scheme = group.schemes.get(name)
        one_scale = scheme is not None and scheme.granularity == "tensor"
        alone = one_scale or linear.weight.numel() > ALONE
        alike = scheme, name in group.sparsity
        stacks.setdefault(name if alone else alike, []).append(name)
    return list(stacks.values())


def _unstacked(q: QTensor, rows: Sequence[int]) -> list[QTensor]:
    if len(rows) == 1:
        return [q]
    zeros = q.zero_point.split(rows) if q.zero_point is not None else [None] * len(rows)
    parts = zip(q.integers.split(rows), q.scale.split(rows), zeros, strict=True)
    return [QTensor(codes.clone(), scale.clone(), zero, q.scheme) for codes, scale, zero in parts]


def _float_inputs(group: BlockGroup, leaders: Iterable[str], scratch: Path) -> dict[str, Buffer]:
    """What each leader reads in the float model, batch by batch; that model's hidden states move
    on."""
    budget = Budget(group.stream.spare)
    kept = {n: Buffer(budget, scratch / str(i)) for i, n in enumerate(sorted(leaders))}
    walk.advance_float_reference(group, lambda name, rows, _real: kept[name].append(rows), kept)
    return kept


def statistic(
    group: BlockGroup,
    leader: str,
    inputs: Inputs,
    options: HessianOptions,
    float_inputs: Iterable[Tensor] | None = None,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """H of methods/weights/hessian.py (in, in), and x_q^T (x_f - x_q) (in, in), times weight^T (in,
    out) if that is passed: sums over the real tokens, with the inputs as coded. The median length
    that token_limit refers to is each batch's own."""
    linear = group.linear(leader)
    factor = inputs.factors.get(leader)
    nothing = torch.empty(0, linear.in_features)
    coder = QuantLinear(nothing, None, inputs.mode, inputs.ranges.get(leader), factor)
    hessian = torch.zeros(linear.in_features, linear.in_features)
    columns = linear.in_features if weight is None else len(weight)
    drift = None if float_inputs is None else torch.zeros(linear.in_features, columns)
    targets: Iterator[Tensor] = iter(float_inputs or ())

    def hook(_name: str, rows: Tensor, real: Tensor) -> None:
        coded = coder.code(rows)
        share = token_weights(coded, options.token_limit)
        first = first_token_weights(real, options.first_token)
        if len(first) == len(rows):  # else they are no tokens
            share = share * first
        coded = coded * share
        with group.stream.sums():
            hessian.addmm_(coded.T, coded)
            if drift is not None:
                reference = next(targets) * share
                missed = (reference if factor is None else reference * factor) - coded
                drift.addmm_(coded.T, missed if weight is None else missed @ weight.T)

    walk.observe_one(group, hook, leader)
    return hessian, drift
