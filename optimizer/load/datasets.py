"""From a data spec to samples: exactly the same rows on every machine.

Everything is read through the `datasets` library. Its cache is a folder of this process that
goes away with it (for files) or the user's Hugging Face cache (for hub ids).
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from optimizer.errors import DataError, MachineError, closest
from optimizer.harness.contract import Contract
from optimizer.harness.tasks import Batch, encode
from optimizer.progress import say
from optimizer.recipe import DataSpec

FILE_FORMATS = ("csv", "json", "parquet", "text")
FIELDS = ("text", "text_pair", "label", "score", "tags")


@dataclass(frozen=True)
class Sample:
    """One row. label: id of the class; score: a number for regression or similarity; words and
    tags: for token-classification, one tag id per word (text is then the words joined)."""

    text: str
    text_pair: str | None = None
    label: int | None = None
    score: float | None = None
    words: tuple[str, ...] | None = None
    tags: tuple[int, ...] | None = None


def samples(spec: DataSpec, limit: int | None = None, seed: int | None = None) -> list[Sample]:
    """The rows of a spec, null rows dropped, in the data set's order.

    spec.samples rows are drawn with spec.seed; of those, `limit` with `seed` (spec.seed when
    None). Drawing is by hash of the row's position, so a smaller draw is part of a larger one,
    and no library's random generator can change it.
    Raises DataError: no such file, no such column, no rows, labels that are not ids or names.
    """
    rows = list(_load(spec.model_dump_json(), spec.base, _fingerprint(spec)))
    rows = _draw(rows, spec.samples, spec.seed, _where(spec))
    return _draw(rows, limit, spec.seed if seed is None else seed, _where(spec))


def _draw(rows: list[Sample], count: int | None, seed: int, where: str) -> list[Sample]:
    if count is None or count == len(rows):
        return rows
    if count > len(rows):
        say(f"{where}: {count} samples were asked for, it has {len(rows)}: all are used")
        return rows

    def rank(i: int) -> bytes:
        return hashlib.sha256(f"{seed}:{i}".encode()).digest()

    return [rows[i] for i in sorted(sorted(range(len(rows)), key=rank)[:count])]


def digest(spec: DataSpec) -> str:
    """sha256 of the rows that `samples(spec)` gives, as canonical JSON lines."""
    h = hashlib.sha256()
    for sample in samples(spec):
        line = json.dumps(asdict(sample), sort_keys=True, ensure_ascii=False)
        h.update(line.encode() + b"\n")
    return h.hexdigest()


def check_disjoint(sets: Mapping[str, Sequence[Sample]]) -> None:
    """Raise DataError when a text is in two sets: measured on what it was tuned on, a model looks
    better than it is. Texts are equal when they are after NFKC, case folding and white space."""
    seen: dict[tuple[str, str], str] = {}
    for name, rows in sets.items():
        for sample in rows:
            key = (_normal(sample.text), _normal(sample.text_pair or ""))
            other = seen.setdefault(key, name)
            if other != name:
                raise DataError(
                    f"{sample.text[:80]!r} is also in the {other} data",
                    where=f"{name} data",
                    accepted="sets without a text in common",
                    fix="Take different rows: another split, file or seed.",
                )


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def batches(
    rows: Sequence[Sample], contract: Contract, tokenizer: Any, batch_size: int, length: int
) -> Iterator[Batch]:
    """Token arrays (batch, sequence) int64 of `rows` in order, as the harness makes them.

    A batch is padded to its own longest text, and cut to `length` tokens (never more than the
    contract's max_length) when that is longer.
    """
    length = min(length, contract.tokenizer.max_length)
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        texts = [s.text for s in part]
        pairs = [s.text_pair for s in part]
        tokens = encode(contract, tokenizer, texts, pairs)
        if tokens["input_ids"].shape[1] > length:
            tokens = encode(contract, tokenizer, texts, pairs, length)
        yield tokens


def _where(spec: DataSpec) -> str:
    return f"data {spec.source}{': ' + ', '.join(spec.files) if spec.files else ''}"


def _files(spec: DataSpec) -> list[Path]:
    """The spec's files, globs expanded, relative to the spec's folder."""
    base = Path(spec.base or ".")
    found: list[Path] = []
    for pattern in spec.files:
        path = Path(pattern)
        here = (
            sorted(path.parent.glob(path.name))
            if path.is_absolute()
            else sorted(base.glob(pattern))
        )
        if not here:
            near = closest(path.name, [p.name for p in (base / path).parent.glob("*")])
            raise DataError(
                f"no file {pattern!r} in {base}{near}",
                where=_where(spec),
                fix="Give names or globs relative to the spec's folder.",
            )
        found += here
    return found


def _fingerprint(spec: DataSpec) -> str:
    """Changes when a local file does, so that the memory of rows read is never stale."""
    folder = Path(spec.base or ".") / spec.source
    paths = _files(spec)
    if not paths and spec.source not in FILE_FORMATS and folder.is_dir():
        paths = sorted(p for p in folder.rglob("*") if p.is_file())
    return json.dumps([[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in paths])


@lru_cache(maxsize=16)
def _load(spec_json: str, base: str, _fingerprint: str) -> tuple[Sample, ...]:
    """Every usable row of the spec. Remembered, because a key and a run both read it."""
    spec = DataSpec.model_validate_json(spec_json).model_copy(update={"base": base})
    table = _table(spec)
    columns = _columns(spec, table)
    names = _label_names(spec, table, columns)
    made: list[Sample] = []
    dropped = 0
    for row in table:
        values = {field: row[column] for field, column in columns.items()}
        if not _usable(values):
            dropped += 1
            continue
        made.append(_sample(values, names, spec, len(made) + dropped))
    if dropped:
        say(f"{_where(spec)}: {dropped} of {len(table)} rows dropped: a column is null or empty")
    if not made:
        raise DataError(
            f"no usable row (read {len(table)})",
            where=_where(spec),
            fix="Check split and columns; a row needs a non-empty text.",
        )
    return tuple(made)


def _columns(spec: DataSpec, table: Any) -> dict[str, str]:
    unknown = [f for f in spec.columns if f not in FIELDS]
    if unknown:
        raise DataError(
            f"{unknown[0]!r} is no field of ours{closest(unknown[0], list(FIELDS))}",
            where=f"{_where(spec)}: columns",
            accepted=", ".join(FIELDS),
        )
    if "text" not in spec.columns:
        raise DataError(
            "no column is given for text",
            where=f"{_where(spec)}: columns",
            accepted=f"text: one of {', '.join(table.column_names)}",
        )
    for field, column in spec.columns.items():
        if column not in table.column_names:
            raise DataError(
                f"no column {column!r} (for {field}){closest(column, table.column_names)}",
                where=f"{_where(spec)}: columns.{field}",
                accepted=", ".join(table.column_names),
            )
    return dict(spec.columns)


def _label_names(spec: DataSpec, table: Any, columns: Mapping[str, str]) -> tuple[str, ...]:
    """Label names in id order: the spec's, or those the data set declares."""
    if spec.labels:
        return spec.labels
    for field in ("label", "tags"):
        feature = table.features.get(columns.get(field, ""))
        feature = getattr(feature, "feature", feature)
        if getattr(feature, "names", None):
            return tuple(feature.names)
    return ()


def _sample(
    values: Mapping[str, Any], names: tuple[str, ...], spec: DataSpec, index: int
) -> Sample:
    """One row. index: its position in the data set, for messages."""
    row = f"{_where(spec)}: row {index}"
    text, pair, tags = values["text"], values.get("text_pair"), values.get("tags")
    words = tuple(map(str, text)) if isinstance(text, list) else None
    if (tags is None) != (words is None) or len(tags or ()) != len(words or ()):
        raise DataError(
            "tags and words do not go together one by one",
            where=f"{row}: tags",
            fix="tags needs a text column that is a list of as many words.",
        )
    return Sample(
        text=str(text) if words is None else " ".join(words),
        text_pair=None if pair is None else str(pair),
        label=_label(values["label"], names, f"{row}: label") if "label" in values else None,
        score=_score(values["score"], f"{row}: score") if "score" in values else None,
        words=words,
        tags=None if tags is None else tuple(_label(t, names, f"{row}: tags") for t in tags),
    )


def _label(value: Any, names: tuple[str, ...], where: str) -> int:
    """The id of a label given as an id or as one of `names`."""
    if isinstance(value, str):
        if value in names:
            return names.index(value)
        raise DataError(
            f"{value!r} is not among the labels{closest(value, list(names))}",
            where=where,
            accepted=", ".join(names) or "ids; names need `labels:` in id order",
            fix="Give the label names in id order, e.g. labels: [negative, positive].",
        )
    if int(value) != value or int(value) < 0 or (names and int(value) >= len(names)):
        raise DataError(
            f"{value!r} is not a label id",
            where=where,
            accepted=f"0..{len(names) - 1}" if names else "whole numbers from 0",
        )
    return int(value)


def _score(value: Any, where: str) -> float:
    try:
        score = float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise DataError(
            f"{value!r} is no finite number",
            where=where,
            accepted="a number",
            fix="Names of classes belong in label.",
        )
    return score


def _usable(values: Mapping[str, Any]) -> bool:
    """No null, and a text that says something (a list of words: at least one)."""
    text = values["text"]
    empty = not text.strip() if isinstance(text, str) else text == []
    return not empty and all(v is not None for v in values.values())


def _table(spec: DataSpec) -> Any:
    """The `datasets` table of the spec's split."""
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    folder = Path(spec.base or ".") / spec.source
    where = _where(spec)
    try:
        with _quiet(), tempfile.TemporaryDirectory(prefix="optimize-data-") as cache:
            if spec.source in FILE_FORMATS:
                if not spec.files:
                    raise DataError("files is missing", where=where, fix="Give files: [...].")
                files = [str(f) for f in _files(spec)]
                return datasets.load_dataset(
                    spec.source,
                    data_files={spec.split: files},
                    split=spec.split,
                    cache_dir=cache,
                    keep_in_memory=True,
                )
            if folder.is_dir():
                return datasets.load_dataset(
                    str(folder), split=spec.split, cache_dir=cache, keep_in_memory=True
                )
            return datasets.load_dataset(
                spec.source, spec.name, split=spec.split, revision=spec.revision
            )
    except (ConnectionError, DatasetNotFoundError) as e:
        raise MachineError(
            f"the data set could not be fetched ({str(e).splitlines()[0][:200]})",
            where=where,
            accepted=f"a hub id, a folder, or one of {', '.join(FILE_FORMATS)} with files",
            fix="Check the name and the network; with HF_HUB_OFFLINE set it must be in the cache.",
        ) from e
    except (DataError, OSError, MemoryError):
        raise
    except Exception as e:  # the library raises many kinds for one thing: data it cannot read
        cause = str(e.__cause__ or e).splitlines() or [type(e).__name__]
        raise DataError(f"it cannot be read ({cause[0][:200]})", where=where) from e


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of `datasets` while inside; whatever was set before comes back."""
    import datasets

    was_on = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if was_on:
            datasets.enable_progress_bars()
