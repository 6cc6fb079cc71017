"""Weights that nobody writes to are linked into the store; all others are copied."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimizer.model.checkpoint.checkpoint import open_checkpoint
from tests.load.conftest import Load, edit_weights

TASK = "text-generation"


@pytest.fixture
def llama(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "llama"))


def shards(folder: Path) -> list[Path]:
    """Divide model.safetensors into two shards with an index."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    parts = [dict(list(tensors.items())[i::2]) for i in (0, 1)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name, {"format": "pt"})
    weight_map = {t: name for name, part in zip(names, parts, strict=True) for t in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return [folder / name for name in names]


def test_a_file_without_write_permission_is_linked_and_another_copied(
    load: Load, llama: Path
) -> None:
    file = llama / "model.safetensors"
    copied = load(llama, TASK) / "checkpoint" / file.name
    assert not copied.samefile(file)
    file.chmod(0o444)
    linked = load(llama, TASK) / "checkpoint" / file.name
    assert linked.samefile(file)


def test_linked_shards_hold_what_a_copy_holds(load: Load, llama: Path) -> None:
    copied = dict(open_checkpoint(load(llama, TASK)).tensors)
    for shard in shards(llama):
        shard.chmod(0o444)
    out = load(llama, TASK)
    assert len(list((out / "checkpoint").glob("*.safetensors"))) == 2
    linked = open_checkpoint(out).tensors
    assert set(linked) == set(copied)
    assert all(torch.equal(linked[name], copied[name]) for name in copied)


def test_files_with_a_tensor_that_the_model_lacks_are_not_linked(load: Load, llama: Path) -> None:
    edit_weights(llama, lambda t: t.update({"extra.weight": torch.ones(2)}))
    (llama / "model.safetensors").chmod(0o444)
    out = load(llama, TASK, ignore_tensors=("extra.weight",))
    assert "extra.weight" not in open_checkpoint(out).tensors
