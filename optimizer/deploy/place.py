"""The folder that a deployment is written to: it appears whole, in place of an earlier one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from optimizer.foundation import atomic
from optimizer.foundation.errors import RecipeError
from optimizer.harness.process.temporary import private_folder

DEPLOYED = "deploy.json"
"""Says what a folder was made of, and that we made it."""


def write(out: Path, fill: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """What `fill` says of the new folder that it wrote into, and writes into DEPLOYED beside it.

    Raises RecipeError, before any work, where something has the name that is not such a folder;
    MachineError where the disk is full or may not be written.
    """
    out = out.resolve()
    if out.exists() and not (out / DEPLOYED).is_file():
        raise RecipeError(
            f"it is there already, and has no {DEPLOYED}: it was not written by this command",
            where=str(out),
            fix="Give --out another name, or remove it.",
        )
    with atomic.disk_errors_explained(out.parent, "--out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with private_folder(out.parent, ".optimize-deploy") as work:
            new = work / "new"
            new.mkdir()
            document = dict(fill(new))
            (new / DEPLOYED).write_text(json.dumps(document, indent=1) + "\n")
            atomic.replace(new, out)
    return document
