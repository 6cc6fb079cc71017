"""Prompt lookup on a bundle: gain in time, and equality of texts.

    python -m benchmarks.decoders.prompt_lookup BUNDLE [--guesses 1 3 7 15] [--threads 1]
                                              [--rounds 3] [--out FILE]

Prompts are functions of Python's own library with an instruction to write them again
(prompt_lookup_genai.py); generation is greedy, up to 128 new tokens. The bundle without guesses and
with at most N guesses per step take turns. The gain is the wall time without over the time with
guesses, for the same number of tokens, of the entire answer and of the part after its first token.

Texts with guesses must be equal for every N, or the exit code is 1. Where they leave the text
without guesses, the gap between the two tokens' scores is given over the deviation of all scores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.decoders.prompt_lookup_genai import NEW, prompts
from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.generate import Options
from optimizer.harness.generate.prompt_lookup import Guesses, PromptLookup
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.harness.tasks.text_generation import arrays, tokenize_prompt

GREEDY = Options(max_new_tokens=NEW, do_sample=False)
FIGURES = ("gain", "gain_after_first_token", "tokens_a_step")


def timed(bundle: Bundle, ids: list[int]) -> tuple[float, float, list[int]]:
    """Generate; return seconds to the first token, seconds from it to the last, and the tokens."""
    start, first, tokens = time.perf_counter(), 0.0, list[int]()
    for piece in bundle.stream([ids], GREEDY):
        first = first or time.perf_counter()
        tokens.append(piece.token)
    return first - start, time.perf_counter() - first, tokens


def tokens_a_step(prompt: list[int], tokens: list[int], lookup: PromptLookup) -> float:
    """Compute the tokens per step that prompt lookup takes for a given text."""
    guesses, at, steps = Guesses([*prompt, tokens[0]], lookup.seconds), 1, 0
    while at < len(tokens):
        step = guesses.step(max(1, len(tokens) - at))
        rest = tokens[at : at + len(step)]
        right = next(
            (i for i, (a, b) in enumerate(zip(step[1:], rest, strict=False)) if a != b), None
        )
        chosen = rest if right is None else rest[: right + 1]
        guesses.update(step, chosen)
        at, steps = at + len(chosen), steps + 1
    return (len(tokens) - 1) / max(steps, 1)


def of(bundle: Bundle) -> PromptLookup:
    assert bundle.lookup is not None
    return bundle.lookup


def apart(bundle: Bundle, ids: list[int], one: int, other: int) -> float:
    """Compute the gap between the scores of two next tokens, over the deviation of all scores."""
    scores = bundle.runner.decoder(bundle.contract).step(arrays(bundle.contract, [ids]))[0, -1]
    return round(float(abs(scores[one] - scores[other]) / scores.std()), 3)


def measured(bundles: dict[int, Bundle], prompt: str, rounds: int) -> dict[str, Any]:
    plain = bundles[0]
    message = [{"role": "user", "content": prompt}]
    ids = tokenize_prompt(plain.contract, plain.encoder, message, "prompt")
    times: dict[int, list[tuple[float, float]]] = {n: [] for n in bundles}
    texts: dict[int, list[int]] = {}
    for i in range(rounds + 1):  # the first warms up
        for n, bundle in bundles.items():
            first, rest, texts[n] = timed(bundle, ids)
            if i:
                times[n].append((first, rest))
    guessed = {tuple(t) for n, t in texts.items() if n}
    row: dict[str, Any] = {
        "prompt": prompt.split("def ", 1)[1].split("(")[0],
        "prompt_tokens": len(ids),
        "tokens": {n: len(t) for n, t in texts.items()},
        "texts_with_guesses": len(guessed),
        "plain_s": [round(statistics.median(t), 3) for t in zip(*times[0], strict=True)],
    }
    for n in (n for n in bundles if n):
        longer = (len(texts[n]) - 1) / (len(texts[0]) - 1)  # where the two texts part
        both = list(zip(times[0], times[n], strict=True))
        row[str(n)] = {
            "gain": round(statistics.median((a[0] + longer * a[1]) / sum(b) for a, b in both), 2),
            "gain_after_first_token": round(
                statistics.median(longer * a[1] / b[1] for a, b in both), 2
            ),
            "tokens_a_step": round(tokens_a_step(ids, texts[n], of(bundles[n])), 2),
        }
    with_guesses = list(next(iter(guessed)))
    pairs = enumerate(zip_longest(texts[0], with_guesses, fillvalue=-1))
    parts = next((i for i, (a, b) in pairs if a != b), None)
    row["parts_from_plain_after"] = parts
    if parts is not None:
        row["apart"] = apart(plain, [*ids, *texts[0][:parts]], texts[0][parts], with_guesses[parts])
    return row


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("bundle", type=Path)
    p.add_argument("--guesses", type=int, nargs="+", default=[1, 3, 7, 15])
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--out", type=Path)
    options = p.parse_args()
    with ExitStack() as stack:
        bundles = {
            n: stack.enter_context(Bundle(options.bundle, threads=options.threads, prompt_lookup=n))
            for n in [0, *options.guesses]
        }
        lookup = of(bundles[max(options.guesses)])
        engine = bundles[0].engine["target"]
        rows = []
        for prompt in prompts():
            rows.append(measured(bundles, prompt, options.rounds))
            print(rows[-1], flush=True)
    document = {
        "machine": describe_machine().to_json(),
        "load_average": round(os.getloadavg()[0], 1),
        "bundle": options.bundle.parent.name,
        "engine": engine,
        "threads": options.threads,
        "rounds": options.rounds,
        "step_ms": {size: round(1000 * s, 2) for size, s in lookup.seconds.items()},
        "median": {
            str(n): {name: statistics.median(r[str(n)][name] for r in rows) for name in FIGURES}
            for n in options.guesses
        },
        "one_text_with_any_guesses": sum(r["texts_with_guesses"] == 1 for r in rows),
        "same_text_as_plain": sum(r["parts_from_plain_after"] is None for r in rows),
        "rows": rows,
    }
    print(json.dumps({k: v for k, v in document.items() if k != "rows"}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return int(document["one_text_with_any_guesses"] != len(rows))


if __name__ == "__main__":
    raise SystemExit(main())
