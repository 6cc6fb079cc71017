"""Turn any failure of a library on a user's file into one of our errors.

Libraries fail on a bad file with KeyError, AssertionError, a panic of Rust code (not an Exception),
a RecursionError, or by using all memory. Each becomes an error in four parts, with exit code 2 (the
file's fault) or 5 (this machine's) and the library's message, so that `internal error` means a bug
of ours.

    with reading(folder / "tokenizer.json", fix="Save it again with transformers."):
        tokenizer = AutoTokenizer.from_pretrained(folder)
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any

from optimizer.foundation.errors import CheckpointError, InputError, MachineError
from optimizer.harness.errors import ExplainedError

JSON_BYTES = 100_000_000  # a tokenizer.json of a million merges has 60 MB
WORDS = 300  # characters of a library's message that are shown
# errors of writing, not of reading: atomic.explain_disk_errors handles them
OF_THE_DISK = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EFBIG,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
)
DOUBT = "If the file is right, run with --debug and report what that prints."
MISTAKES = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError),
    *(NotImplementedError, TypeError),
)
PACKAGE = Path(__file__).parents[1]
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


@contextmanager
def reading(
    where: Path | str,
    *,
    accepted: str = "",
    fix: str = "",
    error: type[InputError] = CheckpointError,
    own_faults: bool = False,
) -> Iterator[None]:
    """Inside, turn a library's exception into `error` (exit 2), or into MachineError (exit 5) where
    memory or a permission is missing.

    where: file, and field where it is known
    accepted, fix: parts of the message
    error: class of the error for a faulty file
    own_faults: True to pass programming mistakes in this project's code unchanged, for a block that
        does more than parse

    Errors of this project, KeyboardInterrupt and SystemExit (model/checkpoint/own_code.py) pass
    unchanged.
    """
    try:
        yield
    except (ExplainedError, KeyboardInterrupt, GeneratorExit, SystemExit):
        raise
    except MemoryError as e:
        raise MachineError(
            "there is not enough memory to read it",
            where=str(where),
            fix="Is it the file you mean? If so, use a machine with more memory.",
        ) from e
    except OSError as e:
        if e.errno in OF_THE_DISK:
            raise
        raise _unreadable(e, where, fix, error) from e
    except BaseException as e:
        if own_faults and _is_own(e):
            raise
        raise error(
            f"it cannot be read ({quote_error(e)})",
            where=str(where),
            accepted=accepted,
            fix=f"{fix} {DOUBT}".strip(),
        ) from e


def _is_own(e: BaseException) -> bool:
    """Return True for a programming mistake (an exception of MISTAKES) in this project's own
    code."""
    if not isinstance(e, MISTAKES):
        return False
    *_, (frame, _) = walk_tb(e.__traceback__)
    return Path(frame.f_code.co_filename).is_relative_to(PACKAGE)


def quote_error(e: BaseException) -> str:
    """Return a library's exception on one line: its type, and the start of its message."""
    if isinstance(e, RecursionError):
        return "it is nested too deeply"
    message = " ".join(str(e).split())
    message = message.encode("utf-8", "backslashreplace").decode()
    shown = message if len(message) <= WORDS else f"{message[:WORDS]}…"
    return f"{type(e).__name__}: {shown}" if shown else type(e).__name__


def _unreadable(
    e: OSError, where: Path | str, fix: str, error: type[InputError]
) -> InputError | MachineError:
    reason = os.strerror(e.errno).lower() if e.errno else quote_error(e)
    if e.filename is not None and str(e.filename) not in str(where):
        reason += f": {e.filename}"
    if isinstance(e, PermissionError):
        return MachineError(
            f"this user may not use it ({reason})",
            where=str(e.filename or where),
            fix="Change its permissions, or the user.",
        )
    return error(f"it cannot be read ({reason})", where=str(where), fix=fix)


def check_regular(
    file: Path, limit: int | None = None, error: type[InputError] = CheckpointError
) -> int:
    """Return the size of a file in bytes.

    limit: maximum bytes; None: no limit

    Raises `error` for a larger file and for one that is not regular (a FIFO or device may never
    end), and as `reading` does.
    """
    with reading(file, error=error):
        status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise error(f"it is {kind}", where=str(file), accepted="a regular file")
    if limit is not None and status.st_size > limit:
        raise error(
            f"it has {status.st_size:,} bytes",
            where=str(file),
            accepted=f"{limit:,} bytes or fewer",
            fix="Is it the file you mean?",
        )
    return status.st_size


def read_text(
    file: Path, limit: int, error: type[InputError] = CheckpointError, fix: str = ""
) -> str:
    """Return the UTF-8 text of a regular file of at most `limit` bytes. Raises as `check_regular`
    does, and `error` for bytes that are not UTF-8."""
    check_regular(file, limit, error)
    with reading(file, error=error, fix=fix), file.open("rb") as f:
        content = f.read(limit + 1)
    if len(content) > limit:  # some special files report a size of 0
        raise error(f"it has more than {limit:,} bytes", where=str(file))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise error(
            f"it is not UTF-8 ({e.reason} at byte {e.start})",
            where=str(file),
            accepted="UTF-8",
            fix="Save it as UTF-8." if fix == "Check the path." else fix,
        ) from e


def read_json(
    file: Path, error: type[InputError] = CheckpointError, fix: str = "", limit: int = JSON_BYTES
) -> Any:
    """Return the value in a JSON file. Raises as `read_text` does, and `error` where the file is
    not JSON."""
    text = read_text(file, limit, error, fix)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        reason = quote_error(e).partition(": ")[2] or quote_error(e)
        raise error(f"not JSON ({reason})", where=str(file), fix=fix) from e


def check_external_data(fields: Mapping[str, str], tensor: str, model: Path) -> Path:
    """Return the path of the file that holds the data of an ONNX tensor outside the model file.

    fields: location, offset and length, as the tensor states them
    tensor: name of the tensor, for messages
    model: the ONNX file

    Raises CheckpointError for a location that is not a plain relative path below the model's folder
    (absolute, "..", a link leading out), a missing file, and bytes beyond the end of the file.
    """
    location, folder = fields.get("location", ""), model.parent.resolve()
    where = f"{model}: {tensor}"
    file = (folder / location).resolve()
    if not location or Path(location).is_absolute() or not file.is_relative_to(folder):
        raise CheckpointError(
            f"external data at {location!r}",
            where=where,
            accepted="a file below the model's own folder",
        )
    if not file.is_file():
        raise CheckpointError(f"external data {location!r} is missing", where=where)
    size = file.stat().st_size
    try:
        offset = int(fields.get("offset", 0))
        length = int(fields.get("length", size - offset))
    except ValueError:
        offset = length = -1
    if offset < 0 or length < 0 or offset + length > size:
        raise CheckpointError(
            f"external data {location!r} ends at byte {size}, before {offset + length}",
            where=where,
            fix="The file was cut short; make it again.",
        )
    return file
