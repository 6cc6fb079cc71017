"""Check the distribution that the harness samples from, against transformers' logits processors.

compared   each token of generate() with the processors' probabilities on the same scores. It is
           drawn by one uniform number, which follows from the seed and the index of the text: the
           number must lie in the token's interval of the cumulative sum. Without sampling the
           token must be the likeliest
limit      64 float32 roundoffs of the cumulative sum
caught     an option ignored or applied twice:
           test_a_fault_of_the_distribution_is_named_by_its_option
caller     generation_laws.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from optimizer.harness.contract import Contract
from optimizer.harness.generate import Options, generate
from optimizer.harness.generate.options import NEUTRAL
from optimizer.harness.inputs.batch import Array
from optimizer.harness.runtimes.decoder import LastOfStep
from optimizer.validate.ledger.pieces.roundoff import UNIT

SAMPLINGS: tuple[Mapping[str, Any], ...] = (
    {"do_sample": True},  # by the contract's own defaults
    {"do_sample": False, "repetition_penalty": 1.3},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.02},
    {"do_sample": True, "repetition_penalty": 1.3},
    {"temperature": 0.8, "top_k": 200, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1},
)
PROMPTS = ([3, 1, 3], [7, 2, 9])
NEW = 24  # tokens after each prompt
VOCABULARY = 2048  # scores of a step at most: with fewer, more faults change no token
DEVIATION = 2.0  # standard deviation of the scores
SEED = 11


class ScriptedScores(LastOfStep):
    """Stand-in for a model (runtimes/decoder.py) that returns given scores, whatever its input.

    scores: (steps, batch, vocabulary)
    """

    past = 0

    def __init__(self, scores: Array) -> None:
        self._scores, self._done = scores, 0

    def decoder(self, contract: Contract, capacity: int = 0) -> ScriptedScores:  # noqa: ARG002
        return self

    def step(self, arrays: Mapping[str, Array]) -> Array:
        """Return logits (batch, tokens, vocabulary) that a test of sampling prescribes: the scores
        of the script's next step at the last token, 0 elsewhere."""
        logits = np.zeros((*arrays["input_ids"].shape, self._scores.shape[2]), np.float32)
        logits[:, -1] = self._scores[self._done]
        self._done += 1
        return logits


class NoText:
    """Tokenizer that decodes any tokens to an empty text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:  # noqa: ARG002
        return ""


def find_problems(contract: Contract) -> list[str]:
    """Return a sentence for each set of sampling options with which the harness draws other tokens
    than transformers' processors."""
    about = contract.decoder
    vocabulary = min(about.vocabulary, VOCABULARY)
    small = replace(
        contract,
        generation=replace(
            about, vocabulary=vocabulary, context=len(PROMPTS[0]) + NEW, eos_ids=(0,), bos_id=None
        ),
    )
    shape = (NEW, len(PROMPTS), vocabulary)
    scores = np.random.default_rng(SEED).normal(0, DEVIATION, shape).astype(np.float32)
    prompts = [[i % vocabulary for i in prompt] for prompt in PROMPTS]
    messages = []
    for sampling in SAMPLINGS:
        values = {
            **NEUTRAL,
            **{n: v for n, v in about.defaults.items() if n in NEUTRAL},
            **sampling,
        }
        options = Options(max_new_tokens=NEW, seed=SEED, ignore_eos=True, **sampling)
        answers = generate(small, ScriptedScores(scores), NoText(), prompts, options)
        wrong = [
            problem
            for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            if (
                problem := _wrong(
                    sampling, values, [*prompt, *answer.tokens], scores[:, number], number
                )
            )
        ]
        messages += wrong[:1]
    return messages


def _wrong(
    sampling: Mapping[str, Any],
    values: Mapping[str, Any],
    text: Sequence[int],
    scores: Array,
    number: int,
) -> str:
    """Write a sentence on the first token that the processors would not draw; "" where all agree.

    sampling: options of the request
    values: all options, defaults included
    text: token ids, the last of which were drawn
    scores: (steps, vocabulary), one row per drawn token
    number: index of the text in the request
    """
    draws = sampling.get("do_sample", True) and values["temperature"] != 0
    generator = np.random.default_rng([SEED, number])
    begun = len(text) - len(scores)
    for step, token in enumerate(text[begun:]):
        ids = torch.tensor([text[: begun + step]])
        processed = _processed(ids, torch.from_numpy(scores[step])[None], values, draws)[0]
        if not draws:
            likeliest = int(processed.argmax())
            if token != likeliest:
                return (
                    f"{_describe(sampling)}: token {step} is {token}, the likeliest is {likeliest}"
                )
            continue
        uniform = generator.random()
        upto = np.cumsum(processed.double().softmax(-1).numpy())
        low, high = (upto[token - 1] if token else 0.0), upto[token]
        # float32 scores, their exponentials, and a sum of these
        near = 64 * UNIT["fp32"]
        if not (low < high and low - near <= uniform <= high + near):
            expected = int(np.searchsorted(upto, uniform))
            return (
                f"{_describe(sampling)}: token {step} is {token}; transformers' processors give "
                f"{expected} at the same random number, {uniform:.6f}, and {token} between "
                f"{low:.6f} and {high:.6f}"
            )
    return ""


def _processed(
    ids: torch.Tensor, scores: torch.Tensor, values: Mapping[str, Any], draws: bool
) -> torch.Tensor:
    """Apply transformers' processors to scores (1, vocabulary), in the order of its generate().

    ids: token ids so far (1, tokens)
    values: all options
    draws: True where tokens are sampled
    """
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    chain = LogitsProcessorList()
    if values["repetition_penalty"] != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(float(values["repetition_penalty"])))
    if draws:
        chain.append(TemperatureLogitsWarper(float(values["temperature"])))
        if values["top_k"]:
            chain.append(TopKLogitsWarper(int(values["top_k"])))
        if values["top_p"] < 1:
            chain.append(TopPLogitsWarper(float(values["top_p"])))
        if values["min_p"]:
            chain.append(MinPLogitsWarper(float(values["min_p"])))
    processed: torch.Tensor = chain(ids, scores.clone())
    return processed


def _describe(sampling: Mapping[str, Any]) -> str:
    return "sampled with " + ", ".join(f"{name} {value}" for name, value in sampling.items())
