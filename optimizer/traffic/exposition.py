"""Read the text of /metrics: counts of a histogram's buckets, and counters by label."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from optimizer.foundation.errors import DataError

LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
ESCAPED = re.compile(r"\\(.)")
Labels = dict[str, str]


@dataclass(frozen=True)
class Exposition:
    """Samples of one /metrics page, on the requests that a server answered.

    samples: (metric, {label: value}, number) per sample
    where: file or address, for messages
    """

    samples: tuple[tuple[str, Labels, float], ...]
    where: str

    @classmethod
    def parse(cls, text: str, where: str) -> Exposition:
        """Parse the text of /metrics.

        Raises DataError for a line that is not in Prometheus' text format, or repeats a series.
        """
        samples, seen = list[tuple[str, Labels, float]](), set[tuple[str, frozenset[Any]]]()
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            match = LINE.fullmatch(line.strip())
            try:
                assert match is not None
                value = float(match[3])
            except (AssertionError, ValueError):
                raise DataError(
                    f"{line[:60]!r}",
                    where=f"{where}:{number}",
                    accepted="the text of /metrics of `optimize serve`",
                ) from None
            labels = {k: _unescaped(v) for k, v in LABEL.findall(match[2] or "")}
            series = match[1], frozenset(labels.items())
            if series in seen:
                raise DataError(
                    f"{line[:60]!r} names a series that an earlier line has",
                    where=f"{where}:{number}",
                    accepted="the text of one request to /metrics",
                )
            seen.add(series)
            samples.append((match[1], labels, value))
        return cls(tuple(samples), where)

    def of_model(self, name: str, model: str = "", version: str = "") -> Labels:
        """Return {"model", "version"} of the one model that has histogram `name`.

        model, version: choose among several models; "": any

        Raises DataError if no model fits, or more than one does.
        """
        bucket = f"{name}_bucket"
        there = [
            {"model": labels["model"], "version": labels["version"]}
            for sample, labels, _ in self.samples
            if sample == bucket and "model" in labels and "version" in labels
        ]
        there = [labels for i, labels in enumerate(there) if labels not in there[:i]]
        named = {k: v for k, v in (("model", model), ("version", version)) if v}
        fitting = [labels for labels in there if named.items() <= labels.items()]
        if len(fitting) == 1:
            return fitting[0]
        listed = ", ".join(f"{one['model']} {one['version']}" for one in there)
        raise DataError(
            f"{len(fitting)} models have {name}" if fitting else f"{name} of this model is missing",
            where=self.where,
            accepted=listed or f"/metrics of an `optimize serve` that counts {name}",
            fix="Name one with --model." if fitting else "",
        )

    def counts(self, name: str, labels: Labels) -> dict[float, int]:
        """Return {upper bound: observations in the bucket} of a histogram in a server's metrics,
        without empty buckets.

        Raises DataError for cumulative counts that fall, and for values above the last finite
        bound.
        """
        below = self.count_by_label(f"{name}_bucket", "le", labels)
        before, counts = 0, dict[float, int]()
        for bound, value in sorted((float(bound), value) for bound, value in below.items()):
            if value < before:
                raise DataError(
                    f"{name} has {value} observations up to {bound:g}, and {before} up to a "
                    "smaller bound",
                    where=self.where,
                    accepted="the text of /metrics of `optimize serve`, unchanged",
                )
            if value > before:
                counts[bound] = value - before
            before = value
        if math.inf in counts:
            raise DataError(f"{name} has values above its last bound", where=self.where)
        return counts

    def bounds(self, name: str, labels: Labels) -> set[float]:
        """Return the upper bounds of all buckets of a histogram in a server's metrics."""
        return {
            float(own["le"])
            for sample, own, _ in self.samples
            if sample == f"{name}_bucket" and labels.items() <= own.items() and "le" in own
        }

    def count_by_label(self, name: str, label: str, labels: Labels) -> dict[str, int]:
        """Return {value of `label`: count} of a counter in a server's metrics, summed over all
        series with `labels`, such as those of several servers.

        Raises DataError for a sample that is negative, infinite or NaN.
        """
        sums: Counter[str] = Counter()
        for sample, own, value in self.samples:
            if sample == name and label in own and labels.items() <= own.items():
                if not 0 <= value < math.inf:
                    raise DataError(
                        f"{name} of {label} {own[label]} is {value}",
                        where=self.where,
                        accepted="a number, 0 or more",
                    )
                sums[own[label]] += round(value)
        return dict(sums)


def _unescaped(text: str) -> str:
    return ESCAPED.sub(lambda match: "\n" if match[1] == "n" else match[1], text)
