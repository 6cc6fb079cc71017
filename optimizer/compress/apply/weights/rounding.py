"""Prune and round the weights of a segment's modules by the recipe's methods.

A method that needs H gets the modules in the order in which they run, each on its inputs after all
modules before it are rounded; modules that read one tensor share its H, and pruning and rounding of
a weight share it too. The inputs of the float model at the same place, stored in a buffer, give P
(see methods/weights/hessian.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from optimizer.compress.apply.pruning.pruning import Prunable, prune
from optimizer.compress.methods.weights.factorization import PART
from optimizer.compress.methods.weights.hessian import weigh_first_tokens, weigh_tokens
from optimizer.compress.methods.weights.tuned import Tuned
from optimizer.compress.module_rows import join_remarks
from optimizer.compress.simulate import QuantLinear
from optimizer.compress.walk import blocks as walk
from optimizer.compress.walk.activation_buffer import Buffer, BufferBudget
from optimizer.compress.walk.blocks import BlockGroup
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.process import freed_memory
from optimizer.foundation.process.torch_device import CPU
from optimizer.foundation.qtensor import QTensor, Scheme
from optimizer.foundation.references import resolve
from optimizer.foundation.sections.method_options import HessianOptions
from optimizer.foundation.state import Activations, Range, input_name
from optimizer.recipe.compression.methods import Method
from optimizer.recipe.compression.quantize import Quantize
from optimizer.recipe.compression.sparsity import Sparsity

HELD = 1 << 22  # largest weight, in values, that is stored de-quantized
ALONE = 1 << 23  # largest weight, in values, that is rounded together with others


@dataclass(frozen=True)
class FloatWeight:
    """Input of a rounding method: one weight, or the stacked weights of modules with one input.

    name: name of the first module
    values: W (out, in)
    second_moments: H (in, in) of methods/weights/hessian.py, for a method that needs it
    cross_moment: P (in, out), for a method that aims at the float model's output
    in_place: H and P may be overwritten
    sparsity: recipe section by which the weight is pruned first; None: not pruned
    mask: (out, in), False where pruned; a method that takes it leaves the zero point there
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
        """W (out, in), the weight to round, with 0 where pruned."""
        return self.values if self.mask is None else self.values * self.mask


@dataclass(frozen=True)
class QuantizedInputs:
    """Quantization that a segment's inputs get while its weights are rounded.

    mode: quantize.activations of the recipe, None for float inputs
    ranges: {module: static range}
    factors: {module: factor (in,) by which the input is multiplied first}
    """

    mode: Activations = None
    ranges: Mapping[str, Range] = field(default_factory=dict)
    factors: Mapping[str, Tensor] = field(default_factory=dict)

    def quantized(self, name: str, linear: nn.Linear, q: QTensor | Tensor) -> QuantLinear:
        """The replacement of module `name` with weight q; a float q: the weight is only pruned."""
        if isinstance(q, Tensor):
            return QuantLinear(q, linear.bias, None, None)
        covered, factor = self.ranges.get(name), self.factors.get(name)
        values = q.dequantize() if q.integers.numel() <= HELD else q
        return QuantLinear.of(linear, values, self.mode, covered, factor)

    def weight(self, name: str, linear: nn.Linear) -> Tensor:
        """Return the matrix to quantize: the weight divided by the factor of its input."""
        factor = self.factors.get(name)
        return linear.weight.flatten(1) if factor is None else linear.weight / factor


@dataclass
class RoundedWeights:
    """Quantized and pruned weights of a segment.

    weights: {module: quantized weight}
    floats: {module: pruned float weight}
    remarks: {module: note for the report}
    """

    weights: dict[str, QTensor] = field(default_factory=dict)
    floats: dict[str, Tensor] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)

    @property
    def all(self) -> dict[str, QTensor | Tensor]:
        """{module: quantized weight, or pruned float weight} of the segment."""
        return {**self.weights, **self.floats}

    def update(self, other: RoundedWeights) -> None:
        """Add the results of other modules of the segment."""
        self.weights |= other.weights
        self.floats |= other.floats
        self.remarks |= other.remarks

    def on_cpu(self) -> RoundedWeights:
        """Return the same rounded weights on the CPU, to be written."""
        weights = {name: q.to(CPU) for name, q in self.weights.items()}
        return RoundedWeights(weights, {n: w.cpu() for n, w in self.floats.items()}, self.remarks)

    def tune(self, tuned: Tuned, remark: str) -> None:
        """Replace the weights of tuned modules, and add `remark` to each of them."""
        self.weights |= tuned.weights
        for name in tuned.weights:
            self.remarks[name] = join_remarks(self.remarks.get(name), remark)


def prune_and_round(weight: FloatWeight, method: Method, quantize: Quantize) -> tuple[QTensor, str]:
    """Prune and round a weight; returns integers and a note.

    Raises CheckpointError for a weight that holds NaN, or an H that cannot be factored.
    """
    with _errors_located(weight.name, weight.second_moments):
        remark = ""
        if weight.sparsity is not None:
            sparse = prune(_prunable(weight, weight.sparsity, quantize, method))
            weight, remark = replace(weight, mask=sparse.mask), sparse.note
        result: tuple[QTensor, str] = resolve(method.apply)(weight, quantize)
        return result[0], join_remarks(remark, result[1])


def prune_float(weight: Prunable, method: Method) -> tuple[Tensor, str]:
    """Prune a weight that stays float; returns (values, note). Raises as `prune_and_round`."""
    with _errors_located(weight.name, weight.second_moments):
        result: tuple[Tensor, str] = resolve(method.apply)(weight)
        return result


def _prunable(
    weight: FloatWeight, sparsity: Sparsity, quantize: Quantize, method: Method
) -> Prunable:
    """Make the input of a pruning method for a weight that is rounded afterwards; pruning must keep
    H and P intact if `method` reads H."""
    options = choose_hessian_options(quantize, sparsity)
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


def choose_hessian_options(quantize: Quantize, sparsity: Sparsity | None) -> HessianOptions:
    """Choose the options of the Hessian H that pruning and rounding share: gptq's; sparsegpt's for
    float weights."""
    if sparsity is not None and quantize.leaves_float:
        return sparsity.sparsegpt
    return quantize.gptq


@contextmanager
def _errors_located(name: str, moments: Tensor | None) -> Iterator[None]:
    """Inside, turn a method's ValueError into a CheckpointError that names the weight or its
    inputs."""
    try:
        yield
    except ValueError as e:
        if "FP4 holds" in str(e):
            raise CheckpointError(
                str(e).removeprefix("weight: "),
                where=f"{name}.weight",
                fix=f"Add {name!r} to quantize.keep_float, or use type: float8.",
            ) from e
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


def compress_weights(
    group: BlockGroup, inputs: QuantizedInputs, quantize: Quantize, scratch: Path
) -> RoundedWeights:
    """Prune and round all weights of a segment; the float reference, if there is one, moves past
    it.

    scratch: folder for activations that do not fit into memory

    Raises CheckpointError for a weight or input that holds NaN, or an H that cannot be factored.
    """
    aims_at_float = group.stream.float_reference is not None and uses_float_target(
        quantize, next(iter(group.sparsity.values()), None)
    )
    if group.stream.float_reference is not None and not aims_at_float:
        walk.advance_float_reference(group)
    needs_hessian = quantize.block_rounding.second_moments
    if not needs_hessian and not any(s.record.calibrated for s in group.sparsity.values()):
        return _compress_each(group, inputs, quantize)
    leader = walk.find_all_sharing(group, "its inputs are unknown")
    float_inputs: Mapping[str, Buffer] = {}
    if aims_at_float:
        float_inputs = _float_inputs(group, set(leader.values()), scratch)
    results = RoundedWeights()
    with ExitStack() as swaps:
        for first in dict.fromkeys(leader.values()):
            linears = {n: group.linear(n) for n in leader if leader[n] == first}
            if max(m.weight.numel() for m in linears.values()) > ALONE:
                freed_memory.give_back()
            part = _compress_sharing(group, linears, inputs, quantize, float_inputs.get(first))
            results.update(part)
            swapped = {n: inputs.quantized(n, linears[n], q) for n, q in part.all.items()}
            swaps.enter_context(walk.swap_modules(group.model, swapped))
    return results


def uses_float_target(quantize: Quantize, sparsity: Sparsity | None) -> bool:
    """Return True where weights are rounded or pruned to reproduce their module's output in the
    float model; False where they reproduce that of the module on inputs from compressed blocks."""
    if quantize.leaves_float:
        return sparsity is not None and sparsity.float_target
    return quantize.aims_at_float(quantize.block_rounding)


def _compress_each(
    group: BlockGroup, inputs: QuantizedInputs, quantize: Quantize
) -> RoundedWeights:
    """Compress the weights of a segment one by one, by methods that read no inputs, such as rtn."""
    results = RoundedWeights()
    for name in group.modules:
        values = inputs.weight(name, group.linear(name))
        scheme, sparsity = group.schemes.get(name), group.sparsity.get(name)
        compress_alone(results, (name, values), scheme, sparsity, quantize)
    return results


def compress_alone(
    results: RoundedWeights,
    named: tuple[str, Tensor],
    scheme: Scheme | None,
    sparsity: Sparsity | None,
    quantize: Quantize,
) -> None:
    """Compress `named`, (module, weight), without its inputs, and add the result to `results`.

    scheme: None: the weight stays float
    """
    name, values = named
    if scheme is not None:
        weight = FloatWeight(name, values, scheme, sparsity=sparsity)
        results.weights[name], results.remarks[name] = prune_and_round(
            weight, quantize.block_rounding, quantize
        )
        return
    assert sparsity is not None
    options = choose_hessian_options(quantize, sparsity)
    alone = Prunable(name, values, sparsity, options.damping, options.act_order)
    results.floats[name], results.remarks[name] = prune_float(alone, quantize.of_kind("float")[0])


def _compress_sharing(
    group: BlockGroup,
    linears: Mapping[str, nn.Linear],
    inputs: QuantizedInputs,
    quantize: Quantize,
    float_inputs: Iterable[Tensor] | None,
) -> RoundedWeights:
    """Compress modules that read one tensor, with one H.

    float_inputs: their input in the float model, batch by batch, where the method corrects the
        difference
    """
    part, (first, linear) = RoundedWeights(), next(iter(linears.items()))
    # x^T (x W^T) is then smaller than x^T x, and less work
    tall = len(linears) == 1 and 2 * linear.out_features <= linear.in_features
    narrow = inputs.weight(first, linear) if tall else None
    options = choose_hessian_options(quantize, group.sparsity.get(first))
    H_all, P_all = measure_hessian(group, first, inputs, options, float_inputs, narrow)
    stacks = _stacks(linears, group)
    for names in stacks:
        weights = [inputs.weight(n, linears[n]) for n in names] if narrow is None else [narrow]
        values = torch.cat(weights) if len(weights) > 1 else weights[0]
        H = H_all if names is stacks[-1] else H_all.clone()
        P = P_all if P_all is None or tall else P_all @ values.T
        rows = [len(w) for w in weights]
        scheme, sparsity = group.schemes.get(names[0]), group.sparsity.get(names[0])
        if scheme is None:
            assert sparsity is not None
            alone = Prunable(
                names[0], values, sparsity, options.damping, options.act_order, H, P, in_place=True
            )
            left, remark = prune_float(alone, quantize.of_kind("float")[0])
            part.floats |= zip(names, map(torch.clone, left.split(rows)), strict=True)
        else:
            weight = FloatWeight(names[0], values, scheme, H, P, True, sparsity)
            q, remark = prune_and_round(weight, quantize.block_rounding, quantize)
            part.weights |= zip(names, _unstack(q, rows), strict=True)
        part.remarks |= dict.fromkeys(names, remark)
    return part


def _stacks(linears: Mapping[str, nn.Linear], group: BlockGroup) -> list[list[str]]:
    """Group modules whose weights are rounded together: rows are independent, unless one scale
    serves all of them. Modules with more than ALONE weights are rounded alone, which saves a copy.
    """
    stacks: dict[object, list[str]] = {}
    for name, linear in linears.items():
        scheme = group.schemes.get(name)
        one_scale = scheme is not None and scheme.granularity == "tensor"
        alone = one_scale or linear.weight.numel() > ALONE
        alike = scheme, name in group.sparsity
        stacks.setdefault(name if alone else alike, []).append(name)
    return list(stacks.values())


def _unstack(q: QTensor, rows: Sequence[int]) -> list[QTensor]:
    if len(rows) == 1:
        return [q]
    zeros = q.zero_point.split(rows) if q.zero_point is not None else [None] * len(rows)
    parts = zip(q.integers.split(rows), q.scale.split(rows), zeros, strict=True)
    return [QTensor(integers.clone(), s.clone(), zero, q.scheme) for integers, s, zero in parts]


def _float_inputs(group: BlockGroup, leaders: Iterable[str], scratch: Path) -> dict[str, Buffer]:
    """Return {leader: its input in the float model, batch by batch}; the float reference moves past
    the segment."""
    budget = BufferBudget(group.stream.spare)
    kept = {n: Buffer(budget, scratch / str(i)) for i, n in enumerate(sorted(leaders))}
    walk.advance_float_reference(group, lambda name, rows, _real: kept[name].append(rows), kept)
    return kept


class _RunningProducts:
    """Running sums over the calibration tokens that the rounding of one input's weights reads: H
    (in, in), on and above its diagonal, and P (in, columns); 0 columns: without P."""

    def __init__(self, features: int, columns: int, device: torch.device) -> None:
        self.H = torch.zeros(features, features, device=device)
        self.P = torch.zeros(features, columns, device=device)

    def merge(self, later: _RunningProducts) -> None:
        self.H += later.H
        self.P += later.P


def measure_hessian(
    group: BlockGroup,
    leader: str,
    inputs: QuantizedInputs,
    options: HessianOptions,
    float_inputs: Iterable[Tensor] | None = None,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Measure H (in, in) and P of methods/weights/hessian.py on the quantized inputs of `leader`.

    weight: W (out, in), for P (in, out); None: P without W^T (in, in)

    P is None without float_inputs. The median of token_limit is taken over each batch.
    """
    linear = group.linear(leader)
    factor = inputs.factors.get(leader)
    device = group.stream.device
    nothing = torch.empty(0, linear.in_features, device=device)
    quantizer = QuantLinear(nothing, None, inputs.mode, inputs.ranges.get(leader), factor)
    columns = linear.in_features if weight is None else len(weight)
    columns = columns if float_inputs is not None else 0
    targets: Iterator[Tensor] = iter(float_inputs or ())

    def measure(sums: Mapping[str, _RunningProducts], part: range) -> None:
        H, P = sums[leader].H, sums[leader].P

        def hook(_name: str, rows: Tensor, real: Tensor) -> None:
            x = quantizer.quantize_input(rows)
            share = weigh_tokens(x, options.token_limit)
            first = weigh_first_tokens(real, options.first_token)
            if len(first) == len(rows):  # else the rows are not tokens
                share = share * first.to(device)
            x = x * share
            with group.stream.sums():
                _add_products(H, x)
                if columns:
                    reference = next(targets).to(device) * share
                    missed = (reference if factor is None else reference * factor) - x
                    P.addmm_(x.T, missed if weight is None else missed @ weight.T)

        walk.observe_one(group, hook, leader, part)

    def start() -> dict[str, _RunningProducts]:
        return {leader: _RunningProducts(linear.in_features, columns, device)}

    products = group.stream.deal.sum(start, measure)[leader]
    H = products.H
    for first in range(0, len(H), PART):
        rows, below = slice(first, first + PART), slice(first + PART, None)
        H[below, rows] = H[rows, below].T
    return H, products.P if columns else None


def _add_products(H: Tensor, x: Tensor) -> None:
    """Add x^T x to the Hessian H (in, in), except for blocks below its diagonal, which equal those
    above."""
    for start in range(0, len(H), PART):
        H[start : start + PART, start:].addmm_(x[:, start : start + PART].T, x[:, start:])
