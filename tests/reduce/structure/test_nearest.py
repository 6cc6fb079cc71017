"""Of several sizes the one is made whose model answers most like the reference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimizer.compress.data import calibration
from optimizer.foundation.errors import CheckpointError
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.reduce import stage
from optimizer.reduce.methods.divergence import kullback_leibler, measure_angle
from optimizer.reduce.structure import latency_table, nearest, width
from optimizer.reduce.structure.nearest import MeasuredSizes, split_texts
from optimizer.reduce.structure.sizes import Sizes
from tests.reduce.smaller import copied, loaded, section

NARROW, SHALLOW = "narrow", "shallow"


@pytest.fixture(scope="module", params=["bert", "llama"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loaded(request.param, tmp_path_factory.mktemp(request.param))


def wanted(reference: Path) -> Any:
    return section(reference, {"latency_gain": 1.5}, methods=["ffn", "depth"])


def candidates(reference: Path) -> dict[str, Sizes]:
    full = stage.open_layout(wanted(reference), reference).model.full
    return {
        SHALLOW: Sizes(full.blocks - 1, full.ffn, full.heads),
        NARROW: Sizes(full.blocks, full.ffn // 2, full.heads),
    }


def latencies(folder: Path, sizes: Sequence[Sizes]) -> Path:
    """Write the part of the stage's folder that reduce reads."""
    folder.mkdir(parents=True)
    document = {"candidates": [asdict(s) for s in sizes]}
    (folder / latency_table.TABLE).write_text(json.dumps(document))
    return folder


def chosen(reference: Path, out: Path, *sizes: Sizes) -> dict[str, Any]:
    """reduced.json."""
    out.mkdir(parents=True, exist_ok=True)
    table = latencies(out.with_name(f"{out.name}-table"), sizes)
    stage.run(wanted(reference), reference, table, out=out)
    assert not (out / "progress").exists()
    document: dict[str, Any] = json.loads((out / "reduced.json").read_text())
    return document


def without_use(reference: Path, what: str, folder: Path) -> Path:
    """The reference with one block, or half the neurons of each, that add nothing."""
    copied(reference, folder)
    layout = stage.open_layout(wanted(folder), folder)
    file = folder / "checkpoint" / "model.safetensors"
    tensors = load_file(file)
    for i, block in enumerate(layout.blocks):
        for part in layout.parts(block):
            weight = tensors[f"{part.down}.weight"]
            if what == NARROW and part.kind == "ffn":
                weight[:, : weight.shape[1] // 2] = 0
            if what == SHALLOW and i == 1:
                tensors[f"{part.down}.weight"] = torch.zeros_like(weight)
    save_file(tensors, file, {"format": "pt"})
    return folder


def test_neurons_that_add_nothing_are_what_goes(reference: Path, tmp_path: Path) -> None:
    several = candidates(reference)
    plain = without_use(reference, NARROW, tmp_path / "reference")
    document = chosen(plain, tmp_path / "out", *several.values())
    distances = {c["sizes"]["ffn"]: c["distance"] for c in document["compared"]}
    assert distances[several[NARROW].ffn] < 1e-6 < distances[several[SHALLOW].ffn]
    assert document["sizes"]["ffn"][1] == several[NARROW].ffn
    assert document["left_out"] == []


def test_a_block_that_adds_nothing_is_what_goes(tmp_path: Path) -> None:
    """(Of a llama: BERT's norms change what goes through a block that adds nothing.)"""
    reference = loaded("llama", tmp_path / "loaded")
    several = candidates(reference)
    plain = without_use(reference, SHALLOW, tmp_path / "reference")
    document = chosen(plain, tmp_path / "out", several[NARROW], several[SHALLOW])
    assert [gone["block"] for gone in document["left_out"]] == ["model.layers.1"]
    assert document["compared"][1]["distance"] < 1e-6 < document["compared"][0]["distance"]


def test_distances_are_of_the_answers_of_texts_that_chose_nothing(
    reference: Path, tmp_path: Path
) -> None:
    """As transformers computes them."""
    several, wants = candidates(reference), wanted(reference)
    layout = stage.open_layout(wants, reference)
    batches = calibration.make_batches(wants, reference)
    _, judged = split_texts(batches)
    kept: list[Path] = []

    def cut(sizes: Sizes, texts: Any, progress: Path, out: Path) -> None:
        assert sum(map(_texts, texts)) == 36
        stage._cut(layout, sizes, texts, progress, out)
        kept.append(shutil.copytree(out, tmp_path / f"kept-{len(kept)}"))

    _, measured = nearest.choose(layout, [*several.values()], batches, cut, tmp_path / "progress")
    assert sum(map(_texts, judged)) == 12
    for folder, known in zip(kept, measured, strict=True):
        expected = torch.cat([_apart(reference, folder, batch) for batch in judged])
        torch.testing.assert_close(known.distances, expected.double(), rtol=1e-3, atol=1e-6)


def _texts(batch: Any) -> int:
    return len(batch["input_ids"])


def _apart(reference: Path, folder: Path, batch: Any) -> torch.Tensor:
    """(texts,): of each text."""
    task = json.loads((reference / "contract.json").read_text())["task"]
    models: list[Any] = [load_torch_model(open_checkpoint(f), task) for f in (reference, folder)]
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        before, after = (model(**batch) for model in models)
    if task == "text-generation":
        texts = zip(before.logits, after.logits, real, strict=True)
        return torch.stack([kullback_leibler(b[r], a[r]).mean() for b, a, r in texts])
    weights = real[..., None].float()
    pooled = [(o.last_hidden_state * weights).sum(1) / weights.sum(1) for o in (before, after)]
    return measure_angle(*pooled)


def test_a_killed_run_measures_no_candidate_again(reference: Path, tmp_path: Path) -> None:
    several = [*candidates(reference).values()]
    whole = chosen(reference, tmp_path / "whole", *several)
    out, layout = tmp_path / "killed", stage.open_layout(wanted(reference), reference)
    progress = out / "progress" / "sizes"
    progress.mkdir(parents=True)
    calls: list[Sizes] = []

    def cut(sizes: Sizes, texts: Any, folder: Path, made: Path) -> None:
        calls.append(sizes)
        if len(calls) == 2:
            raise KeyboardInterrupt
        stage._cut(layout, sizes, texts, folder, made)

    batches = calibration.make_batches(wanted(reference), reference)
    with pytest.raises(KeyboardInterrupt):
        nearest.choose(layout, several, batches, cut, progress)
    kept, measured = nearest.choose(layout, several, batches, cut, progress)
    assert calls == [several[0], several[1], several[1]]
    assert [m.as_dict() for m in measured] == whole["compared"]
    assert [kept.blocks, kept.ffn] == [whole["sizes"][kind][1] for kind in ("blocks", "ffn")]


def test_a_run_killed_within_a_candidate_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = loaded("llama", tmp_path / "loaded")
    several = [*candidates(reference).values()]
    whole = chosen(reference, tmp_path / "whole", *several)
    kept, writes = width._keep, list[Path]()

    def killed(folder: Path, *args: Any) -> None:
        writes.append(folder)
        if len(writes) == 2:  # in the second candidate, which is the one that is narrower
            raise KeyboardInterrupt
        kept(folder, *args)

    out = tmp_path / "killed"
    monkeypatch.setattr(width, "_keep", killed)
    with pytest.raises(KeyboardInterrupt):
        chosen(reference, out, *several)
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "killed-table")
    assert chosen(reference, out, *several) == whole
    name = "checkpoint/model.safetensors"
    assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_answers_that_are_no_numbers_are_refused(reference: Path, tmp_path: Path) -> None:
    several, wants = candidates(reference), wanted(reference)
    layout = stage.open_layout(wants, reference)

    def cut(sizes: Sizes, texts: Any, folder: Path, made: Path) -> None:
        stage._cut(layout, sizes, texts, folder, made)
        file = made / "checkpoint" / "model.safetensors"
        tensors = load_file(file)
        name = next(n for n in tensors if n.endswith("norm.weight") or "LayerNorm" in n)
        tensors[name] = torch.full_like(tensors[name], torch.inf)
        last = next(n for n in reversed(tensors) if "weight" in n and tensors[n].ndim == 2)
        tensors[last] = torch.full_like(tensors[last], torch.nan)
        save_file(tensors, file, {"format": "pt"})

    batches = calibration.make_batches(wants, reference)
    with pytest.raises(
        CheckpointError, match="the distance of its answers from the reference's is nan"
    ):
        nearest.choose(layout, [*several.values()], batches, cut, tmp_path / "progress")


def test_what_chance_tells_apart_does_not_decide() -> None:
    """The first, which takes the least away, unless the other is surely nearer."""
    noise = torch.randn(64, generator=torch.Generator().manual_seed(0)).double()
    noise -= noise.mean()
    first, near, far = (MeasuredSizes(Sizes(n, 8, 0), torch.zeros(64).double()) for n in (1, 2, 3))
    alike = MeasuredSizes(near.sizes, near.distances - 0.1 + noise)  # standard error 0.12
    nearer = MeasuredSizes(far.sizes, far.distances - 0.2 + noise)
    assert nearest.choose_nearest([first, alike]) == first.sizes
    assert nearest.choose_nearest([first, nearer]) == nearer.sizes


def test_every_text_chooses_or_judges_whatever_the_batches_are() -> None:
    ids = torch.arange(22)[:, None]
    for size in (1, 3, 8, 22):
        learned, judged = split_texts([{"input_ids": part} for part in ids.split(size)])
        sizes = [sorted(t for b in part for t in b["input_ids"].flatten().tolist())
                 for part in (learned, judged)]  # fmt: skip
        assert sizes[1] == [3, 7, 11, 15, 19]
        assert sorted(sizes[0] + sizes[1]) == [*range(22)]
