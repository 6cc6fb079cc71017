"""A GGUF file is judged: by the gguf package's own reader, and by transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.recipe.targets import GgufTarget
from optimizer.validate.formats import gguf
from optimizer.validate.ledger import ledger
from optimizer.validate.materials import Materials
from optimizer.validate.stage import STAGE as VALIDATE
from tests.decoders import write_tiny_decoder
from tests.validate.decoder_runs import INT4, INT8, decoder_recipe
from tests.validate.runs import Run, damaged, make

ASYMMETRIC = {**INT4, "symmetric": False}
KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "llama": ({"weights": {**INT4, "full_range": True}, "head": "tied", "embedding": INT8}, "fp16"),
    "qwen3": ({"weights": ASYMMETRIC}, "bf16"),
    "gpt2": ({"weights": INT8, "head": INT8}, "fp32"),
}
"""{family: how its recipe quantizes, and the float type of its file}"""


def changed(folder: Path, **fields: Any) -> Path:
    """A folder whose config.json has other fields."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Of a tiny decoder of each family, lowered to this format. Read-only."""
    made = {}
    for kind, (quantize, float_type) in KINDS.items():
        root = tmp_path_factory.mktemp(kind)
        (root / "data").mkdir()
        own = {"attention_bias": True, "mlp_bias": True} if kind == "llama" else {}
        folder = write_tiny_decoder(root / "model", kind, **own)
        if kind == "llama":  # not what readers assume where the file does not say it
            rope = {"rope_theta": 300.0, "rope_type": "default"}
            changed(folder, rope_parameters=rope, rms_norm_eps=1e-3)
        recipe = decoder_recipe(str(folder), root / "data", quantize)
        target = GgufTarget(runtime="gguf", float=float_type)
        made[kind] = make(root / "run", recipe.model_copy(update={"targets": (target,)}))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_proven_and_its_quality_judged(
    kind: str, files: dict[str, Run], tmp_path: Path
) -> None:
    run = files[kind]
    VALIDATE.run(run.section, run.artifacts, out=tmp_path)
    document = json.loads((tmp_path / "report.json").read_text())
    hops = {h["hop"]: h for h in document["ledger"]}
    assert list(hops) == ["load", "fold", "compress", "lower", "engine", "harness", "rows"]
    assert {n: h["problems"] for n, h in hops.items() if h["problems"]} == {}
    assert [hops[n]["ok"] for n in ("lower", "engine", "harness")] == [True, True, None]
    assert document["judged"]["answered_by"] == document["judged"]["model"] != {}
    assert document["judged"]["answers"]["why"].startswith("the harness does not run ")
    assert "llama.cpp" in hops["engine"]["unproven"]
    assert (hops["lower"]["tolerance"] > 0) == (kind == "qwen3")
    assert "llama.cpp" in document["not_measured"]["speed"]
    assert document["quality"]["note"].startswith("outputs of the file in transformers")
    assert document["verdict"] == "pass"


def rewritten(run: Run, fields: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Write the file again with other values of some keys (None: without it) and other bytes of
    some tensors (a function of them)."""
    from gguf import GGUFReader, GGUFWriter

    file = run.folder("model") / "model.gguf"
    opened = GGUFReader(shutil.copy(file, file.with_suffix(".old")))
    writer = GGUFWriter(file, str(opened.fields["general.architecture"].contents()))
    for key, field in opened.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = fields.get(key, field.contents())
        if value is not None:
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, value, field.types[0], sub_type)
    for tensor in opened.tensors:
        fault = tensors.get(tensor.name, np.array)
        writer.add_tensor(tensor.name, fault(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def unrotated(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Four heads' rows in the order of the checkpoint."""
    return rows.reshape(4, 8, 2, -1).swapaxes(1, 2).reshape(rows.shape).copy()


def swapped(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The two integers of one byte of the first block change places."""
    made = rows.copy()
    made[0, 2] = made[0, 2] >> 4 | (made[0, 2] & 15) << 4
    return made


def scaled(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """One scale is 1.6 % larger."""
    made = rows.copy()
    made[0, :2] = (made[0, :2].view(np.float16) * 1.016).view(np.uint8)
    return made


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rows in another order": ({}, {"blk.1.attn_q.weight": unrotated}, "blk.1.attn_q.weight reads"),
    "nibbles swapped": ({}, {"blk.0.ffn_down.weight": swapped}, "blk.0.ffn_down.weight reads"),
    "a scale": ({}, {"blk.0.ffn_up.weight": scaled}, "blk.0.ffn_up.weight reads"),
    "a norm": ({}, {"output_norm.weight": lambda x: x * 1.01}, "output_norm.weight reads"),
    "no rope base": ({"llama.rope.freq_base": None}, {}, "llama.rope.freq_base is missing"),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": 1e-5}, {}, "epsilon is"),
    "heads": ({"llama.attention.head_count": 2, "llama.rope.dimension_count": 32}, {}, "is 2, not"),
    "split": ({"tokenizer.ggml.pre": "smollm"}, {}, "pre is smollm, not gpt-2"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_file_is_named_by_its_reader(
    name: str, files: dict[str, Run], tmp_path: Path
) -> None:
    run = files["llama"].copy(tmp_path)
    fields, tensors, problem = FAULTS[name]
    rewritten(run, fields, tensors)
    entry = ledger.run_hop(gguf.lower, run.materials())
    assert entry.ok is False
    assert problem in entry.problems[0]


@pytest.fixture(scope="module")
def clean(files: dict[str, Run]) -> Materials:
    """Materials of a file that transformers runs within its limit."""
    materials = files["llama"].materials()
    assert ledger.run_hop(gguf.engine, materials).ok
    return materials


@pytest.mark.parametrize("name", [n for n in FAULTS if n not in ("split", "nibbles swapped")])
def test_a_model_that_computes_otherwise_is_out_of_its_limit(
    name: str, clean: Materials, tmp_path: Path
) -> None:
    fields, tensors, _ = FAULTS[name]
    made = damaged(clean, tmp_path, lambda run: rewritten(run, fields, tensors))
    assert ledger.run_hop(gguf.engine, made).ok is False


def test_a_file_rewritten_as_it_was_is_right(files: dict[str, Run], tmp_path: Path) -> None:
    run = files["llama"].copy(tmp_path)
    rewritten(run, {}, {})
    entry = ledger.run_hop(gguf.lower, run.materials())
    assert entry.problems == ()
