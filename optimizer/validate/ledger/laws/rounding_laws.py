"""Screen weights that a method rounded or pruned by output error (GPTQ, AutoRound, SparseGPT).

compared   output errors on held-out inputs, per output and per module, with those of
           round-to-nearest (after magnitude pruning, where the weight is pruned). With x the float
           model's inputs of a module, x' the compressed model's, W the float weight and Q the
           values of the integers:
           aim    |x W^T - x' Q^T|     the error that the method minimizes, earlier errors included
           alone  |x' W^T - x' Q^T|    the error of the module itself. Round-to-nearest is here
                  given |x W^T - x' W^T| too, the earlier error that the method compensates
limit      none is known. A module or output beyond rounding_limits.SCREEN is rounded again on
           resampled texts, and that comparison decides (limits/resampled.py)
caught     lost low bits, head scales an eighth too wide:
           test_a_head_pays_for_no_error_but_its_own,
           test_low_bits_that_are_lost_are_seen_where_a_rounder_leaves_the_weight

A method that does not read the float model's inputs is compared by `aim` with x = x'. Tokens are
weighted as in GPTQ (hessian.weigh_tokens), so that massive activations of a few tokens do not
dominate. For a convolution x W^T is its output on images, with all places weighted alike. Called by
hop `compress`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from optimizer.compress.apply.weights.rounding import choose_hessian_options
from optimizer.compress.methods.weights.hessian import weigh_tokens
from optimizer.foundation.conv_geometry import ConvGeometry, flatten_positions
from optimizer.foundation.process import threads
from optimizer.foundation.qtensor import QTensor, absmax_scale, quantize
from optimizer.harness.runtimes.ort.run import cores
from optimizer.validate.ledger.distance import Array
from optimizer.validate.ledger.laws import sparsity_laws
from optimizer.validate.ledger.limits.resampled import (
    Statistic,
    Suspect,
    quantize_input,
    read_values,
)
from optimizer.validate.ledger.limits.rounding_limits import SCREEN
from optimizer.validate.ledger.trace import Trace
from optimizer.validate.materials import Materials


def find_suspects(
    m: Materials, compressed: Sequence[Trace], float_reference: Sequence[Trace]
) -> list[Suspect]:
    """Return the suspects among the weights that a method rounded by output error.

    compressed: traces of the compressed model
    float_reference: traces of the float model; those of the compressed one for a method that does
        not read float inputs

    The head is compared on the compressed model's inputs, because it does not compensate earlier
    errors. Weights of modules that are not traced are left to other laws.
    """

    def judge(name: str) -> list[Suspect]:
        suspects: list[Suspect] = []
        module = name.removesuffix(".weight")
        layer = m.float_model.get_submodule(module)
        x = _inputs(compressed, module, layer)
        float_input = x if module == m.family.head else _inputs(float_reference, module, layer)
        if x is None or float_input is None or not m.compared_by_output(name):
            return suspects
        q = m.state.weights[name] if name in m.state.weights else m.state.replaced[name]
        weight = m.rounded_weight(name)
        factor = m.state.factor_of(module)
        if factor is not None:
            x, float_input = x * factor, float_input * factor
        quantized = quantize_input(m.state, module, x)
        if isinstance(layer, nn.Conv2d):
            data = _ModuleInputs(quantized, x, float_input, _images_by(layer))
        else:
            options = choose_hessian_options(m.section.quantize, m.section.sparsity)
            share = weigh_tokens(quantized, options.token_limit)
            data = _ModuleInputs(quantized * share, x * share, float_input * share, _tokens_by)
        pattern = m.state.pattern_of(name)
        if pattern is not None:
            norms = data.quantized.norm(dim=0)
            suspects += sparsity_laws.find_suspects(name, q, weight, norms, pattern)
        values = sparsity_laws.prune_by_magnitude(weight, pattern)
        if isinstance(q, QTensor):
            values = quantize(values, *absmax_scale(values, q.scheme), q.scheme).dequantize()
        return suspects + _suspects(name, q, (weight, values), data)

    names = dict.fromkeys((*m.state.weights, *m.state.sparsity))
    return [s for suspects in threads.map_in_threads(judge, names, cores()) for s in suspects]


def list_unjudged(m: Materials) -> list[str]:
    """Write a sentence on each method of the recipe that declares no rule by which its integers can
    be judged."""
    counts = Counter(name for w in m.state.weights for name in m.rounding(w).unjudged)
    return [
        f"the integers of {count} modules: method {name} states no rule for them "
        "(Method.judged_by), or no limits (Method.limits)"
        for name, count in counts.items()
    ]


def _tokens_by(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


def _images_by(layer: nn.Conv2d) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function (images, weight) -> outputs (places, out) of a screened convolution.

    layer: the convolution; its weight is passed as (out, in of a group * height * width)
    """
    filters = ConvGeometry.read(layer)
    return lambda x, weight: flatten_positions(filters.conv2d(x, weight))


@dataclass(frozen=True)
class _ModuleInputs:
    """Inputs of a screened module, (tokens, in) or images, in the float model and in the quantized
    ones."""

    quantized: Tensor  # the values of their integers
    compressed: Tensor  # in the compressed model
    float_input: Tensor  # in the float model
    product: Callable[[Tensor, Tensor], Tensor]  # (inputs, weight) -> (tokens, out)


@dataclass
class _ModuleOutputs:
    """Squared errors (out,) that the screen of a rounded weight compares: of a module's outputs for
    its integers and for round-to-nearest. A product is computed at its first use, because a
    statistic reads half of them."""

    inputs: _ModuleInputs
    weight: Tensor  # (out, in) in float
    values: Tensor  # of its integers
    plain: Tensor  # by round-to-nearest

    def errors(self, alone: bool) -> Tensor:
        """Squared error (out,) of the integers; `alone`: of the module itself, else with earlier
        errors."""
        exact = self._of_compressed if alone else self._of_floats
        return (exact - self._of_values).square().sum(0)

    def allowed(self, alone: bool) -> Tensor:
        """Squared error (out,) of round-to-nearest; `alone`: enlarged by the error of earlier
        modules, which the method compensates."""
        usual = self._usual
        if alone:
            usual = usual + (self._of_floats - self._of_compressed).norm(dim=0)
        return usual.square()

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.inputs.product(x, weight)

    @cached_property
    def _of_values(self) -> Tensor:
        return self._product(self.inputs.quantized, self.values)

    @cached_property
    def _of_floats(self) -> Tensor:
        return self._product(self.inputs.float_input, self.weight)

    @cached_property
    def _of_compressed(self) -> Tensor:
        return self._product(self.inputs.compressed, self.weight)

    @cached_property
    def _usual(self) -> Tensor:
        rounded = self._product(self.inputs.quantized, self.plain)
        return (self._of_floats - rounded).square().sum(0).sqrt()


def _suspects(
    name: str, q: QTensor | Tensor, weights: tuple[Tensor, Tensor], data: _ModuleInputs
) -> list[Suspect]:
    """Return the suspects of one weight: the module and its worst output, where they are beyond the
    screen.

    q: the quantized weight, or the pruned float weight
    weights: (float weight, values after round-to-nearest or magnitude pruning), (out, in) each
    """
    suspects, (weight, plain) = [], weights
    outputs = _ModuleOutputs(data, weight, read_values(q), plain)
    for alone in (False, True):
        error, usual = outputs.errors(alone), outputs.allowed(alone)
        more = " and earlier errors" if alone else ""
        pooled = float((error.sum() / usual.sum().clamp(min=1e-30)).sqrt())
        if pooled > SCREEN.output_module:
            off = f"its outputs are {pooled:.2f} times as far off"
            message = f"{name}: {off} as by round-to-nearest{more}"
            suspects.append(Suspect(name, None, _relative(data, plain, alone, True), message, 1))
        each = (error / usual.clamp(min=float(usual.median()) / 4 + 1e-30)).sqrt()
        row = int(each.argmax())
        if float(each[row]) > SCREEN.output:
            message = (
                f"{name}: output {row} is {float(each[row]):.2f} times as far off as by "
                f"round-to-nearest{more}"
            )
            statistic = _relative(data, plain, alone, False)
            suspects.append(Suspect(name, row, statistic, message, len(each)))
    return suspects


def _relative(data: _ModuleInputs, plain: Tensor, alone: bool, pooled: bool) -> Statistic:
    """Return the screen's statistic log(error / error of round-to-nearest) of each row.

    plain: values after round-to-nearest (out, in)
    alone: True for the error of the module itself, False with earlier errors
    pooled: True for one value over all rows
    """

    def statistic(q: QTensor | Tensor, weight: Tensor, rows: Tensor) -> Tensor:
        outputs = _ModuleOutputs(data, weight, read_values(q), plain[rows])
        error, usual = outputs.errors(alone), outputs.allowed(alone).clamp(min=1e-30)
        if pooled:
            return (error.sum() / usual.sum()).clamp(min=1e-30).log()[None]
        return (error / usual).clamp(min=1e-30).log()

    return statistic


def _inputs(traces: Iterable[Trace], module: str, layer: nn.Module) -> Tensor | None:
    """Collect the inputs of the screened `module` from traces: real tokens (tokens, in), or images,
    or all rows of an input without tokens, such as relative positions; None where the module was
    not traced."""
    images = isinstance(layer, nn.Conv2d)
    rows: list[Array] = [
        array if images else _real_rows(array, trace.mask)
        for trace in traces
        for (name, _), array in trace.inputs.items()
        if name == module
    ]
    return torch.cat([torch.from_numpy(a) for a in rows]) if rows else None


def _real_rows(array: Array, mask: Array) -> Array:
    tokens = array.shape[: mask.ndim] == mask.shape
    return (array[mask.astype(bool)] if tokens else array).reshape(-1, array.shape[-1])
