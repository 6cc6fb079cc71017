"""Divide the calibration batches into partial sums, and deal these out to processes.

The recipe (compress.partial_sums) says how many there are; each holds consecutive batches. A
statistic is measured once per partial sum, and these are merged in their order, one after the
other. So its bits depend on their number, and neither on the number of processes nor on which of
them measured what. Every process gets the same sums and compresses the same blocks by them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, Self, TypeVar

from optimizer.foundation.process.launch import ALONE, Processes

ALL = range(sys.maxsize)
"""Every batch of a process."""


class Statistic(Protocol):
    """Running sums over calibration batches, which several processes compute in parts. Its
    attributes, set when it is made, are tensors of fixed shapes or numbers."""

    def merge(self, later: Self) -> None:
        """Add the same sums over later batches, which another process may have computed."""


S = TypeVar("S", bound=Statistic)


@dataclass(frozen=True)
class Deal:
    """Division of the calibration batches of a walk, as one process sees it.

    sizes: number of batches of each partial sum, in order; (): one of all
    """

    sizes: tuple[int, ...] = ()
    processes: Processes = ALONE

    @classmethod
    def of(cls, batches: int, partial_sums: int, processes: Processes = ALONE) -> Deal:
        """Divide the walk's `batches`, their number, into up to `partial_sums` parts of about equal
        size."""
        count = max(1, min(partial_sums, batches))
        ends = [(i + 1) * batches // count for i in range(count)]
        return cls(tuple(b - a for a, b in zip([0, *ends], ends, strict=False)), processes)

    @property
    def owners(self) -> list[int]:
        """Ranks of the processes that compute each partial sum of the walk."""
        count = max(1, len(self.sizes))
        return [i * self.processes.count // count for i in range(count)]

    @property
    def own(self) -> range:
        """Numbers of the calibration batches that this process computes, among all."""
        parts = self._of_all()
        return range(parts[0].start, parts[-1].stop)

    @property
    def parts(self) -> list[range]:
        """Partial sums of this process, as ranges of its own calibration batches."""
        first = self.own.start
        return [range(part.start - first, part.stop - first) for part in self._of_all()]

    @property
    def first_part(self) -> range:
        """This process's calibration batches in the first of all partial sums."""
        return self.parts[0] if self.processes.first else range(0)

    def sum(
        self,
        start: Callable[[], Mapping[str, S]],
        measure: Callable[[Mapping[str, S], range], None],
    ) -> Mapping[str, S]:
        """Measure statistics over all calibration batches: {name: statistic}, the same in every
        process.

        start: function that returns empty ones
        measure: function that adds some of this process's batches to them
        """

        def measured(part: range) -> Mapping[str, S]:
            statistics = start()
            measure(statistics, part)
            return statistics

        own: Iterator[Mapping[str, S]] = map(measured, self.parts)
        if self.processes.count > 1:  # all are measured before the first is sent
            own = iter(deque(own).popleft, None)
        total: Mapping[str, S] = {}
        for owner in self.owners:
            later = next(own) if owner == self.processes.rank else start()
            for name in later:
                self.processes.copy(later[name], owner)
                if total:
                    total[name].merge(later[name])
            total = total or later
            del later  # before the next one takes memory
        return total

    def _of_all(self) -> list[range]:
        """Partial sums of this process, as ranges of the batches of all processes."""
        if not self.sizes:
            return [ALL]
        ends, rank = [*accumulate(self.sizes)], self.processes.rank
        owned = zip(self.owners, self.sizes, ends, strict=True)
        return [range(end - size, end) for owner, size, end in owned if owner == rank]
