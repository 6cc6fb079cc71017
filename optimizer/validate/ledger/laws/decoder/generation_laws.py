"""The hop `harness` of a decoder: check generation, from prompt to text as a bundle does it.

compared   the harness's tokens, texts and contract with transformers' and with the same graph run
           on each complete text
limit      tokens drawn: the largest gap to the likeliest token, in standard deviations of the
           logits, that correct runs produce (CorrectRuns.token_gap); everything else: equal
caught     positions off by one in the loop, another token drawn, a fault after 64 tokens, a
           contract changed: test_a_loop_that_draws_another_token_is_caught_at_the_harness,
           test_a_fault_that_no_short_greedy_text_shows_is_caught_at_the_harness

 1. tokens    transformers' tokenizer, from the source's own files, gives the ids of every prompt
 2. template  transformers renders a conversation as the harness does
 3. contract  the ids, sizes and end tokens are the source config's
 4. greedy    The loop, with KV cache and batches padded on the left, draws the likeliest tokens of
              the same graph run on each complete text; at a difference the two best tokens lie
              within the limit. As the runtime fuses the graph and, where inputs stay float,
              operator by operator. A prompt alone draws exactly the likeliest tokens of the same
              pieces, which have the same bits.
 5. fields    the text is transformers' for the tokens, and the other fields follow from them
 6. long      laws 4 and 5 on texts that pass 64 and 512 tokens and that end with the context, up
              to the length of an evaluation window
 7. steps     arrays of every step, at every length up to the context (step_laws.py)
 8. sampling  the distribution that tokens are drawn from (sampling_laws.py)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.generate import Options, generate
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.harness.runtimes.runner import Runner
from optimizer.harness.tasks import text_generation
from optimizer.validate import target_runner
from optimizer.validate.decoder import OnnxDecoder, compute_logits
from optimizer.validate.ledger.breach import CORRECT_RUNS, write_breach
from optimizer.validate.ledger.distance import Array, Distance
from optimizer.validate.ledger.entry import LedgerEntry
from optimizer.validate.ledger.laws import answer_laws, contract_laws
from optimizer.validate.ledger.laws.contract_laws import STRANGE
from optimizer.validate.ledger.laws.decoder import sampling_laws, step_laws
from optimizer.validate.materials import Materials

PROMPTS, NEW = 3, 12
LONG, AFTER = (64, 512), 4  # cached tokens that long texts pass, and tokens drawn around them
CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello!"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  What is 2 + 2?\n"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Why?"},
    ],
)


def harness(m: Materials) -> LedgerEntry:
    """Hop `harness` of a decoder: check by laws 1 to 8 that the bundle's harness tokenizes,
    renders, samples and stops as transformers does."""
    folder = m.bundle or m.source
    served = contracts.read(folder / "contract.json")
    tasks.check(served, str(folder / "contract.json"))
    tokenizer = load_tokenizer(folder if m.bundle else folder / "checkpoint", served)
    checkpoint = m.source / "checkpoint"
    problems = contract_laws.compare_contract(m.contract, served, checkpoint)
    problems += _ends(served, checkpoint)
    problems += compare_tokens(checkpoint, served, tokenizer, list(m.texts)[:8])
    problems += compare_templates(checkpoint, served, tokenizer)
    problems += step_laws.find_problems(served) + sampling_laws.find_problems(served)
    precision, long = m.section.target.computes_in, _long(m)
    drawn = PROMPTS * NEW + len(long) * AFTER
    limit = m.correct.token_gap(drawn, precision, blocks=bool(m.kernel_blocks))
    gap, odd = _greedy(m, served, tokenizer, limit, long, fuse=True)
    problems += odd
    if m.kernel_blocks:
        written = m.correct.token_gap(PROMPTS * NEW, m.precision, blocks=False)
        problems += _greedy(m, served, tokenizer, written, [], fuse=False)[1]
    measured = Distance(gap, gap, 1.0, gap)
    why = "the loop adds nothing to the model; only a tie may end differently"
    start = "each text by itself"
    entry = LedgerEntry("harness", start, limit, measured, not problems, why, tuple(problems))
    return entry.with_unproven(_unseen(m, long), step_laws.describe_unseen(served.decoder.context))


def compare_tokens(
    checkpoint: Path, served: Contract, tokenizer: Any, texts: Sequence[str]
) -> list[str]:
    """Check law 1: return a problem for each text to which the harness gives other token ids than
    transformers' tokenizer.

    checkpoint: folder with the source's tokenizer files
    served: the harness's contract
    tokenizer: the harness's tokenizer
    """
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(checkpoint)
    broken = []
    for text in (*texts, *STRANGE):
        expected = reference(text)["input_ids"]
        if len(expected) >= served.decoder.context:
            continue
        actual = text_generation.tokenize_prompt(served, tokenizer, text, "prompt")
        if actual != expected:
            broken.append(f"{text[:30]!r} is tokens {actual[:8]}, transformers' {expected[:8]}")
    return broken


def compare_templates(checkpoint: Path, served: Contract, tokenizer: Any) -> list[str]:
    """Check law 2: return a problem for each conversation that the harness renders to another text
    than transformers' chat template."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(checkpoint)
    known = reference.chat_template is not None
    if known != (served.decoder.chat_template is not None):
        return [f"the contract has {'no' if known else 'a'} chat template; the source differs"]
    broken = []
    for conversation in CONVERSATIONS if known else ():
        expected = reference.apply_chat_template(
            conversation, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        actual = text_generation.tokenize_prompt(served, tokenizer, conversation, "prompt")
        if actual != list(expected):
            broken.append(
                f"a conversation is rendered as {tokenizer.decode(actual)[:60]!r}, by transformers "
                f"as {reference.decode(expected)[:60]!r}"
            )
    return broken


def _ends(served: Contract, checkpoint: Path) -> list[str]:
    """Check law 3: return a problem for each end token of the source's config that does not end a
    text in the bundle's contract."""
    end_ids: set[int] = set()
    for file in (checkpoint / n for n in ("config.json", "generation_config.json")):
        text = file.read_text("utf-8") if file.is_file() else "{}"
        ids = json.loads(text).get("eos_token_id")
        end_ids |= set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    missing = sorted(end_ids - set(served.decoder.eos_ids))
    return [f"token {i} ends a text in the source's config, but not here" for i in missing]


def _long(m: Materials) -> list[list[int]]:
    """Make long prompts, as token ids, for the laws of generation: the last tokens of the ledger's
    texts, joined."""
    most = min(m.contract.decoder.context, _affordable(m))
    lengths = sorted({min(n + AFTER // 2, most) for n in (*LONG, most)})
    ids = [i for text in _prompts(m) for i in text]
    ids *= 1 + most // len(ids)
    return [ids[-n:-AFTER] for n in lengths if n > max(LONG[0], AFTER)]


def _affordable(m: Materials) -> int:
    """Return the largest number of tokens that these laws run in one piece. `plan` counts the
    memory of that many tokens' logits."""
    return max(LONG[-1] + AFTER, m.section.validate_.sequence_length)


def _unseen(m: Materials, long: Sequence[Sequence[int]]) -> str:
    """Write a sentence on the lengths at which no token was drawn; "" where there are none."""
    context, most = m.contract.decoder.context, max((len(p) + AFTER for p in long), default=0)
    return "" if most >= context else f"tokens were drawn up to {most:,} of {context:,} tokens"


def _greedy(
    m: Materials,
    served: Contract,
    tokenizer: Any,
    tie: float,
    long: Sequence[list[int]],
    *,
    fuse: bool,
) -> tuple[float, list[str]]:
    """Laws 4 to 6: return (largest gap of a drawn token to the likeliest one, problems).

    tie: limit of the gap, in standard deviations of the logits
    long: prompts (token ids) that run one by one
    fuse: True for fused kernels; False for operators as written
    """
    rows = sorted({tuple(t[:16]) for t in _prompts(m)}, key=len)[-PROMPTS:]
    prompts = [list(r[: len(r) - i]) for i, r in enumerate(rows)]  # of different lengths
    options = Options(max_new_tokens=NEW, do_sample=False, repetition_penalty=1.0, ignore_eos=True)
    few = replace(options, max_new_tokens=AFTER)
    widest, problems = 0.0, []
    by = "" if fuse else ", operator by operator"
    with closing(target_runner.open_decoder(m, fuse=fuse)) as runner:
        answers = generate(served, runner, tokenizer, prompts, options)
        reference = answer_laws.ReferencePipeline(m.contract, m.source / "checkpoint").tokenizer
        for prompt, answer in zip(prompts, answers, strict=True):  # law 5
            problems += answer_laws.compare_generated(reference, prompt, answer, NEW)
        alone = generate(served, runner, tokenizer, prompts[:1], options)[0].tokens
        likeliest = _likeliest(m, runner, prompts[0], len(alone))
        if list(alone) != likeliest:
            problems.append(f"it draws {list(alone)}; the likeliest tokens are {likeliest}{by}")
        system = OnnxDecoder(runner, m.contract)
        answers += [generate(served, runner, tokenizer, [p], few)[0] for p in long]
        for prompt, answer in zip([*prompts, *long], answers, strict=True):
            gap = _gap(system, prompt, answer.tokens)
            widest = max(widest, gap)
            if not gap <= tie:
                far, limit = write_breach(gap, tie)
                problems.append(
                    f"after {len(prompt)} tokens it draws {list(answer.tokens)[:6]} ..., of which "
                    f"one lies {far} deviations below the likeliest{by}, {limit} {CORRECT_RUNS}"
                )
    return widest, problems


def _likeliest(m: Materials, runner: Runner, prompt: list[int], count: int) -> list[int]:
    """Return the next `count` tokens that the loop must draw for one prompt. The graph gives the
    same bits for the same pieces, so ties are not accepted."""
    session = runner.decoder(m.contract, len(prompt) + count)
    ids, drawn = np.array([prompt], np.int64), list[int]()
    mask = np.ones_like(ids)
    while len(drawn) < count:
        scores = session.last(text_generation.build_step_arrays(m.contract, ids, mask))[0]
        drawn.append(int(scores.argmax()))
        ids = np.array([drawn[-1:]], np.int64)
        mask = np.concatenate([mask, np.ones_like(ids)], 1)
    return drawn


def _prompts(m: Materials) -> list[list[int]]:
    return [m.encoder.encode(t).ids for t in m.texts]


def _gap(system: OnnxDecoder, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Return the largest gap of a drawn token to the likeliest, in standard deviations of the
    logits. One run over prompt and answer gives all logits, because they depend on earlier tokens
    only.

    prompt, answer: token ids
    """
    ids = np.array([*prompt, *answer], np.int64)
    logits: Array = compute_logits(system, ids)[len(prompt) - 1 : -1].astype(np.float64)
    drawn = logits[np.arange(len(answer)), list(answer)]
    return float(((logits.max(1) - drawn) / logits.std(1)).max())
