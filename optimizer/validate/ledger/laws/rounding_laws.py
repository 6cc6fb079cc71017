"""What is looked at in integers that a method chose by what comes out, so that they are not the
nearest.

On held-out inputs, x of the float model and x' of the compressed one, both as they enter a module,
and with W what was rounded and Q the values of the integers,

    aim    |x W^T - x' Q^T|     what the method makes small: earlier errors are made up for
    alone  |x' W^T - x' Q^T|    the module by itself, which pays for that

are compared with what W rounded to nearest gives, pruned by magnitude first where it is pruned,
`alone` with |x W^T - x' W^T| beside it, what there was to make up for: of all outputs of a module
together, and of every output by itself. No
theorem bounds them; a module or output beyond the screen (rounding_limits.SCREEN) is rounded again
on resampled texts, and judged by that (validate/ledger/limits/resampled.py). A method that does not
look at the float model's inputs is compared by `aim` with x = x'. Tokens count as they do for gptq
(hessian.token_weights), so that a few massive activations do not decide alone. Of a convolution
x W^T is what its filters make of images, whose places all count alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optimizer.compress.apply.weights.rounding import hessian_options
from optimizer.compress.methods.weights.hessian import token_weights
from optimizer.compress.simulate import fake_quantize, fake_quantize_per_token
from optimizer.foundation.conv_geometry import ConvGeometry, flatten_positions
from optimizer.foundation.qtensor import QTensor, absmax_scale, quantize
from optimizer.foundation.state import CompressedState, input_name
from optimizer.validate.ledger.distance import Array
from optimizer.validate.ledger.laws import sparsity_laws
from optimizer.validate.ledger.limits.resampled import Statistic, Suspect, values_of
from optimizer.validate.ledger.limits.rounding_limits import SCREEN
from optimizer.validate.ledger.trace import Trace
from optimizer.validate.materials import Materials


def outputs(
    m: Materials, compressed: Sequence[Trace], float_reference: Sequence[Trace]
) -> list[Suspect]:
    """Both are traces: of the compressed and of the float (folded) model; the same twice for a
    method that does not compare them. The head makes up for nothing, whoever asks.
    Weights of no traced module are left to other laws."""
    suspects = []
    for name in dict.fromkeys((*m.state.weights, *m.state.sparsity)):
        module = name.removesuffix(".weight")
        layer = m.float_model.get_submodule(module)
        x = _inputs(compressed, module, layer)
        float_input = x if module == m.family.head else _inputs(float_reference, module, layer)
        if x is None or float_input is None or not m.compared_by_output(name):
            continue
        q = m.state.weights[name] if name in m.state.weights else m.state.replaced[name]
        weight = m.rounded_weight(name)
        factor = m.state.factor_of(module)
        if factor is not None:
            x, float_input = x * factor, float_input * factor
        quantized = _coded(m.state, module, x)
        if isinstance(layer, nn.Conv2d):
            data = _ModuleInputs(quantized, x, float_input, _images_by(layer))
        else:
            options = hessian_options(m.section.quantize, m.section.sparsity)
            share = token_weights(quantized, options.token_limit)
            data = _ModuleInputs(quantized * share, x * share, float_input * share, _tokens_by)
        pattern = m.state.pattern_of(name)
        if pattern is not None:
            norms = data.quantized.norm(dim=0)
            suspects += sparsity_laws.kept_suspects(name, q, weight, norms, pattern)
        values = sparsity_laws.plain(weight, pattern)
        if isinstance(q, QTensor):
            values = quantize(values, *absmax_scale(values, q.scheme), q.scheme).dequantize()
        suspects += _suspects(name, q, (weight, values), data)
    return suspects


def without_law(m: Materials) -> list[str]:
    """The methods that chose integers and whose records say nothing of these."""
    counts = Counter(name for w in m.state.weights for name in m.rounding(w).unjudged)
    return [
        f"the integers of {count} modules: method {name} states no law of them "
        "(Method.law), or no limits (Method.limits)"
        for name, count in counts.items()
    ]


def _tokens_by(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


def _images_by(layer: nn.Conv2d) -> Callable[[Tensor, Tensor], Tensor]:
    """(places, out) of images and a weight (out, in of a group * height * width)."""
    filters = ConvGeometry.of(layer)
    return lambda x, weight: flatten_positions(filters.conv2d(x, weight))


@dataclass(frozen=True)
class _ModuleInputs:
    """Inputs of a module, (tokens, in) or images: as its integers say, in the compressed and the
    float model. product: (tokens, out) of such and a weight."""

    quantized: Tensor
    compressed: Tensor
    float_input: Tensor
    product: Callable[[Tensor, Tensor], Tensor]

    def errors(self, weight: Tensor, values: Tensor, alone: bool) -> Tensor:
        """Squared, per output: values (out, in) against the weight."""
        exact = self.product(self.compressed if alone else self.float_input, weight)
        return (exact - self.product(self.quantized, values)).square().sum(0)

    def allowed(self, weight: Tensor, plain: Tensor, alone: bool) -> Tensor:
        """Squared, per output: what plain rounding gives, and what there was to make up for."""
        usual = self.errors(weight, plain, alone=False).sqrt()
        if alone:
            earlier = self.product(self.float_input - self.compressed, weight)
            usual = usual + earlier.norm(dim=0)
        return usual.square()


def _suspects(
    name: str, q: QTensor | Tensor, weights: tuple[Tensor, Tensor], data: _ModuleInputs
) -> list[Suspect]:
    """weights: what was rounded or pruned, and what is plain."""
    suspects, (weight, plain) = [], weights
    for alone in (False, True):
        error = data.errors(weight, values_of(q), alone)
        usual = data.allowed(weight, plain, alone)
        more = " and earlier errors" if alone else ""
        whole = float((error.sum() / usual.sum().clamp(min=1e-30)).sqrt())
        if whole > SCREEN.output_module:
            message = (
                f"{name}: its outputs are {whole:.2f} times as far off as by plain rounding{more}"
            )
            suspects.append(Suspect(name, None, _relative(data, plain, alone, True), message, 1))
        each = (error / usual.clamp(min=float(usual.median()) / 4 + 1e-30)).sqrt()
        row = int(each.argmax())
        if float(each[row]) > SCREEN.output:
            message = (
                f"{name}: output {row} is {float(each[row]):.2f} times as far off as by plain "
                f"rounding{more}"
            )
            statistic = _relative(data, plain, alone, False)
            suspects.append(Suspect(name, row, statistic, message, len(each)))
    return suspects


def _relative(data: _ModuleInputs, plain: Tensor, alone: bool, whole: bool) -> Statistic:
    """The logarithm of a row's error by what plain rounding gives, or of all rows' together."""

    def statistic(q: QTensor | Tensor, weight: Tensor, rows: Tensor) -> Tensor:
        error = data.errors(weight, values_of(q), alone)
        usual = data.allowed(weight, plain[rows], alone).clamp(min=1e-30)
        if whole:
            return (error.sum() / usual.sum()).clamp(min=1e-30).log()[None]
        return (error / usual).clamp(min=1e-30).log()

    return statistic


def _coded(state: CompressedState, module: str, x: Tensor) -> Tensor:
    """x, already multiplied by the site's factor, as its codes say it is."""
    mode = state.activations_of(module)
    if mode == "token":
        return fake_quantize_per_token(x)
    return x if mode is None else fake_quantize(x, state.ranges[input_name(module)])


def _inputs(traces: Iterable[Trace], module: str, layer: nn.Module) -> Tensor | None:
    """(tokens, in) of the real tokens that entered `module`, or the images that did."""
    images = isinstance(layer, nn.Conv2d)
    rows: list[Array] = [
        array if images else array[trace.mask.astype(bool)].reshape(-1, array.shape[-1])
        for trace in traces
        for (name, _), array in trace.inputs.items()
        if name == module
    ]
    return torch.cat([torch.from_numpy(a) for a in rows]) if rows else None
