"""Store of finished steps, keyed by everything that can change their bytes.

A step's **key** is the hash of its stage's name and version, the digest of the code it runs, its
recipe section, the keys of its inputs, the digests of the files it reads, and the versions of the
packages it uses. Its folder is <root>/<stage>/<key>. A measured step (timings) writes other bytes
each time; steps that read it are keyed by its content.

Laws (tested):
 1. A folder under its final name is complete: it is written under another name, fsynced, then
    renamed, so a run killed at any instant leaves no folder that looks finished.
 2. Two runs on one store never compute one key at once: there is an exclusive lock per key.
 3. made_from.json in the folder records everything that the key was made of, and lists every file
    with its size and sha256.
 4. A finished folder is reused only if every file has its recorded digest; else it is made again.
 5. A resumable stage continues in its partial folder; every other starts with an empty one.

With a bucket as its root, the folder is that of this machine, whose steps are those of the bucket
(shared_store.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from dataclasses import replace as replaced
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any, Generic, TypeVar

from optimizer.foundation.atomic import explain_disk_errors, lock, remove, replace, restore
from optimizer.foundation.errors import CheckpointError, MachineError, StoreError
from optimizer.foundation.process import freed_memory
from optimizer.foundation.progress import overdue, say
from optimizer.foundation.source_digest import digest_sources
from optimizer.recipe.schema import Section, TargetSection
from optimizer.shared_store import Root, SharedStep, SharedStore, folder_of, folder_option

MADE_FROM = "made_from.json"
STAGES = (
    *("load", "latencies", "reduce", "recover", "compress", "qat", "export", "lower", "build"),
    *("validate", "package", "slo", "publish"),
)


Shapes = Mapping[str, tuple[int, ...]]  # {tensor: shape}, from the checkpoint's headers
NARROWEST = 32
"""Assumed size of an attention head, which headers lack; larger heads need less than predicted."""


class CompressedShapes(dict[str, tuple[int, ...]]):
    """Shapes of a compressed model's tensors, {tensor: shape}, predicted before compress runs.

    integers: {weight that compress stores as integers: (shape, bytes per value, scales included)}.
        The integers of a head tied to the embedding are under "head": a checkpoint has no tensor
        for them
    before: shapes of the model before compress
    """

    def __init__(
        self, shapes: Shapes, integers: Mapping[str, tuple[tuple[int, ...], float]]
    ) -> None:
        super().__init__(shapes)
        self.integers, self.before = dict(integers), shapes


def lowered_bytes(shapes: Shapes, width: int) -> int:
    """Predict the bytes of the weights in a lowered file. width: bytes of a float value"""
    integers = shapes.integers if isinstance(shapes, CompressedShapes) else {}
    floats = sum(prod(shape) for name, shape in shapes.items() if name not in integers)
    return width * floats + round(sum(prod(s) * each for s, each in integers.values()))


@dataclass(frozen=True)
class Estimate:
    """Predicted needs of a step, for `optimize plan`: peak memory in bytes, disk in bytes, seconds,
    bytes of GPU memory (0 for a step on the CPU), and a comment."""

    memory: int = 0
    disk: int = 0
    seconds: float = 0.0
    device_memory: int = 0
    comment: str = ""


@dataclass(frozen=True)
class Stage:
    """Stage of the pipeline. `files`, `estimate`, `shapes` and `remark` read only headers of files.

    run: (section, *inputs, out), reads the folders of its inputs and writes the folder `out`
    packages: distributions whose version can change the output
    files: (section) -> {name: digest} of files read besides the inputs (data sets, checkpoint)
    estimate: (section, shapes of an input that compress wrote, else of the first, or of the output
        without inputs) -> needs
    shapes: (section, *shapes of the inputs) -> shapes of the model that it writes; default: those
        of `estimate`
    remark: (section) -> comment on the estimate in `optimize plan`
    resumable: True where it continues from its partial folder
    measured: True where its output differs from run to run
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
    """Stage applied to a section and inputs. Its folder, `path`, exists once it is done.

    unfetched: {relative name: {size, sha256}} of files that only the bucket has; used in a dry
        store
    """

    stage: str
    key: str
    path: Path
    measured: bool = False
    unfetched: Mapping[str, Any] | None = field(default=None, compare=False)

    @property
    def identity(self) -> str:
        """Digest that represents this step in the keys of later steps: its key or, if measured, its
        content's."""
        files = (self.unfetched or recorded_files(self.path)) if self.measured else None
        return self.key if files is None else digest_json(files)

    @property
    def done(self) -> bool:
        """True where the step's folder is complete on this machine."""
        return self.unfetched is None and recorded_files(self.path) is not None


T = TypeVar("T")


@dataclass(frozen=True)
class Artifacts(Generic[T]):
    """Steps (to a stage: folders) of one target, up to its engine.

    base: checkpoint from the last of load, reduce, recover and qat
    state: compressed state from compress, or qat
    graph: float graph from export; `base` for a target without a graph
    model, engine: results of lower and build
    """

    base: T
    state: T
    graph: T
    model: T
    engine: T


@dataclass(frozen=True)
class Reference(Generic[T]):
    """Steps (to a stage: folders) of the model that a candidate is judged against, where
    `Artifacts.base` is another model.

    checkpoint: result of load
    graph: float graph of `checkpoint`
    smaller: result of reduce; without it `checkpoint`
    untrained: checkpoint before qat
    latencies: result of latencies where a latency gain is measured on this target, or None
    """

    checkpoint: T
    graph: T
    smaller: T
    untrained: T
    latencies: T | None = None


@dataclass(frozen=True)
class Built(Generic[T]):
    """Steps (to a stage: folders) of one finished target: those of lower, build and validate."""

    target: TargetSection
    model: T
    engine: T
    report: T


@dataclass(frozen=True)
class LabelModelSteps(Generic[T]):
    """Steps (to a stage: folders) of the model that reads the labels of requests for images: those
    of load and export."""

    checkpoint: T
    graph: T


Input = Any
"""Input of a stage: a Step, None, one of the records above, or a tuple of such inputs."""


def steps_of(value: Input) -> tuple[Step, ...]:
    """Return every step in an input of a stage, in order."""
    if isinstance(value, Step):
        return (value,)
    if is_dataclass(value):
        value = tuple(vars(value).values())
    return tuple(s for x in value for s in steps_of(x)) if isinstance(value, tuple) else ()


def folders_of(value: Input) -> Any:
    """Return an input of a stage with every step replaced by its folder."""
    if isinstance(value, Step):
        return value.path
    if isinstance(value, tuple):
        return tuple(map(folders_of, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replaced(value, **{name: folders_of(part) for name, part in vars(value).items()})
    return value


class Stopped(Exception):  # not an error
    """Raised for a step of a stage after `Store.until`."""


@dataclass
class Store:
    """Folder of finished steps, alone or with a bucket.

    dry: True computes keys and logs which steps would run (`optimize plan`), and writes nothing
    again: names of stages to run even where they are finished, such as a measurement
    until: last stage; `step` raises Stopped for a later one
    stages: names of the stages, in order
    recipe: name of the recipe, recorded in each folder; not part of a key
    predicted: {key of a step: seconds that it is predicted to take}
    log: steps in order, for the report and --json
    folder: folder of the steps on this machine
    """

    root: Root
    dry: bool = False
    again: frozenset[str] = frozenset()
    until: str | None = None
    stages: tuple[str, ...] = STAGES
    recipe: str = ""
    predicted: Mapping[str, float] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)
    folder: Path = field(init=False)
    _verified: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        folder = folder_of(self.root)
        with explain_disk_errors(folder, folder_option(self.root)):
            self.folder = folder.resolve()  # stages start processes in other working directories
            self.folder.exists()

    @property
    def bucket(self) -> SharedStore | None:
        """Bucket that has the steps of all machines."""
        return None if isinstance(self.root, Path) else self.root

    def reaches(self, stage: str) -> bool:
        """Return True where a stage is not after `until`."""
        return not self.until or self.stages.index(stage) <= self.stages.index(self.until)

    def step(self, stage: Stage, section: Section | None, *inputs: Input) -> Step:
        """Return the step of a stage: reused, or made by stage.run(section, *inputs), where each
        input that is a step is given as its folder. A dry store only adds the step to its log.

        Raises the errors of the stage, MachineError for a full or read-only disk, and Stopped for a
        stage after the store's `until`.
        """
        if not self.reaches(stage.name):
            raise Stopped
        steps = steps_of(inputs)
        made_from = self._made_from(stage, section, steps)
        key = digest_json(made_from)[:32]
        step = Step(stage.name, key, self.folder / stage.name / key, stage.measured)
        if self.dry:
            there = self.bucket.find(stage.name, key) if self.bucket else None
            if there and there.files not in (None, recorded_files(step.path)):
                step = replaced(step, unfetched=there.files)
            self.log.append(
                {
                    "stage": stage.name,
                    "key": key,
                    "step": step,
                    "of": stage,
                    "section": section,
                    "inputs": steps,
                    "made_from": made_from,
                }
            )
            return step
        started = time.monotonic()
        with explain_disk_errors(self.folder, folder_option(self.root)):
            _make_home(step.path.parent, folder_option(self.root))
            with lock(step.path.with_suffix(".lock")):
                restore(step.path)
                there = self.bucket.find(stage.name, key) if self.bucket else None
                what = self._find(stage, step, there)
                if what == "ran":
                    self._make(stage, section, inputs, step, made_from)
                same = there is not None and there.files == recorded_files(step.path)
                if self.bucket and (what == "ran" or not same):
                    self._share(self.bucket, step, there)
        self._record(stage, step, what, time.monotonic() - started)
        say(
            f"{stage.name}: {'done' if what == 'ran' else what} {step.key[:12]} "
            f"({time.monotonic() - started:.1f} s)"
        )
        return step

    def _find(self, stage: Stage, step: Step, there: SharedStep | None) -> str:
        """Return "reused" for a step in the folder, "fetched" for one only in the bucket, and "ran"
        for one that has to be made. If both have the step, the bucket's is used."""
        if stage.name in self.again:
            return "ran"
        if there is not None and there.files is not None:
            if there.files == recorded_files(step.path) and self._usable(step):
                return "reused"
            if self._fetch(step, there):
                return "fetched"
            say(f"{stage.name}: the step is damaged in the bucket; it is replaced")
        return "reused" if self._usable(step) else "ran"

    def _fetch(self, step: Step, there: SharedStep) -> bool:
        """Copy a step from the bucket to its folder; return False where it is damaged."""
        assert self.bucket is not None
        partial = step.path.with_suffix(".fetching")
        remove(partial)
        partial.mkdir()
        good = self.bucket.fetch(there, partial)
        if good:
            (partial / MADE_FROM).write_bytes(there.data)
            replace(partial, step.path)
            self._verified.add(step.path)
        remove(partial)
        return good

    def _share(self, bucket: SharedStore, step: Step, there: SharedStep | None) -> None:
        """Send a step to the bucket, in place of `there` (None: the bucket lacks it). If another
        machine sent the step meanwhile, its files replace those here: all machines continue from
        the same bytes."""
        data, version = (step.path / MADE_FROM).read_bytes(), there.version if there else None
        if bucket.send(step.stage, step.key, step.path, data, version):
            return
        there = bucket.find(step.stage, step.key)
        same = there is not None and there.files == recorded_files(step.path)
        if not same and (there is None or there.files is None or not self._fetch(step, there)):
            raise StoreError(
                "another machine sent this step meanwhile, and its files cannot be read",
                where=f"{bucket.address}: {step.stage} {step.key}",
                fix="Run the same command again; finished steps are kept.",
            )

    def _make(
        self,
        stage: Stage,
        section: Section | None,
        inputs: tuple[Input, ...],
        step: Step,
        made_from: dict[str, Any],
    ) -> None:
        partial = step.path.with_suffix(".partial")
        # A run that was killed may have left there the finished folder that it replaced.
        if not (stage.resumable and partial.is_dir()) or (partial / MADE_FROM).is_file():
            _discard(partial)
        # A measurement stays until the new one replaces it: another run may be reading it.
        if not step.done or stage.name not in self.again:
            _discard(step.path)
        partial.mkdir(exist_ok=True)
        say(f"{stage.name}: running {step.key[:12]}")
        try:
            with overdue(stage.name, self.predicted.get(step.key, 0.0)):
                stage.run(section, *folders_of(inputs), out=partial)
            freed_memory.give_back()  # so that the next stage's peak excludes this memory
        except SystemExit as e:  # our code never exits inside a stage
            raise CheckpointError(
                f"the model's own code ended the program (exit {e.code})",
                where=f"stage {stage.name}",
                fix="Read that code before you set model.trust_remote_code: true.",
            ) from e
        if [i.identity for i in steps_of(inputs)] != made_from["inputs"]:
            raise StoreError(
                "another run replaced an input of this step while it was read",
                where=str(step.path),
                fix="Run the same command again; finished steps are reused.",
            )
        document = {**made_from, "key": step.key, "files": listing(partial)}
        document["recipe"] = self.recipe
        (partial / MADE_FROM).write_text(json.dumps(document, indent=1, sort_keys=True))
        replace(partial, step.path)
        _discard(partial)  # the replaced folder

    def _usable(self, step: Step) -> bool:
        """Return True where every file of a step has its recorded digest; each step is read once
        per store object."""
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
            "code": digest_sources(stage.run.__module__),
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
    """Return the installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def digest_json(document: Any) -> str:
    """Return the sha256 of a document's canonical JSON text."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_file(path: Path) -> str:
    """Return the sha256 of a file, read in blocks."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def listing(folder: Path) -> dict[str, dict[str, Any]]:
    """Return {relative name: {size, sha256}} of every file but MADE_FROM below `folder`, sorted."""
    return {
        str(p.relative_to(folder)): {"size": p.stat().st_size, "sha256": digest_file(p)}
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name != MADE_FROM
    }


def recorded_files(folder: Path) -> dict[str, Any] | None:
    """Return {relative name: {size, sha256}} from a finished folder's made_from.json; None where it
    is missing or unreadable."""
    try:
        document = json.loads((folder / MADE_FROM).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    files = document.get("files") if isinstance(document, dict) else None
    return files if isinstance(files, dict) else None


def _make_home(folder: Path, option: str) -> None:
    """Create a folder. Raises MachineError where this is impossible (/proc, a missing mount)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as e:
        raise MachineError(
            "no folder can be created here", where=str(folder), fix=f"Point {option} elsewhere."
        ) from e


def _discard(folder: Path) -> None:
    """Remove a finished folder. It is renamed first, because a resumable stage would continue in a
    folder that was removed by half."""
    doomed = folder.with_suffix(".discarded")
    remove(doomed)
    if os.path.lexists(folder):
        os.rename(folder, doomed)
        remove(doomed)
