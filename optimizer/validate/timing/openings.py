"""Sessions that are timed and opened again between rounds.

A session is faster or slower for as long as it is open, by the place of its weights and buffers in
memory, so two systems are compared in several openings of both (timing/stopping_rules.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from optimizer.harness.contract import Contract
from optimizer.harness.inputs.batch import Array
from optimizer.harness.runtimes.decoder import Decoder

BETWEEN = 16 << 20  # bytes, at most


class Openings:
    """The runners of several timed systems, which are closed and opened again between rounds.

    openers: {system: function that opens its runner}
    """

    def __init__(self, openers: Mapping[str, Callable[[], Any]]) -> None:
        self._openers, self._runners = openers, dict[str, Any]()
        self._random, self._between, self._count = random.Random(), list[bytearray](), 0

    def open(self) -> None:
        """Close all runners of timed systems, if open, and open them again. The first to be opened
        changes from call to call, and memory of random size is allocated between runners; else an
        allocator would give each its former place."""
        self.close()
        names, first = list(self._openers), self._count % max(len(self._openers), 1)
        self._count += 1
        for name in names[first:] + names[:first]:
            self._between.append(bytearray(self._random.randrange(BETWEEN)))
            self._runners[name] = self._openers[name]()

    def close(self) -> None:
        """Close all runners of timed systems, in random order."""
        for name in self._random.sample(list(self._runners), len(self._runners)):
            self._runners.pop(name).close()
        self._between.clear()

    def opened(self, name: str) -> Any:
        """Return the runner of the timed system `name` that is open now; systems are reopened
        between rounds."""
        return self._runners[name]

    def runner(self, name: str) -> OpenRunner:
        """Return a runner of system `name` that uses, at each call, the runner of the present
        opening."""
        return OpenRunner(self._runners, name)


@dataclass(frozen=True)
class OpenRunner:
    """A timed system's runner that uses, at each call, the one in `runners` that is open for
    `name`."""

    runners: Mapping[str, Any]
    name: str

    def infer(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        outputs: dict[str, Array] = self.runners[self.name].infer(arrays)
        return outputs

    def decoder(self, contract: Contract, capacity: int = 0) -> Decoder:
        decoder: Decoder = self.runners[self.name].decoder(contract, capacity)
        return decoder
