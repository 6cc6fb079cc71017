"""Carry out a run for `optimize run`, `step` and `verify-rebuild`."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from optimizer.foundation.errors import (
    CheckpointError,
    DataError,
    InconclusiveError,
    MachineError,
    OptimizeError,
    RecipeError,
)
from optimizer.shared_store import Root, options

if TYPE_CHECKING:
    from optimizer.commands.build.outcome import RunResult
    from optimizer.commands.release.publish import Access


ERRORS = (CheckpointError, DataError, InconclusiveError, MachineError, RecipeError)
"""Errors that a child process can report, by class name."""


@dataclass(frozen=True)
class RunRequest:
    """Command line of `optimize run`, parsed.

    lock: lock that the recipe must agree with, or None
    portable_kernels: True in a process started with portable kernels
                      (optimizer/foundation/process/portable_kernels.py)
    access: credentials of registries; needed where `until` is "publish"
    """

    recipe: Path
    overrides: tuple[str, ...]
    store: Root
    artifacts: Path
    lock: Path | None = None
    until: str = "package"
    ignore_estimate: bool = False
    remeasure: bool = False
    portable_kernels: bool = False
    access: Access | None = None


def carry_out(request: RunRequest) -> RunResult:
    """Carry out `optimize run`: read and check the recipe, compare its needs with this machine, run
    it; return the result."""
    from optimizer import checks, pipeline
    from optimizer.commands.build import predictions, room
    from optimizer.commands.build.outcome import finish
    from optimizer.commands.release.publish import open_place
    from optimizer.foundation.process import portable_kernels
    from optimizer.recipe import file as recipe_file
    from optimizer.store import Store

    resolved, lines = checks.read(
        *(request.recipe, request.overrides), fetch=True, lock=request.lock, until=request.until
    )
    predicted: dict[str, float] = {}
    with recipe_file.locate_errors(lines):
        if not request.ignore_estimate:
            dry = Store(request.store, dry=True, until=request.until)
            pipeline.run(resolved, dry)
            steps = predictions.build_document(dry)
            room.check(steps, request.store, room.read_memory_limit())
            predicted = {step["key"]: step.get("seconds", 0.0) for step in steps}
        if resolved.compress.deterministic and not request.portable_kernels:
            _compute_portably(request, "qat" if resolved.qat else "compress")
        with portable_kernels.use_portable_kernels() if request.portable_kernels else nullcontext():
            return finish(
                resolved,
                request.store,
                request.artifacts,
                until=request.until,
                remeasure=request.remeasure,
                predicted=predicted,
                open_place=partial(open_place, access=request.access) if request.access else None,
            )


def _compute_portably(request: RunRequest, last: str) -> None:
    """Make the steps up to stage `last` in a child process with portable kernels; this process then
    finds them in the store. Raises the child's error."""
    from optimizer.harness.process.child import run_python
    from optimizer.store import STAGES

    until = min(request.until, last, key=STAGES.index)
    words = ["--json", "--portable-kernels", "run", str(request.recipe), "--ignore-estimate"]
    words += [word for override in request.overrides for word in ("--set", override)]
    words += [*options(request.store), "--artifacts", str(request.artifacts)]
    code = f"from optimizer.cli import main\nmain({[*words, '--until', until]!r})"
    done = run_python(code, Path.cwd(), show_errors=True)
    if done.returncode == 0:
        return
    try:
        document = json.loads(done.stdout)
        kind = {e.__name__: e for e in ERRORS}.get(document["error"], OptimizeError)
        error = kind(
            document["found"],
            where=document["where"],
            accepted=document["accepted"],
            fix=document["fix"],
        )
    except (ValueError, KeyError, TypeError):
        error = MachineError(
            f"the process with portable kernels ended with code {done.returncode}",
            where="compress.deterministic",
            fix="A negative code is a signal; -9 usually means too little memory. Finished steps "
            "are kept: run the same command again to resume.",
        )
    raise error
