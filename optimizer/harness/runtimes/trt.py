"""Build a TensorRT engine from ONNX; needs no GPU.

Networks are strongly typed: precision is what the ONNX says (Q/DQ and casts), never a builder
flag. An engine cannot be opened without its GPU, so what is known about it is collected from the
network definition that was handed to the builder, and from the engine's own header and size.

trt_products.PRODUCTS is where the products of the TensorRT family differ from each other.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import BuildError, HarnessError
from .trt_header import read_header
from .trt_network import facts
from .trt_products import PRODUCTS, Options, imported, refuse_options, version

__all__ = ["PRODUCTS", "Options", "build", "kept_packed", "version"]

Progress = Callable[[str, int, int], None]
Span = tuple[int, int, int]


# What the parser or the builder says -> what to do about it.
ADVICE = (
    (
        "Non-zero zero point",
        "It takes symmetric quantization only: lower with the trt_qdq dialect, symmetric: true.",
    ),
    ("has type Int32 but must have type", "It takes no int32 codes: leave the bias in float."),
    (
        "Plugin not found",
        "No such operator here: leave the module out of the graph, or use target onnxruntime.",
    ),
    (
        "input tensor A must be FP16",
        "MatMulNBits runs in fp16 only: use float: fp16, or DequantizeLinear + MatMul.",
    ),
    ("FP32 GEMM is not supported", "SM75 runs fp16 only: use float: fp16, or drop 75."),
    ("MIN<=OPT<=MAX", "Each of shapes must be [min, opt, max], ascending."),
    (
        "not self-consistent",
        "The model cannot run at the largest shape: lower the maximum of shapes.sequence to "
        "what the model's positions allow.",
    ),
)
DEFAULTS = Options()
OVERHEAD = 8 << 10  # bytes of kernels and metadata per layer: MiniLM 8.7 k, two-layer BERT 8.2 k
UNSUPPORTED = "This target does not run that operator: use target onnxruntime for this model."


def build(
    onnx: Path,
    engine: Path,
    *,
    shapes: Mapping[str, Span] | Sequence[Mapping[str, Span]],
    product: str = "tensorrt-rtx",
    options: Options = DEFAULTS,
    modules: Mapping[str, str] | None = None,
    timing_cache: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Build `engine` from `onnx` and return what is known of it (see `_describe`).

    shapes: [min, opt, max] of each dynamic axis by its name in the ONNX; several of them make as
    many profiles. modules: {module: name of its codes in the ONNX}, to be found again in the
    network. timing_cache: a file read if it is there and written after the build, for products
    that have one; others leave it alone. progress(phase, done, of) is called as phases advance;
    Ctrl-C stops the build at the next one.
    Raises MachineError when the builder or a GPU it needs is missing, BuildError naming the
    module when it does not take the model or an option.
    """
    trt = imported(product)
    refuse_options(product, options)
    log = _log(trt)
    builder = trt.Builder(log)
    flag = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flag)
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(onnx)):
        raise _parse_error(parser, onnx, log.messages)
    config = builder.create_builder_config()
    cache = _read_timing_cache(config, timing_cache) if PRODUCTS[product].timing_cache else None
    _target(trt, config, options.compute_capabilities)
    several = [shapes] if isinstance(shapes, Mapping) else shapes
    profiles = [_add_profile(builder, network, config, one, log.messages) for one in several]
    known = facts(network, modules or {})
    monitor = _monitor(trt, progress)
    config.progress_monitor = monitor
    with _interruptible(monitor):
        plan = builder.build_serialized_network(network, config)
    if monitor.interrupted:
        raise KeyboardInterrupt
    _refuse_bad_plan(plan, log, onnx)
    engine.write_bytes(plan)
    if cache is not None and timing_cache is not None:
        _write(timing_cache, config.get_timing_cache().serialize())
    return _describe(engine, product, profiles, known, log.messages)


def _describe(
    engine: Path,
    product: str,
    profiles: list[dict[str, Any]],
    known: dict[str, Any],
    messages: list[tuple[str, str]],
) -> dict[str, Any]:
    """The sidecar: {"runtime", "version", "compute_capabilities", "bytes", "io", "profiles",
    "layers", "modules", "weights", "kept_packed", "warnings"}.
    """
    header = read_header(engine)
    weights, layers = known["weights"], known["layers"]
    return {
        "runtime": product,
        "version": header.version,
        "compute_capabilities": list(header.compute_capabilities),
        "bytes": header.length,
        "io": {"inputs": known["inputs"], "outputs": known["outputs"]},
        "profiles": profiles,
        "layers": layers,
        "modules": known["modules"],
        "weights": weights,
        "kept_packed": kept_packed(
            header.length, weights["stored"], weights["widened"], len(layers)
        ),
        "warnings": sorted({m for kind, m in messages if kind == "warning"}),
    }


def kept_packed(length: int, stored: int, widened: int, layers: int) -> bool | None:
    """Whether an engine of `length` bytes is so small that its codes must still be codes.

    stored, widened: bytes of all weights as the network has them, and with every code in its
    float type. None when the two are too near, beside the length, to tell.
    """
    if widened - stored < 0.1 * length:
        return None
    return length < (stored + widened) / 2 + OVERHEAD * layers


def _read_timing_cache(config: Any, path: Path | None) -> Any:
    """The builder's measurements so far, from `path` when it is there; one of another version or
    GPU is empty again."""
    if path is None:
        return None
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    config.set_timing_cache(cache, ignore_mismatch=False)
    return cache


def _write(path: Path, data: Any) -> None:
    """At once: another process may be reading it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(data)
    beside.replace(path)


def _log(trt: Any) -> Any:
    """A logger that keeps warnings and errors instead of printing them."""

    class Log(trt.ILogger):
        def __init__(self) -> None:
            super().__init__()
            self.messages: list[tuple[str, str]] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.WARNING:
                kind = "warning" if severity == trt.ILogger.Severity.WARNING else "error"
                self.messages.append((kind, message))

    return Log()


def _monitor(trt: Any, progress: Progress | None) -> Any:
    """Passes phases on to `progress`, and stops the build once `interrupted` is set."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            super().__init__()
            self.interrupted = False
            self.steps: dict[str, int] = {}

        def phase_start(self, phase: str, _parent: str | None, steps: int) -> None:
            self.steps[phase] = steps
            self._tell(phase, 0)

        def step_complete(self, phase: str, step: int) -> bool:
            self._tell(phase, step + 1)
            return not self.interrupted

        def phase_finish(self, phase: str) -> None:
            self._tell(phase, self.steps[phase])

        def _tell(self, phase: str, done: int) -> None:
            if progress is not None:
                progress(phase, done, self.steps[phase])

    return Monitor()


@contextmanager
def _interruptible(monitor: Any) -> Iterator[None]:
    """While inside, Ctrl-C sets monitor.interrupted: an exception may not cross C++ frames."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is ever interrupted
        return

    def stop(*_: object) -> None:
        monitor.interrupted = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _target(trt: Any, config: Any, wanted: Sequence[str]) -> None:
    if wanted:
        config.num_compute_capabilities = len(wanted)
        for i, capability in enumerate(wanted):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{capability}"), i)


def _add_profile(
    builder: Any,
    network: Any,
    config: Any,
    shapes: Mapping[str, Span],
    messages: list[tuple[str, str]],
) -> dict[str, dict[str, list[int]]]:
    """One optimization profile: {input: {"min", "opt", "max"}}, each a whole shape."""
    profile = builder.create_optimization_profile()
    made = {}
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        spans = []
        for axis, size in enumerate(tensor.shape):
            name = tensor.get_dimension_name(axis)
            if size < 0 and name not in shapes:
                raise BuildError(
                    f"dynamic axis {name!r} of input {tensor.name} has no range",
                    where="shapes",
                    accepted=", ".join(shapes),
                )
            spans.append(shapes[name] if size < 0 else (size,) * 3)
        low, opt, high = ([span[k] for span in spans] for k in range(3))
        profile.set_shape(tensor.name, low, opt, high)
        made[tensor.name] = {"min": low, "opt": opt, "max": high}
    if not profile or config.add_optimization_profile(profile) < 0:
        raise BuildError("the profile was refused", where="shapes", fix=_advice(messages))
    return made


def _parse_error(parser: Any, onnx: Path, messages: list[tuple[str, str]]) -> HarnessError:
    """The parser's first complaint, naming the node and what to do."""
    if not parser.num_errors:
        return BuildError(f"the parser refused it ({_errors(messages)})", where=str(onnx))
    e = parser.get_error(0)
    said = e.desc().strip()
    useful = [line for line in said.splitlines() if "Cuda" not in line]  # there is no GPU: noise
    advice = _advice([("error", said)]) or (UNSUPPORTED if "UNSUPPORTED" in str(e.code()) else "")
    reason = "" if said == "false" else f" ({' '.join(useful)[:300]})"
    return BuildError(
        f"node {e.node_name() or e.node()} ({e.node_operator()}) is not supported{reason}",
        where=str(onnx),
        fix=advice,
    )


def _refuse_bad_plan(plan: Any, log: Any, onnx: Path) -> None:
    inconsistent = [m for _, m in log.messages if "not self-consistent" in m]
    if plan is not None and not inconsistent:
        return
    said = inconsistent[0] if inconsistent else _errors(log.messages)
    raise BuildError(
        f"the builder refused it ({said[:400]})", where=str(onnx), fix=_advice([("error", said)])
    )


def _errors(messages: list[tuple[str, str]]) -> str:
    errors = [m for kind, m in messages if kind == "error" and "Cuda Runtime" not in m]
    return " ".join(errors) or "no reason was given"


def _advice(messages: list[tuple[str, str]]) -> str:
    text = " ".join(m for _, m in messages)
    return next((advice for sign, advice in ADVICE if sign in text), "")
