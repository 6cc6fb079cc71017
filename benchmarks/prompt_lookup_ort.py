"""Tokens guessed from the prompt itself, on ONNX Runtime: how much faster, and the same text?

    python benchmarks/prompt_lookup_ort.py BUNDLE [--guesses 1 3 5 7] [--threads 1] [--rounds 3]
                                                  [--out FILE]

Prompts and lengths are those of prompt_lookup.py: functions of Python's own library with an
instruction to write them again, greedy, 128 new tokens. The bundle without guesses and with each
number of them take turns. Per prompt and number the wall time without over the time with, of the
whole answer and of what comes after its first token, and the share of guesses that were right.
Texts with guesses must be one text, or the exit code is 1; where it leaves the one without, how far
the two tokens' logits lie apart there, over the deviation of all, by the model itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.harness.bundle import Bundle
from optimizer.harness.generate import Options
from optimizer.harness.generate.prompt_lookup import Guesses
from optimizer.harness.machine import this_machine
from optimizer.harness.tasks.text_generation import arrays, prompt_ids

sys.path.insert(0, str(Path(__file__).parent))
from prompt_lookup import NEW, prompts

GREEDY = Options(max_new_tokens=NEW, do_sample=False, ignore_eos=True)


def timed(bundle: Bundle, ids: list[int]) -> tuple[float, float, list[int]]:
    """Seconds to the first token, and from it to the last; the tokens."""
    start, first, tokens = time.perf_counter(), 0.0, list[int]()
    for piece in bundle.stream([ids], GREEDY):
        first = first or time.perf_counter()
        tokens.append(piece.token)
    return first - start, time.perf_counter() - first, tokens


def acceptance(prompt: list[int], tokens: list[int], most: int) -> tuple[float, float]:
    """Of a text that is known: tokens a step, and the share of guesses that were right."""
    guesses, at, steps = Guesses([*prompt, tokens[0]], most), 1, 0
    while at < len(tokens):
        step = guesses.step(len(tokens) - at)
        right = 1
        while right < len(step) and step[right] == tokens[at + right - 1]:
            right += 1
        chosen = tokens[at : at + right]
        guesses.chosen(step, chosen)
        at, steps = at + len(chosen), steps + 1
    return (len(tokens) - 1) / steps, guesses.right / max(guesses.guessed, 1)


def apart(bundle: Bundle, ids: list[int], one: int, other: int) -> float:
    """Of the scores behind these tokens, between two tokens, over the deviation of all."""
    scores = bundle.runner.decoder(bundle.contract).step(arrays(bundle.contract, [ids]))[0, -1]
    return round(float(abs(scores[one] - scores[other]) / scores.std()), 3)


def measured(bundles: dict[int, Bundle], prompt: str, rounds: int) -> dict[str, Any]:
    plain = bundles[0]
    message = [{"role": "user", "content": prompt}]
    ids = prompt_ids(plain.contract, plain.encoder, message, "prompt")
    times: dict[int, list[tuple[float, float]]] = {n: [] for n in bundles}
    texts: dict[int, list[int]] = {}
    for i in range(rounds + 1):
        for n, bundle in bundles.items():
            first, rest, texts[n] = timed(bundle, ids)
            if i:
                times[n].append((first, rest))
    guessed = {tuple(t) for n, t in texts.items() if n}
    row: dict[str, Any] = {
        "prompt": prompt.split("def ", 1)[1].split("(")[0],
        "prompt_tokens": len(ids),
        "texts_with_guesses": len(guessed),
        "plain_s": [round(statistics.median(t), 2) for t in zip(*times[0], strict=True)],
    }
    for n in bundles:
        if not n:
            continue
        whole = [sum(a) / sum(b) for a, b in zip(times[0], times[n], strict=True)]
        rest = [a[1] / b[1] for a, b in zip(times[0], times[n], strict=True)]
        a_step, right = acceptance(ids, texts[n], n)
        row[str(n)] = {
            "gain": round(statistics.median(whole), 2),
            "gain_after_first_token": round(statistics.median(rest), 2),
            "tokens_a_step": round(a_step, 2),
            "right": round(right, 2),
        }
    with_guesses = next(iter(guessed))
    same = next((i for i in range(NEW) if texts[0][i] != with_guesses[i]), NEW)
    row["same_as_plain"] = same
    if same < NEW:
        row["apart"] = apart(plain, [*ids, *texts[0][:same]], texts[0][same], with_guesses[same])
    return row


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("bundle", type=Path)
    p.add_argument("--guesses", type=int, nargs="+", default=[1, 3, 5, 7])
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--out", type=Path)
    options = p.parse_args()
    with ExitStack() as stack:
        bundles = {
            n: stack.enter_context(Bundle(options.bundle, threads=options.threads, prompt_lookup=n))
            for n in [0, *options.guesses]
        }
        rows = []
        for prompt in prompts():
            rows.append(measured(bundles, prompt, options.rounds))
            print(rows[-1], flush=True)
    document = {
        "machine": this_machine().to_json(),
        "load_average": round(os.getloadavg()[0], 1),
        "bundle": options.bundle.parent.name,
        "threads": options.threads,
        "rounds": options.rounds,
        "median": {
            str(n): {
                name: float(np.median([r[str(n)][name] for r in rows]))
                for name in ("gain", "gain_after_first_token", "tokens_a_step", "right")
            }
            for n in options.guesses
        },
        "one_text_with_any_guesses": sum(r["texts_with_guesses"] == 1 for r in rows),
        "same_text_as_plain": sum(r["same_as_plain"] == NEW for r in rows),
        "rows": rows,
    }
    print(json.dumps({k: v for k, v in document.items() if k != "rows"}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return int(document["one_text_with_any_guesses"] != len(rows))


if __name__ == "__main__":
    raise SystemExit(main())
