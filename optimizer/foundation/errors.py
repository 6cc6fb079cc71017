"""Errors that end a run before all gates passed, as one tree.

    OptimizeError                 exit 1   our bug, or a failure nobody foresaw
    ├── InputError                exit 2   something the user gave us is wrong
    │   ├── RecipeError                    the YAML, or the command line
    │   ├── CheckpointError                the model folder
    │   └── DataError                      a calibration or evaluation set
    ├── GateError                 exit 3   a gate failed: the result is not good enough to ship
    │   └── LedgerError                    a hop beyond its limit
    ├── InconclusiveError         exit 4   the data cannot decide; says how many samples would
    └── MachineError              exit 5   this machine cannot run the task (a package, a GPU,
                                           disk space, a permission)
        └── StoreError                     the store of finished steps, whatever the target

A message has four parts, always in this order: the place, the value found, the accepted values, and
the fix. Raise with all four when they exist:

    raise RecipeError("width 576 is not divisible by group_size 128",
                      where="recipes/x.yaml:14: quantize.weights.group_size",
                      accepted="a divisor of 576 that is a power of two: 16, 32, 64",
                      fix="Use group_size: 64, or add the module to keep_float.")
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from typing import Any

from optimizer.harness.errors import ExplainedError


class OptimizeError(ExplainedError):
    """Base of every error that this project raises on purpose.

    further: other errors found at the same time, which are printed after this one
    """

    further: tuple[OptimizeError, ...] = ()


class InputError(OptimizeError):
    """The user's input is wrong, and nothing was computed from it."""

    exit_code = 2


class RecipeError(InputError):
    """The recipe or the command line is wrong."""


class CheckpointError(InputError):
    """The model folder is missing, incomplete, corrupt, or of an unsupported kind."""


class DataError(InputError):
    """A data set is missing, empty, mislabelled, or overlaps one it must not overlap."""


class GateError(OptimizeError):
    """The candidate was built and measured, and is not good enough to ship."""

    exit_code = 3


class LedgerError(GateError):
    """A hop changed the numbers by more than its declared tolerance."""


class InconclusiveError(OptimizeError):
    """The evaluation data cannot separate pass from fail at the recipe's confidence."""

    exit_code = 4


class MachineError(OptimizeError):
    """This machine lacks something the run needs: a package, a device, space, a permission."""

    exit_code = 5


class StoreError(MachineError):
    """A step cannot be stored, because the disk, the memory or the store fails. Every target is
    affected."""


def split(error: ExplainedError) -> tuple[ExplainedError, ...]:
    """Return the error and those in its `further`."""
    return (error, *error.further) if isinstance(error, OptimizeError) else (error,)


def error_document(error: ExplainedError) -> dict[str, Any]:
    """Return the document of `--json`: exit code, the first error's fields, and all `errors`."""
    errors = [one.as_dict() for one in split(error)]
    return {"exit_code": error.exit_code, **error.as_dict(), "errors": errors}


def join(errors: Iterable[OptimizeError]) -> OptimizeError | None:
    """Return the first error with the others as `further`, each once; None without errors. Errors
    in the user's input come before those of the machine, so that the exit code is the input's."""
    distinct: dict[str, OptimizeError] = {}
    for error in errors:
        for one in (error, *error.further):
            distinct.setdefault(str(one), one)
        error.further = ()
    if not distinct:
        return None
    placed = [one for one in distinct.values() if not _is_repeated_in(distinct.values(), one)]
    first, *others = sorted(placed, key=lambda error: isinstance(error, MachineError))
    first.further = tuple(others)
    return first


def _is_repeated_in(errors: Iterable[OptimizeError], one: OptimizeError) -> bool:
    """Return True where another error has the same problem and the same place with more in front of
    it, such as the file."""
    return any(
        e.problem == one.problem and e.where.endswith(f": {one.where}") for e in errors if one.where
    )


def collect(calls: Iterable[Callable[[], object]]) -> None:
    """Make every call; raise all InputErrors and MachineErrors of the calls as one, see `join`."""
    errors: list[OptimizeError] = []
    for call in calls:
        try:
            call()
        except (InputError, MachineError) as e:
            errors.append(e)
    error = join(errors)
    if error is not None:
        raise error


KEPT = "Finished steps are kept."
UNPLACED = "Free space on the disk of --store, --artifacts, and of temporary files (TMPDIR)."
OF_THE_MACHINE = {
    errno.ENOSPC: ("Free space, or point {option} at another disk.", UNPLACED),
    errno.EDQUOT: ("Free quota, or point {option} at another disk.", UNPLACED),
    errno.EROFS: ("Point {option} at a writable folder.", "Name a writable folder."),
    errno.EACCES: ("Point {option} at a folder you may write to.", "Change its permissions."),
    errno.EPERM: ("Point {option} at a folder you may write to.", "Change its permissions."),
    errno.ENAMETOOLONG: ("Give {option} a shorter name.", "Give a shorter name."),
    errno.EFBIG: ("Raise the limit of a file's size (ulimit -f).",) * 2,
    errno.EIO: ("The disk answers with an error: look at the system's log.",) * 2,
    errno.EMFILE: ("Raise the limit of open files (ulimit -n).",) * 2,
    errno.ENFILE: ("Raise the limit of open files (fs.file-max).",) * 2,
    errno.ENOMEM: ("Use a machine with more memory.",) * 2,
}
"""{error number: (fix where an option names the place, fix where none does)}"""
KERNEL = ("/proc/", "/sys/")
"""File systems of the kernel, which refuse a new file with ENOENT."""


def explain_system_error(
    error: Exception, root: str | os.PathLike[str] = "", option: str = ""
) -> OptimizeError | None:
    """Explain an error of this machine or of a path: a full disk, a missing permission, no memory,
    a loop of links, no home folder. Returns None for any other error, which may be a bug.

    root: folder of the work, named where the error names no file
    option: command line option that moves `root` elsewhere
    """
    text = str(error)
    names = (getattr(error, "filename2", None), getattr(error, "filename", None), root)
    place = str(next(filter(None, names), ""))
    number = error.errno if isinstance(error, OSError) else None
    # the loader's message for a library that cannot be mapped
    unmapped = isinstance(error, ImportError) and "failed to map segment" in text
    if unmapped or isinstance(error, MemoryError):
        return StoreError(
            f"there is not enough memory ({text or type(error).__name__})",
            where="this machine",
            fix=f"Use a machine with more, or raise this process's limit (ulimit -v). {KEPT}",
        )
    if number == errno.ELOOP or text.startswith("Symlink loop"):
        return RecipeError("symbolic links form a loop", where=place, fix="Name another path.")
    if isinstance(error, ValueError) and "embedded null" in text:
        return RecipeError("a path holds a NUL character", where=place, fix="Name another path.")
    if "Could not determine home directory" in text or "getpwuid()" in text:
        return MachineError(
            "this user has no home folder and no name here",
            fix="Set HOME to a folder that this user may write to, and USER to any name.",
        )
    if option and number == errno.ENOENT and os.path.realpath(place).startswith(KERNEL):
        return StoreError(
            "this is a kernel file system; files cannot be created",
            where=place,
            fix=f"Move {option}.",
        )
    if option and number == errno.EISDIR:
        return StoreError(
            os.strerror(number).lower(),
            where=place,
            fix=f"A folder stands where a file should; point {option} elsewhere.",
        )
    if option and number in (errno.ENOTDIR, errno.EEXIST):
        return StoreError(
            os.strerror(number).lower(),
            where=place,
            fix=f"A file stands where a folder should; point {option} at a folder.",
        )
    if number not in OF_THE_MACHINE:
        return None
    with_option, without = OF_THE_MACHINE[number]
    fix = with_option.format(option=option) if option else without
    if option != "--out":  # a file or folder of one command, which has no steps
        fix = f"{fix} {KEPT}"
    return StoreError(os.strerror(number).lower(), where=place, fix=fix)


def suggest(word: str, choices: list[str]) -> str:
    """Return '; did you mean "x"?' for the nearest choice, or '' when none is near."""
    import difflib

    if len(word) < 4:  # gpu is not cpu, nor fp8 fp32
        choices = [c for c in choices if c[:1] == word[:1] and len(c) == len(word)]
    matches = difflib.get_close_matches(word, choices, n=1, cutoff=0.55)
    return f'; did you mean "{matches[0]}"?' if matches else ""
