"""Open the engine that fit.py chose: as shipped, or built on this machine first."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import tasks
from ..contract import Contract
from ..errors import BundleError, CacheError, MachineError
from ..runtimes import table
from ..runtimes.fitted import FittedRunner
from ..runtimes.machine import Machine
from ..runtimes.ort import bound
from ..runtimes.ort.run import OrtRunner
from ..runtimes.runner import Runner
from ..runtimes.trt.products import PRODUCTS, BuildOptions
from ..tasks.text_generation import build_step_arrays
from . import engine_cache
from .engine_cache import Build, Say
from .fit import ADVICE, How
from .fit_columns import FitContext, capability, profiles

if TYPE_CHECKING:
    from ..runtimes.openvino.run import OpenVinoSettings

Span = tuple[int, int, int]
EVERY = 1.0  # seconds between two lines of progress


@dataclass(frozen=True)
class Workshop:
    """Bundle and machine for which engines are opened and built.

    folder: folder of the bundle
    cache: folder of engines built or compiled here; None: nothing is built or cached
    say: receives progress messages; None: none
    contract: contract of the model; None if no engine is opened
    builder: function that makes the Build of an engine's entry; None: `builder` of this module
    damaged: files of the bundle that must not be read
    """

    folder: Path
    manifest: Mapping[str, Any]
    machine: Machine
    cache: Path | None
    say: Say | None = None
    contract: Contract | None = None
    builder: Callable[[Workshop, Mapping[str, Any]], Build] | None = None
    damaged: Set[str] = frozenset()

    def open(self, engine: Mapping[str, Any], how: How, threads: int) -> Runner:
        """Open a bundle's engine and return its runner.

        engine: entry of the manifest
        how: "load" opens it as shipped, "build" builds it first
        threads: threads of a run; 0: one per processor

        Raises MachineError if a dependency is missing or does not start (UnopenedError: the file
        does not open), BuildError if the builder rejects the model, BundleError if a file is
        missing or is another model's.
        """
        return OPENERS[engine["runtime"]](self, engine, how, threads)

    def build_cached(self, engine: Mapping[str, Any]) -> Path:
        """Find or build a bundle's engine in the cache; return the path of its file.

        Raises MachineError without a cache folder, and the errors of the builder.
        """
        if self.cache is None:
            raise MachineError(
                "the engine must be built here, and no cache folder was given",
                where=engine["target"],
                fix="Name a folder: --cache FOLDER, or cache= of Bundle.",
            )
        shipped = engine.get("timing_cache")
        if shipped in self.damaged:
            if self.say is not None:
                self.say(f"{shipped} is damaged: kernels are timed again")
            shipped = None
        return engine_cache.obtain(
            self.cache,
            self.describe_origin(engine),
            (self.builder or builder)(self, engine),
            timing_cache=self.folder / shipped if shipped else None,
            say=self.say,
        )

    def is_cached(self, engine: Mapping[str, Any]) -> bool:
        """Return True if the cache of engines that were built on this machine holds this one."""
        if self.cache is None:
            return False
        return engine_cache.find_cached(self.cache, self.describe_origin(engine)) is not None

    def describe_origin(self, engine: Mapping[str, Any]) -> dict[str, Any]:
        """Return everything that a bundle's engine depends on if it is built here
        (engine_cache.py)."""
        version = FitContext(engine, self.machine, frozenset()).installed or ""
        return engine_cache.describe_origin(engine, self.manifest["files"], self.machine, version)


def open_model(shop: Workshop, engine: Mapping[str, Any], _how: How, threads: int) -> Runner:
    """Open the portable ONNX model of an engine's manifest entry in ONNX Runtime."""
    provider = engine.get("provider") or engine["device"]
    divide = engine["fit"].get("divide_batches", False)
    model, contract = shop.folder / engine["model"], shop.contract
    texts = contract is not None and contract.tokenizer is not None
    if contract is None or not texts or provider != "cuda":
        return OrtRunner(model, device=provider, threads=threads, divide=divide)
    if tasks.look_up(contract).generates:
        return open_decoder(
            shop, contract, model, provider, engine["fit"].get("cuda_graphs", False)
        )
    return open_on_device(shop, contract, model, provider, padded_sizes(engine, contract))


def open_decoder(
    shop: Workshop, contract: Contract, model: Path, device: str, graphs: bool
) -> Runner:
    """Open a bundle's decoder (text generation) on a device.

    graphs: replay one CUDA graph per step of one token; a model that cannot be captured runs
        without, with a warning
    """
    if graphs:
        try:
            return _open_decoder_with_graphs(contract, model, device)
        except (MachineError, BundleError) as e:
            if shop.say is not None:
                shop.say(f"no CUDA graph is replayed, so that each token takes longer: {e}")
    return OrtRunner(model, device=device)


def _open_decoder_with_graphs(contract: Contract, model: Path, device: str) -> Runner:
    """Open a bundle's decoder and capture a step, so that one that cannot be captured is known."""
    runner = OrtRunner(model, device=device, graphs=True)
    try:
        if not runner.fixes_steps:
            raise BundleError("its past and present share no buffer", where=str(model))
        one = np.ones((1, 1), np.int64)
        runner.decoder(contract).last(build_step_arrays(contract, one, one))
    except (MachineError, BundleError):
        runner.close()
        raise
    return runner


def padded_sizes(engine: Mapping[str, Any], contract: Contract) -> list[dict[str, Any]]:
    """Return the optimization profiles of a bundle's engine, to whose sizes inputs are padded.

    [] for an engine that takes any size. engine: its entry in the manifest
    """
    task = tasks.look_up(contract)
    if task.generates:
        return []
    if table.look_up(engine["runtime"]).engine_files:
        return profiles(engine["fit"]["shapes"])
    # logits of a vocabulary at each position would fill the memory of the sizes that are kept
    replayed = engine["fit"].get("cuda_graphs", False) and not task.reads_vocabulary
    texts = contract.tokenizer is not None
    return bound.list_profiles(contract.text.max_length) if replayed and texts else []


def open_on_device(
    shop: Workshop, contract: Contract, model: Path, device: str, sizes: Sequence[dict[str, Any]]
) -> Runner:
    """Open a bundle's encoder of texts on buffers of a device, from which only the answer is
    copied.

    sizes: sizes that texts are padded to, to replay a CUDA graph of each; a model that cannot be
        captured runs without, with a warning. Empty: no graphs
    """
    answer = tasks.look_up(contract).answer_output
    if sizes:
        try:
            return _open_with_graphs(contract, model, device, answer, sizes)
        except (MachineError, BundleError) as e:
            if shop.say is not None:
                shop.say(f"no CUDA graphs are replayed, so that each answer takes longer: {e}")
    return OrtRunner(model, device=device, bound=True, answer=answer)


def _open_with_graphs(
    contract: Contract, model: Path, device: str, answer: str, sizes: Sequence[dict[str, Any]]
) -> Runner:
    """Open a bundle's model and capture its smallest size, so that one that cannot be captured is
    known."""
    runner = OrtRunner(model, device=device, graphs=True, answer=answer)
    fitted = FittedRunner(runner, contract, sizes)
    try:
        fitted.infer({i.name: np.ones((1, 1), i.dtype) for i in contract.inputs})
    except (MachineError, BundleError):
        fitted.close()
        raise
    return fitted


def open_openvino(shop: Workshop, engine: Mapping[str, Any], _how: How, threads: int) -> Runner:
    """Open a bundle's portable model in OpenVINO; the compiled model is cached for the next
    start."""
    from ..runtimes.openvino import devices
    from ..runtimes.openvino.run import OpenVinoRunner, OpenVinoSettings

    model, settings = shop.folder / engine["model"], OpenVinoSettings.from_fit(engine["fit"])
    devices.check(settings.device)
    axes = {i.name: i.axes for i in shop.contract.inputs} if shop.contract is not None else None
    kept = shop.cache is not None and not settings.paged  # OpenVINO imports no paged model
    kept = kept and "EXPORT_IMPORT" in devices.list_capabilities(settings.device)
    compiled = _compiled(shop, engine, settings, threads) if kept else None
    return OpenVinoRunner(model, settings, threads=threads, compiled=compiled, axes=axes)


def _compiled(
    shop: Workshop, engine: Mapping[str, Any], settings: OpenVinoSettings, threads: int
) -> Path | None:
    """Return the path of the bundle's model in the cache, compiled by OpenVINO for this processor;
    None if the cache is not writable."""
    from ..runtimes.openvino.devices import read_full_name
    from ..runtimes.openvino.run import write_compiled

    machine, model = shop.machine, shop.folder / engine["model"]
    document = shop.describe_origin(engine) | {
        "processor": [machine.cpu, *machine.cpu_features],
        "device": read_full_name(settings.device),
        "threads": threads or machine.cores,
    }
    assert shop.cache is not None
    try:
        return engine_cache.obtain(
            shop.cache,
            document,
            lambda path, _timing_cache: write_compiled(model, settings, threads, path),
            say=shop.say,
        )
    except CacheError as e:
        if shop.say is not None:
            shop.say(f"the model is compiled at each start, because it cannot be cached: {e}")
        return None


def open_engine(shop: Workshop, engine: Mapping[str, Any], how: How, _threads: int) -> Runner:
    """Open the engine file of a manifest entry in TensorRT or TensorRT-RTX."""
    from ..runtimes.trt.run import TrtRunner

    path = shop.folder / engine["engine"] if how == "load" else shop.build_cached(engine)
    product, gpu = engine["runtime"], shop.machine.gpu
    stripped = how == "load" and engine["fit"].get("strip_weights", False)
    kernels = None
    if PRODUCTS[product].runtime_config and shop.cache is not None:
        shop.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        kernels = (
            shop.cache / f"{engine_cache.name_engine_folder(shop.describe_origin(engine))}.kernels"
        )
    runner = TrtRunner(
        path,
        product=product,
        weights=shop.folder / engine["model"] if stripped else None,
        host_code=how == "load" and engine["fit"].get("version_compatible", False),
        runtime_cache=kernels,
        gpu=(gpu.name, gpu.compute_capability) if gpu is not None else None,
    )
    sizes = padded_sizes(engine, shop.contract) if shop.contract is not None else []
    if shop.contract is None or not sizes:
        return runner
    try:
        return FittedRunner(runner, shop.contract, sizes)
    except BundleError:
        runner.close()
        raise


OPENERS: dict[str, Callable[[Workshop, Mapping[str, Any], How, int], Runner]] = {
    "onnxruntime": open_model,
    "openvino": open_openvino,
    "tensorrt": open_engine,
    "tensorrt-rtx": open_engine,
}
"""The opener of each runtime that the harness runs (runtimes/table.py)."""


def builder(shop: Workshop, engine: Mapping[str, Any]) -> Build:
    """Make a Build, which builds a bundle's engine for the GPU of shop.machine and reports its
    progress."""
    from ..runtimes.trt.build import builder

    product, gpu = engine["runtime"], shop.machine.gpu
    named = PRODUCTS[product].compute_capabilities
    if gpu is None:
        raise MachineError("no GPU was found", where=engine["target"], fix=ADVICE["gpu"])
    # Portability options cost speed, and this engine stays on this machine.
    options = replace(
        BuildOptions.from_json(engine["fit"]),
        hardware_compatible="none",
        version_compatible=False,
        strip_weights=False,
        compute_capabilities=(capability(gpu.compute_capability),) if named else (),
    )

    def build(path: Path, timing_cache: Path) -> None:
        builder.build(
            shop.folder / engine["model"],
            path,
            shapes=spans(engine["fit"]["shapes"]),
            product=product,
            options=options,
            timing_cache=timing_cache if PRODUCTS[product].timing_cache else None,
            progress=progress(engine["target"], shop.say),
        )

    return build


def spans(shapes: Any) -> list[dict[str, Span]]:
    """Convert the manifest's shapes of an engine to profiles, [{axis: (min, opt, max)}].

    The mask of a decoder (axis `total`) covers cached and new tokens.
    """
    profile_spans = []
    for profile in profiles(shapes):
        spans = {
            axis: (int(low), int(opt), int(high)) for axis, (low, opt, high) in profile.items()
        }
        if "past" in spans and "total" not in spans:
            low, opt, high = (p + s for p, s in zip(spans["past"], spans["sequence"], strict=True))
            spans["total"] = (low, opt, high)
        profile_spans.append(spans)
    return profile_spans


def progress(
    target: str, say: Say | None, clock: Callable[[], float] = time.monotonic
) -> Callable[[str, int, int], None] | None:
    """Make a callback that reports the progress of building a bundle's engine each second; None if
    `say` is None."""
    if say is None:
        return None
    start, reported = clock(), -EVERY

    def tell(_phase: str, done: int, of: int) -> None:
        nonlocal reported
        spent = clock() - start
        if spent - reported < EVERY and done < of:
            return
        reported = spent
        rest = f", about {spent * (of - done) / done:.0f} s left" if 0 < done < of else ""
        say(f"building {target} for this GPU: {100 * done // of} %{rest}")

    return tell
