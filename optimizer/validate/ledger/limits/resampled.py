"""Judge suspicious rows of a weight by rounding them again with the same method on resampled
texts.

    suspects of the laws -> (problems, sentences on rows that cannot be judged)

No definition bounds these statistics. The suspicious rows, and others of the weight as controls,
are rounded again RESAMPLES times, with every calibration text counted a random number of times
(Poisson(1): the bootstrap of a sum). A row is refused where its statistic lies further from those
of its own re-roundings than the re-roundings of all rows lie apart, by the tolerance bound of
foundation/rounding/tolerance.py for the number of screened rows. Called by hop `compress`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from optimizer.compress.apply.pruning.pruning import Prunable
from optimizer.compress.apply.weights.rounding import (
    FloatWeight,
    choose_hessian_options,
    prune_and_round,
    prune_float,
    uses_float_target,
)
from optimizer.compress.methods.weights.hessian import weigh_first_tokens, weigh_tokens
from optimizer.compress.simulate import fake_quantize, quantize_tokens
from optimizer.foundation.process import freed_memory
from optimizer.foundation.qtensor import QTensor
from optimizer.foundation.rounding.tolerance import MISSED, tolerance_factor
from optimizer.foundation.state import PER_TOKEN, CompressedState, input_name, owner_of
from optimizer.harness.inputs.batch import Batch
from optimizer.validate.ledger import trace
from optimizer.validate.ledger.pieces import roundoff
from optimizer.validate.materials import Materials

RESAMPLES = 6
CONTROLS = 24
SMALLEST = 1e-4  # difference of a statistic by float32 sums over a row

Sums = tuple[Tensor, Tensor | None]
"""(H, P) of compress/methods/weights/hessian.py; no P where the method does not aim at another
model's output."""
_Inputs = dict[str, list[Tensor]]
Statistic = Callable[[QTensor | Tensor, Tensor, Tensor], Tensor]
"""(quantized or pruned rows, their float weight, their row numbers) -> (rows,), or (1,) for all of
them."""


@dataclass(frozen=True)
class Suspect:
    """A row of a parameter whose statistic is beyond the screen.

    parameter: name of the parameter
    row: number of the row; None: all rows together
    statistic: function that is compared between the row and its re-roundings
    message: sentence for the report
    looks: number of rows that were screened
    """

    parameter: str
    row: int | None
    statistic: Statistic
    message: str
    looks: int  # number of rows that were screened


def judge_suspects(m: Materials, suspects: Sequence[Suspect]) -> tuple[list[str], list[str]]:
    """Judge all suspects: (problems, sentences on suspects that cannot be judged)."""
    refused, unjudged, again = list[str](), list[str](), list[ResampledRows]()
    for parameter in dict.fromkeys(s.parameter for s in suspects):
        of_parameter = [s for s in suspects if s.parameter == parameter]
        if parameter in m.state.weights and m.rounding(parameter).learned:
            unjudged += [f"{s.message} (learned: no null model)" for s in of_parameter]
        else:
            again.append(_rows_of(m, parameter, of_parameter))
    for several in _together(m, again):
        for chosen, sums in zip(several, _sums(m, several), strict=True):
            refused += _refused(m, chosen, sums)
        freed_memory.give_back()  # the sums' memory has sizes that no later hop reuses
    return refused, unjudged


@dataclass(frozen=True)
class ResampledRows:
    """Rows of a parameter that are rounded again: the suspects and other rows as controls.

    rows: row numbers (rows,)
    weight: float values (rows, in)
    """

    parameter: str
    rows: Tensor
    weight: Tensor
    suspects: Sequence[Suspect]

    @property
    def module(self) -> str:
        return owner_of(self.parameter)

    @property
    def memory(self) -> int:
        """Bytes of the matrices that the resampled second moments of this parameter take: H
        (inputs, inputs) and P (rows, inputs) of each resample."""
        rows, inputs = self.weight.shape
        return RESAMPLES * self.weight.element_size() * inputs * (inputs + rows)


def _rows_of(m: Materials, parameter: str, suspects: Sequence[Suspect]) -> ResampledRows:
    weight, stored = m.rounded_weight(parameter), _stored(m, parameter)
    generator = torch.Generator().manual_seed(0)
    controls = torch.randperm(len(weight), generator=generator)[:CONTROLS].tolist()
    rows = torch.tensor(sorted({*controls, *(s.row for s in suspects if s.row is not None)}))
    if isinstance(stored, QTensor) and stored.scheme.granularity == "tensor":
        rows = torch.arange(len(weight))
    return ResampledRows(parameter, rows, weight[rows], suspects)


def _stored(m: Materials, parameter: str) -> QTensor | Tensor:
    weights = m.state.weights
    return weights[parameter] if parameter in weights else m.state.replaced[parameter]


def _together(m: Materials, chosen: Sequence[ResampledRows]) -> Iterator[list[ResampledRows]]:
    """Group the suspects' parameters whose sums are computed in one pass over the calibration
    texts. The sums of a group take at most the memory of the float weights, of which a later hop
    has several copies (estimate.py)."""
    most = sum(p.numel() * p.element_size() for p in m.float_model.parameters())
    several: list[ResampledRows] = []
    for each in chosen:
        if several and sum(c.memory for c in several) + each.memory > most:
            yield several
            several = []
        several.append(each)
    if several:
        yield several


def _refused(m: Materials, chosen: ResampledRows, sums: Sequence[Sums]) -> list[str]:
    """Return a sentence for each suspect of a parameter that lies further from its re-roundings
    than correct rows do.

    sums: (H, P) of each resample
    """
    rows, weight = chosen.rows, chosen.weight
    again = _rounded_again(m, chosen, sums)
    stored = _some_rows(_stored(m, chosen.parameter), rows)
    problems = []
    for s in chosen.suspects:
        null = np.stack([s.statistic(q, weight, rows).double().numpy() for q in again])
        value = s.statistic(stored, weight, rows).double().numpy()
        at = 0 if s.row is None else rows.tolist().index(s.row)
        limit = _limit(null, at, s.looks)
        far = abs(float(value[at]) - float(null[:, at].mean()))
        if not far <= limit:
            problems.append(
                f"{s.message}; rounded again on resampled texts it is {null[:, at].mean():.3g} +- "
                f"{limit:.2g}, not {float(value[at]):.3g}"
            )
    return problems


def _limit(null: roundoff.Floats, at: int, looks: int) -> float:
    """Return the distance from its mean that the statistic of a correct row may have.

    null: statistic of the re-rounded rows (resamples, rows)
    at: index of the row
    looks: number of rows that were screened
    """
    count, rows = null.shape
    variance = null.var(0, ddof=1)
    spread = np.sqrt(max(float(variance.mean()), float(variance[at])) * (1 + 1 / count))
    factor = tolerance_factor(max(rows * (count - 1), 3), 1 - MISSED / max(looks, 1))
    return float(max(factor * spread, SMALLEST))


def read_values(q: QTensor | Tensor) -> Tensor:
    """Return the values (rows, in) float32 of a judged weight's integers or pruned floats."""
    return q if isinstance(q, Tensor) else q.dequantize()


def _some_rows(q: QTensor | Tensor, rows: Tensor) -> QTensor | Tensor:
    if isinstance(q, Tensor):
        return q[rows]
    if q.scheme.granularity == "tensor":
        return q
    zero = None if q.zero_point is None else q.zero_point[rows]
    return QTensor(q.integers[rows], q.scale[rows], zero, q.scheme)


def _rounded_again(
    m: Materials, chosen: ResampledRows, sums: Sequence[Sums]
) -> Sequence[QTensor | Tensor]:
    """Round (or prune) the suspects' rows again by the recipe's method once per resample.

    sums: (H, P) of each resample
    """
    parameter, module, weight = chosen.parameter, chosen.module, chosen.weight
    quantize = m.section.quantize
    sparsity = m.section.sparsity if parameter in m.state.sparsity else None
    if parameter in m.state.weights:
        scheme, method = m.state.scheme(parameter), quantize.block_rounding
        weights = [FloatWeight(module, weight, scheme, H, P, False, sparsity) for H, P in sums]
        return [prune_and_round(w, method, quantize)[0] for w in weights]
    assert sparsity is not None
    options, method = choose_hessian_options(quantize, sparsity), quantize.of_kind("float")[0]
    floats = [
        Prunable(module, weight, sparsity, options.damping, options.act_order, H, P)
        for H, P in sums
    ]
    return [prune_float(w, method)[0] for w in floats]


def _sums(m: Materials, several: Sequence[ResampledRows]) -> list[list[Sums]]:
    """Compute the sums of inputs (H, P) of suspects, for each parameter and each resample of the
    calibration texts, in one pass over these."""
    collecting = {chosen.module: _Accumulator(m, chosen) for chosen in several}
    aiming = [name for name, c in collecting.items() if c.against_float]
    reference = m.float_model if m.state.pruned_floats else m.folded_model
    for batch in m.calibration():
        targets = _inputs(reference, batch, aiming) if aiming else {}

        def add(name: str, x: Tensor, batch: Batch = batch, targets: _Inputs = targets) -> None:
            collecting[name].add(batch, x, targets[name].pop(0) if name in targets else None)

        trace.observe(m.simulated_model, batch, list(collecting), add)
    return [c.sums() for c in collecting.values()]


class _Accumulator:
    """Running sums H and P of GPTQ for each resample of the calibration texts; see
    compress/methods/weights/hessian.py."""

    def __init__(self, m: Materials, chosen: ResampledRows) -> None:
        self.m, self.module, self.weight = m, chosen.module, chosen.weight
        quantize, self.head = m.section.quantize, chosen.module == m.family.head
        self.options = choose_hessian_options(quantize, m.section.sparsity)
        self.against_float = uses_float_target(quantize, m.section.sparsity) and not self.head
        rows, inputs = chosen.weight.shape
        self.hessians = [torch.zeros(inputs, inputs) for _ in range(RESAMPLES)]
        self.gradients = [torch.zeros(inputs, rows) for _ in range(RESAMPLES)]
        self.generator = torch.Generator().manual_seed(
            1
        )  # of its own, so that counts do not depend on other rows

    def add(self, batch: Batch, rows: Tensor, target: Tensor | None) -> None:
        """Add one use of the module in a batch.

        rows: its inputs (tokens, in) in the compressed model
        target: its inputs (tokens, in) in the float model; None where the method does not read them
        """
        factor, real = self.m.state.factor_of(self.module), _positions(batch, len(rows))
        scaled = rows if factor is None else rows * factor
        quantized = quantize_input(self.m.state, self.module, scaled)
        share = torch.ones(len(rows), 1)
        if not self.head:
            share = weigh_tokens(quantized, self.options.token_limit)
            first = weigh_first_tokens(real, self.options.first_token)
            share = share * first if len(first) == len(rows) else share
        quantized = quantized * share
        missed = None
        if target is not None:
            full = target if factor is None else target * factor
            missed = (full * share - quantized) @ self.weight.T
        self._count(real, quantized, missed)

    def _count(self, real: Tensor, rows: Tensor, missed: Tensor | None) -> None:
        """Add a module's inputs to the sums of every resample, with each text counted a random
        number of times.

        real: (inputs, positions), False for padding
        """
        texts = torch.arange(len(real)).repeat_interleave(real.sum(1))
        of_texts = len(texts) == len(rows)
        alone = len(real) == 1 and of_texts  # one text: one product, added `times` times
        h = rows.T @ rows if alone else None
        p = rows.T @ missed if alone and missed is not None else None
        for hessian, gradient in zip(self.hessians, self.gradients, strict=True):
            times = torch.poisson(torch.ones(len(real)), generator=self.generator)
            if h is not None:
                hessian.add_(h, alpha=float(times))
                if p is not None:
                    gradient.add_(p, alpha=float(times))
                continue
            weighted = (rows * times[texts][:, None] if of_texts else rows).T
            hessian.addmm_(weighted, rows)
            if missed is not None:
                gradient.addmm_(weighted, missed)

    def sums(self) -> list[Sums]:
        pairs = zip(self.hessians, self.gradients, strict=True)
        return [(h, p if self.against_float else None) for h, p in pairs]


def _positions(batch: Batch, rows: int) -> torch.Tensor:
    """Return the real positions of a resampled batch, (inputs, positions) bool, False for padding.

    rows: number of rows that a module read; where the batch has no padding, all of them are real
    """
    real = torch.from_numpy(batch.real)
    return real if real.ndim > 1 else real[:, None].expand(len(real), rows // len(real))


def _inputs(model: torch.nn.Module, batch: Batch, modules: Collection[str]) -> _Inputs:
    """Run a batch and return the inputs of suspects' modules, {module: [(tokens, in) of each
    call]}."""
    rows: _Inputs = {name: [] for name in modules}
    last: list[Tensor] = []  # the last input and its copy: several modules read one tensor

    def keep(name: str, x: Tensor) -> None:
        if not last or last[0] is not x:
            last[:] = [x, x.clone()]
        rows[name].append(last[1])

    trace.observe(model, batch, modules, keep)
    return rows


def quantize_input(state: CompressedState, module: str, x: Tensor) -> Tensor:
    """Quantize and de-quantize, for a law, the input x of a module, which its factor has
    multiplied; return x where it stays float."""
    mode = state.activations_of(module)
    if mode in PER_TOKEN:
        return quantize_tokens(x, mode)
    return x if mode is None else fake_quantize(x, state.ranges[input_name(module)], mode)
