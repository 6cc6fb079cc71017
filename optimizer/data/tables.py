"""Where the rows of a data spec lie, and reading them through the `datasets` library.

Its cache is a folder of this process that goes away with it (for files) or the user's Hugging Face
cache (for hub ids).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from optimizer.data import parquet_file
from optimizer.data.table_checks import CHECKS, check_columns, check_parquet
from optimizer.foundation.errors import DataError, MachineError, closest
from optimizer.foundation.progress import say
from optimizer.foundation.reading import check_regular, reading
from optimizer.harness.process.temporary import temporary_folder
from optimizer.recipe.schema import DataSpec

FILES = 10_000  # in a folder that is a data set
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
        check, options = CHECKS.get(spec.source), dict[str, Any]()
        if spec.source == "parquet" and (columns := parquet_file.shared(files, spec)):
            check, options = partial(check_parquet, columns=columns), {"columns": columns}
        if check is not None:
            for file in files:
                check(Path(file))
        try:
            return _of_files(spec, files, cache, **options)
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
