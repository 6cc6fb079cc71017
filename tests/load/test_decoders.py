"""Causal language models: loaded as by transformers, with a complete contract."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from optimizer.data.datasets import Sample, cut_windows
from optimizer.foundation.errors import CheckpointError, DataError, OptimizeError
from optimizer.harness.contract import Contract, read
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.load import faithful, weights
from optimizer.load.headers import read_shapes
from optimizer.load.stage import STAGE
from optimizer.model.architectures.architecture import find_family
from optimizer.model.checkpoint.checkpoint import Checkpoint, open_checkpoint
from optimizer.model.checkpoint.model import (
    build_skeleton,
    find_tied_names,
    load_torch_model,
    materialize,
    release,
)
from optimizer.recipe.schema import Model
from tests.decoders import write_tiny_decoder
from tests.load.conftest import Load, edit_json, edit_weights

KINDS = [
    *((kind, True) for kind in ("llama", "mistral", "qwen2", "qwen3", "gpt2", "opt")),
    ("llama", False),
    ("qwen3", False),
]
TASK = "text-generation"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
IDS = torch.arange(5, 25).reshape(2, 10)


@pytest.fixture
def llama(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tied decoder that a test may change."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "llama"))


@pytest.fixture
def opened(load: Load, tiny_llama: Path) -> Checkpoint:
    return open_checkpoint(load(tiny_llama, TASK))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_a_decoder_answers_as_transformers_loads_it(
    load: Load, tmp_path: Path, kind: str, tied: bool
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = write_tiny_decoder(tmp_path / "source", kind, tied=tied)
    out = load(folder, TASK)
    checkpoint = open_checkpoint(out)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    torch.testing.assert_close(
        logits(load_torch_model(checkpoint, "text-generation")),
        logits(theirs),
        rtol=1e-4,
        atol=1e-4,
    )
    reloaded = AutoModelForCausalLM.from_pretrained(out / "checkpoint", attn_implementation="eager")
    assert torch.equal(logits(reloaded.eval()), logits(theirs))

    contract, facts = read(out / "contract.json"), find_family(theirs.config, "text-generation")
    assert [i.name for i in contract.inputs][2:] == ["position_ids"] * facts.position_ids
    assert contract.generation is not None
    with torch.no_grad():
        layers = theirs(IDS, use_cache=True).past_key_values.layers
    about = contract.generation
    assert len(layers) == about.layers
    assert tuple(layers[0].keys.shape) == (2, about.kv_heads, 10, about.head_dim)
    assert about.context == 256
    assert about.eos_ids == (2,)
    text = "It was a good day, naïve 北京 😀"
    mine = load_tokenizer(out / "checkpoint", contract)
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert mine.encode(text).ids == ids
    assert mine.decode(ids) == text

    section = Model(source=str(folder), task="text-generation")
    model = build_skeleton(checkpoint, "text-generation")
    assert read_shapes(section) == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert {n: checkpoint.shape(n) for n in checkpoint.tensors} == read_shapes(section)
    assert (HEAD in find_tied_names(model)) == (HEAD not in checkpoint.tensors) == tied


def test_weights_stored_by_input_come_as_those_of_a_linear_layer(
    load: Load, tmp_path: Path
) -> None:
    folder = write_tiny_decoder(tmp_path / "source", "gpt2")
    tensors = open_checkpoint(load(folder, TASK)).tensors
    for linear in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        name = f"transformer.h.1.{linear}.weight"
        stored = load_file(folder / "model.safetensors")[name]
        assert torch.equal(tensors[name], stored.T)
        assert torch.equal(tensors.stored(name), stored)
        assert torch.equal(tensors.as_stored(name, tensors[name]), stored)
        assert tensors[name].is_contiguous()
    with pytest.raises(ValueError, match="not a matrix stored by rows"):
        tensors.rows("transformer.h.1.attn.c_proj.weight", IDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_an_embedding_are_read_alone(
    load: Load, llama: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_weights(llama, lambda t: t.update({n: v.to(dtype) for n, v in t.items()}))
    tensors = open_checkpoint(load(llama, TASK)).tensors
    whole = tensors[EMBEDDING]
    monkeypatch.setattr("optimizer.model.checkpoint.checkpoint.read_entry", None)
    for ids in (IDS, torch.tensor([[7, 7, 3]]), torch.tensor(4), torch.empty(0, dtype=torch.long)):
        assert torch.equal(tensors.rows(EMBEDDING, ids), whole[ids])
    for bad in (-1, len(whole)):
        with pytest.raises(IndexError, match=EMBEDDING):
            tensors.rows(EMBEDDING, torch.tensor([0, bad]))


def test_a_head_with_a_value_of_its_own_is_untied(opened: Checkpoint) -> None:
    head = opened.tensors[EMBEDDING] * 2
    plain = load_torch_model(opened, "text-generation")
    model: Any = load_torch_model(opened, "text-generation", {HEAD: head})
    assert torch.equal(model.lm_head.weight, head)
    assert torch.equal(model.model.embed_tokens.weight, opened.tensors[EMBEDDING])
    torch.testing.assert_close(logits(model), 2 * logits(plain))


def test_an_untied_head_is_filled_and_released_alone(opened: Checkpoint) -> None:
    head = opened.tensors[EMBEDDING] * 2
    model: Any = build_skeleton(opened, "text-generation")
    materialize(model, "model.embed_tokens", opened.tensors)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    materialize(model, "model.layers.0", opened.tensors, {HEAD: head})
    assert model.lm_head.weight.is_meta
    assert not model.model.embed_tokens.weight.is_meta
    materialize(model, "lm_head", opened.tensors, {HEAD: head})
    release(model, "model.embed_tokens")
    assert model.model.embed_tokens.weight.is_meta
    assert torch.equal(model.lm_head.weight, head)


def test_a_tied_parameter_is_filled_under_either_name(opened: Checkpoint) -> None:
    model: Any = build_skeleton(opened, "text-generation")
    materialize(model, HEAD.removesuffix(".weight"), opened.tensors)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, opened.tensors[EMBEDDING])


def test_tied_weights_may_be_stored_twice_or_as_the_head_and_must_be_equal(
    load: Load, llama: Path
) -> None:
    expected = (load(llama, TASK) / "checkpoint/model.safetensors").read_bytes()
    edit_weights(llama, lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    out = load(llama, TASK)
    assert (out / "checkpoint/model.safetensors").read_bytes() == expected
    edit_weights(llama, lambda t: t.pop(EMBEDDING))
    out = load(llama, TASK)
    assert (out / "checkpoint/model.safetensors").read_bytes() == expected
    edit_weights(llama, lambda t: t.update({EMBEDDING: t[HEAD] * 2}))
    with pytest.raises(CheckpointError, match=r"different values.*false"):
        load(llama, TASK)


def test_a_decoder_does_not_fill_masks(load: Load, tiny_llama: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a decoder.*task: text-generation"):
        load(tiny_llama, "fill-mask")


def test_a_decoder_that_sees_both_sides_does_not_generate(load: Load, tmp_path: Path) -> None:
    folder = write_tiny_decoder(tmp_path / "both", "gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(CheckpointError, match=r"attention bidirectional.*sentence-embedding"):
        load(folder, TASK)


def test_an_encoder_does_not_generate(load: Load, tiny_bert: Path) -> None:
    with pytest.raises(CheckpointError, match=r"an encoder.*sentence-embedding"):
        load(tiny_bert, TASK)


def generation(load: Load, folder: Path) -> Any:
    about = read(load(folder, TASK) / "contract.json").generation
    assert about is not None
    return about


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_an_option_of_generation_that_is_not_read_is_refused(
    load: Load, llama: Path, file: str
) -> None:
    edit_json(llama / "generation_config.json", num_beams=1, typical_p=1.0, suppress_tokens=[])
    load(llama, TASK)
    if file == "config.json":
        (llama / "generation_config.json").unlink()
    edit_json(llama / file, no_repeat_ngram_size=2)
    with pytest.raises(CheckpointError, match=rf"{file}: no_repeat_ngram_size: '2' was found"):
        load(llama, TASK)


def test_options_of_an_older_config_are_those_of_transformers(load: Load, llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    (llama / "generation_config.json").unlink()
    edit_json(llama / "config.json", do_sample=True, temperature=0.25, top_k=7)
    theirs = AutoModelForCausalLM.from_pretrained(llama).generation_config
    defaults = read(load(llama, TASK) / "contract.json").decoder.defaults
    assert defaults == {k: getattr(theirs, k) for k in ("do_sample", "temperature", "top_k")}


def test_ends_and_advice_are_those_of_the_generation_config(load: Load, llama: Path) -> None:
    edit_json(
        llama / "generation_config.json",
        eos_token_id=[0, 2],
        temperature=0.6,
        do_sample=True,
        top_k=None,
        max_new_tokens=9,
    )
    about = generation(load, llama)
    assert about.eos_ids == (2, 0)  # the tokenizer's own first
    assert about.defaults == {"do_sample": True, "temperature": 0.6}
    assert about.bos_id == 0
    (llama / "generation_config.json").unlink()
    assert generation(load, llama).eos_ids == (2,)


def test_without_a_token_that_ends_a_text_it_is_refused(load: Load, llama: Path) -> None:
    edit_json(llama / "generation_config.json", eos_token_id=None)
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    with pytest.raises(CheckpointError, match=r"eos_token_id.*no end-of-text token is set.*: 2"):
        load(llama, TASK)
    edit_json(llama / "config.json", eos_token_id=5000)
    with pytest.raises(CheckpointError, match="token id 5000"):
        load(llama, TASK)


def test_the_template_is_read_from_either_file_or_absent(load: Load, llama: Path) -> None:
    template = (llama / "chat_template.jinja").read_text()
    assert generation(load, llama).chat_template == template
    (llama / "chat_template.jinja").unlink()
    assert generation(load, llama).chat_template is None
    edit_json(llama / "tokenizer_config.json", chat_template="{{ bos_token }}")
    assert generation(load, llama).chat_template == "{{ bos_token }}"


def test_a_tokenizer_that_does_not_pad_pads_with_an_end(load: Load, llama: Path) -> None:
    contract = read(load(llama, TASK) / "contract.json")
    assert (contract.tokenizer.pad_id, contract.tokenizer.pad_token) == (2, "<|im_end|>")


def test_a_window_that_slides_is_the_longest_text(load: Load, tmp_path: Path) -> None:
    folder = write_tiny_decoder(tmp_path / "source", "mistral")
    edit_json(folder / "config.json", sliding_window=32)
    about = generation(load, folder)
    assert about.context == 32


def test_frequencies_that_change_with_the_length_of_a_text_are_refused(
    load: Load, llama: Path
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    edit_json(llama / "config.json", rope_parameters=rope)
    with pytest.raises(CheckpointError, match=r"rope_type 'dynamic' changes frequencies"):
        load(llama, TASK)


@pytest.mark.parametrize("add", [True, False])
def test_the_written_tokenizer_begins_texts_as_transformers_does(
    load: Load, llama: Path, add: bool
) -> None:
    from transformers import LlamaTokenizerFast

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{i:02X}>": i + 3 for i in range(256)}}
    vocabulary |= {t: len(vocabulary) + i for i, t in enumerate(["▁", "a", "b", "▁a", "ab", "▁ab"])}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (llama / name).unlink()
    LlamaTokenizerFast(vocab=vocabulary, merges=merges, add_bos_token=add).save_pretrained(llama)
    out = load(llama, TASK)
    ours = load_tokenizer(out / "checkpoint", read(out / "contract.json"))
    ids = ours.encode("ab").ids
    assert (ids[0] == 1) == add
    assert ids[-1] == vocabulary["▁ab"]
    assert ours.decode(ours.encode("é ab").ids) == "é ab"


@pytest.fixture
def judged(llama: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> Any:
    """check(changes to what was written, changes to where from) of a model too large to be held:
    six blocks, in bfloat16."""
    write_tiny_decoder(llama, "gpt2", layers=6)
    edit_weights(llama, lambda t: t.update({n: v.bfloat16() for n, v in t.items()}))
    monkeypatch.setattr(faithful, "IN_MEMORY", 1000)
    section = Model(source=str(llama), task="text-generation")
    checkpoint = open_checkpoint(load(llama, TASK))  # which the check has passed
    model = build_skeleton(checkpoint, "text-generation")
    pairing = weights.match(weights.find(llama, section), model, section)

    def check(written: dict[str, torch.Tensor], names: dict[str, str]) -> None:
        stored = {n: checkpoint.tensors.stored(n) for n in checkpoint.tensors}
        other_pairing = weights.SourceWeights(pairing.stored, {**pairing.source_names, **names}, ())
        faithful.check(llama, section, {**stored, **written}, other_pairing)

    check({}, {})
    return check, checkpoint


@pytest.mark.parametrize("name", ["wte.weight", "h.0.attn.c_proj.weight", "h.5.mlp.c_fc.bias"])
def test_a_large_model_is_judged_in_pieces_and_each_counts(judged: Any, name: str) -> None:
    check, checkpoint = judged
    name = f"transformer.{name}"
    with pytest.raises(OptimizeError, match=name):
        check({name: checkpoint.tensors.stored(name).flip(0)}, {})


def test_a_block_that_was_taken_for_another_is_seen(judged: Any) -> None:
    check, checkpoint = judged
    one, two = (f"transformer.h.{i}.ln_1.weight" for i in (3, 4))
    with pytest.raises(OptimizeError, match="not its name"):
        check({one: checkpoint.tensors.stored(two)}, {one: two})


def rows(*texts: str) -> list[Sample]:
    return [Sample(text=t) for t in texts]


@pytest.fixture
def tokens(load: Load, tiny_llama: Path) -> tuple[Any, Contract]:
    out = load(tiny_llama, TASK)
    contract = read(out / "contract.json")
    return load_tokenizer(out / "checkpoint", contract), contract


def test_windows_are_the_texts_joined_by_the_end_and_cut(tokens: tuple[Any, Contract]) -> None:
    tokenizer, _ = tokens
    texts = ["the story is good", "bad food", "a very long night of waste"]
    joined = np.concatenate(cut_windows(rows(*texts), *tokens, 4))
    stream = [i for t in texts for i in [*tokenizer.encode(t).ids, 2]][:-1]
    assert joined.tolist() == stream[: len(joined)]
    assert 0 <= len(stream) - len(joined) < 4
    made = cut_windows(rows(*texts), *tokens, 5)
    assert {(w.shape, w.dtype) for w in made} == {((5,), np.dtype(np.int64))}


def test_less_than_a_window_of_text_says_how_much_is_needed(tokens: tuple[Any, Contract]) -> None:
    with pytest.raises(DataError, match=r"have 4 tokens.*needs 64.*about \d+ characters"):
        cut_windows(rows("a b", "c"), *tokens, 64)


def test_a_window_longer_than_the_context_is_refused(tokens: tuple[Any, Contract]) -> None:
    with pytest.raises(DataError, match=r"257.*takes 256"):
        cut_windows(rows("a " * 999), *tokens, 257)


def test_a_larger_model_is_predicted_to_be_held_in_part() -> None:
    assert STAGE.estimate is not None
    section = Model(source="x", task="text-generation")

    def memory(layers: int) -> int:
        named = {f"model.layers.{i}.w": (4096, 4096) for i in range(layers)}
        return STAGE.estimate(section, named | {HEAD: (4096, 4096)}).memory  # type: ignore[misc]

    assert memory(2) < memory(4)
    assert memory(48) == memory(96)


def test_the_predicted_disk_is_that_of_the_stored_dtype(load: Load, llama: Path) -> None:
    edit_weights(llama, lambda t: t.update({n: v.bfloat16() for n, v in t.items()}))
    section = Model(source=str(llama), task="text-generation")
    assert STAGE.estimate is not None
    size = (load(llama, TASK) / "checkpoint/model.safetensors").stat().st_size
    assert 0.9 * size < STAGE.estimate(section, read_shapes(section)).disk <= size
