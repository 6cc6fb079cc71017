"""Calibration batches, from the recipe's data and from generated text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimizer.compress.data.own_text import generate
from optimizer.compress.walk.capture import Batch
from optimizer.compress.walk.model_source import ModelSource
from optimizer.foundation.errors import DataError, RecipeError
from optimizer.foundation.progress import say
from optimizer.recipe.schema import Calibrate, Compression, Reduction


def make_batches(section: Compression | Reduction, source: Path) -> list[Batch]:
    """Make calibration batches, [] without section.calibrate: full windows for a decoder; else
    inputs of similar size together, to save padding. source: folder of load"""
    from optimizer.data import datasets
    from optimizer.harness import contract as contracts
    from optimizer.harness import tasks

    calibrate = section.calibrate
    if calibrate is None:
        return []
    contract = contracts.read(source / "contract.json")
    task = tasks.look_up(contract)
    if task.calibration_items == "windows":
        batch_size, windows = calibrate.batch_size, _windows(calibrate, source)
        _check_enough(len(windows), section)
        windows = windows[: calibrate.samples]
        return [
            _window_batch(windows[i : i + batch_size]) for i in range(0, len(windows), batch_size)
        ]
    encoder = task.inputs.open(source / "checkpoint", contract)
    rows = datasets.read_calibration_rows(calibrate, task)
    if not rows:
        raise DataError("no calibration sample", where="calibrate.data")
    rows = datasets.sort_by_size(rows, task)
    arrays = datasets.encode_batches(
        rows, contract, encoder, calibrate.batch_size, calibrate.sequence_length
    )
    return [{k: torch.from_numpy(v) for k, v in batch.items()} for batch in arrays]


def make_tuning_batches(section: Compression, source: Path) -> list[Batch]:
    """Make batches of one window each for the method that tunes the whole model: windows of
    calibrate.data after the first calibrate.samples; [] where its options ask for none."""
    calibrate, tuning = section.calibrate, section.quantize.model_tuning
    if calibrate is None or tuning is None or not tuning.samples:
        return []
    windows = _windows(calibrate, source)[calibrate.samples :][: tuning.samples]
    return [_window_batch([window]) for window in windows]


def _windows(calibrate: Calibrate, source: Path) -> list[Any]:
    """List all windows of calibrate.sequence_length token ids that calibrate.data fills."""
    from optimizer.data import datasets
    from optimizer.harness import contract as contracts
    from optimizer.harness import tasks

    contract = contracts.read(source / "contract.json")
    task = tasks.look_up(contract)
    rows = datasets.read_calibration_rows(calibrate, task)
    if not rows:
        raise DataError("no calibration sample", where="calibrate.data")
    encoder = task.inputs.open(source / "checkpoint", contract)
    return datasets.cut_windows(rows, encoder, contract, calibrate.sequence_length)


def check_enough(section: Compression | Reduction, source: Path) -> None:
    """Raise DataError for texts that fill fewer windows than make_batches needs.

    source: folder with contract.json and the checkpoint's tokenizer
    """
    from optimizer.harness import contract as contracts
    from optimizer.harness import tasks

    task = tasks.look_up(contracts.read(source / "contract.json"))
    if section.calibrate is not None and task.calibration_items == "windows":
        _check_enough(len(_windows(section.calibrate, source)), section)


def _check_enough(windows: int, section: Compression | Reduction) -> None:
    """Check before compress or reduce walks over them: raise DataError where `windows`, the number
    of calibration windows, is less than calibration and tuning need."""
    calibrate = section.calibrate
    assert calibrate is not None
    tuning = section.quantize.model_tuning if isinstance(section, Compression) else None
    more, sequence_length = tuning.samples if tuning else 0, calibrate.sequence_length
    if windows >= calibrate.samples + more:
        return
    if windows < calibrate.samples:
        where, left, needed = "calibrate.samples", windows, str(calibrate.samples)
    else:
        assert isinstance(section, Compression)
        name = section.quantize.of_kind("model-tuning")[0].name
        where, left = f"quantize.{name}.samples", windows - calibrate.samples
        needed = f"{calibrate.samples} + {more}"
    raise DataError(
        f"the text fills {windows} of {needed} windows of {sequence_length} tokens",
        where=where,
        fix=f"Give more text, or set samples: {left}.",
    )


def _window_batch(windows: Iterable[Any]) -> Batch:
    """Stack token ids of calibration windows of one length to a batch without padding."""
    ids = torch.stack([torch.as_tensor(w, dtype=torch.int64) for w in windows])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@dataclass(frozen=True)
class Windows:
    """Calibration batches by which the whole model is tuned, and held-out batches of one window
    each."""

    train: Sequence[Batch]
    held_out: Sequence[Batch]


def split(batches: Sequence[Batch], held_out: int, where: str) -> Windows:
    """Hold out the last `held_out` calibration windows from tuning. Raises RecipeError when no
    others would remain.

    where: place of held_out in the recipe
    """
    total = sum(map(_size, batches))
    if total <= held_out:
        raise RecipeError(
            f"{held_out} of {total} windows of text are to be held out, which leaves none",
            where=where,
            fix="Calibrate on more text, or hold out less.",
        )
    train: list[Batch] = []
    left = total - held_out
    for batch in batches:
        if left > 0:
            train.append({name: t[:left] for name, t in batch.items()})
        left -= _size(batch)
    return Windows(train, split_batches(batches)[-held_out:])


def split_batches(batches: Sequence[Batch]) -> list[Batch]:
    """Split calibration batches into batches of one window."""
    return [
        {name: t[i : i + 1] for name, t in batch.items()}
        for batch in batches
        for i in range(_size(batch))
    ]


def _size(batch: Batch) -> int:
    """Return the number of inputs in a calibration batch."""
    return len(next(iter(batch.values())))


def generate_windows(
    source: ModelSource,
    prompts: Sequence[Batch],
    count: int,
    seed: int,
    folder: Path,
    *,
    step: str,
) -> Tensor:
    """Generate `count` calibration windows (count, length) with the float model, once; a file in
    `folder` stores them for a run that is resumed.

    step: name of the step in progress messages
    """
    from safetensors.torch import load_file, save_file

    file = folder / "generated.safetensors"
    if not file.exists():
        say(f"{step}: the model generates {count} windows of text")
        ids = torch.cat([b["input_ids"] for b in prompts])
        with source.filled():
            written = generate(source.model, ids, count, seed)
        save_file({"ids": written}, file.with_suffix(".partial"))
        file.with_suffix(".partial").rename(file)
    windows: Tensor = load_file(file)["ids"]
    return windows


def batch_windows(windows: Tensor, batch_size: int) -> list[Batch]:
    """Cut calibration windows (count, length) of token ids into batches of up to `batch_size`
    windows."""
    return [_window_batch(part) for part in windows.split(batch_size) if len(part)]
