"""Every way a run can end other than "all gates passed", as one tree.

    OptimizeError                 exit 1   our bug, or a failure nobody foresaw
    ├── InputError                exit 2   something the user gave us is wrong
    │   ├── RecipeError                    the YAML, or the command line
    │   ├── CheckpointError                the model folder
    │   └── DataError                      a calibration or evaluation set
    ├── GateError                 exit 3   a gate failed: the result is not good enough to ship
    │   └── LedgerError                    a hop left its declared tolerance
    ├── InconclusiveError         exit 4   the data cannot decide; says how many samples would
    └── MachineError              exit 5   this machine cannot do what was asked (a package, a GPU,
                                           disk space, a permission)

A message has four parts, always in this order: where, what was found, what is accepted,
what to do. Raise with all four when they exist:

    raise RecipeError("width 576 is not divisible by group_size 128",
                      where="recipes/x.yaml:14: quantize.weights.group_size",
                      accepted="a divisor of 576 that is a power of two: 16, 32, 64",
                      fix="Use group_size: 64, or add the module to keep_float.")
"""

from __future__ import annotations

from optimizer.harness.errors import ExplainedError


class OptimizeError(ExplainedError):
    """Base of every error this project raises on purpose."""


class InputError(OptimizeError):
    """Something the user gave us is wrong; nothing was computed from it."""

    exit_code = 2


class RecipeError(InputError):
    """The recipe or the command line is wrong."""


class CheckpointError(InputError):
    """The model folder is missing, incomplete, corrupt, or of a kind we refuse."""


class DataError(InputError):
    """A data set is missing, empty, mislabelled, or overlaps one it must not overlap."""


class GateError(OptimizeError):
    """The candidate was built and measured, and is not good enough to ship."""

    exit_code = 3


class LedgerError(GateError):
    """A hop changed the numbers by more than it declared it would."""


class InconclusiveError(OptimizeError):
    """The evaluation data cannot tell pass from fail at the asked confidence."""

    exit_code = 4


class MachineError(OptimizeError):
    """This machine lacks what was asked of it: a package, a device, space, a permission."""

    exit_code = 5


def closest(word: str, choices: list[str]) -> str:
    """'; did you mean "x"?' for the nearest choice, or '' when nothing is near."""
    import difflib

    matches = difflib.get_close_matches(word, choices, n=1, cutoff=0.55)
    return f'; did you mean "{matches[0]}"?' if matches else ""
