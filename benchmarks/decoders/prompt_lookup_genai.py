"""Prompt lookup in OpenVINO GenAI: gain in time, and equality of texts.

    PYTHON -m benchmarks.decoders.prompt_lookup_genai --genai FOLDER [--tokens 4] [--threads 1]
        [--rounds 3] [--out FILE]

PYTHON has openvino-genai besides the project. FOLDER is a bundle's model/openvino-cpu (genai:
true). Prompts are functions of Python's own library with an instruction to write them again, so
that the answer repeats the prompt; generation is greedy, 128 new tokens. A pipeline with guesses
and one without take turns. The output per prompt is the wall time without over the time with
guesses, the number of tokens before the two texts differ, and the gap between the two tokens'
logits there, over the deviation of all logits.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.harness.inputs import kv_cache
from optimizer.harness.runtimes.machine import describe_machine

NEW = 128


def prompts() -> list[str]:
    import base64
    import fnmatch
    import shlex
    import statistics as stats
    import string
    import textwrap

    functions: list[Any] = [
        fnmatch.translate,
        textwrap.indent,
        textwrap.dedent,
        string.capwords,
        shlex.join,
        base64.urlsafe_b64decode,
        stats.median,
        string.Template.substitute,
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
        if tokens:
            chosen.num_assistant_tokens, chosen.max_ngram_size = tokens, 3
        return chosen

    tokenizer = genai.Tokenizer(str(options.genai))
    logits = in_one_step(options.genai / "openvino_model.xml", properties)
    systems = {
        "plain": (pipeline(), settings(0)),
        "guessing": (pipeline(prompt_lookup=True), settings(options.tokens)),
    }
    rows = []
    for prompt in prompts():
        times: dict[str, list[float]] = {name: [] for name in systems}
        texts: dict[str, list[int]] = {}
        message = [{"role": "user", "content": prompt}]
        chat = tokenizer.apply_chat_template(message, add_generation_prompt=True)
        ids = tokenizer.encode(chat)
        for i in range(options.rounds + 1):
            for name, (pipe, chosen) in systems.items():
                begun = time.perf_counter()
                result = pipe.generate(ids, chosen)
                if i:
                    times[name].append(time.perf_counter() - begun)
                texts[name] = [int(t) for t in result.tokens[0]]
        pairs = zip(times["plain"], times["guessing"], strict=True)
        ratios = [a / b for a, b in pairs]
        plain, guessed = texts["plain"], texts["guessing"]
        same = next((i for i in range(NEW) if plain[i] != guessed[i]), NEW)
        row = {
            "prompt": prompt.split("def ", 1)[1].split("(")[0],
            "gain": round(statistics.median(ratios), 2),
            "plain_s": round(statistics.median(times["plain"]), 2),
            "same_tokens": same,
        }
        if same < NEW:
            scores = logits([*ids.input_ids.data[0].tolist(), *plain[:same]])
            apart = abs(float(scores[plain[same]] - scores[guessed[same]]))
            row["apart"] = round(apart / float(scores.std()), 3)
        rows.append(row)
        print(rows[-1], flush=True)
    document = {
        "machine": describe_machine().cpu,
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


def in_one_step(model: Path, properties: dict[str, Any]) -> Callable[[list[int]], Any]:
    """Compile a model as a function: tokens -> logits after the last (vocabulary,)."""
    import openvino as ov

    compiled = ov.Core().compile_model(str(model), "CPU", properties)
    names = {name for port in compiled.inputs for name in port.get_names()}

    def logits(ids: list[int]) -> Any:
        mask = np.ones((1, len(ids)), np.int64)
        arrays = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": mask,
            "position_ids": kv_cache.position_ids(mask, len(ids)),
            "beam_idx": np.zeros(1, np.int32),
        }
        given = {n: a for n, a in arrays.items() if n in names}
        return compiled.create_infer_request().infer(given)[0][0, -1]

    return logits


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
