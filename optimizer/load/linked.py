"""Take a checkpoint's own files into the store without copying them.

A hard link shares what is written to the file later: a training script that saves again to the same
file would change a finished step, and a run in the middle of it would mix two checkpoints. So only
files that nobody writes to are linked: blobs of the hub's cache, named by their digest, and files
without write permission. Others are cloned where the file system can (reflink), else copied.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from optimizer.foundation import atomic
from optimizer.load.weights import SourceWeights
from optimizer.model.checkpoint.checkpoint import TensorPlace, read_header

INDEX = "model.safetensors.index.json"
WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


def link(pairing: SourceWeights, checkpoint: Path) -> bool:
    """Put the source's safetensors files into `checkpoint` if they are what would be written: every
    tensor under its parameter's name and dtype. Returns False, with nothing left there, where they
    are not, or cannot be linked or cloned.

    Raises CheckpointError for NaN or infinity.
    """
    if pairing.unused or any(name != p for p, name in pairing.source_names.items()):
        return False
    entries = pairing.stored.values()
    files = sorted({e.file for e in entries if isinstance(e, TensorPlace)})
    as_stored = all(
        isinstance(e, TensorPlace) and e.dtype == spec[0]
        for e, spec in zip(
            (pairing.stored[p] for p in pairing.source_names), pairing.specs().values(), strict=True
        )
    )
    if not as_stored or sum(len(read_header(f)) for f in files) != len(pairing.source_names):
        return False
    index = files[0].with_name(INDEX)
    if len(files) > 1 and not index.is_file():
        return False
    for file in files:
        if not (_link(file, checkpoint / file.name) or atomic.clone(file, checkpoint / file.name)):
            for other in files:
                (checkpoint / other.name).unlink(missing_ok=True)
            return False
    if len(files) > 1:
        shutil.copyfile(index, checkpoint / INDEX)
    for parameter in pairing.source_names:
        pairing.read(parameter)
    return True


def never_written(file: Path) -> bool:
    """Return True for a source's file that nobody writes to: a blob of the hub's cache, or a file
    without write permission."""
    real = file.resolve()
    blob = real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
    return blob or not real.stat().st_mode & WRITABLE


def _link(file: Path, target: Path) -> bool:
    """Make `target` another name (hard link) of a checkpoint file that nobody writes to; returns
    False for any other file."""
    try:
        if never_written(file):
            os.link(file.resolve(), target)
            return True
    except OSError:  # another disk, or a file system without links
        pass
    return False
