"""Where the rows of a data spec lie, and reading them through the `datasets` library.

Its cache is a folder of this process that goes away with it (for files) or the user's Hugging Face
cache (for hub ids).
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from optimizer.errors import DataError, MachineError, closest
from optimizer.harness.temporary import temporary_folder
from optimizer.progress import say
from optimizer.reading import check_regular, reading
from optimizer.recipe.schema import DataSpec

FILES = 10_000  # in a folder that is a data set
COLUMNS = 1_000  # of a table; four are read at most
HEADER = 1_000_000  # bytes of a csv file's first line
LINE = 64_000_000  # bytes of a csv file's other lines
DEPTH = 100  # of JSON; a row here has 2
CHUNK = 1_000_000  # bytes of JSON that are looked at together
UNFOLDED = 100_000_000  # bytes of a compressed file, unfolded,
TIMES = 1_000  # or so many times its size; text unfolds to 3 to 20 times
FOLDED: dict[bytes, Any] = {b"\x1f\x8b": gzip, b"BZh": bz2, b"\xfd7zXZ\0": lzma}
"""By the first bytes, as `datasets` tells them: the module that opens such a file."""
# A name and its colon (1: the name); another string whole, so that brackets in it do not count, or
# up to the chunk's end (2: what closes it); an opening bracket (3); a closing one (4). Each byte is
# read once: no part gives back what it took, and a string without an end is one match, too.
TOKENS = re.compile(
    rb'("(?:[^"\\]++|\\.)*+")\s*+:|"(?:[^"\\]++|\\.)*+("?)|([\[{])|([\]}])', re.DOTALL
)
STRING_END = re.compile(rb'(?:[^"\\]++|\\.)*+("?)', re.DOTALL)
QUOTED_END = re.compile(rb'(?:[^"]++|"")*+("?)')
FILE_FORMATS = ("csv", "json", "parquet", "text")


def where_of(spec: DataSpec) -> str:
    return f"data {spec.source}{': ' + ', '.join(spec.files) if spec.files else ''}"


def is_local(spec: DataSpec) -> bool:
    """Whether the data are files of this machine, by the spec alone."""
    return spec.source in FILE_FORMATS or _folder(spec).is_dir()


def _folder(spec: DataSpec) -> Path:
    """Where a source that is a folder would be. Raises DataError for what can be no path."""
    folder = Path(spec.base or ".") / spec.source
    with reading(where_of(spec), error=DataError):
        folder.is_dir()
    return folder


def local_files(spec: DataSpec) -> list[Path]:
    """The spec's files, globs expanded, relative to the spec's folder; each once."""
    with reading(where_of(spec), error=DataError):
        return _local_files(spec)


def _local_files(spec: DataSpec) -> list[Path]:
    base = Path(spec.base or ".")
    paths: list[Path] = []
    for pattern in spec.files:
        path = Path(pattern)
        here = (
            sorted(path.parent.glob(path.name))
            if path.is_absolute()
            else sorted(base.glob(pattern))
        )
        if not here:
            suggestion = closest(path.name, [p.name for p in (base / path).parent.glob("*")])
            raise DataError(
                f"no file {pattern!r} in {base}{suggestion}",
                where=where_of(spec),
                fix=f"Get it first: {spec.obtain}"
                if spec.obtain
                else "Give names or globs relative to the spec's folder.",
            )
        paths += here
    once: dict[Path, Path] = {}
    for path in paths:
        check_regular(path, error=DataError)
        once.setdefault(path.resolve(), path)
    return list(once.values())


def folder_files(spec: DataSpec) -> list[Path]:
    """Every file below the folder of a source that is one. Raises DataError where there are more
    than FILES: it is then hardly the folder of a data set."""
    if spec.source in FILE_FORMATS:
        return []
    paths: list[Path] = []
    with reading(where_of(spec), error=DataError):
        for path in _folder(spec).rglob("*"):
            paths += [path] if path.is_file() else []
            if len(paths) > FILES:
                raise DataError(
                    f"{_folder(spec).resolve()} holds more than {FILES:,} files",
                    where=where_of(spec),
                    fix="Give the folder of the data set, or its files.",
                )
    return sorted(paths)


def open_table(spec: DataSpec) -> Any:
    """The `datasets` table of the spec's split."""
    with temporary_folder("data") as cache:  # the library, too, needs such a place to be imported
        return _open_table(spec, cache)


def _open_table(spec: DataSpec, cache: Path) -> Any:
    from datasets.exceptions import DatasetNotFoundError

    place = where_of(spec)
    try:
        with _quiet():
            return _opened(spec, cache)
    except (ConnectionError, DatasetNotFoundError) as e:
        raise MachineError(
            f"the data set could not be fetched ({str(e).splitlines()[0][:200]})",
            where=place,
            accepted=f"a hub id, a folder, or one of {', '.join(FILE_FORMATS)} with files",
            fix="Check the name and the network; with HF_HUB_OFFLINE set it must be in the cache.",
        ) from e
    except (DataError, MachineError):
        raise
    except (OSError, MemoryError):
        with reading(place, error=DataError):
            raise
    except Exception as e:  # the library raises many kinds for one thing: data it cannot read
        cause = str(e.__cause__ or e).splitlines() or [type(e.__cause__ or e).__name__]
        if "corresponds to no data" in cause[0]:  # a header without rows, [], white space
            raise DataError("the data is empty", where=place, fix="Give rows.") from e
        raise DataError(f"it cannot be read ({cause[0][:200]})", where=place) from e


def _opened(spec: DataSpec, cache: Path) -> Any:
    import datasets

    if spec.source in FILE_FORMATS:
        if not spec.files:
            raise DataError("files is missing", where=where_of(spec), fix="Give files: [...].")
        files = [str(f) for f in local_files(spec)]
        _check_not_empty(files)
        for file in files if spec.source in CHECKS else ():
            CHECKS[spec.source](Path(file))
        try:
            return _of_files(spec, files, cache)
        except datasets.exceptions.DatasetGenerationError as e:
            if len(files) == 1 or not isinstance(e.__cause__, datasets.table.CastError):
                raise
        return _columns_of_each(spec, files, cache)
    folder = _folder(spec)
    if folder.is_dir():
        folder_files(spec)  # not so many that the library would look for ever
        _check_folder(folder, cache)
        return datasets.load_dataset(
            str(folder), split=spec.split, cache_dir=str(cache), keep_in_memory=True
        )
    revision = _commit(spec.source, spec.revision)
    return datasets.load_dataset(spec.source, spec.name, split=spec.split, revision=revision)


def _of_files(spec: DataSpec, files: list[str], cache: Path) -> Any:
    import datasets

    return datasets.load_dataset(
        spec.source,
        data_files={spec.split: files},
        split=spec.split,
        cache_dir=str(cache),
        keep_in_memory=True,
    )


def _columns_of_each(spec: DataSpec, files: list[str], cache: Path) -> Any:
    """The rows of files that have other columns besides those of the spec: only the spec's."""
    import datasets

    columns, tables = list(spec.columns.values()), []
    for file in files:
        table = _of_files(spec, [file], cache)
        missing = [column for column in columns if column not in table.column_names]
        if missing:
            raise DataError(
                f"no column {', '.join(map(repr, missing))}, which the spec reads of every file",
                where=file,
                accepted=", ".join(map(repr, table.column_names)),
                fix="Correct columns, or leave the file out.",
            )
        tables.append(table.select_columns(columns))
    return datasets.concatenate_datasets(tables)


def _check_folder(folder: Path, cache: Path) -> None:
    """The checks of the files that the library would read of a folder, of all splits."""
    import datasets

    builder = datasets.load_dataset_builder(str(folder), cache_dir=str(cache))
    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in CHECKS:
        return
    check = CHECKS[kind]
    if kind == "csv":
        check = partial(check_columns, separator=builder.config.sep.encode())
    for files in (builder.config.data_files or {}).values():
        for file in map(Path, files):
            if file.is_file():
                check(file)


@contextmanager
def _unfolded(file: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed where it is compressed with gzip, bzip2 or xz.

    Raises DataError for one whose compressed bytes are damaged.
    """
    with reading(file, error=DataError):
        with file.open("rb") as plain:
            start = plain.read(max(map(len, FOLDED)))
        opener = next((FOLDED[magic] for magic in FOLDED if start.startswith(magic)), None)
        with file.open("rb") if opener is None else opener.open(file, "rb") as content:
            yield cast(BinaryIO, content)


def _check_unfolded(size: int, file: Path) -> None:
    """Raise DataError where `size` bytes are more than a file may unfold to."""
    limit = max(UNFOLDED, TIMES * file.stat().st_size)
    if size > limit:
        raise DataError(
            f"it unfolds to more than {limit:,} bytes",
            where=str(file),
            accepted=f"{UNFOLDED:,} bytes, or {TIMES:,} times the file's size",
            fix="Is it the file you mean? If so, give it unpacked.",
        )


def check_depth(file: Path) -> None:
    """Raise DataError for JSON that is nested more than DEPTH levels deep, whose readers recurse,
    one until the process ends; or that has more than COLUMNS names, each a column or a part of one,
    which they read for minutes."""
    enclosing: list[int] = []  # of each open bracket, what it is the value of
    current = 0  # the name that a value would belong to, as the hash of all names on the way to it
    names: set[int] = set()
    for token, line in _json_tokens(file):
        if token.group(1):
            current = hash((enclosing[-1] if enclosing else 0, token.group(1)))
            names.add(current)
        elif token.group(3):
            enclosing.append(current)
        elif token.group(4) and enclosing:
            current = enclosing.pop()
        if len(enclosing) > DEPTH:
            raise DataError(
                f"it is nested more than {DEPTH} levels deep",
                where=f"{file}:{_line(token, line)}",
                fix="One text, label or score per column is read; leave the others out.",
            )
        if len(names) > COLUMNS:
            raise DataError(
                f"it has more than {COLUMNS:,} columns",
                where=f"{file}:{_line(token, line)}",
                accepted=f"{COLUMNS:,} or fewer, the names inside of others included",
                fix="Leave out the columns that hold neither texts nor labels.",
            )


def _line(token: re.Match[bytes], first: int) -> int:
    return first + token.string.count(b"\n", 0, token.start())


def _json_tokens(file: Path) -> Iterator[tuple[re.Match[bytes], int]]:
    """Each name and bracket outside of strings, with the line that its chunk begins in."""
    size, line, rest, in_string = 0, 1, b"", False
    with _unfolded(file) as content:
        while chunk := content.read(CHUNK):
            size += len(chunk)
            _check_unfolded(size, file)
            chunk, rest, start = rest + chunk, b"", 0
            if in_string:
                end = cast(re.Match[bytes], STRING_END.match(chunk))
                in_string, start = not end.group(1), end.end()
                rest = chunk[start:] if in_string else b""  # of an escape, its first half
            for token in () if in_string else TOKENS.finditer(chunk, start):
                if token.group(2) == b"":
                    in_string, rest = True, chunk[token.end() :]
                    break
                if token.group(2) is None:
                    yield token, line
            line += chunk.count(b"\n", 0, len(chunk) - len(rest))


def check_columns(file: Path, separator: bytes = b",") -> None:
    """Raise DataError for a csv file of more than COLUMNS columns, by its first line, or cells in
    a row; and for a line of more than LINE bytes."""
    cell = re.compile(
        rb'(?:"(?:[^"]++|"")*+("?))?[^S\r\n]*+([S\r\n]?)'.replace(b"S", re.escape(separator))
    )
    cells, quoted = 0, False  # separators of the row so far; whether a quote is open
    for number, line in _csv_lines(file, separator):
        start = 0
        if quoted:
            end = cast(re.Match[bytes], QUOTED_END.match(line))
            quoted, start = not end.group(1), end.end()
        elif b'"' not in line and line.count(separator) < COLUMNS:
            continue
        for match in () if quoted else cell.finditer(line, start):
            quoted = match.group(1) == b""
            cells = cells + 1 if match.group(2) == separator else cells
            cells = 0 if match.group(2) in (b"\r", b"\n") else cells
            _check_cells(cells + 1, "cells", f"{file}:{number}")
            if quoted:
                break


def _csv_lines(file: Path, separator: bytes) -> Iterator[tuple[int, bytes]]:
    """The lines and their numbers, without those between which no quote and few separators are."""
    size, number = 0, 1
    with _unfolded(file) as content:
        _check_cells(content.readline(HEADER).count(separator) + 1, "columns", f"{file}:1")
        content.seek(0)
        while chunk := content.read(CHUNK):
            end = content.readline(LINE)
            size += len(chunk) + len(end)
            _check_unfolded(size, file)
            if len(end) == LINE:
                raise DataError(
                    "a line is too long",
                    where=f"{file}, after line {number}",
                    accepted=f"less than {LINE:,} bytes",
                )
            chunk += end
            if b'"' in chunk or chunk.count(separator) >= COLUMNS:
                yield from enumerate(chunk.splitlines(keepends=True), number)
            number += chunk.count(b"\n")


def _check_cells(count: int, what: str, where: str) -> None:
    if count > COLUMNS:
        raise DataError(
            f"it has {count:,} {what}",
            where=where,
            accepted=f"{COLUMNS:,} or fewer",
            fix="Leave out the columns that hold neither texts nor labels.",
        )


CHECKS: dict[str, Callable[[Path], None]] = {"json": check_depth, "csv": check_columns}
"""By format: what its library would not survive."""


def _check_not_empty(files: Sequence[str]) -> None:
    for file in files:
        if Path(file).stat().st_size == 0:
            raise DataError("the file is empty", where=file, fix="Give rows, or leave it out.")


@lru_cache(maxsize=16)
def _commit(name: str, revision: str | None) -> str | None:
    """The commit of a hub data set, asked once per process: key and run then read the same rows,
    whatever is pushed in between. `revision` itself when it is a commit, or nobody answers."""
    from huggingface_hub import HfApi

    if revision is not None and re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    try:
        commit: str | None = HfApi().dataset_info(name, revision=revision).sha
    except Exception as e:  # of the HTTP library underneath, which differs; opening it says more
        reason = (str(e).splitlines() or [type(e).__name__])[0][:120]
        say(f"data {name}: its commit could not be asked for ({reason}): a cached copy will do")
        return revision
    return commit


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
