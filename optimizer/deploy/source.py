"""Read the bundle to deploy: its verified manifest and its contract."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import InputError
from optimizer.harness import tasks
from optimizer.harness.bundle.manifest import MANIFEST, read_manifest, refuse_damage
from optimizer.harness.contract import Contract
from optimizer.harness.runtimes.table import VLLM


@dataclass(frozen=True)
class BundleSource:
    """Bundle to deploy, in a local folder: its verified manifest and its contract."""

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
    def for_vllm(self) -> dict[str, Any] | None:
        """Manifest's entry of the engine that vLLM serves; None if the harness runs the deployed
        bundle."""
        engines = [e for e in self.manifest["engines"] if e["runtime"] == VLLM]
        return engines[0] if engines and self.manifest.get("runnable") is False else None

    @property
    def generates(self) -> bool:
        """True for a deployed bundle that generates text."""
        return tasks.look_up(self.contract).generates

    def copy(self, to: Path) -> None:
        """Copy the bundle beside the deployment's files: manifest.json, and only the files that it
        lists, into the folder `to`."""
        for name in (*sorted(self.files), MANIFEST):
            target = to / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.folder / name, target)


def read(folder: Path, needed: str) -> BundleSource:
    """Read the bundle to deploy from `folder`, after verifying its files.

    needed: file of the harness that the platform starts.
    Raises BundleError for a folder that is not a bundle; InputError for a bundle with a damaged
    file, without `needed`, or whose engines the harness does not run.
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
            f"its harness has no {needed}, which this platform starts",
            where=str(folder),
            fix="Package the model again with this version: optimize RECIPE.",
        )
    source = BundleSource(folder, manifest, contract)
    if manifest.get("runnable") is False and source.for_vllm is None:
        raise InputError(
            "the harness runs none of its engines", where=str(folder), accepted="runnable bundles"
        )
    return source
