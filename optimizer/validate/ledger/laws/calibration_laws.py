"""Run the calibration texts through the finished model again, for the laws that read its inputs.

    laws, finished model, float model, calibration batches -> Findings

One batch in COMPARED also runs through the folded float model. range_laws.py and
bias_correction_laws.py compare what compress stored with the same statistic of the finished model's
inputs. Their limit is how far that statistic differs between float and quantized inputs. The other
batches run through the float model only where a law doubts a value. Called by hop `compress`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from optimizer.foundation.conv_geometry import ConvGeometry
from optimizer.foundation.state import CompressedState, Range
from optimizer.harness.inputs.batch import Batch
from optimizer.validate.ledger import trace

COMPARED = 4  # one calibration batch in 4 also runs through the float model
FINISHED, COMMON, FLOAT, REST = range(4)
"""Inputs of modules, by model and batches:

FINISHED   of the finished model, on all batches
COMMON     of the finished model, on the batches that both models run
FLOAT      of the float model, on the same batches
REST       of the float model, on the other batches, of doubtful modules only
"""


class CalibrationLaw(Protocol):
    """A law that reads the inputs of modules while the calibration texts run."""

    @property
    def modules(self) -> Sequence[str]:
        """Modules whose inputs the law reads."""

    def see(self, kinds: Sequence[int], module: str, rows: Tensor) -> None:
        """Collect inputs of one module.

        kinds: kinds of inputs that these count for: FINISHED, COMMON, FLOAT or REST
        rows: (tokens, width), real tokens only; of a convolution images
        """

    def findings(self) -> Findings:
        """Return the problems of the compressed state that the calibration inputs show, the worst
        first, and reasons for judging less. Called after the last input, and again after the last
        input of kind REST (rows beyond the sample)."""

    def doubtful(self) -> Sequence[str]:
        """List the modules whose findings inputs of kind REST may change. Called after
        `findings`."""


@dataclass(frozen=True)
class Findings:
    """Problems that the laws report, and what they could not judge."""

    problems: Sequence[str] = ()  # sentences, one per broken law
    unjudged: Sequence[str] = ()  # sentences on values for which no limit can be measured


def judge(
    laws: Sequence[CalibrationLaw],
    finished: nn.Module,
    floats: nn.Module,
    batches: Callable[[], Iterable[Batch]],
) -> Findings:
    """Run the calibration batches through both models, give the inputs to all laws and return the
    laws' findings together.

    finished: the compressed state in torch
    floats: the folded float model
    batches: function that reads the calibration batches, called twice where a law has doubts
    """
    laws = [law for law in laws if law.modules]
    if not laws:
        return Findings()

    every = [law.modules for law in laws]

    def observe(
        model: nn.Module, batch: Batch, *kinds: int, of: Sequence[Sequence[str]] = every
    ) -> None:
        modules = dict.fromkeys(module for names in of for module in names)

        def see(module: str, rows: Tensor) -> None:
            for law, names in zip(laws, of, strict=True):
                if module in names:
                    law.see(kinds, module, rows)

        trace.observe(model, batch, modules, see)

    for i, batch in enumerate(batches()):
        if i % COMPARED:
            observe(finished, batch, FINISHED)
        else:
            observe(finished, batch, FINISHED, COMMON)
            observe(floats, batch, FLOAT)
    verdicts = [law.findings() for law in laws]
    doubtful = [law.doubtful() for law in laws]
    if any(doubtful):
        for i, batch in enumerate(batches()):
            if i % COMPARED:
                observe(floats, batch, REST, of=doubtful)
        verdicts = [law.findings() for law in laws]
    return Findings(
        [problem for v in verdicts for problem in v.problems],
        [reason for v in verdicts for reason in v.unjudged],
    )


class SharedInputs:
    """Group the modules that read the same tensor with the same range, factor and filters, so that
    a law stores its values once: the first module of a group collects them for all.

    first: {module: module that collects for it}
    filters: geometry of the modules that are convolutions; None: it does not matter
    """

    def __init__(
        self,
        state: CompressedState,
        modules: Sequence[str],
        filters: Mapping[str, ConvGeometry | None] = MappingProxyType({}),
    ) -> None:
        self.filters = {m: filters.get(m) for m in modules}
        self.ranges = {m: state.range_of(m) for m in modules}
        self.factors = {m: state.factor_of(m) for m in modules}
        self.first: dict[str, str] = {}
        self._rows: Tensor | None = None
        self._firsts: list[str] = []

    def collects(self, module: str, rows: Tensor) -> bool:
        """Return True where `module` must store `rows`, False where an earlier module stores them
        for both.

        rows: input of the module; modules that read it in turn pass the same object (trace.observe)
        """
        if rows is not self._rows:
            self._rows, self._firsts = rows, []
        for first in self._firsts:
            alike = self.ranges[first] == self.ranges[module]
            alike &= self.filters[first] == self.filters[module]
            if alike and _equal(self.factors[first], self.factors[module]):
                self.first[module] = first
                return False
        self._firsts.append(module)
        self.first[module] = module
        return True


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def compute_integer_ends(covered: Range) -> tuple[int, int]:
    """Compute the least and the largest integer of a judged activation range, minus its zero
    point."""
    return -covered.zero_point, 255 - covered.zero_point
