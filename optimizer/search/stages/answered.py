"""Stage `answered`: the float model's answers to the rows of an evaluation set, with which every
trial of a search is compared. Also the file in which answers are kept.

out/rows.npz, train.npz   arrays of Answers (validate/quality/quality.py), one per row; train.npz
                          for a probe; neither for text-generation
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.data.datasets import Sample, digest
from optimizer.harness import contract as contracts
from optimizer.recipe.schema import Validation
from optimizer.store import Stage
from optimizer.validate import reference_device
from optimizer.validate.quality import answers, evaluation
from optimizer.validate.quality.evaluation import FIRST
from optimizer.validate.quality.quality import Answers
from optimizer.validate.run_artifacts import RunArtifacts
from optimizer.validate.stage import one_torch_thread, read_data, specs

ROWS, TRAIN = "rows.npz", "train.npz"
ARRAYS = ("text", "pair", "words")
"""Fields of Answers that hold arrays."""


def run(section: Validation, base: Path, out: Path) -> None:
    """Answer the rows of validate.data, and of validate.train for a probe. base: folder of load"""
    m = RunArtifacts(section, base, base, base, base, base, scratch=out)
    rows, train = read_rows(section, base)
    reference_device.check(m)
    with one_torch_thread(), reference_device.used(m):
        reference = answers.reference(m, rows, train)
    if reference is None:
        return  # text-generation is judged window by window, on the logits of both systems
    write(reference[0], out / ROWS)
    if reference[1] is not None:
        write(reference[1][1], out / TRAIN)


def read_rows(section: Validation, base: Path) -> tuple[list[Sample], list[Sample] | None]:
    """Rows of validate.data with the model's label ids, and of validate.train."""
    contract = contracts.read(base / "contract.json")
    data = read_data(section, base, contract)
    rows = evaluation.sets(section.validate_, data, contract)[FIRST]
    return rows, data.get("validate.train")


def write(system: Answers, file: Path) -> None:
    """Write the answers of a system. A field without a value has no array."""
    arrays: dict[str, Any] = {}
    for name in ARRAYS:
        for i, value in enumerate(getattr(system, name) or ()):
            arrays[f"{name}.{i}"] = np.asarray(value)
    if system.spans is not None:
        arrays["spans"] = np.frombuffer(json.dumps(system.spans).encode(), np.uint8)
    np.savez(file, **arrays)


def read(file: Path) -> Answers:
    """Read answers that `write` wrote."""
    with np.load(file, allow_pickle=False) as arrays:
        spans = json.loads(arrays["spans"].tobytes()) if "spans" in arrays else None
        counts = {n: sum(key.startswith(f"{n}.") for key in arrays.files) for n in ARRAYS}
        fields = {
            n: tuple(arrays[f"{n}.{i}"] for i in range(count)) or None
            for n, count in counts.items()
        }
    return Answers(
        fields["text"] or (),
        fields["pair"],
        fields["words"],
        None if spans is None else tuple(spans),
    )


def files(section: Validation) -> dict[str, str]:
    """Digests of every data set."""
    return {name: digest(spec) for name, spec in specs(section).items()}


STAGE = Stage(
    "answered",
    1,
    run,
    packages=("torch", "transformers", "tokenizers", "numpy"),
    files=files,
)
