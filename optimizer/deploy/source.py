"""The bundle that is deployed: its manifest, verified, and its contract."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import InputError
from optimizer.harness import tasks
from optimizer.harness.bundle.manifest import MANIFEST, read_manifest, refuse_damage
from optimizer.harness.contract import Contract


@dataclass(frozen=True)
class Source:
    """A bundle. folder: where it lies now."""

    folder: Path
    manifest: dict[str, Any]
    contract: Contract

    @property
    def name(self) -> str:
        return str(self.manifest["name"])

    @property
    def version(self) -> str:
        return str(self.manifest["version"])

    @property
    def files(self) -> set[str]:
        return {*self.manifest["files"]}

    @property
    def generates(self) -> bool:
        """Whether it continues texts."""
        return tasks.of(self.contract).generates

    def copy(self, to: Path) -> None:
        """Its files and its manifest, and nothing that lies beside them."""
        for name in (*sorted(self.files), MANIFEST):
            target = to / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.folder / name, target)


def read(folder: Path, needed: str) -> Source:
    """needed: the file of the harness that the platform starts.

    Raises BundleError for what is no bundle; InputError for one that is damaged in any file, whose
    harness runs none of its engines, or that was packaged before the harness had the file.
    """
    manifest = read_manifest(folder)
    damaged = refuse_damage(folder, manifest)
    if damaged:
        raise InputError(
            f"damaged: {', '.join(sorted(damaged))}", where=str(folder), fix="Get the bundle again."
        )
    contract = Contract.from_json(manifest["contract"], MANIFEST)
    tasks.check(contract, MANIFEST)
    if needed not in manifest["files"]:
        raise InputError(
            f"its harness has no {needed}",
            where=str(folder),
            fix="Package the model again with this version: optimize RECIPE.",
        )
    if manifest.get("runnable") is False:
        raise InputError(
            "the harness runs none of its engines", where=str(folder), accepted="runnable bundles"
        )
    return Source(folder, manifest, contract)
