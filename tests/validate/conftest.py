"""Clean runs, one per scheme, made once."""

from __future__ import annotations

import fcntl
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeVar

import pytest

from optimizer.validate.ledger import hops, ledger
from optimizer.validate.materials import Materials
from tests.conftest import sentences
from tests.validate import decoder_runs as decoders
from tests.validate.runs import (
    SCHEMES,
    Run,
    balanced,
    for_tensorrt,
    label,
    lowered_again,
    make,
    prove,
    recipe,
)

SAME_GRAPH = (
    "token",
    "w8",
    "w4",
    "w4a8",
)  # nothing is folded into the float graph: one export serves all

Made = TypeVar("Made")


def make_once(folder: Path, name: str, make_in: Callable[[Path], Made]) -> Made:
    """make_in(folder) of the worker that asks first. The others wait for it and read it.

    folder: shared by all workers
    """
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = folder / f"{name}.pickle"
        if not file.exists():
            file.write_bytes(pickle.dumps(make_in(Path(mkdtemp(prefix=name, dir=folder)))))
        made: Made = pickle.loads(file.read_bytes())
        return made


@pytest.fixture(scope="session")
def runs(tiny_bert: Path, shared_folder: Path) -> dict[str, Run]:
    """{scheme: run} of the tiny encoder. Read-only: copy one before damaging it."""
    return make_once(shared_folder, "runs", lambda root: make_runs(tiny_bert, root))


def make_runs(tiny_bert: Path, root: Path) -> dict[str, Run]:
    made: dict[str, Run] = {}
    for name, quantize in SCHEMES.items():
        data = root / name / "data"
        data.mkdir(parents=True)
        wanted = recipe(str(tiny_bert), data, quantize, "sentence-embedding")
        exported = made["static"] if name in SAME_GRAPH else None
        made[name] = make(root / name, wanted, exported)
    return made


@pytest.fixture(scope="session")
def proven(
    runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Materials]:
    """scheme, or "tensorrt" for the static one in that dialect -> Materials that hold at every hop.

    Torch's results are computed once: see `damaged`.
    """

    @cache
    def proven_run(scheme: str) -> Materials:
        if scheme == "tensorrt":
            run = for_tensorrt(runs["static"], tmp_path_factory.mktemp(scheme))
            return prove(lowered_again(proven_run("static"), run), "lower")
        return prove(runs[scheme].materials())

    return proven_run


@pytest.fixture(scope="session")
def loaded(runs: dict[str, Run]) -> Callable[[str], Materials]:
    """scheme -> Materials whose source is proven: a copy with another state shares its model."""

    @cache
    def loaded_run(scheme: str) -> Materials:
        materials = runs[scheme].materials()
        assert ledger.run_hop(hops.load, materials).ok
        return materials

    return loaded_run


@pytest.fixture(scope="session")
def classifier_run(tiny_classifier: Path, shared_folder: Path) -> Run:
    """Run whose labels are the float model's answers, except every eighth."""
    return make_once(
        shared_folder, "classifier_run", lambda root: make_classifier(tiny_classifier, root)
    )


def make_classifier(tiny_classifier: Path, root: Path) -> Run:
    data, model = root / "data", root / "classifier"
    data.mkdir()
    wanted = recipe(str(model), data, SCHEMES["static"], "text-classification", metric="accuracy")
    labels = balanced(tiny_classifier, model, sentences(64, seed=2))
    label(data / "evaluate.jsonl", [k if i % 8 else 1 - k for i, k in enumerate(labels)])
    return make(root, wanted)


@pytest.fixture(scope="session")
def decoder_runs(tiny_llama: Path, shared_folder: Path) -> dict[str, Run]:
    """{scheme: run} of the tiny decoder; nothing is folded, so one export serves all."""
    return make_once(shared_folder, "decoder_runs", lambda root: make_decoders(tiny_llama, root))


def make_decoders(tiny_llama: Path, root: Path) -> dict[str, Run]:
    made: dict[str, Run] = {}
    for name, quantize in decoders.SCHEMES.items():
        data = root / name / "data"
        data.mkdir(parents=True)
        wanted = decoders.decoder_recipe(str(tiny_llama), data, quantize, name == "fused")
        first = next(iter(made.values()), None)
        made[name] = decoders.make_decoder(root / name, wanted, first)
    return made
