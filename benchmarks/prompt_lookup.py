"""Guessed tokens, from the prompt itself, in OpenVINO GenAI: how much faster, and is it the same text?

    PYTHON benchmarks/prompt_lookup.py --genai FOLDER [--tokens 4] [--threads 1] [--out FILE]

PYTHON has openvino-genai besides the project. FOLDER is a bundle's model/openvino-cpu (genai:
true). Prompts are functions of Python's own library with an instruction to write them again, so
that what follows has often been there before; greedy, 128 new tokens. One pipeline guesses, the
other does not; they take turns. Per prompt the wall time without over the time with, the tokens
before the two texts part, and how near the two likeliest tokens lay where they did, as a share of
the logits' deviation, by the model itself with its text fed token by token.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.harness.machine import this_machine

NEW = 128


def prompts() -> list[str]:
    import base64
    import bisect
    import heapq
    import shlex
    import statistics as stats
    import string
    import textwrap

    functions: list[Any] = [
        bisect.bisect_left,
        heapq.heappush,
        textwrap.dedent,
        string.capwords,
        shlex.join,
        base64.b32encode,
        stats.median,
        bisect.insort_right,
    ]
    asked = "Write this Python function again, with the same name and the same comments:\n\n{}\n\n"
    return [asked.format(inspect.getsource(f)[:1200]) for f in functions]


def main() -> None:
    import openvino_genai as genai

    options = arguments()
    properties = json.loads((options.genai / "openvino_properties.json").read_text())
    properties["INFERENCE_NUM_THREADS"] = options.threads

    def pipeline(**more: Any) -> Any:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1  # GB
        scheduler.enable_prefix_caching = False
        return genai.LLMPipeline(
            str(options.genai), "CPU", scheduler_config=scheduler, **properties, **more
        )

    def settings(tokens: int) -> Any:
        chosen = genai.GenerationConfig()
        chosen.max_new_tokens, chosen.do_sample, chosen.ignore_eos = NEW, False, True
        chosen.apply_chat_template = True
        if tokens:
            chosen.num_assistant_tokens, chosen.max_ngram_size = tokens, 3
        return chosen

    tokenizer = genai.Tokenizer(str(options.genai))
    systems = {
        "plain": (pipeline(), settings(0)),
        "guessing": (pipeline(prompt_lookup=True), settings(options.tokens)),
    }
    rows = []
    for prompt in prompts():
        times: dict[str, list[float]] = {name: [] for name in systems}
        texts: dict[str, list[int]] = {}
        for i in range(options.rounds + 1):
            for name, (pipe, chosen) in systems.items():
                ids = tokenizer.encode(
                    tokenizer.apply_chat_template(
                        [{"role": "user", "content": prompt}], add_generation_prompt=True
                    )
                )
                begun = time.perf_counter()
                result = pipe.generate(ids, chosen)
                if i:
                    times[name].append(time.perf_counter() - begun)
                texts[name] = [int(t) for t in result.tokens[0]]
        pairs = zip(times["plain"], times["guessing"], strict=True)
        ratios = [a / b for a, b in pairs]
        same = np.array(texts["plain"]) == np.array(texts["guessing"])
        rows.append(
            {
                "prompt": prompt.split("def ", 1)[1].split("(")[0],
                "gain": round(statistics.median(ratios), 2),
                "plain_s": round(statistics.median(times["plain"]), 2),
                "same_tokens": int(len(same) if same.all() else same.argmin()),
            }
        )
        print(rows[-1], flush=True)
    document = {
        "machine": this_machine().cpu,
        "load_average": round(os.getloadavg()[0], 1),
        "properties": properties,
        "tokens": options.tokens,
        "median_gain": statistics.median(r["gain"] for r in rows),
        "same_texts": sum(r["same_tokens"] == NEW for r in rows),
        "rows": rows,
    }
    print(json.dumps({k: v for k, v in document.items() if k != "rows"}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--genai", type=Path, required=True)
    p.add_argument("--tokens", type=int, default=4, help="guessed at once")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--out", type=Path)
    return p.parse_args()


if __name__ == "__main__":
    main()
