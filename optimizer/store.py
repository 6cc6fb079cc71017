"""Finished work, found again by what it was made of.

A step's **key** is the hash of everything that can change its bytes: stage name and version,
the digest of the code it runs, its recipe section, the keys of its inputs, the digests of the
files it reads, and the versions of the packages it uses. Its folder is <root>/<stage>/<key>.
A measured step (timings) gives other bytes each time: what follows it is keyed by its content.

Laws (tested):
 1. A folder under its final name is complete: it is written beside, fsynced, then renamed, so a
    run killed at any instant leaves nothing that could be taken for done.
 2. Two runs on one store never compute one key twice: an exclusive lock per key.
 3. made_from.json inside says everything the key was made of, and lists every file with its
    size and sha256.
 4. A finished folder is used only if every file still has its recorded digest; else it is made
    again.
 5. A resumable stage finds its own partial folder again; every other starts from an empty one.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from optimizer.foundation.atomic import disk_errors_explained, lock, remove, replace, restore
from optimizer.foundation.errors import CheckpointError, MachineError, StoreError
from optimizer.foundation.process import freed_memory
from optimizer.foundation.progress import say
from optimizer.foundation.source_digest import source_digest
from optimizer.recipe.schema import Section

MADE_FROM = "made_from.json"
STAGES = (
    *("load", "latencies", "reduce", "recover", "compress", "qat", "export", "lower", "build"),
    *("validate", "package", "slo", "publish"),
)


Shapes = Mapping[str, tuple[int, ...]]  # of every tensor, from the checkpoint's headers


@dataclass(frozen=True)
class Estimate:
    """What a step is predicted to need: bytes of memory at the peak, bytes of disk, seconds."""

    memory: int = 0
    disk: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Stage:
    """One box of the flow.

    run(section, *input_folders, out) reads folders and writes one. `files(section)` gives the
    digests of what it reads besides its inputs (data sets, the source checkpoint); `packages`
    the distributions whose version can change its bytes. `shapes(section, *those of its inputs)`
    says the tensors of the model that it writes, where they are not its first input's;
    `estimate(section, shapes)` predicts what it will need, from its first input's shapes, or from
    its own where it has no input; `remark(section)` is what `optimize plan` says of that
    prediction. All read headers alone.
    """

    name: str
    version: int
    run: Callable[..., None]
    packages: tuple[str, ...] = ()
    files: Callable[[Any], Mapping[str, str]] | None = None
    estimate: Callable[[Any, Shapes], Estimate] | None = None
    shapes: Callable[..., Shapes] | None = None
    remark: Callable[[Any], str] | None = None
    resumable: bool = False
    measured: bool = False


@dataclass(frozen=True)
class Step:
    """A stage applied to a section and inputs. `path` exists once it is done.

    identity: what a step that reads this one is keyed by.
    """

    stage: str
    key: str
    path: Path
    measured: bool = False

    @property
    def identity(self) -> str:
        files = recorded_files(self.path) if self.measured else None
        return self.key if files is None else digest_json(files)

    @property
    def done(self) -> bool:
        return recorded_files(self.path) is not None


class Stopped(Exception):  # nothing went wrong
    """A step behind the last stage of `Store.until`."""


@dataclass
class Store:
    """A folder of finished steps. `log` records what happened, for the report and for --json.

    dry: only compute keys and say which steps would run (`optimize plan`); nothing is written.
    until: the stage after which no step is begun: `step` raises Stopped. stages: their order.
    again: names of stages to redo even when they are done (a measurement, say).
    recipe: name of the recipe that runs, noted in each folder made; it is not part of a key.
    """

    root: Path
    dry: bool = False
    again: frozenset[str] = frozenset()
    until: str | None = None
    stages: tuple[str, ...] = STAGES
    recipe: str = ""
    log: list[dict[str, Any]] = field(default_factory=list)
    _verified: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        with disk_errors_explained(self.root, "--store"):
            self.root = self.root.resolve()  # stages start processes of other working directories
            self.root.exists()

    def reaches(self, stage: str) -> bool:
        """Whether a stage of this name is not behind `until`."""
        return not self.until or self.stages.index(stage) <= self.stages.index(self.until)

    def step(self, stage: Stage, section: Section | None, *inputs: Step) -> Step:
        """Find or make the folder of stage.run(section, *inputs).

        Raises whatever the stage raises; MachineError when the disk is full or read-only; Stopped
        behind `until`.
        """
        if not self.reaches(stage.name):
            raise Stopped
        made_from = self._made_from(stage, section, inputs)
        key = digest_json(made_from)[:32]
        step = Step(stage.name, key, self.root / stage.name / key, stage.measured)
        if self.dry:
            self.log.append(
                {
                    "stage": stage.name,
                    "key": key,
                    "step": step,
                    "of": stage,
                    "section": section,
                    "inputs": inputs,
                    "made_from": made_from,
                }
            )
            return step
        started = time.monotonic()
        with disk_errors_explained(self.root, "--store"):
            _make_home(step.path.parent)
            with lock(step.path.with_suffix(".lock")):
                restore(step.path)
                reused = stage.name not in self.again and self._usable(step)
                if not reused:
                    self._make(stage, section, inputs, step, made_from)
        self._record(stage, step, "reused" if reused else "ran", time.monotonic() - started)
        say(
            f"{stage.name}: {'reused' if reused else 'done'} {step.key[:12]} "
            f"({time.monotonic() - started:.1f} s)"
        )
        return step

    def _make(
        self,
        stage: Stage,
        section: Section | None,
        inputs: tuple[Step, ...],
        step: Step,
        made_from: dict[str, Any],
    ) -> None:
        partial = step.path.with_suffix(".partial")
        if not (stage.resumable and partial.is_dir()):
            remove(partial)
        # What is measured again stays until it is replaced: another run may be reading it. A
        # resumable stage must not find it in its partial folder afterwards.
        if not step.done or stage.name not in self.again or stage.resumable:
            _discard(step.path)
        partial.mkdir(exist_ok=True)
        say(f"{stage.name}: running {step.key[:12]}")
        try:
            stage.run(section, *(i.path for i in inputs), out=partial)
            freed_memory.give_back()  # the next stage's peak is its own
        except SystemExit as e:  # nothing of ours ends the program inside a stage
            raise CheckpointError(
                f"code that the model brings ended the program (exit {e.code})",
                where=f"stage {stage.name}",
                fix="Read that code before model.trust_remote_code: true.",
            ) from e
        if [i.identity for i in inputs] != made_from["inputs"]:
            raise StoreError(
                "another run measured an input of this step again while it was read",
                where=str(step.path),
                fix="Run the same command again; finished steps are kept.",
            )
        document = {**made_from, "key": step.key, "files": listing(partial)}
        document["recipe"] = self.recipe
        (partial / MADE_FROM).write_text(json.dumps(document, indent=1, sort_keys=True))
        replace(partial, step.path)
        remove(partial)  # what was replaced

    def _usable(self, step: Step) -> bool:
        """Law 4. Each folder is read once per store object."""
        if step.path in self._verified:
            return True
        if not os.path.lexists(step.path):
            return False
        try:
            good = recorded_files(step.path) == listing(step.path)
        except OSError:  # a file that cannot be read
            good = False
        if good:
            self._verified.add(step.path)
        else:
            say(f"{step.stage}: {step.path} was damaged after it was finished; making it again")
        return good

    def _made_from(
        self, stage: Stage, section: Section | None, inputs: tuple[Step, ...]
    ) -> dict[str, Any]:
        return {
            "stage": stage.name,
            "stage_version": stage.version,
            "code": source_digest(stage.run.__module__),
            "section": section.model_dump(mode="json", by_alias=True) if section else None,
            "inputs": [i.identity for i in inputs],
            "reads": dict(stage.files(section)) if stage.files else {},
            "packages": {p: package_version(p) for p in stage.packages},
        }

    def _record(self, stage: Stage, step: Step, what: str, seconds: float) -> None:
        self.log.append(
            {
                "stage": stage.name,
                "key": step.key,
                "what": what,
                "seconds": round(seconds, 3),
                "path": str(step.path),
            }
        )


def package_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def digest_json(document: Any) -> str:
    """sha256 of the canonical JSON text."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_file(path: Path) -> str:
    """sha256 of a file, read in pieces."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def listing(folder: Path) -> dict[str, dict[str, Any]]:
    """{relative name: {size, sha256}} of every file below `folder`, sorted."""
    return {
        str(p.relative_to(folder)): {"size": p.stat().st_size, "sha256": digest_file(p)}
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != MADE_FROM
    }


def recorded_files(folder: Path) -> dict[str, Any] | None:
    """{relative name: {size, sha256}} that a finished folder's made_from.json lists; None where
    there is none, or none that can be read."""
    try:
        document = json.loads((folder / MADE_FROM).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    files = document.get("files") if isinstance(document, dict) else None
    return files if isinstance(files, dict) else None


def _make_home(folder: Path) -> None:
    """Raises MachineError where no folder can be made at all (/proc, a missing mount)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as e:
        raise MachineError(
            "no folder can be made here", where=str(folder), fix="Point --store elsewhere."
        ) from e


def _discard(folder: Path) -> None:
    """Remove a finished folder; renamed first, so that half of it is never under its name."""
    doomed = folder.with_suffix(".discarded")
    remove(doomed)
    if os.path.lexists(folder):
        os.rename(folder, doomed)
        remove(doomed)
