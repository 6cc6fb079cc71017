"""Peak memory of reduce does not grow with depth, and that of learning is what plan says; measured
in fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optimizer.load.stage import STAGE as LOAD
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.recipe.data import DataSpec
from optimizer.recipe.recover import Recover
from optimizer.recipe.schema import Model, Recovery
from optimizer.reduce.learn.estimate import estimate_recovery
from tests.conftest import write_rows, write_tokenizer
from tests.decoders import write_decoder_tokenizer
from tests.reduce.smaller import TASKS, reduced

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "encoders" / "compress_memory.py"


@pytest.mark.slow
@pytest.mark.parametrize("importance", ["fisher", "second_order"])
def test_eight_times_the_layers_need_no_more_memory(importance: str) -> None:
    layers = ["--width", "256", "--layers", "6", "48", "--reduce", importance]
    command = [sys.executable, str(SCRIPT), *layers]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    shallow, deep = (json.loads(out)[n] for n in ("6", "48"))
    added = deep["weights_mb"] - shallow["weights_mb"]
    assert added > 0.15 * shallow["peak_mb"]  # holding the weights would break the next line
    assert deep["peak_mb"] <= 1.15 * shallow["peak_mb"]


LEARN = """
import resource, sys
from pathlib import Path
from optimizer.recipe.schema import Recovery
from optimizer.reduce.learn import recover

section = Recovery.model_validate_json(sys.argv[1])
recover.run(section, *map(Path, sys.argv[2:]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_learning_needs_what_plan_says_within_a_fifth(kind: str, tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    reference.mkdir()
    task = TASKS["encoder" if kind == "bert" else "decoder"]
    LOAD.run(Model(source=str(write_wide(kind, tmp_path / "model")), task=task), out=reference)
    write_rows(tmp_path / "reference.jsonl", 800, seed=1)
    smaller = reduced(reference, tmp_path / "smaller", {"keep": 1.0}, importance="magnitude")
    rows = DataSpec(source="json", files=(str(tmp_path / "reference.jsonl"),))
    how = Recover(held_out=8, sequence_length=64, batch_size=16, steps=3, precision="fp32")
    section = Recovery(recover=how, data=rows, task=task)
    (out := tmp_path / "out").mkdir()
    arguments = [section.model_dump_json(), *map(str, (reference, smaller, out))]
    done = subprocess.run(
        [sys.executable, "-c", LEARN, *arguments], check=True, capture_output=True, text=True
    )
    peak = int(done.stdout.split()[-1])
    checkpoint = open_checkpoint(reference)
    predicted = estimate_recovery(
        section, {n: checkpoint.shape(n) for n in checkpoint.tensors}
    ).memory
    assert peak == pytest.approx(predicted, rel=0.2)


def write_wide(kind: str, folder: Path) -> Path:
    """A random model of 30 million weights in its blocks: they outweigh the libraries."""
    import transformers

    folder.mkdir()
    sizes = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
    if kind == "bert":
        words = write_tokenizer(folder)
        config: Any = transformers.BertConfig(vocab_size=words, intermediate_size=2048, **sizes)
        model: Any = transformers.BertModel(config)
    else:
        words = write_decoder_tokenizer(folder)
        config = transformers.LlamaConfig(vocab_size=words, intermediate_size=1792, **sizes)
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    (folder / "README.md").write_text("---\\nlicense: apache-2.0\\n---\\nRandom.\\n")
    return folder
