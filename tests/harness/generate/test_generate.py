"""The generation loop gives the tokens of transformers, independent of the batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.harness.errors import BundleError, InputError
from optimizer.harness.generate import Options, generate, loop, stream
from optimizer.harness.generate.loop import prefill
from optimizer.harness.runtimes.decoder import pieces
from optimizer.harness.runtimes.ort import fixed_step
from optimizer.harness.runtimes.ort.bound import UNCAPTURED
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.harness.tasks import text_generation
from tests.decoders import write_tiny_decoder
from tests.harness import small_model, tiny_decoder

PROMPTS = [
    "the film was",
    "a very good place in the night with the staff of",
    "never again",
    "it is not the food, it is the people and the price of the work that",
]
KINDS = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "opt")
LONG = Options(max_new_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers(kind: str, tmp_path: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = write_tiny_decoder(tmp_path, kind)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    contract = tiny_decoder.contract(model.config.vocab_size, kind)
    made = generate(contract, tiny_decoder.TorchRunner(model), tokenizer, PROMPTS, LONG)
    for prompt, completion in zip(PROMPTS, made, strict=True):
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        wanted = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            min_new_tokens=24,
            pad_token_id=2,
        )
        # its processor forbids the end token; ours only continues after it
        assert 2 not in completion.tokens
        assert list(completion.tokens) == wanted[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("options", [LONG, Options(24, True, 0.9, 40, 0.95, ignore_eos=True)])
def test_which_prompts_share_a_batch_changes_no_token(
    options: Options, contract: Any, runner: OrtRunner, tokenizer: Any
) -> None:
    together = generate(contract, runner, tokenizer, PROMPTS, options)
    for size in (1, 3):
        assert generate(contract, runner, tokenizer, PROMPTS, options, batch_size=size) == together
    assert len({m.tokens for m in together}) == len(PROMPTS)


def test_a_cache_written_in_place_gives_the_same(
    contract: Any, runner: OrtRunner, shared: OrtRunner, tokenizer: Any
) -> None:
    new = generate(contract, runner, tokenizer, PROMPTS, LONG)
    assert generate(contract, shared, tokenizer, PROMPTS, LONG) == new


def test_steps_of_fixed_size_give_the_same_bits_while_the_cache_grows_and_is_used_again(
    decoder_folder: Path, contract: Any, shared: OrtRunner, tokenizer: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(fixed_step, "SMALLEST", 8)
    rows = [tokenizer.encode(p).ids[:6] for p in PROMPTS[:3]]
    first = text_generation.arrays(contract, rows)
    rng = np.random.default_rng(0)
    graphs: list[int] = []

    class Recording(OrtRunner):
        def run_bound(self, binding: Any, graph: int = UNCAPTURED) -> None:
            graphs.append(graph)
            super().run_bound(binding, graph)

    with Recording(decoder_folder / "shared.onnx", threads=1, fixed=True) as runner:
        for starts in (first, {n: a[:1, -1:] for n, a in first.items()}, first):
            decoders = [runner.decoder(contract), shared.decoder(contract)]
            mask = np.asarray(starts["attention_mask"])
            scores = [d.last(starts) for d in decoders]
            for _ in range(20):
                np.testing.assert_array_equal(*scores)
                mask = np.concatenate([mask, np.ones_like(mask[:, :1])], 1)
                ids = rng.integers(3, 200, (len(mask), 1))
                step = text_generation.build_step_arrays(contract, ids, mask)
                scores = [d.last(step) for d in decoders]
            caches = [d.cache() for d in decoders]
            for name in caches[0]:
                np.testing.assert_array_equal(caches[0][name], caches[1][name])
    prompts, steps = (graphs.count(UNCAPTURED), [g for g in graphs if g != UNCAPTURED])
    assert len(steps) >= 60 > prompts
    assert set(steps[:20]) == set(steps[-20:]) != set(steps[20:-20])


def test_a_kept_cache_holds_nothing_of_an_earlier_text(
    decoder_folder: Path, contract: Any, shared: OrtRunner
) -> None:
    """Kernels for a GPU may multiply values under the mask by 0, and 0 * NaN is NaN."""
    one = np.ones((1, 1))
    step = text_generation.build_step_arrays(contract, one, one)
    with OrtRunner(decoder_folder / "shared.onnx", threads=1, fixed=True) as runner:
        decoder: Any = runner.decoder(contract)
        decoder.last(step)
        kept = list(decoder._cache.values())
        for value in kept:
            value.update_inplace(np.full(value.shape(), np.nan, np.float32))
        decoder = runner.decoder(contract)
        as_int32 = {name: array.astype(np.int32) for name, array in step.items()}
        np.testing.assert_array_equal(decoder.last(as_int32), shared.decoder(contract).last(step))
        assert list(decoder._cache.values()) == kept
        assert all(np.isfinite(value.numpy()).all() for value in kept)


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_batch_in_pieces_gives_what_it_gives_whole(
    size: int, contract: Any, runner: OrtRunner, tokenizer: Any
) -> None:
    rows = [tokenizer.encode(p).ids for p in PROMPTS]
    first = text_generation.arrays(contract, rows)
    whole, split = runner.decoder(contract), runner.decoder(contract)
    wanted = whole.step(first)
    found = np.concatenate([split.step(p) for p in pieces(first, size)], 1)
    real = np.asarray(first["attention_mask"], bool)
    np.testing.assert_allclose(found[real], wanted[real], atol=2e-5)
    assert split.past == whole.past == real.shape[1]
    for name, array in whole.cache().items():
        kept = array.transpose(0, 2, 1, 3)[real]
        np.testing.assert_allclose(split.cache()[name].transpose(0, 2, 1, 3)[real], kept, atol=2e-5)


def test_a_later_step_in_pieces_sees_what_came_before(
    contract: Any, runner: OrtRunner, tokenizer: Any
) -> None:
    ids = np.array([tokenizer.encode(PROMPTS[3]).ids])
    mask, half = np.ones_like(ids), ids.shape[1] // 2
    whole, split = runner.decoder(contract), runner.decoder(contract)
    wanted = whole.step(text_generation.build_step_arrays(contract, ids, mask))
    split.step(text_generation.build_step_arrays(contract, ids[:, :half], mask[:, :half]))
    later = text_generation.build_step_arrays(contract, ids[:, half:], mask)
    found = [split.step(p) for p in pieces(later, 2)]
    np.testing.assert_allclose(np.concatenate(found, 1), wanted[:, half:], atol=2e-5)


def test_shared_buffers_grow_past_what_they_were_made_for(
    contract: Any, runner: OrtRunner, shared: OrtRunner, tokenizer: Any
) -> None:
    first = text_generation.arrays(contract, [tokenizer.encode(PROMPTS[3]).ids])
    small, plain = shared.decoder(contract, 2), runner.decoder(contract)
    wanted = prefill(plain, first)
    np.testing.assert_allclose(prefill(small, first, size=2), wanted, atol=2e-5)


def test_a_row_ends_where_the_context_does(contract: Any, tokenizer: Any) -> None:
    script = tiny_decoder.ScriptRunner([40, 41, 42, 43], tokenizer.get_vocab_size())
    prompts = [[50] * 94, [60, 61]]  # the first has room for two
    made = generate(contract, script, tokenizer, prompts, Options(max_new_tokens=4))
    assert [m.tokens for m in made] == [(40, 41), (40, 41, 42, 43)]
    assert [m.finish for m in made] == ["length", "length"]
    assert all(s["attention_mask"].shape[1] <= tiny_decoder.CONTEXT for s in script.steps)


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ([5, 6, 7, 8, 9], [range(3), range(3, 5)]),
        ([5, 81, 6, 7], [range(1), range(1, 2), range(2, 4)]),
        ([5], [range(1)]),
    ],
)
def test_prompts_share_a_batch_when_each_column_is_in_the_context(
    lengths: list[int], wanted: list[range], contract: Any
) -> None:
    assert list(loop.batches(contract, lengths, Options(16), 3)) == wanted


def test_prompts_share_a_batch_up_to_the_size_of_its_logits(
    contract: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LOGITS", 2 * 40 * 4 * contract.generation.vocabulary)
    found = list(loop.batches(contract, [40] * 5, Options(16), 8))
    assert [len(r) for r in found] == [2, 2, 1]


def test_an_end_of_text_ends_a_row_and_is_no_text(contract: Any, tokenizer: Any) -> None:
    word = tokenizer.encode("good").ids
    script = tiny_decoder.ScriptRunner([*word, 2, *word], tokenizer.get_vocab_size())
    (made,) = generate(contract, script, tokenizer, ["the"])
    assert (made.text, made.finish, made.tokens) == ("good", "eos", (*word, 2))
    script = tiny_decoder.ScriptRunner([*word, 2, *word], tokenizer.get_vocab_size())
    options = Options(max_new_tokens=5, ignore_eos=True)
    (made,) = generate(contract, script, tokenizer, ["the"], options)
    assert (made.finish, len(made.tokens)) == ("length", 5)


def test_a_seed_reproduces_and_another_does_not(
    contract: Any, runner: OrtRunner, tokenizer: Any
) -> None:
    def drawn(seed: int, prompts: list[str]) -> list[tuple[int, ...]]:
        options = Options(16, temperature=1.5, seed=seed)
        return [c.tokens for c in generate(contract, runner, tokenizer, prompts, options)]

    assert drawn(3, PROMPTS) == drawn(3, PROMPTS)
    assert drawn(3, PROMPTS) != drawn(4, PROMPTS)
    assert len(set(drawn(3, [PROMPTS[0]] * 4))) == 4


def test_the_prompt_counts_as_seen(contract: Any, tokenizer: Any) -> None:
    script = tiny_decoder.ScriptRunner([40], tokenizer.get_vocab_size())
    options = Options(1, repetition_penalty=1e9)
    prompts = [[50, 40], [50, 51]]
    first, second = generate(contract, script, tokenizer, prompts, options)
    assert first.tokens != (40,)
    assert second.tokens == (40,)


def test_streamed_pieces_are_the_text_and_one_per_token(
    contract: Any, runner: OrtRunner, tokenizer: Any
) -> None:
    options = Options(40, temperature=1.2)
    made = generate(contract, runner, tokenizer, PROMPTS, options)
    found = list(stream(contract, runner, tokenizer, PROMPTS, options))
    for i, completion in enumerate(made):
        own = [p for p in found if p.row == i]
        assert "".join(p.text for p in own) == completion.text
        assert tuple(p.token for p in own) == completion.tokens
        assert [p.finish is not None for p in own] == [False] * (len(own) - 1) + [True]


def test_a_conversation_is_apply_template_by_the_template(contract: Any, tokenizer: Any) -> None:
    script = tiny_decoder.ScriptRunner([2], tokenizer.get_vocab_size())
    generate(contract, script, tokenizer, [[{"role": "user", "content": "hi"}]])
    wanted = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(script.steps[0]["input_ids"][0], skip_special_tokens=False) == wanted


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "at least one prompt"),
        ("a text", "list of at least one"),
        ([""], r"prompts\[0\]: the prompt has no token"),
        (["good", [7] * 96], r"prompts\[1\]: the prompt has 96 tokens. Accepted: up to 95"),
        ([[5, 100000]], "token id 100000"),
        ([{"role": "user", "content": "hi"}], "Put it in a list"),
        ([3.5], "float"),
        ([[{"content": "hi"}]], "message 0 has no role"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_refused_before_the_first_run(
    prompts: Any, message: str, contract: Any, tokenizer: Any
) -> None:
    script = tiny_decoder.ScriptRunner([2], tokenizer.get_vocab_size())
    with pytest.raises(InputError, match=message):
        stream(contract, script, tokenizer, prompts)
    assert script.steps == []


def test_arrays_that_do_not_continue_the_cache_are_refused(
    contract: Any, runner: OrtRunner
) -> None:
    decoder = runner.decoder(contract)
    first = text_generation.arrays(contract, [[5, 6, 7]])
    decoder.step(first)
    with pytest.raises(InputError, match=r"attention_mask.*3 tokens in the KV cache"):
        decoder.step(first)


def test_a_model_without_a_cache_is_no_decoder(contract: Any, tmp_path: Path) -> None:
    encoder = OrtRunner(small_model.model(tmp_path / "m.onnx"), threads=1)
    with pytest.raises(BundleError, match=r"past_key_values\.0\.key"):
        encoder.decoder(contract)
