"""An ONNX file as a target's runtime runs it: opened by the table that serves a bundle, with the
target's own precision, properties and threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

from optimizer import targets
from optimizer.foundation.references import resolve
from optimizer.harness.bundle.engines import Workshop
from optimizer.harness.contract import Contract
from optimizer.harness.runtimes.machine import this_machine
from optimizer.harness.runtimes.runner import Runner
from optimizer.recipe.schema import TargetSection
from optimizer.validate.run_artifacts import RunArtifacts


def opened(
    section: TargetSection,
    model: Path,
    contract: Contract | None = None,
    threads: int | None = None,
) -> Runner:
    """model: an ONNX file. threads: those of the section when None. Nothing compiled by another run
    is used or kept. Raises harness.errors.MachineError, BundleError."""
    shop = Workshop(model.parent, {"files": {}}, this_machine(), None, contract=contract)
    chosen = section.intra_op_threads if threads is None else threads
    return shop.open(entry(section, model), "load", chosen)


def entry(section: TargetSection, model: Path) -> dict[str, Any]:
    """The file as a manifest lists it, intact."""
    target = targets.of(section.runtime)
    return {
        "target": section.name,
        "runtime": section.runtime,
        "device": section.device,
        "provider": section.execution_provider,
        "model": str(model.resolve()),
        "model_files": [],
        "engine": None,
        "deferred": False,
        "fit": resolve(target.fit)(section) if target.fit else {},
    }


def float_forms(section: TargetSection) -> dict[str, TargetSection]:
    """{name in reports: section} of what the target's own runtime offers in float here."""
    floats = targets.of(section.runtime).floats
    forms: dict[str, TargetSection] = (
        resolve(floats)(section) if floats else {f"{section.runtime}-float": section}
    )
    return forms


def pieces(m: RunArtifacts) -> Callable[[Path], AbstractContextManager[Runner]]:
    """Opens pieces of the lowered graph in the target's kernels, on one thread, what is float in
    float32: integers of a coarser type cannot be told from its rounding."""
    section = m.section.target
    if section.computes_in != section.float_type:
        section = section.model_copy(update={"float": section.float_type})

    @contextmanager
    def open_piece(model: Path) -> Iterator[Runner]:
        with closing(opened(section, model, threads=1)) as runner:
            yield runner

    return open_piece
