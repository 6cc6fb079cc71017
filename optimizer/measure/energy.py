"""Read the energy of the processors' packages: RAPL counters of Linux, Intel's and AMD's.

A counter is of a whole package, whatever programs it runs, and idle power is part of it. The kernel
lets only root read it, unless an administrator allows others.
https://www.kernel.org/doc/html/latest/power/powercap/powercap.html
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/class/powercap")


@dataclass(frozen=True)
class Package:
    """Counter of one package. range: microjoules at which it begins again at 0."""

    file: Path
    range: int

    def microjoules(self) -> int:
        return int(self.file.read_text())


class Meter:
    """Energy of all packages since `start`. missing: why there is none, "" where there is."""

    def __init__(self, root: Path = ROOT) -> None:
        self._packages: list[Package] = []
        self.missing = f"no {root}/*/energy_uj of a processor's package can be read"
        try:
            for zone in sorted(root.glob("*:*")):
                if (zone / "name").read_text().strip().startswith("package"):
                    most = int((zone / "max_energy_range_uj").read_text())
                    self._packages.append(Package(zone / "energy_uj", most))
            self.start()
        except (OSError, ValueError) as e:
            self._packages, self.missing = [], f"{self.missing} ({e})"
        if self._packages:
            self.missing = ""

    def start(self) -> None:
        self._before = [package.microjoules() for package in self._packages]

    def joules(self) -> float | None:
        """Energy since `start`; None where it cannot be read. A counter that began again once is
        corrected."""
        if not self._packages:
            return None
        after = [package.microjoules() for package in self._packages]
        spent = (
            b - a if b >= a else b - a + package.range
            for a, b, package in zip(self._before, after, self._packages, strict=True)
        )
        return sum(spent) / 1e6
