"""A bundle of the small model, made by the real build and package stages from hand-made folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from optimizer.data.datasets import read_samples
from optimizer.harness.bundle.manifest import digest, digest_content
from optimizer.lower import build
from optimizer.package import manifest as manifests
from optimizer.package import stage as package
from optimizer.recipe import file as recipe_file
from optimizer.recipe.schema import Recipe
from optimizer.store import Built
from optimizer.validate import judged, sense
from optimizer.validate.run_artifacts import RunArtifacts
from tests.conftest import write_tiny_recipe
from tests.harness import small_model
from tests.made_once import once

ORT = "{runtime: onnxruntime, device: cpu, threads: 1}"
RTX = (
    "{runtime: tensorrt-rtx, on_missing: defer, float: fp32, "
    "shapes: {batch: [1, 2, 4], sequence: [4, 16, 32]}}"
)


def recipe(folder: Path, targets: tuple[str, ...] = (ORT,), activations: bool = True) -> Recipe:
    """The tiny recipe with these targets; the model it names is not read here."""
    file = write_tiny_recipe(folder, folder / "model")
    lines = file.read_text().splitlines(keepends=True)
    kept = [line for line in lines if activations or not line.startswith("  activations:")]
    head, tail = "".join(kept).split("targets:\n", 1)
    tail = tail[tail.index("validate:") :]
    lines = "".join(f"  - {t}\n" for t in targets)
    file.write_text(f"{head}targets:\n{lines}{tail}")
    return recipe_file.read(file)


def source(folder: Path) -> Path:
    """Write the folder of the load stage."""
    small_model.tokenizer(folder / "checkpoint")
    (folder / "checkpoint" / "LICENSE").write_text("Do what you like.\n")
    (folder / "contract.json").write_text(json.dumps(small_model.contract()))
    origin = {"source": "made here", "revision": None, "licence": "apache-2.0", "files": {}}
    (folder / "source.json").write_text(json.dumps(origin))
    return folder


def sensed(asked: Recipe, source: Path) -> dict[str, Any]:
    """Return the section `sense` of a report: figures of the texts and the tokenizer."""
    data = {"validate.data": read_samples(asked.validate_.data)}
    return sense.measure_inputs(asked.validation(asked.targets[0]), source, data)


def judge(asked: Recipe, folders: Sequence[Path], *, answered: bool = False) -> None:
    """Write into the reports what the validate stage says was judged. folders: as `steps` has them.
    answered: with rows, which packaging answers again."""
    source, state, *rest = folders
    for i, target in enumerate(asked.targets):
        model, engine, report = rest[3 * i : 3 * i + 3]
        run = RunArtifacts(asked.validation(target), source, state, source, model, engine)
        record = {**judged.files(run), "answered_by": None, "answers": {"rows": 0, "why": "made"}}
        if answered:
            record = judged.record(run, read_samples(asked.validate_.data), None, report)
        document = json.loads((report / "report.json").read_text())
        (report / "report.json").write_text(json.dumps({**document, "judged": record}))


def steps(folder: Path, asked: Recipe) -> list[Path]:
    """The folders that the package stage takes, source and state first."""
    state = folder / "state"
    state.mkdir(parents=True)
    made = [source(folder / "source"), state]
    for i, target in enumerate(asked.targets):
        dialect = "ort_qdq" if target.runtime == "onnxruntime" else "trt_qdq"
        model = small_model.lowered(folder / f"lower{i}", dialect)
        engine, report = folder / f"build{i}", folder / f"validate{i}"
        engine.mkdir()
        report.mkdir()
        build.run(target, model, out=engine)
        name = f"{target.runtime}-{target.device}"
        document: dict[str, Any] = {
            "target": name,
            "verdict": "pass",
            "gates": [],
            "ledger": [],
            "modules": [],
        }
        document["sense"] = sensed(asked, made[0])
        (report / "report.json").write_text(json.dumps(document))
        made += [model, engine, report]
    judge(asked, made)
    return made


def inputs(asked: Recipe, folders: Sequence[Path]) -> tuple[Path, Path, tuple[Built[Path], ...]]:
    """The package stage's inputs. folders: as `steps` has them, of the first targets."""
    source, state, *rest = folders
    count = len(rest) // 3
    built = (Built(asked.targets[i], *rest[3 * i : 3 * i + 3]) for i in range(count))
    return source, state, tuple(built)


def edited(bundle: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The bundle with its manifest changed, and the digests made to match."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(manifest)
    with suppress(KeyError, TypeError):
        manifest["content_digest"] = digest_content(manifest["contract"], manifest["files"])
    manifest["digest"] = digest(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    return bundle


def make(folder: Path, targets: tuple[str, ...] = (ORT,)) -> Path:
    """The package stage's output folder: bundle/ and the tar. Its inputs are in `folder`/steps."""
    if targets == (ORT,):
        _package_once(folder)
    else:  # some tests change how the engines of other targets are built
        _package(folder, targets)
    return folder / "package"


@once
def _package_once(folder: Path) -> None:
    _package(folder, (ORT,))


def _package(folder: Path, targets: tuple[str, ...]) -> None:
    asked = recipe(folder / "recipe", targets)
    (folder / "package").mkdir()
    taken = inputs(asked, steps(folder / "steps", asked))
    package.run(asked.packaging, *taken, out=folder / "package")


STAYING = ("__init__.py", "__main__.py")  # one or two of each folder


def lean(bundle: Path, folder: Path) -> Path:
    """Copy a bundle without most of its 217 sources, for tests that do not run them."""
    shutil.copytree(bundle, folder)
    for source in (folder / "harness").rglob("*.py"):
        if source.name not in STAYING:
            source.unlink()
    manifests.write(folder, json.loads((folder / "manifest.json").read_bytes()))
    return folder


def python(bundle: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The interpreter in a bundle's folder, as a receiver starts it: without our path."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=bundle, env=environment, capture_output=True, text=True)
