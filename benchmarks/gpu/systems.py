"""Systems that suite.py compares."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import Arrays, of

Files = Mapping[str, Any]


def nothing() -> None:
    """Close nothing."""


@dataclass
class Held:
    """Inputs on the device: run() waits for one forward pass, outputs() returns its arrays."""

    run: Callable[[], object]
    outputs: Callable[[], Arrays]
    close: Callable[[], None] = nothing
    not_captured: str = ""


@dataclass
class Writer:
    """Generation of one batch: step(arrays) -> logits (batch, new or last, vocabulary)."""

    step: Callable[[Arrays], Any]
    close: Callable[[], None] = nothing


def silent() -> Mapping[str, Any]:
    return {}


@dataclass
class System:
    """Open system: an encoder has `infer` and maybe `resident`, a decoder `start`.

    infer: arrays -> arrays
    resident: arrays -> inputs on the device
    start: (batch, capacity in tokens) -> generation of a batch
    about: versions and settings
    after: further facts once it has run, such as peak memory
    """

    infer: Callable[[Arrays], Arrays] | None = None
    resident: Callable[[Arrays], Held] | None = None
    start: Callable[[int, int], Writer] | None = None
    about: dict[str, Any] = field(default_factory=dict)
    after: Callable[[], Mapping[str, Any]] = silent
    close: Callable[[], None] = nothing


def torch_encoder(files: Files, rehearse: bool, compiled: bool = False) -> System:
    import torch
    from transformers import AutoModel

    device, kind = _torch_place(rehearse)
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

    def host(out: Any) -> Arrays:
        return {"last_hidden_state": out.float().cpu().numpy()}

    def resident(arrays: Arrays) -> Held:
        given = moved(arrays)
        last: list[Any] = [None]

        def run() -> None:
            last[0] = forward(given)

        return Held(run, lambda: host(last[0]))

    about = {"torch": torch.__version__, "dtype": str(kind), "mode": _mode(compiled)}
    return System(lambda a: host(forward(moved(a))), resident, about=about, after=_torch_peak)


def torch_decoder(files: Files, rehearse: bool, compiled: bool = False) -> System:
    """Open a decoder in torch.

    compiled: run the prompt eagerly and each token by a compiled step with a KV cache of fixed
        size, as transformers' generate does (docs: llm_optims, static cache)
    """
    import torch
    from transformers import AutoModelForCausalLM, StaticCache

    device, kind = _torch_place(rehearse)
    model = AutoModelForCausalLM.from_pretrained(files["checkpoint"], dtype=kind)
    model = model.to(device).eval()
    one = torch.compile(model, mode="max-autotune", dynamic=False) if compiled else model
    caches: dict[tuple[int, int], Any] = {}  # kept: a captured graph holds their addresses

    def start(batch: int, capacity: int) -> Writer:
        cache: list[Any] = [None]
        if compiled:
            if (batch, capacity) in caches:
                caches[batch, capacity].reset()
            else:
                made = StaticCache(config=model.config, max_cache_len=capacity)
                caches[batch, capacity] = made
            cache[0] = caches[batch, capacity]

        def step(arrays: Arrays) -> Any:
            given = {n: torch.from_numpy(a).to(device) for n, a in arrays.items()}
            if compiled:
                del given["attention_mask"]  # no row has padding
            call = one if arrays["input_ids"].shape[1] == 1 else model
            with torch.no_grad():
                out = call(**given, past_key_values=cache[0], use_cache=True)
            cache[0] = out.past_key_values
            return out.logits[:, -1:].float().cpu().numpy()

        return Writer(step)

    about = {"torch": torch.__version__, "dtype": str(kind), "mode": _mode(compiled)}
    return System(start=start, about=about, after=_torch_peak)


def torch_compiled(files: Files, rehearse: bool) -> System:
    return torch_encoder(files, rehearse, compiled=True)


def torch_compiled_decoder(files: Files, rehearse: bool) -> System:
    return torch_decoder(files, rehearse, compiled=True)


def _torch_place(rehearse: bool) -> tuple[str, Any]:
    import torch

    return ("cpu", torch.float32) if rehearse else ("cuda", torch.float16)


def _mode(compiled: bool) -> str:
    return "compile, max-autotune" if compiled else "eager"


def _torch_peak() -> Mapping[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {}
    return {
        "peak_allocated_mib": torch.cuda.max_memory_allocated() / 2**20,
        "peak_reserved_mib": torch.cuda.max_memory_reserved() / 2**20,
    }


def ort_encoder(files: Files, rehearse: bool) -> System:
    from optimizer.harness.errors import HarnessError
    from optimizer.harness.runtimes.ort.run import OrtRunner, version

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
    names = list(runner.inputs)

    def resident(arrays: Arrays) -> Held:
        from benchmarks.gpu.resident import OrtResident

        held = OrtResident(runner, of(arrays, names))
        return Held(held.run, held.outputs)

    return System(lambda a: runner.infer(of(a, names)), resident, about=about, close=runner.close)


def served_encoder(files: Files, rehearse: bool) -> System:
    """Open the model as a bundle does: graphs of padded sizes, the answer alone copied."""
    from optimizer.harness.bundle.engines import Workshop, open_on_device
    from optimizer.harness.runtimes.machine import describe_machine
    from optimizer.harness.runtimes.ort.bound import list_profiles
    from optimizer.harness.runtimes.ort.run import version

    names, contract = _contract(files)
    warnings: list[str] = []
    path, device = Path(files["onnx"]), "cpu" if rehearse else "cuda"
    shop = Workshop(path.parent, {"files": {}}, describe_machine(), None, warnings.append)
    sizes = [] if rehearse else list_profiles(contract.text.max_length)
    runner = open_on_device(shop, contract, path, device, sizes)
    about = {"onnxruntime": version(), "device": device, "warnings": warnings}
    return System(lambda a: dict(runner.infer(of(a, names))), about=about, close=runner.close)


def ort_decoder(files: Files, rehearse: bool) -> System:
    from optimizer.harness.runtimes.ort.run import OrtRunner, version

    device = "cpu" if rehearse else "cuda"
    runner = OrtRunner(Path(files["onnx"]), device=device)
    about = {"onnxruntime": version(), "dtype": "float16", "nodes_by_provider": runner.placed}
    names, contract = _contract(files)

    def start(_: int, capacity: int) -> Writer:
        decoder = runner.decoder(contract, capacity)
        return Writer(lambda arrays: decoder.step(of(arrays, names)))

    return System(start=start, about=about, close=runner.close)


def served_decoder(files: Files, rehearse: bool) -> System:
    """Open the model as a bundle does: a graph of each step, the newest token's logits alone."""
    runner, contract, about = _served(files, rehearse)
    names = [i.name for i in contract.inputs]

    def start(_: int, capacity: int) -> Writer:
        decoder = runner.decoder(contract, capacity)
        return Writer(lambda arrays: decoder.last(of(arrays, names))[:, None])

    return System(start=start, about=about, close=runner.close)


def served_slots(files: Files, rehearse: bool) -> System:
    """Open the model as `serve --batching padded` does: prompts one by one, then a graph of each
    step of all texts."""
    import numpy as np

    runner, contract, about = _served(files, rehearse)

    def start(batch: int, capacity: int) -> Writer:
        slots = runner.slots(contract, batch, capacity)
        for text in range(batch):
            slots.open(text)

        def step(arrays: Arrays) -> Any:
            ids = arrays["input_ids"]
            if ids.shape[1] > 1:
                logits = {text: slots.read(text, row.tolist()) for text, row in enumerate(ids)}
            else:
                logits = slots.step({text: int(row[0]) for text, row in enumerate(ids)})
            return np.stack([logits[text] for text in range(batch)])[:, None]

        return Writer(step)

    return System(start=start, about=about, close=runner.close)


def _served(files: Files, rehearse: bool) -> tuple[Any, Any, dict[str, Any]]:
    """(runner as a bundle opens it, contract, facts)."""
    from optimizer.harness.bundle.engines import Workshop, open_decoder
    from optimizer.harness.runtimes.machine import describe_machine
    from optimizer.harness.runtimes.ort.run import OrtRunner, version

    _, contract = _contract(files)
    warnings: list[str] = []
    path = Path(files["onnx"])
    shop = Workshop(path.parent, {"files": {}}, describe_machine(), None, warnings.append)
    if rehearse:
        runner: Any = OrtRunner(path, fixed=True)
    else:
        runner = open_decoder(shop, contract, path, "cuda", graphs=True)
    about = {"onnxruntime": version(), "nodes_by_provider": runner.placed, "warnings": warnings}
    return runner, contract, about


def trt_encoder(product: str) -> Callable[[Files, bool], System]:
    def opened(files: Files, _: bool) -> System:
        runner, about = _engine(files, product)
        names = list(runner.inputs)

        def resident(arrays: Arrays) -> Held:
            from benchmarks.gpu.resident import TrtResident

            held = TrtResident(runner, of(arrays, names))
            return Held(held.run, held.outputs, held.close, held.not_captured)

        return System(
            lambda a: runner.infer(of(a, names)),
            resident,
            about=about,
            after=lambda: {"not_captured": dict(runner.not_captured)},
            close=runner.close,
        )

    return opened


def trt_decoder(product: str) -> Callable[[Files, bool], System]:
    def opened(files: Files, _: bool) -> System:
        runner, about = _engine(files, product)
        names, contract = _contract(files)

        def start(_batch: int, capacity: int) -> Writer:
            decoder = runner.decoder(contract, capacity)
            return Writer(lambda arrays: decoder.step(of(arrays, names)), decoder.close)

        return System(start=start, about=about, close=runner.close)

    return opened


def _engine(files: Files, product: str) -> tuple[Any, dict[str, Any]]:
    """Open the engine; return it with facts. Raises Refused where it does not fit here."""
    from optimizer.harness.errors import MachineError
    from optimizer.harness.runtimes.trt.products import PRODUCTS, import_product
    from optimizer.harness.runtimes.trt.run import TrtRunner
    from optimizer.harness.runtimes.trt.validity import refuse_invalid

    path = Path(files["engine"])
    try:
        refuse_invalid(path, import_product(product))
    except MachineError as e:
        raise Refused(str(e)) from e
    about: dict[str, Any] = {"product": product, "engine_bytes": path.stat().st_size}
    options: dict[str, Any] = {}
    if PRODUCTS[product].runtime_config:
        eager = SPECIALIZATION in inspect.signature(TrtRunner).parameters
        options = {SPECIALIZATION: "eager"} if eager else {}
        about[SPECIALIZATION] = (
            "eager"
            if eager
            else "lazy: kernels for a shape are compiled while fallback kernels answer, so a "
            "median may be of those"
        )
    return TrtRunner(path, product=product, **options), about


SPECIALIZATION = "specialize"


class Refused(Exception):
    """Engine that the runtime does not open here."""


def _contract(files: Files) -> tuple[list[str], Any]:
    """Read the names of the inputs without the KV cache's, and the contract."""
    from optimizer.harness.contract import read

    contract = read(Path(files["contract"]))
    return [i.name for i in contract.inputs], contract


SYSTEMS: dict[tuple[str, str], Callable[[Files, bool], System]] = {
    ("encoder", "torch-eager"): torch_encoder,
    ("encoder", "torch-compile"): torch_compiled,
    ("encoder", "onnxruntime"): ort_encoder,
    ("encoder", "served"): served_encoder,
    ("encoder", "tensorrt-rtx"): trt_encoder("tensorrt-rtx"),
    ("encoder", "tensorrt"): trt_encoder("tensorrt"),
    ("decoder", "torch-eager"): torch_decoder,
    ("decoder", "torch-compile"): torch_compiled_decoder,
    ("decoder", "onnxruntime"): ort_decoder,
    ("decoder", "served"): served_decoder,
    ("decoder", "slots"): served_slots,
    ("decoder", "tensorrt-rtx"): trt_decoder("tensorrt-rtx"),
    ("decoder", "tensorrt"): trt_decoder("tensorrt"),
}
