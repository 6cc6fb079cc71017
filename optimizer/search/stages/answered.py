"""Stage `answered`: the float model's answers to the rows of an evaluation set, with which every
trial of a search is compared. Also the file in which answers are kept.

out/rows.npz, train.npz   arrays of Answers (validate/quality/quality.py), one per row; train.npz
                          for a probe; neither for text-generation
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from optimizer.data.datasets import Sample, digest_rows
from optimizer.harness import contract as contracts
from optimizer.recipe.schema import Validation
from optimizer.store import Stage
from optimizer.validate import reference_device
from optimizer.validate.data import list_specs, read_data
from optimizer.validate.quality import answers, evaluation
from optimizer.validate.quality.evaluation import FIRST
from optimizer.validate.quality.images.observed import METRICS
from optimizer.validate.quality.quality import Answers
from optimizer.validate.run_artifacts import RunArtifacts
from optimizer.validate.stage import use_one_torch_thread

ROWS, TRAIN = "rows.npz", "train.npz"
ARRAYS = ("text", "pair", "words")
"""Fields of Answers that hold arrays."""
OBSERVATIONS = {kind.__name__: kind for kind, _ in METRICS}


def run(section: Validation, base: Path, out: Path) -> None:
    """Answer with the float model the rows by which a search judges candidates: those of
    validate.data, and of validate.train for a probe. base: folder of load"""
    m = RunArtifacts(section, base, base, base, base, base, scratch=out)
    rows, train = read_rows(section, base)
    reference_device.check(m)
    with use_one_torch_thread(), reference_device.use_device(m):
        reference = answers.answer_by_reference(m, rows, train)
    if reference is None:
        return  # text-generation is judged window by window, on the logits of both systems
    write(reference[0], out / ROWS)
    if reference[1] is not None:
        write(reference[1][1], out / TRAIN)


def read_rows(section: Validation, base: Path) -> tuple[list[Sample], list[Sample] | None]:
    """Return a search's rows of validate.data, with the model's label ids, and those of
    validate.train.

    base: folder of load. The second is None for a recipe without validate.train.
    """
    contract = contracts.read(base / "contract.json")
    data = read_data(section, base, contract)
    rows = evaluation.read_sets(section.validate_, data, contract)[FIRST]
    return rows, data.get("validate.train")


def read_baseline(folder: Path, every: Sequence[Sample], rows: Sequence[Sample]) -> Answers:
    """Read the float model's answers to some rows of a search.

    folder: folder of this stage
    every: all rows, as `read_rows` returned them
    rows: those of them to which answers are returned
    """
    place = {id(row): i for i, row in enumerate(every)}
    return read(folder / ROWS).of_rows([place[id(row)] for row in rows])


def probe_rows(folder: Path, train: Sequence[Sample] | None) -> answers.Train | None:
    """Return the training rows and the float model's answers to them, to which the classifier of
    metric probe_accuracy is fitted; None where the search has another metric.

    folder: folder of this stage
    train: rows of validate.train, as `read_rows` returned them
    """
    file = folder / TRAIN
    return (train, read(file)) if train is not None and file.exists() else None


def write(system: Answers, file: Path) -> None:
    """Write to a file the answers of a system in a search. A field without a value has no array."""
    arrays: dict[str, Any] = {}
    for name in ARRAYS:
        for i, value in enumerate(getattr(system, name) or ()):
            arrays[f"{name}.{i}"] = np.asarray(value)
    for i, observation in enumerate(system.seen or ()):
        arrays |= {f"seen.{i}.{name}": value for name, value in _fields(observation).items()}
    others = {
        "spans": system.spans,
        "dot": system.dot,
        "sizes": system.sizes,
        "seen": [type(observation).__name__ for observation in system.seen or ()],
    }
    arrays["others"] = np.frombuffer(json.dumps(others).encode(), np.uint8)
    np.savez(file, **arrays)


def read(file: Path) -> Answers:
    """Read a system's answers in a search, which `write` wrote."""
    with np.load(file, allow_pickle=False) as stored:
        arrays = dict(stored)
    others = json.loads(arrays.pop("others").tobytes())
    counts = {n: sum(key.startswith(f"{n}.") for key in arrays) for n in ARRAYS}
    fields = {
        n: tuple(arrays[f"{n}.{i}"] for i in range(count)) or None for n, count in counts.items()
    }
    kinds = [OBSERVATIONS[name] for name in others["seen"]]
    seen = (_observation(kind, arrays, f"seen.{i}") for i, kind in enumerate(kinds))
    return Answers(
        fields["text"] or (),
        fields["pair"],
        fields["words"],
        None if others["spans"] is None else tuple(others["spans"]),
        others["dot"],
        tuple(others["sizes"]),
        tuple(seen) or None,
    )


def _fields(record: Any) -> dict[str, Any]:
    """Return {name: array or number} of the fields of a record of answers.

    A field that is itself a record gives an entry "field.inner" per field of it; None gives none.
    """
    arrays: dict[str, Any] = {}
    for name, value in vars(record).items():
        if is_dataclass(value):
            arrays |= {f"{name}.{inner}": array for inner, array in _fields(value).items()}
        elif value is not None:
            arrays[name] = np.asarray(value)
    return arrays


def _observation(kind: Any, arrays: Mapping[str, Any], place: str) -> Any:
    """Read an answer: the record of type `kind` whose `_fields` are in `arrays` below `place`."""
    values = {}
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            values[name] = _observation(hint, arrays, f"{place}.{name}")
            continue
        array = arrays.get(f"{place}.{name}")
        values[name] = array.item() if array is not None and array.ndim == 0 else array
    return kind(**values)


def files(section: Validation) -> dict[str, str]:
    """Return, for the key of this stage of a search, the digests of the rows of every data set,
    {name: sha256}."""
    return {name: digest_rows(spec) for name, spec in list_specs(section).items()}


STAGE = Stage(
    "answered",
    2,
    run,
    packages=("torch", "transformers", "tokenizers", "numpy"),
    files=files,
)
