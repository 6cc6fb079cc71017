"""Errors of running a bundle, each with the exit code of the process.

    HarnessError         exit 1   unexpected
    ├── InputError       exit 2   the request is wrong: a text, an array, an argument
    ├── AnswerError      exit 2   the model computed NaN or infinity, so an input has no answer
    ├── BundleError      exit 2   the bundle is damaged, incomplete, or of another version
    ├── BuildError       exit 2   the engine builder rejects the model
    └── MachineError     exit 5   this machine lacks something: a package, a device
        ├── UnopenedError         the runtime does not open an intact engine or model
        └── CacheError            the engine cache cannot be written

Raised by the whole harness; printed by commands/command_line.py.
"""

from __future__ import annotations


class ExplainedError(Exception):
    """Error in four parts, printed in this order: where, the problem, the accepted values, the fix.

    Base of the errors of the harness and of the toolchain (optimizer/foundation/errors.py).
    """

    exit_code = 1

    def __init__(self, problem: str, *, where: str = "", accepted: str = "", fix: str = "") -> None:
        self.problem, self.where, self.accepted, self.fix = problem, where, accepted, fix
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.where}: {self.problem}" if self.where else self.problem
        for more in (f"Accepted: {self.accepted}" if self.accepted else "", self.fix):
            if more:
                text += f" {more}" if text.endswith((".", "?")) else f". {more}"
        return text

    def as_dict(self) -> dict[str, str]:
        """Return an error of the harness or toolchain as texts for `--json`, with the problem under
        "found"."""
        return {
            "error": type(self).__name__,
            "where": self.where,
            "found": self.problem,
            "accepted": self.accepted,
            "fix": self.fix,
        }


class HarnessError(ExplainedError):
    """Base of every error that the harness raises on purpose."""


class InputError(HarnessError):
    """Error of the harness for a wrong request: a text, an array or an argument."""

    exit_code = 2


class AnswerError(HarnessError):
    """Error of the harness where the model computed NaN or infinity."""

    exit_code = 2

    def __init__(self, problem: str, *, where: str = "") -> None:
        super().__init__(
            problem,
            where=where,
            fix="The model overflows on this input: try another engine (--runtime), or rebuild the "
            "bundle with float: fp32.",
        )


class BundleError(HarnessError):
    """Error of the harness for a bundle that is damaged, incomplete, or of an unreadable
    version."""

    exit_code = 2


class BuildError(HarnessError):
    """Error of the harness where the engine builder rejects the model, the shapes or the GPU."""

    exit_code = 2


class MachineError(HarnessError):
    """Error of the harness where this machine lacks a package, a device or a driver."""

    exit_code = 5


class UnopenedError(MachineError):
    """Error of the harness for a file that this machine's runtime does not open; one built here
    may."""


class CacheError(MachineError):
    """Error of the harness where the cache folder of engines cannot be written."""


def require(good: bool, where: str, value: object, accepted: str, fix: str = "") -> None:
    """Raise BundleError naming `where`, `value` and `accepted`, unless `good` is true."""
    if not good:
        raise BundleError(f"{value!r} was found", where=where, accepted=accepted, fix=fix)
