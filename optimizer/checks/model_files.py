"""Check the weights and the tokenizer of a model on this machine, each on its own."""

from __future__ import annotations

from pathlib import Path

from optimizer.foundation.reading import reading
from optimizer.harness import tasks
from optimizer.harness.inputs.text import TEXT
from optimizer.load import source, weights
from optimizer.load.config.model_folder import model_folder
from optimizer.load.onnx_model import files as onnx_files
from optimizer.load.tokenizer import tokenizer
from optimizer.recipe.schema import Model


def check_weights(section: Model) -> None:
    """Check before a run: raise CheckpointError for weights that are missing, incomplete, or only a
    pickle. Reads headers; a pickle that the recipe allows is not read."""
    folder = local_folder(section)
    if folder is not None and not weights.is_only_pickled(folder, section):
        weights.find(folder, section)


def check_tokenizer(section: Model) -> None:
    """Check before a run: raise CheckpointError where the task is on texts and the model's files
    have no vocabulary."""
    folder = local_folder(section)
    if folder is not None and tasks.find_task(section.task).inputs.name == TEXT.name:
        tokenizer.check_present(folder)


def local_folder(section: Model) -> Path | None:
    """Find, to check a recipe, the folder of config.json on this machine. None for a model that
    only the hub has, a GGUF or ONNX file, and a model with code of its own, which must be run to be
    known.

    Raises CheckpointError or MachineError for a source that stage load refuses.
    """
    unread = section.gguf_file is not None or onnx_files.takes(section)
    unread = unread or section.trust_remote_code
    if unread or not source.is_local(section.source, section.base):
        return None
    resolved = source.resolve(section)
    with reading(resolved.folder):
        source.list_files(resolved)
        return model_folder(resolved.folder)
