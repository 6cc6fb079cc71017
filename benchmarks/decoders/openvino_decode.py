"""INT4 decoding in OpenVINO: ours beside its own INT4, and many texts at once.

    PYTHON -m benchmarks.decoders.openvino_decode --genai FOLDER --onnxruntime LOWERED --float GRAPH

PYTHON has openvino-genai and nncf besides the project. FOLDER is a bundle's model/openvino-cpu
(genai: true), LOWERED the folder of the same integers lowered for ONNX Runtime, and GRAPH the
folder of the export stage. OpenVINO's own INT4 is NNCF's compress_weights of the float graph with
our attentions, in groups of 64; it leaves head and embedding in INT8, as in ours.

 1. one text: CPU seconds per token on one thread after a prompt of 128 tokens, systems taking turns
    in rounds; the median of the rounds' ratios to ours
 2. sixteen texts: tokens a second of ContinuousBatchingPipeline with all texts at once, over one
    after the other, and the number of texts that are the same

Writes results/openvino_decode.md and .json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from benchmarks.measure.results import RESULTS, ROOT
from optimizer.export import onnx_file
from optimizer.harness.inputs import kv_cache
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.harness.runtimes.openvino import stateful
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.lower.openvino import attention

PROMPT, TOKENS, TEXTS, ALONE, NEW = 128, 24, 16, 4, 48
CONTEXT = 1024  # maximum tokens of a text
Step = Callable[[dict[str, Any]], Any]
F32 = {"INFERENCE_PRECISION_HINT": "f32"}


def main() -> None:
    options = arguments()
    properties = json.loads((options.genai / "openvino_properties.json").read_text())
    own = nncf_model(options.float / "model.onnx", options.work)
    ours = options.genai / "openvino_model.xml"
    starts: dict[str, Callable[[], Step]] = {
        "ours in OpenVINO": in_openvino(ours, properties),
        "OpenVINO's own INT4, its defaults": in_openvino(own, {}),
        "OpenVINO's own INT4, float in f32": in_openvino(own, F32),
        "ours in ONNX Runtime": in_onnxruntime(options.onnxruntime / "model.onnx"),
    }
    decode = one_text(starts, options.rounds)
    batching = [many_texts(options.genai, properties, n, options.rounds) for n in (1, 2)]
    result = {
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": describe_machine().cpu,
        "load_average": round(os.getloadavg()[0], 1),
        "rounds": options.rounds,
        "properties": properties,
        "decode": decode,
        "batching": batching,
    }
    (options.out / "openvino_decode.json").write_text(json.dumps(result, indent=1))
    (options.out / "openvino_decode.md").write_text(page(result))
    print(page(result))


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--genai", type=Path, required=True)
    p.add_argument("--onnxruntime", type=Path, required=True)
    p.add_argument("--float", type=Path, required=True)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--work", type=Path, default=ROOT / "artifacts" / "openvino_decode")
    p.add_argument("--out", type=Path, default=RESULTS)
    return p.parse_args()


def nncf_model(graph: Path, work: Path) -> Path:
    """Make OpenVINO's own INT4 of the float graph in `work`, once."""
    path = work / "nncf_int4.xml"
    if path.is_file():
        return path
    import nncf

    work.mkdir(parents=True, exist_ok=True)
    model = onnx_file.load(graph)
    attention.fuse(model, CONTEXT)
    with tempfile.TemporaryDirectory() as folder:
        onnx_file.save(model, Path(folder) / "model.onnx")
        read = ov.Core().read_model(str(Path(folder) / "model.onnx"))
        mode = nncf.CompressWeightsMode.INT4_SYM
        compressed = nncf.compress_weights(read, mode=mode, group_size=64, ratio=1.0)
        stateful.make_stateful(ov, compressed)
        ov.save_model(compressed, str(path), compress_to_fp16=False)
    return path


def in_openvino(model: Path, properties: dict[str, Any]) -> Callable[[], Step]:
    """Compile a model; return a function that opens a new request for a text."""
    threads = {"INFERENCE_NUM_THREADS": 1, "ENABLE_CPU_PINNING": False}
    compiled = ov.Core().compile_model(str(model), "CPU", {**properties, **threads})
    names = {name for port in compiled.inputs for name in port.get_names()}

    def start() -> Step:
        request = compiled.create_infer_request()
        return lambda arrays: request.infer({n: a for n, a in arrays.items() if n in names})

    return start


def in_onnxruntime(model: Path) -> Callable[[], Step]:
    """Open a model in the harness's ONNX Runtime decoder, whose KV cache is one buffer."""
    from optimizer.harness.contract import read

    contract = read(next(model.parents[2].glob("load/*/contract.json")))
    runner = OrtRunner(model, threads=1)
    names = [i.name for i in contract.inputs]

    def start() -> Step:
        decoder = runner.decoder(contract, PROMPT + TOKENS)
        return lambda arrays: decoder.step({n: arrays[n] for n in names})

    return start


def one_text(starts: dict[str, Callable[[], Step]], rounds: int) -> dict[str, Any]:
    """Measure {system: {prefill_ms, token_ms, ratio to the first system}} in CPU time."""
    ids = np.random.default_rng(0).integers(0, 40_000, (1, PROMPT + TOKENS))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in starts}
    for i in range(rounds + 1):
        names = [*starts][i % len(starts) :] + [*starts][: i % len(starts)]
        for name in names:
            step = starts[name]()
            prefill = time_tokens(step, ids, 0, PROMPT)
            steps = [time_tokens(step, ids, k, k + 1) for k in range(PROMPT, PROMPT + TOKENS)]
            times[name] += [(prefill, statistics.median(steps))] if i else []
    first = times[next(iter(times))]
    return {
        name: {
            "prefill_ms": statistics.median(p for p, _ in own),
            "token_ms": statistics.median(t for _, t in own),
            "ratio": statistics.median(t / f for (_, t), (_, f) in zip(own, first, strict=True)),
        }
        for name, own in times.items()
    }


def time_tokens(step: Step, ids: Any, start: int, end: int) -> float:
    """Time the tokens start..end in CPU milliseconds."""
    mask = np.ones((1, end), np.int64)
    arrays = {
        "input_ids": ids[:, start:end],
        "attention_mask": mask,
        "position_ids": kv_cache.position_ids(mask, end - start),
        "beam_idx": np.zeros(1, np.int32),
    }
    begun = time.process_time()
    step(arrays)
    return 1e3 * (time.process_time() - begun)


def many_texts(folder: Path, properties: dict[str, Any], threads: int, rounds: int) -> Any:
    """Time sixteen prompts together, and the first few one after the other."""
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    settings = genai.GenerationConfig()
    settings.max_new_tokens, settings.do_sample, settings.ignore_eos = NEW, False, True
    settings.apply_chat_template = False
    pipeline = genai.ContinuousBatchingPipeline(
        str(folder), scheduler, "CPU", {**properties, "INFERENCE_NUM_THREADS": threads}
    )
    prompts = [
        f"The history of town number {i} begins with a mill, a bridge and a quarrel about who pays"
        for i in range(TEXTS)
    ]

    def texts(given: list[str]) -> list[str]:
        results = pipeline.generate(given, [settings] * len(given))
        return [r.m_generation_ids[0] for r in results]

    texts(prompts[:1])
    wall, cpu, same = [], [], 0
    for _ in range(rounds):
        marks = [(time.perf_counter(), time.process_time())]
        alone = [texts([p])[0] for p in prompts[:ALONE]]
        marks.append((time.perf_counter(), time.process_time()))
        together = texts(prompts)
        marks.append((time.perf_counter(), time.process_time()))
        one, all_ = ([b - a for a, b in zip(*marks[i : i + 2], strict=True)] for i in (0, 1))
        wall.append(one[0] / ALONE * TEXTS / all_[0])
        cpu.append(one[1] / ALONE * TEXTS / all_[1])
        same = sum(a == b for a, b in zip(alone, together, strict=False))
    return {
        "threads": threads,
        "wall_gain": statistics.median(wall),
        "cpu_gain": statistics.median(cpu),
        "same_texts": same,
        "of": ALONE,
    }


def page(result: dict[str, Any]) -> str:
    rows = [
        f"| {name} | {v['token_ms']:.2f} | {v['ratio']:.2f} | {v['prefill_ms']:.0f} |"
        for name, v in result["decode"].items()
    ]
    batches = [
        f"| {b['threads']} | {b['wall_gain']:.1f} | {b['cpu_gain']:.1f} "
        f"| {b['same_texts']} of {b['of']} |"
        for b in result["batching"]
    ]
    return "\n".join(
        [
            "# INT4 decoding in OpenVINO",
            "",
            "Made by `python -m benchmarks.decoders.openvino_decode`; SmolLM2-135M, batch 1, one "
            "thread, "
            f"CPU time, median of {result['rounds']} rounds. Ours runs with "
            f"`{json.dumps(result['properties'])}`.",
            "",
            "| system | ms per token | times ours | prompt of 128, ms |",
            "| --- | ---: | ---: | ---: |",
            *rows,
            "",
            f"{TEXTS} texts at once through ContinuousBatchingPipeline, {NEW} tokens each, over "
            "one after the other:",
            "",
            "| threads | tokens/s, times | CPU time, times | same text |",
            "| ---: | ---: | ---: | ---: |",
            *batches,
            "",
            f"Measured {result['when']} on {result['cpu']}, other programs running (load average "
            f"{result['load_average']}).",
            "",
        ]
    )


if __name__ == "__main__":
    main()
