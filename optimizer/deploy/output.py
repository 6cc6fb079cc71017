"""Write a deployment to its output folder atomically; an earlier deployment is replaced."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.foundation import atomic
from optimizer.foundation.errors import RecipeError
from optimizer.harness.process.temporary import make_private_folder

DEPLOYED = "deploy.json"
"""File that describes a deployment and marks its folder as ours."""


@dataclass(frozen=True)
class Output:
    """Files for one platform, and how to start the bundle with them.

    start: commands that start the deployment; OUT stands for the folder.
    server: Server.document; None for a platform that does not run the bundle's server (Triton)
    """

    start: Sequence[str]
    server: Mapping[str, Any] | None = None


def write_folder(out: Path, fill: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """Create the deployment's folder `out` with the files that `fill` writes, and return the
    document of DEPLOYED.

    fill: writes the files into a new folder and returns the document.
    Raises RecipeError, before any work, if `out` exists and is not a deployment; MachineError if
    the disk is full or not writable.
    """
    out = out.resolve()
    if out.exists() and not (out / DEPLOYED).is_file():
        raise RecipeError(
            f"it exists and has no {DEPLOYED}, so it was not written by this command",
            where=str(out),
            fix="Give --out another name, or remove the folder.",
        )
    with atomic.explain_disk_errors(out.parent, "--out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with make_private_folder(out.parent, ".optimize-deploy") as work:
            new = work / "new"
            new.mkdir()
            document = dict(fill(new))
            (new / DEPLOYED).write_text(json.dumps(document, indent=1) + "\n")
            atomic.replace(new, out)
    return document
