"""Read requests from a server's log, a trace, or the histograms of /metrics.

log       lines of `optimize serve`: {"event": "request", "time", "ms", "status", "lengths", ...};
          other events, and lines that are not JSON, are counted and left out
trace     JSON lines {"lengths": [12, 40]} or {"length": 12, "batch": 2}, perhaps with "time"
          (seconds, or ISO 8601), "ms" and "new_tokens"
metrics   Prometheus' text with optimize_row_tokens and optimize_batch_rows; a row counts with the
          upper bound of its bucket, and instants are unknown
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from optimizer.foundation.errors import DataError
from optimizer.harness.bounds import BATCH, SEQUENCE
from optimizer.traffic.exposition import Exposition

ANSWERED = (200, "OK")
REFUSED = (429, 503, "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNAVAILABLE")
LENGTHS, BATCHES = "optimize_row_tokens", "optimize_batch_rows"


@dataclass(frozen=True)
class Traffic:
    """Distributions of the requests in a server's log.

    lengths: {tokens of a row: number of rows}
    batches: {rows of a run of the model: number of runs}, fractions where known of rows alone
    instants: ascending arrival times in seconds; () where unknown
    milliseconds: times of answered requests
    new_tokens: generated tokens per text
    model: name in the log; "" where it names none
    left_out: {what: number of lines} that were not read
    """

    lengths: Mapping[int, float]
    batches: Mapping[int, float]
    instants: tuple[float, ...] = ()
    milliseconds: tuple[float, ...] = ()
    new_tokens: tuple[float, ...] = ()
    model: str = ""
    left_out: Mapping[str, int] = field(default_factory=dict)


def read(text: str, where: str, model: str = "") -> Traffic:
    """Read the requests in a server's log. Raises DataError where no length is found, a value is
    not accepted, or the text has several models and `model` names none of them.

    where: name of the file, for messages
    """
    if text.startswith(("# HELP ", "# TYPE ")):
        return _read_metrics(Exposition.parse(text, where), model)
    left_out: Counter[str] = Counter()
    entries = [e for e in _entries(text, where, left_out) if _concerns_a_model(e)]
    names = sorted({str(e["model"]) for e in entries if e.get("model")})
    if model and model not in names:
        raise _report_no_model(names, where, f"no request is to model {model}")
    if len(names) > 1 and not model:
        raise _report_no_model(names, where, "requests are to several models")
    entries = [e for e in entries if not model or e.get("model") == model]
    traffic = _read_entries(entries, where, left_out)
    return Traffic(**{**vars(traffic), "model": model or "".join(names)})


def _report_no_model(names: Sequence[str], where: str, problem: str) -> DataError:
    return DataError(
        problem, where=where, accepted=", ".join(names) or "none", fix="Name one with --model."
    )


def _entries(text: str, where: str, left_out: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a server's log that describe a request, each with its "line"."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            left_out["lines that are not JSON"] += 1
            continue
        if not isinstance(entry, dict):
            raise DataError("the line is not an object", where=f"{where}:{number}")
        if entry.get("event", "request") != "request":
            left_out["lines of other events"] += 1
            continue
        yield {**entry, "line": number}


def _concerns_a_model(entry: Mapping[str, Any]) -> bool:
    """Return True for a request in a server's log that a model answered, or that was refused under
    overload."""
    status = entry.get("status", 200)
    return status in REFUSED or (status in ANSWERED and bool({"length", "lengths"} & set(entry)))


def _read_entries(entries: Iterable[dict[str, Any]], where: str, left_out: Counter[str]) -> Traffic:
    """Count lengths, batches and times of the requests of a log or trace.

    left_out: {reason: number of entries}, extended in place

    Raises DataError if no request has lengths.
    """
    lengths: Counter[int] = Counter()
    batches: Counter[int] = Counter()
    instants, milliseconds, new = list[float](), list[float](), list[float]()
    for entry in entries:
        at = f"{where}:{entry['line']}"
        ms = _number(entry, "ms", at)
        if "time" in entry:
            # a log has the time at which a request ended
            ended = "event" in entry and ms is not None
            instants.append(_seconds(entry["time"], at) - (ms / 1000 if ended and ms else 0))
        if entry.get("status", 200) in REFUSED:
            left_out["refused requests, which count for the rate alone"] += 1
            continue
        if ms is not None:
            milliseconds.append(ms)
        if entry.get("cache", "miss") != "miss":
            left_out["requests answered by a cache, which count for the rate alone"] += 1
            continue
        rows = _lengths(entry, at)
        lengths.update(rows)
        batch = entry.get("batch", len(rows)) if "lengths" in entry else len(rows)
        batches[_whole(batch, BATCH, "batch", at)] += len(rows) / batch  # type: ignore[assignment]
        if "new_tokens" in entry:
            new.append(_number(entry, "new_tokens", at) or 0.0)
        elif "batch" not in entry and "tokens" in entry:  # in a log of generated texts
            new.append((entry["tokens"] - sum(rows)) / len(rows))
    if not lengths:
        raise DataError(
            "no request with lengths was found",
            where=where,
            accepted='the log of `optimize serve` (its standard error); JSON lines {"lengths": '
            '[12, 40], "time": 1.5}; or the text of /metrics',
        )
    return Traffic(
        lengths, batches, tuple(sorted(instants)), tuple(milliseconds), tuple(new), "", left_out
    )


def _lengths(entry: Mapping[str, Any], at: str) -> list[int]:
    if "lengths" in entry:
        listed = entry["lengths"]
        if not isinstance(listed, list) or not listed:
            raise DataError(f"lengths: {listed!r:.60}", where=at, accepted="a list of numbers")
    else:
        listed = [entry["length"]] * _whole(entry.get("batch", 1), BATCH, "batch", at)
    return [_whole(length, SEQUENCE, "length", at) for length in listed]


def _whole(value: Any, most: int, name: str, at: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise DataError(
            f"{name}: {value!r:.60}", where=at, accepted=f"a whole number from 1 to {most:,}"
        )
    return value


def _number(entry: Mapping[str, Any], name: str, at: str) -> float | None:
    value = entry.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise DataError(f"{name}: {value!r:.60}", where=at, accepted="a number, 0 or more")
    return float(value)


def _seconds(value: Any, at: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    try:
        return datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError):
        raise DataError(
            f"time: {value!r:.60}", where=at, accepted="seconds, or a time of ISO 8601"
        ) from None


def _read_metrics(metrics: Exposition, model: str) -> Traffic:
    named = metrics.of_model(LENGTHS, model)
    lengths = metrics.counts(LENGTHS, named)
    if not lengths:
        raise DataError(
            f"{LENGTHS} has counted no row",
            where=metrics.where,
            accepted="a server of texts that has answered requests",
        )
    batches = metrics.counts(BATCHES, named)
    return Traffic(_whole_bounds(lengths), _whole_bounds(batches), model=named["model"])


def _whole_bounds(counts: Mapping[float, int]) -> dict[int, float]:
    return {int(bound): float(number) for bound, number in counts.items()}
