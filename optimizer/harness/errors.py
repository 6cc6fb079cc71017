"""The ways running a bundle can fail, each with the exit code of the process.

    HarnessError         exit 1   unexpected
    ├── InputError       exit 2   the request is wrong: a text, an array, an argument
    ├── AnswerError      exit 2   what the model computed is no number, so a text has no answer
    ├── BundleError      exit 2   the bundle is damaged, incomplete, or of another version
    ├── BuildError       exit 2   a builder does not take the model it was asked to build
    └── MachineError     exit 5   this machine lacks something: a package, a device
        ├── UnopenedError         it does not open a file whose digest is right
        └── CacheError            it keeps nothing of what was built

A message says where, what was found, what is accepted and what to do, in this order.
"""

from __future__ import annotations


class ExplainedError(Exception):
    """An error in four parts: where, what was found, what is accepted, what to do.

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
        """The message as fields, for `--json`."""
        return {
            "error": type(self).__name__,
            "where": self.where,
            "found": self.problem,
            "accepted": self.accepted,
            "fix": self.fix,
        }


class HarnessError(ExplainedError):
    """Base of every error the harness raises on purpose."""


class InputError(HarnessError):
    """What was asked of the model cannot be asked of it."""

    exit_code = 2


class AnswerError(HarnessError):
    """What the model computed is no number, so nothing can be read from it."""

    exit_code = 2

    def __init__(self, problem: str, *, where: str) -> None:
        super().__init__(
            problem,
            where=where,
            fix="The model overflows on this input: try another engine (--runtime), or rebuild the "
            "bundle with float: fp32.",
        )


class BundleError(HarnessError):
    """The bundle is damaged, incomplete, or written by a version this one cannot read."""

    exit_code = 2


class BuildError(HarnessError):
    """A builder does not take the model, the shapes or the GPUs it was given."""

    exit_code = 2


class MachineError(HarnessError):
    """This machine lacks what was asked of it: a package, a device, a driver."""

    exit_code = 5


class UnopenedError(MachineError):
    """An engine, or a model, that this machine's runtime does not open; one that is built here
    may open."""


class CacheError(MachineError):
    """The folder for what is built on this machine cannot be written."""


def require(good: bool, where: str, value: object, accepted: str, fix: str = "") -> None:
    """Raises BundleError naming what was found and what is accepted, unless `good`."""
    if not good:
        raise BundleError(f"{value!r} was found", where=where, accepted=accepted, fix=fix)
