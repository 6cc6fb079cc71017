"""Measuring stages at growing sizes: the checkpoint, the peak of a process tree, the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.decoders.scale import LLAMA, STAGES, divide, make_checkpoint, recipe, stage_table
from benchmarks.measure import memory
from optimizer.load import weights
from optimizer.recipe import file as recipe_file
from optimizer.recipe.schema import Model

TINY = LLAMA | {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def test_a_checkpoint_of_a_shape_has_shards_and_the_same_bytes_again(tmp_path: Path) -> None:
    for name in ("one", "two"):
        values = make_checkpoint(TINY, tmp_path / name)
    one, two = (sorted((tmp_path / name).glob("*.safetensors")) for name in ("one", "two"))
    assert len(one) > 1
    assert [f.read_bytes() for f in one] == [f.read_bytes() for f in two]
    found = weights.find(tmp_path / "one", Model(source="one", task="text-generation"))
    stored = {name: weights.read_values(entry) for name, entry in found.items()}
    assert sum(t.numel() for t in stored.values()) == values
    assert 0.015 < float(stored["model.embed_tokens.weight"].float().std()) < 0.025


def test_a_tensor_larger_than_a_shard_has_its_own() -> None:
    assert divide({"a": 3, "b": 9, "c": 1, "d": 4}, 5) == [["a"], ["b"], ["c", "d"]]


def test_the_peak_of_a_program_counts_the_memory_of_its_children(tmp_path: Path) -> None:
    child = "x = bytearray(60_000_000); import time; time.sleep(0.3)"
    code = "import subprocess, sys; y = bytearray(50_000_000)\n"
    code += f"subprocess.run([sys.executable, '-c', {child!r}])"
    used = memory.run([sys.executable, "-c", code], tmp_path / "log")
    assert used.exit_code == 0
    assert 110_000_000 < used.anonymous < 160_000_000
    assert 60_000_000 < used.resident < 110_000_000


def test_the_recipe_is_one_that_the_schema_accepts(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe("scale", tmp_path, "gptq", 64)))
    assert recipe_file.read(file).quantize.methods == ("gptq",)


def test_the_table_holds_measured_beside_predicted() -> None:
    used = {
        "anonymous": 2_000_000,
        "resident": 3_000_000,
        "disk": 0,
        "stage_seconds": 4.0,
        "cpu_seconds": 5.0,
        "predicted": {"memory": 1_000_000, "disk": 0, "seconds": 6.0},
    }
    text = stage_table({STAGES[0]: used}, 0.5)
    assert "| load | 2 / 1 | 3 | 0 / 0 | 4.0 / 6.0 | 5.0 | 8.0 |" in text
