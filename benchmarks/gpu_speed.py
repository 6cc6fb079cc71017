"""The systems that gpu_suite.py times, and how.

Encoder, for each batch and sequence: `end_to_end`, arrays of the host to arrays of the host, and,
where a system can be asked, `forward`, with inputs that are on the device already; each waited for.
Rounds until the clock has settled are thrown away. Decoder: a prompt, then one token after the
other, chosen on the host (greedy), the cache staying where the system keeps it.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, Any]
Left = Callable[[], float]
ROUNDS, SETTLING, AT_MOST = 200, 10, 1.5  # seconds of one cell
PROMPT, NEW = 128, 64


def nothing() -> None:
    """There is nothing to close."""


@dataclass
class System:
    """An encoder: infer(arrays) -> arrays; resident(arrays) -> a forward to call, or None. A
    decoder: start(batch, capacity) -> step(arrays) -> logits. about: what was opened."""

    infer: Callable[[Arrays], Arrays] | None = None
    resident: Callable[[Arrays], Callable[[], object]] | None = None
    start: Callable[[int, int], Callable[[Arrays], Any]] | None = None
    about: dict[str, Any] = field(default_factory=dict)
    close: Callable[[], None] = nothing


def device_memory() -> int | None:
    """MiB in use on the first GPU, by everybody; None without one."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return int(done.stdout.splitlines()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def encode(system: System, grid: dict[str, Iterable[int]], left: Left) -> dict[str, Any]:
    """{"cells": [{"batch", "sequence", "end_to_end", "forward", "texts_per_second"}]}."""
    cells: list[dict[str, Any]] = []
    for batch in grid["batch"]:
        for sequence in grid["sequence"]:
            cell: dict[str, Any] = {"batch": batch, "sequence": sequence}
            cells.append(cell)
            if left() < 3 * AT_MOST:
                cell["why"] = "not run: time"
                continue
            arrays, infer = ids(batch, sequence), system.infer
            assert infer is not None
            start = time.perf_counter()
            infer(arrays)
            cell["first_seconds"] = time.perf_counter() - start
            cell["end_to_end"] = repeated(lambda: infer(arrays), left)  # noqa: B023
            if system.resident is not None:
                cell["forward"] = repeated(system.resident(arrays), left)
            best = cell.get("forward", cell["end_to_end"])
            cell["texts_per_second"] = batch / best["p50_ms"] * 1e3
    return {"cells": cells}


def repeated(run: Callable[[], object], left: Left) -> dict[str, Any]:
    """{"p50_ms", "p90_ms", "p99_ms", "runs"}; fewer runs when time is short."""
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < ROUNDS + SETTLING:
        if len(times) > SETTLING + 5 and (time.perf_counter() - start > AT_MOST or left() < 1):
            break
        before = time.perf_counter()
        run()
        times.append((time.perf_counter() - before) * 1e3)
    kept = np.array(times[SETTLING:])
    low, high, far = np.percentile(kept, (50, 90, 99))
    return {"p50_ms": low, "p90_ms": high, "p99_ms": far, "runs": len(kept)}


def decode(system: System, grid: dict[str, Iterable[int]], left: Left) -> dict[str, Any]:
    """{"cells": [{"batch", "prompt", "new", "first_token_ms", "token_ms", and tokens_per_second of
    all rows together}]}."""
    cells: list[dict[str, Any]] = []
    for batch in grid["batch"]:
        cell: dict[str, Any] = {"batch": batch, "prompt": PROMPT, "new": NEW}
        cells.append(cell)
        if left() < 5:
            cell["why"] = "not run: time"
            continue
        continued(system, batch)  # settles clocks, kernels and graphs
        first, times = continued(system, batch)
        cell["first_token_ms"] = first * 1e3
        cell["token_ms"] = {
            "p50_ms": float(np.median(times)) * 1e3,
            "p90_ms": float(np.percentile(times, 90)) * 1e3,
        }
        cell["tokens_per_second"] = batch / float(np.median(times))
    return {"cells": cells}


def continued(system: System, batch: int) -> tuple[float, list[float]]:
    """Seconds to the first token, and of each one after."""
    assert system.start is not None
    given = ids(batch, PROMPT)["input_ids"]
    step, past, times = system.start(batch, PROMPT + NEW), 0, []
    for _ in range(NEW + 1):
        total = past + given.shape[1]
        arrays = {
            "input_ids": given,
            "attention_mask": np.ones((batch, total), np.int64),
            "position_ids": np.tile(np.arange(past, total, dtype=np.int64), (batch, 1)),
        }
        before = time.perf_counter()
        logits = step(arrays)
        given = np.asarray(logits)[:, -1].argmax(-1).astype(np.int64)[:, None]
        times.append(time.perf_counter() - before)
        past = total
    return times[0], times[1:]


def ids(batch: int, sequence: int) -> Arrays:
    """Real-looking inputs: every token counts, none repeats in step."""
    chosen = np.random.default_rng(0).integers(5, 80, (batch, sequence))
    return {
        "input_ids": chosen.astype(np.int64),
        "attention_mask": np.ones((batch, sequence), np.int64),
        "token_type_ids": np.zeros((batch, sequence), np.int64),
    }


def of(arrays: Arrays, names: Iterable[str]) -> Arrays:
    return {n: arrays[n] for n in names}


def torch_encoder(files: dict[str, Any], rehearse: bool, compiled: bool = False) -> System:
    import torch
    from transformers import AutoModel

    device = "cpu" if rehearse else "cuda"
    kind = torch.float32 if rehearse else torch.float16
    model = AutoModel.from_pretrained(files["checkpoint"], dtype=kind).to(device).eval()
    call = torch.compile(model, mode="max-autotune", dynamic=False) if compiled else model

    def moved(arrays: Arrays) -> Arrays:
        return {n: torch.from_numpy(a).to(device) for n, a in arrays.items()}

    def forward(given: Arrays) -> Any:
        with torch.inference_mode():
            out = call(**given).last_hidden_state
        if device == "cuda":
            torch.cuda.synchronize()
        return out

    def resident(arrays: Arrays) -> Callable[[], object]:
        given = moved(arrays)
        return lambda: forward(given)

    def infer(arrays: Arrays) -> Arrays:
        return {"last_hidden_state": forward(moved(arrays)).float().cpu().numpy()}

    mode = "compile, max-autotune" if compiled else "eager"
    about = {"torch": torch.__version__, "dtype": str(kind), "mode": mode}
    return System(infer, resident, about=about)


def torch_compiled(files: dict[str, Any], rehearse: bool) -> System:
    return torch_encoder(files, rehearse, compiled=True)


def torch_decoder(files: dict[str, Any], rehearse: bool) -> System:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cpu" if rehearse else "cuda"
    kind = torch.float32 if rehearse else torch.float16
    model = AutoModelForCausalLM.from_pretrained(files["checkpoint"], dtype=kind)
    model = model.to(device).eval()

    def start(_batch: int, _capacity: int) -> Callable[[Arrays], Any]:
        cache: list[Any] = [None]

        def step(arrays: Arrays) -> Any:
            given = {n: torch.from_numpy(a).to(device) for n, a in arrays.items()}
            with torch.inference_mode():
                out = model(**given, past_key_values=cache[0], use_cache=True)
            cache[0] = out.past_key_values
            return out.logits[:, -1:].float().cpu().numpy()

        return step

    size = sum(p.numel() * p.element_size() for p in model.parameters())
    about = {"torch": torch.__version__, "dtype": str(kind), "weight_bytes": size}
    return System(start=start, about=about)


def ort_encoder(files: dict[str, Any], rehearse: bool) -> System:
    from optimizer.harness.errors import HarnessError
    from optimizer.harness.runtimes.ort import OrtRunner, version

    device = "cpu" if rehearse else "cuda"
    about: dict[str, Any] = {"onnxruntime": version(), "dtype": "float16", "device": device}
    try:
        runner = OrtRunner(Path(files["onnx"]), device=device, bound=True, graphs=not rehearse)
        about["cuda_graphs"] = not rehearse
    except HarnessError as e:
        if rehearse:
            raise
        about["cuda_graphs"] = f"no: {e}"
        runner = OrtRunner(Path(files["onnx"]), device=device, bound=True)
    about["nodes_by_provider"] = runner.placed
    return _ours(runner, about)


def ort_decoder(files: dict[str, Any], rehearse: bool) -> System:
    from optimizer.harness.runtimes.ort import OrtRunner, version

    device = "cpu" if rehearse else "cuda"
    runner = OrtRunner(Path(files["onnx"]), device=device)
    about = {"onnxruntime": version(), "dtype": "float16", "nodes_by_provider": runner.placed}
    return _ours_decoder(runner, files, {**about, "weight_bytes": _size(files["onnx"])})


def trt_encoder(product: str) -> Callable[[dict[str, Any], bool], System]:
    def opened(files: dict[str, Any], _: bool) -> System:
        from optimizer.harness.runtimes.trt_run import TrtRunner

        runner = TrtRunner(Path(files["engine"]), product=product)
        return _ours(runner, {"product": product, "engine_bytes": _size(files["engine"])})

    return opened


def trt_decoder(product: str) -> Callable[[dict[str, Any], bool], System]:
    def opened(files: dict[str, Any], _: bool) -> System:
        from optimizer.harness.runtimes.trt_run import TrtRunner

        runner = TrtRunner(Path(files["engine"]), product=product)
        about = {"product": product, "weight_bytes": _size(files["engine"])}
        return _ours_decoder(runner, files, about)

    return opened


def _ours(runner: Any, about: dict[str, Any]) -> System:
    names = list(runner.inputs)
    return System(
        infer=lambda arrays: runner.infer(of(arrays, names)),
        resident=lambda arrays: runner.resident(of(arrays, names)).run,
        about=about,
        close=runner.close,
    )


def _ours_decoder(runner: Any, files: dict[str, Any], about: dict[str, Any]) -> System:
    from optimizer.harness.contract import read

    contract = read(Path(files["contract"]))
    names = [i.name for i in contract.inputs]

    def start(_: int, capacity: int) -> Callable[[Arrays], Any]:
        decoder = runner.decoder(contract, capacity)
        return lambda arrays: decoder.step(of(arrays, names))

    return System(start=start, about=about, close=runner.close)


def _size(model: str) -> int:
    path = Path(model)
    return sum(f.stat().st_size for f in (path, path.with_name(path.name + ".data")) if f.is_file())


SYSTEMS: dict[tuple[str, str], Callable[[dict[str, Any], bool], System]] = {
    ("encoder", "torch-eager"): torch_encoder,
    ("encoder", "torch-compile"): torch_compiled,
    ("encoder", "onnxruntime"): ort_encoder,
    ("encoder", "tensorrt-rtx"): trt_encoder("tensorrt-rtx"),
    ("encoder", "tensorrt"): trt_encoder("tensorrt"),
    ("decoder", "torch-eager"): torch_decoder,
    ("decoder", "onnxruntime"): ort_decoder,
    ("decoder", "tensorrt-rtx"): trt_decoder("tensorrt-rtx"),
    ("decoder", "tensorrt"): trt_decoder("tensorrt"),
}
