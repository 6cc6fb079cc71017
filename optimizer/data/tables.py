"""Find the files of a data spec, and read them through library `datasets`.

The cache of `datasets` is a temporary folder for files, and the user's Hugging Face cache for hub
ids.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from optimizer.data import arrays, parquet_file
from optimizer.data.table_checks import CHECKS, HEADER, check_columns, check_parquet, open_unpacked
from optimizer.foundation.errors import DataError, MachineError, suggest
from optimizer.foundation.progress import say
from optimizer.foundation.reading import check_regular, reading
from optimizer.harness.process.temporary import make_temporary_folder
from optimizer.recipe.schema import DataSpec

FILES = 10_000  # maximum in the folder of a data set
SEPARATORS = (",", ";", "\t", "|")
NPZ = "npz"
FILE_FORMATS = ("csv", "json", "parquet", "text", NPZ)


def describe_place(spec: DataSpec) -> str:
    """Describe where a data set is, for messages."""
    return f"data {spec.source}{': ' + ', '.join(spec.files) if spec.files else ''}"


def is_local(spec: DataSpec) -> bool:
    """Return True for a spec of files or a folder on this machine."""
    return spec.source in FILE_FORMATS or _folder(spec).is_dir()


def _folder(spec: DataSpec) -> Path:
    """Return the path of a data set's source that is a folder. Raises DataError for an impossible
    path."""
    folder = Path(spec.base or ".") / spec.source
    with reading(describe_place(spec), error=DataError):
        folder.is_dir()
    return folder


def list_files(spec: DataSpec) -> list[Path]:
    """Return the spec's files, each once, with globs expanded relative to the spec's folder."""
    with reading(describe_place(spec), error=DataError):
        return _local_files(spec)


def _local_files(spec: DataSpec) -> list[Path]:
    """Expand the spec's file names and globs, and return each file once. Raises DataError for a
    pattern without a match and for a file that is not regular."""
    base = Path(spec.base or ".")
    paths: list[Path] = []
    for pattern in spec.files:
        path = Path(pattern)
        matches = (
            sorted(path.parent.glob(path.name))
            if path.is_absolute()
            else sorted(base.glob(pattern))
        )
        if not matches:
            suggestion = suggest(path.name, [p.name for p in (base / path).parent.glob("*")])
            raise DataError(
                f"no file {pattern!r} in {base}{suggestion}",
                where=describe_place(spec),
                fix=f"Get it first: {spec.obtain}"
                if spec.obtain
                else "Use names or globs relative to the spec's folder.",
            )
        paths += matches
    by_path: dict[Path, Path] = {}
    for path in paths:
        check_regular(path, error=DataError)
        by_path.setdefault(path.resolve(), path)
    return list(by_path.values())


def list_folder_files(spec: DataSpec) -> list[Path]:
    """Return the sorted paths of all files below a source that is a folder; [] for a format of
    FILE_FORMATS. Raises DataError for more than FILES files, because such a folder is unlikely to
    be a data set."""
    if spec.source in FILE_FORMATS:
        return []
    paths: list[Path] = []
    with reading(describe_place(spec), error=DataError):
        for path in _folder(spec).rglob("*"):
            paths += [path] if path.is_file() else []
            if len(paths) > FILES:
                raise DataError(
                    f"{_folder(spec).resolve()} has more than {FILES:,} files",
                    where=describe_place(spec),
                    fix="Set source to the folder of the data set, or to a format with files.",
                )
    return sorted(paths)


def open_table(spec: DataSpec) -> Any:
    """Return the table of the spec's split, from library `datasets` or with the same interface."""
    if spec.source == NPZ:
        files = list_files(spec)
        if not files:
            raise DataError("files is missing", where=describe_place(spec), fix="Set files: [...].")
        return arrays.open_files(files)
    with make_temporary_folder("data") as cache:  # needed even to import the library
        return _open_table(spec, cache)


def _open_table(spec: DataSpec, cache: Path) -> Any:
    """Load the table; errors of library `datasets` become DataError or, without a connection,
    MachineError.

    cache: folder for the cache of `datasets`
    """
    from datasets.exceptions import DatasetNotFoundError

    place = describe_place(spec)
    try:
        with _without_progress_bars():
            return _load_table(spec, cache)
    except (ConnectionError, DatasetNotFoundError) as e:
        raise MachineError(
            f"the data set could not be fetched ({str(e).splitlines()[0][:200]})",
            where=place,
            accepted=f"a hub id, a folder, or one of {', '.join(FILE_FORMATS)} with files",
            fix="Check the name and the network; with HF_HUB_OFFLINE it must be in the cache.",
        ) from e
    except (DataError, MachineError):
        raise
    except (OSError, MemoryError):
        with reading(place, error=DataError):
            raise
    except Exception as e:  # the library raises many types of errors for unreadable data
        if isinstance(e.__cause__ or e, UnicodeDecodeError):
            raise DataError(
                f"the files are not {spec.encoding or 'UTF-8'} ({e.__cause__ or e})",
                where=place,
                fix="Set encoding to theirs (of files from Excel often cp1252), or save as UTF-8.",
            ) from e
        cause = str(e.__cause__ or e).splitlines() or [type(e.__cause__ or e).__name__]
        if "corresponds to no data" in cause[0]:  # a header without rows, [], white space
            raise DataError("the data are empty", where=place, fix="Use a file with rows.") from e
        raise DataError(f"the data cannot be read ({cause[0][:200]})", where=place) from e


def _load_table(spec: DataSpec, cache: Path) -> Any:
    """Load the table of the spec's split from files, a folder or the hub. Local files are checked
    before the library reads them.

    cache: folder for the cache of `datasets`
    """
    import datasets

    if spec.source in FILE_FORMATS:
        if not spec.files:
            raise DataError("files is missing", where=describe_place(spec), fix="Set files: [...].")
        files = [str(f) for f in list_files(spec)]
        _check_not_empty(files)
        check, options = CHECKS.get(spec.source), dict[str, Any]()
        if spec.source == "parquet" and (columns := parquet_file.find_common_columns(files, spec)):
            check, options = partial(check_parquet, columns=columns), {"columns": columns}
        if spec.source == "csv":
            options["sep"] = detect_separator(spec, Path(files[0]))
            check = partial(check_columns, separator=options["sep"].encode())
        if spec.encoding is not None and spec.source in ("csv", "text"):
            options["encoding"] = spec.encoding
        if check is not None:
            for file in files:
                check(Path(file))
        try:
            return _of_files(spec, files, cache, **options)
        except datasets.exceptions.DatasetGenerationError as e:
            if len(files) == 1 or not isinstance(e.__cause__, datasets.table.CastError):
                raise
        return _columns_of_each(spec, files, cache, options)
    folder = _folder(spec)
    if folder.is_dir():
        list_folder_files(spec)  # limits their number, so that the library's search ends
        _check_folder(folder, cache)
        return datasets.load_dataset(
            str(folder), split=spec.split, cache_dir=str(cache), keep_in_memory=True
        )
    revision = _commit(spec.source, spec.revision)
    return datasets.load_dataset(spec.source, spec.name, split=spec.split, revision=revision)


def _of_files(spec: DataSpec, files: list[str], cache: Path, **options: Any) -> Any:
    import datasets

    return datasets.load_dataset(
        spec.source,
        data_files={spec.split: files},
        split=spec.split,
        cache_dir=str(cache),
        keep_in_memory=True,
        **options,
    )


def detect_separator(spec: DataSpec, file: Path) -> str:
    """Return the character between the fields of a data set's csv file: the spec's; else the first
    of SEPARATORS with which the first line has the spec's columns; else the one with which it has
    the most fields."""
    if spec.separator is not None:
        return spec.separator
    with reading(file, error=DataError), open_unpacked(file) as content:
        line = content.readline(HEADER).decode(spec.encoding or "utf-8-sig", errors="replace")
    fields = {
        sign: next(csv.reader([line], delimiter=sign), []) if sign in line else [line.strip()]
        for sign in SEPARATORS
    }
    columns = set(spec.columns.values())
    fitting = [sign for sign, names in fields.items() if columns <= {*names}]
    return fitting[0] if fitting else max(SEPARATORS, key=lambda sign: len(fields[sign]))


def _columns_of_each(
    spec: DataSpec, files: list[str], cache: Path, options: Mapping[str, Any]
) -> Any:
    """Return a table of only the spec's columns, joined from files whose other columns differ."""
    import datasets

    columns, tables = list(spec.columns.values()), []
    for file in files:
        table = _of_files(spec, [file], cache, **options)
        missing = [column for column in columns if column not in table.column_names]
        if missing:
            raise DataError(
                f"no column {', '.join(map(repr, missing))}, which the spec reads from every file",
                where=file,
                accepted=", ".join(map(repr, table.column_names)),
                fix="Correct columns, or remove the file from files.",
            )
        tables.append(table.select_columns(columns))
    return datasets.concatenate_datasets(tables)


def _check_folder(folder: Path, cache: Path) -> None:
    """Apply the check for its format to each file in `folder` that `datasets` would read, of all
    splits."""
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


def _check_not_empty(files: Sequence[str]) -> None:
    for file in files:
        if Path(file).stat().st_size == 0:
            raise DataError("the file is empty", where=file, fix="Remove it from files.")


@lru_cache(maxsize=16)
def _commit(name: str, revision: str | None) -> str | None:
    """Return the commit of a data set on the hub, resolved once per process, so that a step's key
    and its run read the same rows even after a push. `revision` is returned where it is a commit
    already, or the hub does not answer."""
    from huggingface_hub import HfApi

    if revision is not None and re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    try:
        commit: str | None = HfApi().dataset_info(name, revision=revision).sha
    except Exception as e:  # from any HTTP library; opening the data set reports more
        reason = (str(e).splitlines() or [type(e).__name__])[0][:120]
        say(f"data {name}: the hub did not return its commit ({reason}); a cached copy is used")
        return revision
    return commit


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Inside, hide the progress bars of `datasets`; other messages stay visible."""
    import datasets

    was_on = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if was_on:
            datasets.enable_progress_bars()
