"""The hop `reduce`: a smaller checkpoint passes, and each planted fault is named at it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from optimizer.recipe.schema import (
    CompressedTensorsTarget,
    DataSpec,
    Quantize,
    Validate,
    Validation,
)
from optimizer.validate.ledger.entry import LedgerEntry
from optimizer.validate.ledger.laws.reduce.structure_laws import reduce
from optimizer.validate.ledger.ledger import run_hop
from optimizer.validate.materials import Materials
from tests.conftest import sentences
from tests.reduce.smaller import loaded, reduced, section

Tensors = dict[str, Tensor]


def hop(reference: Path, smaller: Path) -> LedgerEntry:
    rows = DataSpec(source="json", files=("none.jsonl",))
    document = json.loads((smaller / "reduced.json").read_text())
    keys = ["goal", "methods", *(["importance"] if document["methods"] != ["depth"] else [])]
    asked = section(reference, **{k: document[k] for k in keys})
    generates = json.loads((reference / "contract.json").read_text())["generation"] is not None
    made = Validation(
        validate=Validate(data=rows, metric="perplexity" if generates else "cosine", max_drop=0.1),
        quantize=Quantize(),
        calibrate=asked.calibrate,
        reduce=asked.reduce,
        target=CompressedTensorsTarget(runtime="compressed-tensors"),
    )
    none = [smaller] * 4
    return run_hop(
        reduce,
        Materials(
            made, smaller, *none, texts=sentences(6, seed=9), smaller=smaller, original=reference
        ),
    )


@pytest.fixture(scope="module", params=["bert", "llama", "qwen2", "gpt2", "albert"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp(request.param)
    reference = loaded(request.param, root)
    return request.param, reference, reduced(reference, root / "smaller", {"keep": 0.7})


def test_a_smaller_checkpoint_passes_and_its_distance_is_measured(pair: Any) -> None:
    _, reference, smaller = pair
    entry = hop(reference, smaller)
    assert entry.problems == ()
    assert entry.ok
    assert entry.measured is not None
    assert entry.measured.worst > 1e-3


def rows_shifted(t: Tensors, name: str) -> None:
    t[name] = t[name].roll(1, 0)


def bias_of_others(t: Tensors, name: str) -> None:
    t[name] = t[name].flip(0).contiguous()


def bias_not_cut(t: Tensors, name: str) -> None:
    t[name] = torch.cat([t[name], t[name][:8]])


def embedding_cut_once(t: Tensors, name: str) -> None:
    t["lm_head.weight"] = t[name][:-1].clone()


def outputs_swapped(t: Tensors, name: str) -> None:
    t[name][[3, 4]] = t[name][[4, 3]]


def adjusted_too_far(t: Tensors, name: str) -> None:
    t[name] *= 1.1


def columns_shifted(t: Tensors, name: str) -> None:
    t[name] = t[name].roll(1, 1)


FAULTS: dict[str, tuple[str, str, Callable[[Tensors, str], None]]] = {
    "rows shifted by one": ("bert", "encoder.layer.1.intermediate.dense.weight", rows_shifted),
    "columns shifted by one": ("bert", "encoder.layer.0.output.dense.weight", columns_shifted),
    "two outputs swapped": ("bert", "encoder.layer.1.output.dense.weight", outputs_swapped),
    "another output's adjusted bias": (
        "bert", "encoder.layer.0.output.dense.bias", bias_of_others),
    "adjusted too far": ("bert", "encoder.layer.2.output.dense.weight", adjusted_too_far),
    "another neuron's bias": ("bert", "encoder.layer.1.intermediate.dense.bias", bias_of_others),
    "a bias not cut with its row": (
        "bert", "encoder.layer.2.intermediate.dense.bias", bias_not_cut),
    "a tied embedding cut once of twice": (
        "llama", "model.embed_tokens.weight", embedding_cut_once),
    "another head's keys": ("qwen2", "model.layers.0.self_attn.k_proj.bias", bias_of_others),
    "fused rows shifted": ("gpt2", "transformer.h.0.mlp.c_fc.weight", columns_shifted),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str, tmp_path: Path) -> None:
    kind, name, change = FAULTS[fault]
    reference = loaded(kind, tmp_path)
    smaller = reduced(reference, tmp_path / "smaller", {"keep": 0.7})
    file = smaller / "checkpoint" / "model.safetensors"
    tensors = load_file(file)
    change(tensors, name)
    save_file(tensors, file)
    entry = hop(reference, smaller)
    assert entry.ok is False
    expected = "lm_head.weight" if "embedding" in fault else name
    expected = expected.replace("bias", "weight") if "adjusted bias" in fault else expected
    assert entry.problems[0].partition(": ")[0] == expected
    assert len(entry.problems) == 1 or "adjusts" in entry.problems[0]  # later layers err too


@pytest.mark.parametrize("what", ["ffn", "heads"])
def test_an_index_off_by_one_is_named(what: str, tmp_path: Path) -> None:
    """reduced.json lists another neuron, or another key/value head, as kept."""
    reference = loaded("llama", tmp_path)
    smaller = reduced(reference, tmp_path / "smaller", {"keep": 0.84}, methods=[what])
    file = smaller / "reduced.json"
    document = json.loads(file.read_text())
    there = document["sizes"][what][0]
    kept = document["layers"][1][what]
    kept[-1] = min({*range(there)} - {*kept}, key=lambda i: abs(i - kept[-1]))
    kept.sort()
    file.write_text(json.dumps(document))
    entry = hop(reference, smaller)
    assert any("layers.1." in problem and "differs from" in problem for problem in entry.problems)


def test_queries_of_another_group_are_named(tmp_path: Path) -> None:
    """The mapping of query heads to key/value heads is off by one."""
    reference = loaded("llama", tmp_path)
    smaller = reduced(reference, tmp_path / "smaller", {"keep": 0.84}, methods=["heads"])
    file = smaller / "checkpoint" / "model.safetensors"
    tensors, whole = load_file(file), load_file(reference / "checkpoint" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    (group,) = json.loads((smaller / "reduced.json").read_text())["layers"][0]["heads"]
    size = len(tensors[name])
    tensors[name] = whole[name].roll(-size // 2, 0)[group * size : (group + 1) * size].contiguous()
    save_file(tensors, file)
    assert any(p.startswith(f"{name}: differs") for p in hop(reference, smaller).problems)


def test_a_block_used_twice_is_named(tmp_path: Path) -> None:
    reference = loaded("bert", tmp_path)
    smaller = tmp_path / "smaller"
    shutil.copytree(reduced(reference, tmp_path / "first", {"keep": 0.7}), smaller)
    file = smaller / "reduced.json"
    document = json.loads(file.read_text())
    document["layers"][1] = {**document["layers"][0], "block": "encoder.layer.1"}
    file.write_text(json.dumps(document))
    problems = hop(reference, smaller).problems
    assert any("each once" in p for p in problems)
    assert any(p.startswith("encoder.layer.1.") for p in problems)
