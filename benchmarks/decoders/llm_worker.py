"""Worker process of one way to run a language model.

    python -m benchmarks.decoders.llm_worker '{"kind": ..., "model": ..., "threads": n,
        "options": {...}, "clock": ...}'
    {"prompt": n, "tokens": m, "seed": s}   -> {"prefill_ms": time, "ms": [m times]}
    {"score": [ids]}                        -> {"nats": per token of the text after its first}
    {"gigabytes": true}                     -> {"read": GB/s, "copy": GB/s}     kind "memory" only

The prefill has n random tokens; then m tokens follow greedily, one at a time, and the time of each
includes choosing it. The clock is "wall", or "cpu" for processor time on a shared machine (one
thread only; OpenVINO GenAI reports wall time always). Three further kinds make a peer's model and
end: "build", "requantize" and "nncf".

The module runs in the project's environment or in the peers' own: it imports numpy and the runtime
of its kind (for "harness" and "nncf" this project as well).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.decoders import llama_library
from benchmarks.measure.worker import answer_requests, pin, redirect_output

Answer = dict[str, Any]
CLOCK = time.perf_counter
SIZE = 1 << 28  # bytes of each array that memory is measured with: more than any cache holds


def time_steps(prefill: Callable[[], Any], step: Callable[[], Any], tokens: int) -> Answer:
    """Time one prefill and each of `tokens` steps in milliseconds, by CLOCK."""
    times = []
    for run in (prefill, *[step] * tokens):
        start = CLOCK()
        run()
        times.append(1000 * (CLOCK() - start))
    return {"prefill_ms": times[0], "ms": times[1:]}


def nats(logits: Any, ids: list[int]) -> float:
    """Compute the mean loss of each token after the first from logits (tokens, vocabulary)."""
    rows = np.asarray(logits[: len(ids) - 1], np.float32)
    highest = rows.max(-1, keepdims=True)
    total = highest[:, 0] + np.log(np.exp(rows - highest).sum(-1, dtype=np.float64))
    return float((total - rows[np.arange(len(rows)), ids[1:]]).mean())


class Run(Protocol):
    """Open model, called with a prompt and the number of tokens to generate."""

    def __call__(self, prompt: list[int], tokens: int) -> Answer: ...

    def score(self, ids: list[int]) -> float:
        """Compute `nats` of a text. Raises NotImplementedError without logits of the runtime."""


class Ort:
    """Decoder graph in a plain session with the harness's settings.

    Past and present share one buffer where the graph's metadata says so.
    """

    def __init__(self, model: str, threads: int, _options: dict[str, Any]) -> None:
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = threads
        settings.log_severity_level = 3
        settings.add_session_config_entry("session.intra_op.allow_spinning", "1")
        settings.add_session_config_entry("session.force_spinning_stop", "1")
        self.value = onnxruntime.OrtValue.ortvalue_from_numpy
        self.session = onnxruntime.InferenceSession(
            model, settings, providers=["CPUExecutionProvider"]
        )
        self.shared = self.session.get_modelmeta().custom_metadata_map.get("kv_cache") == "shared"
        self.inputs = {i.name: i for i in self.session.get_inputs()}
        self.pasts = [n for n in self.inputs if n.startswith("past_key_values.")]
        logits = next(o for o in self.session.get_outputs() if o.name == "logits")
        self.vocabulary = logits.shape[-1]

    def __call__(self, prompt: list[int], tokens: int) -> Answer:
        self.ids, self.done, self.binding = prompt, 0, self.session.io_binding()
        room = len(prompt) + tokens if self.shared else 0
        self.cache = {n: self.value(self._buffer(n, room)) for n in self.pasts}
        self.bound = False
        return time_steps(self._step, self._step, tokens)

    def score(self, ids: list[int]) -> float:
        self(ids, 0)
        return nats(self.logits[0], ids)

    def _buffer(self, name: str, room: int) -> Any:
        _, heads, _, width = self.inputs[name].shape
        return np.zeros((1, heads, room, width), np.float32)

    def _step(self) -> None:
        """Run a step as ort/decoder.py of the harness does: a shared cache is bound once."""
        count, binding = len(self.ids), self.binding
        total = self.done + count
        given = {
            "input_ids": np.array([self.ids]),
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(self.done, total)[None],
        }
        for name in self.inputs.keys() & given.keys():
            binding.bind_cpu_input(name, given[name])
        logits = np.empty((1, count, self.vocabulary), np.float32)
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        for name in () if self.bound else self.pasts:
            present = name.replace("past_key_values", "present")
            binding.bind_ortvalue_input(name, self.cache[name])
            if self.shared:
                binding.bind_ortvalue_output(present, self.cache[name])
            else:
                binding.bind_output(present, "cpu")
        self.bound = self.shared
        self.session.run_with_iobinding(binding)
        if not self.shared:
            _, *present = binding.get_outputs()
            self.cache = dict(zip(self.pasts, present, strict=True))
        self.done, self.ids, self.logits = total, [int(logits[0, -1].argmax())], logits


class Harness:
    """Decoder of a bundle as the harness runs it in OpenVINO, with a paged KV cache."""

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        from optimizer.harness.contract import read
        from optimizer.harness.runtimes.openvino.run import OpenVinoRunner, OpenVinoSettings

        settings = OpenVinoSettings(block=options["dynamic_quantization"], paged=True)
        self.runner = OpenVinoRunner(Path(model), settings, threads=threads)
        self.contract = read(Path(options["contract"]))

    def __call__(self, prompt: list[int], tokens: int) -> Answer:
        self.decoder = self.runner.decoder(self.contract, len(prompt) + tokens)
        self.ids, self.done = prompt, 0
        return time_steps(self._step, self._step, tokens)

    def score(self, ids: list[int]) -> float:
        self(ids, 0)
        return nats(self.logits[0], ids)

    def _step(self) -> None:
        total = self.done + len(self.ids)
        given = {
            "input_ids": np.array([self.ids]),
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(self.done, total)[None],
        }
        self.logits = self.decoder.step(given)
        self.done, self.ids = total, [int(self.logits[0, -1].argmax())]


class Genai:
    """Model of onnxruntime-genai: a folder with genai_config.json."""

    def __init__(self, model: str, threads: int, _options: dict[str, Any]) -> None:
        import onnxruntime_genai as genai

        self.genai, config = genai, genai.Config(model)
        session = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self.model = genai.Model(config)

    def __call__(self, prompt: list[int], tokens: int) -> Answer:
        settings = self.genai.GeneratorParams(self.model)
        length = len(prompt) + tokens + 2
        settings.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = self.genai.Generator(self.model, settings)

        def prefill() -> None:
            generator.append_tokens(np.array(prompt, np.int32))
            generator.generate_next_token()  # chooses from the prompt's logits

        return time_steps(prefill, generator.generate_next_token, tokens)

    def score(self, ids: list[int]) -> float:
        settings = self.genai.GeneratorParams(self.model)
        settings.set_search_options(max_length=len(ids) + 1)
        generator = self.genai.Generator(self.model, settings)
        generator.append_tokens(np.array(ids, np.int32))
        return nats(generator.get_output("logits")[0], ids)


class OpenVino:
    """Pipeline of OpenVINO GenAI, which reads GGUF by itself and reports its own times."""

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        import openvino
        import openvino_genai

        self.genai, self.tensor = openvino_genai, openvino.Tensor
        self.model, self.threads = Path(model), threads
        self.pipeline = openvino_genai.LLMPipeline(
            model, "CPU", INFERENCE_NUM_THREADS=threads, **options
        )

    def __call__(self, prompt: list[int], tokens: int) -> Answer:
        settings = self.genai.GenerationConfig()
        settings.max_new_tokens, settings.ignore_eos, settings.do_sample = tokens + 1, True, False
        ids = np.array([prompt])
        given = self.genai.TokenizedInputs(self.tensor(ids), self.tensor(np.ones_like(ids)))
        metrics = self.pipeline.generate(given, settings).perf_metrics
        steps = [t / 1000 for t in metrics.raw_metrics.m_durations]
        return {"prefill_ms": metrics.get_ttft().mean, "ms": steps[-tokens:] if tokens else []}

    def score(self, ids: list[int]) -> float:
        """Compute `nats` from the same file, opened without the pipeline, which gives no logits."""
        if not self.model.is_dir():
            raise NotImplementedError("OpenVINO GenAI keeps the model it makes of a GGUF file")
        import openvino

        path = str(self.model / "openvino_model.xml")
        threads = {"INFERENCE_NUM_THREADS": self.threads}
        compiled = openvino.Core().compile_model(path, "CPU", threads)
        row = np.array([ids])
        arrays = {
            "input_ids": row,
            "attention_mask": np.ones_like(row),
            "position_ids": np.arange(len(ids))[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        return nats(next(iter(compiled(arrays).values()))[0], ids)


class Llama:
    """Model in llama.cpp's own library; see llama_library.py."""

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        self.text = llama_library.Text(Path(options["library"]), Path(model), threads)

    def __call__(self, prompt: list[int], tokens: int) -> Answer:
        self.text.clear()
        self.ids = prompt
        return time_steps(self._step, self._step, tokens)

    def score(self, ids: list[int]) -> float:
        self.text.clear()
        return nats(self.text.step(ids, every=True), ids)

    def _step(self) -> None:
        self.ids = [int(self.text.step(self.ids).argmax())]


KINDS: dict[str, Callable[[str, int, dict[str, Any]], Run]] = {
    "ort": Ort,
    "harness": Harness,
    "genai": Genai,
    "openvino": OpenVino,
    "llama": Llama,
}


def memory(threads: int) -> dict[str, float]:
    """Measure the memory bandwidth of reading (a dot product) and of copying, in GB/s.

    Takes the best of seven tries; a copy counts the bytes read and those written.
    """
    pairs = [[np.ones(SIZE // 4, np.float32) for _ in range(2)] for _ in range(threads)]

    def best(work: Callable[[Any, Any], Any]) -> float:
        rates = []
        for _ in range(7):
            made = [threading.Thread(target=work, args=pair) for pair in pairs]
            start = time.perf_counter()
            for t in made:
                t.start()
            for t in made:
                t.join()
            rates.append(2 * SIZE * threads / (time.perf_counter() - start) / 1e9)
        return max(rates)

    return {"read": best(np.dot), "copy": best(np.copyto)}


def build(checkpoint: str, out: str) -> None:
    """Make onnxruntime-genai's own INT4 model for the CPU, by its defaults."""
    module = "onnxruntime_genai.models.builder"
    command = [sys.executable, "-m", module, "-m", checkpoint, "-o", out, "-p", "int4", "-e", "cpu"]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})


def requantize(gguf: str, out: str, library: str) -> None:
    """Write a GGUF file as llama.cpp's Q4_0, by its defaults."""
    llama_library.quantize(
        Path(library), Path(gguf), Path(out), llama_library.Q4_0, requantize=True
    )


def nncf(source: str, out: str) -> None:
    """Write a folder for OpenVINO GenAI with OpenVINO's own INT4 of the float graph.

    source: folder of the graph, a colon, folder of the checkpoint
    """
    import shutil

    import openvino
    from openvino_tokenizers import convert_tokenizer

    from benchmarks.decoders.openvino_decode import nncf_model
    from optimizer.load.tokenizer.tokenizer import open_tokenizer

    graph, _, checkpoint = source.partition(":")
    folder, theirs = Path(out), open_tokenizer(Path(checkpoint))
    made = nncf_model(Path(graph) / "model.onnx", folder)
    for suffix in (".xml", ".bin"):
        made.with_suffix(suffix).rename(folder / f"openvino_model{suffix}")
    for model, name in zip(
        convert_tokenizer(theirs, with_detokenizer=True), ("tokenizer", "detokenizer"), strict=True
    ):
        openvino.save_model(model, str(folder / f"openvino_{name}.xml"))
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        if (Path(checkpoint) / name).is_file():
            shutil.copyfile(Path(checkpoint) / name, folder / name)


MAKERS: dict[str, Callable[..., None]] = {"build": build, "requantize": requantize, "nncf": nncf}


def main() -> None:
    answers, config = redirect_output(), json.loads(sys.argv[1])
    if config["kind"] in MAKERS:
        MAKERS[config["kind"]](config["model"], config["out"], *config["given"])
        return
    threads = config["threads"]
    pin(threads)
    if config.get("clock") == "cpu":
        globals()["CLOCK"] = time.process_time
    if config["kind"] == "memory":
        answer_requests(answers, lambda _: memory(threads))
        return
    run = KINDS[config["kind"]](config["model"], threads, config["options"])

    def answer(asked: dict[str, Any]) -> Answer:
        if "score" in asked:
            return {"nats": run.score(asked["score"])}
        prompt = np.random.default_rng(asked["seed"]).integers(100, 40000, asked["prompt"]).tolist()
        return run(prompt, asked["tokens"])

    answer_requests(answers, answer)


if __name__ == "__main__":
    main()
