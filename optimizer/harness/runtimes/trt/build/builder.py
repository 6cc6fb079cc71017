"""Build a TensorRT engine from ONNX, with any product of the family.

Networks are strongly typed: precision follows the ONNX file (Q/DQ and casts), never a builder flag.
TensorRT-RTX builds without a GPU; such an engine cannot be opened, so its description comes from
the network definition and from the engine's header and size. With a GPU the engine is inspected
(inspect.py).

products.PRODUCTS lists the differences of the products of the TensorRT family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....errors import BuildError, MachineError
from ....process.collection import pause_collection
from .. import caches
from ..cuda import first_device
from ..header import read_header
from ..inspect import inspect_engine
from ..products import PRODUCTS, BuildOptions, import_product, refuse_options, version
from . import advice
from .network import summarize_network
from .watch import Messages, Progress, interruptible, logger, monitor

__all__ = ["PRODUCTS", "BuildOptions", "Progress", "build", "configure", "keeps_packed", "version"]

Span = tuple[int, int, int]

DEFAULTS = BuildOptions()
OVERHEAD = 8 << 10  # bytes of kernels and metadata per layer: MiniLM 8.7 k, two-layer BERT 8.2 k


@pause_collection()
def build(
    onnx: Path,
    engine: Path,
    *,
    shapes: Mapping[str, Span] | Sequence[Mapping[str, Span]],
    product: str = "tensorrt-rtx",
    options: BuildOptions = DEFAULTS,
    modules: Mapping[str, str] | None = None,
    timing_cache: Path | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Build a TensorRT engine from an ONNX file and return its description (see `_describe`).

    shapes: {dynamic axis in the ONNX: [min, opt, max]}; a list of them gives one profile each.
    product: a key of products.PRODUCTS.
    modules: {module: name of its quantized weight in the ONNX}, to be found in the network.
    timing_cache: file that is read if present and written after the build, for products with a
        timing cache.
    progress: called as progress(phase, done, total) during the build. Ctrl-C stops the build at its
        next step.
    Raises MachineError if the builder, or a GPU that it needs, is missing; BuildError naming the
    module if the builder does not take the model or an option.
    """
    trt = import_product(product)
    refuse_options(product, options)
    log = logger(trt)
    builder = _builder(trt, log, product)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(onnx)):
        raise advice.parse_error(parser, onnx, log.messages)
    config = builder.create_builder_config()
    configure(trt, config, options)
    cache = caches.timing_cache(config, timing_cache) if PRODUCTS[product].timing_cache else None
    several = [shapes] if isinstance(shapes, Mapping) else shapes
    profiles = [_add_profile(builder, network, config, one, log.messages) for one in several]
    known = summarize_network(network, modules or {})
    watching = monitor(trt, progress, PRODUCTS[product].slow_phase)
    config.progress_monitor = watching
    with interruptible(watching):
        plan = builder.build_serialized_network(network, config)
    if watching.interrupted:
        raise KeyboardInterrupt
    _refuse_bad_plan(plan, log.messages, onnx, product, options)
    engine.write_bytes(plan)
    if cache is not None and timing_cache is not None:
        caches.write(timing_cache, config.get_timing_cache().serialize())
    known["kernels"] = inspect_engine(
        trt, log, plan, known["modules"], host_code=options.version_compatible
    )
    return _describe(engine, product, profiles, known, log.messages)


def _builder(trt: Any, log: Any, product: str) -> Any:
    """Create TensorRT's engine builder. Raises MachineError if it does not start, e.g. without a
    GPU."""
    try:
        builder = trt.Builder(log)
    except TypeError:  # raised by the binding for a null pointer
        builder = None
    if builder is None:
        raise MachineError(
            f"the builder did not start ({advice.join_errors(log.messages)[:300]})",
            where=f"target {product}",
            fix="It needs a GPU with its driver; with on_missing: defer the engine is built where "
            "the bundle runs."
            if PRODUCTS[product].needs_gpu
            else "",
        )
    return builder


def configure(trt: Any, config: Any, options: BuildOptions) -> None:
    """Set the build options of a recipe in TensorRT's config. The inspector needs DETAILED
    verbosity."""
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if options.workspace_gb is not None:
        config.set_memory_pool_limit(
            trt.MemoryPoolType.WORKSPACE, int(options.workspace_gb * (1 << 30))
        )
    flags = trt.BuilderFlag
    config.clear_flag(flags.TF32)  # on by default; fp32 of the ONNX is computed in fp32
    if options.sparse_weights:
        config.set_flag(flags.SPARSE_WEIGHTS)
    if options.version_compatible:
        config.set_flag(flags.VERSION_COMPATIBLE)
    if options.refittable:
        config.set_flag(flags.REFIT)
    if options.strip_weights:
        config.set_flag(flags.STRIP_PLAN)
        if not options.refittable:  # the same weights are restored at loading
            config.set_flag(flags.REFIT_IDENTICAL)
    levels = trt.HardwareCompatibilityLevel
    if options.hardware_compatible == "ampere_plus":
        config.hardware_compatibility_level = levels.AMPERE_PLUS
    elif options.hardware_compatible == "same_compute_capability":
        config.hardware_compatibility_level = _same_capability(levels)
    if options.compute_capabilities:
        config.num_compute_capabilities = len(options.compute_capabilities)
        for i, capability in enumerate(options.compute_capabilities):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{capability}"), i)


def _same_capability(levels: Any) -> Any:
    """Return TensorRT's level of hardware compatibility SAME_COMPUTE_CAPABILITY. Raises BuildError
    if this TensorRT lacks it."""
    if not hasattr(levels, "SAME_COMPUTE_CAPABILITY"):
        raise BuildError(
            "this TensorRT is too old for same_compute_capability",
            where="hardware_compatible",
            accepted="none, ampere_plus",
        )
    return levels.SAME_COMPUTE_CAPABILITY


def _add_profile(
    builder: Any, network: Any, config: Any, shapes: Mapping[str, Span], messages: Messages
) -> dict[str, dict[str, list[int]]]:
    """Add an optimization profile to TensorRT's build; return {input: {"min", "opt", "max"}}, each
    a shape.

    shapes: {dynamic axis: [min, opt, max]}

    Raises BuildError for a dynamic axis without a range, and for a profile that the builder
    rejects.
    """
    profile = builder.create_optimization_profile()
    ranges = {}
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
        ranges[tensor.name] = {"min": low, "opt": opt, "max": high}
    if not profile or config.add_optimization_profile(profile) < 0:
        raise BuildError(
            "the builder rejected the profile", where="shapes", fix=advice.advise(messages)
        )
    return ranges


def _refuse_bad_plan(
    plan: Any, messages: Messages, onnx: Path, product: str, options: BuildOptions
) -> None:
    """Raise the error of a build of TensorRT that returned no engine, or one that is reported
    inconsistent."""
    inconsistent = any("not self-consistent" in m for _, m in messages)
    if plan is not None and not inconsistent:
        return
    gpu_only = [o for o in options.changed() if o in PRODUCTS[product].with_gpu]
    if plan is None and gpu_only and "CUDA_SUCCESS" in advice.join_errors(messages):
        raise MachineError(
            f"{product} takes {', '.join(gpu_only)} only on a machine with a GPU; this has none",
            where=f"target {product}",
            fix=f"Build on a machine with a GPU, or remove {', '.join(gpu_only)}.",
        )
    raise advice.plan_error(messages, onnx)


def _describe(
    engine: Path,
    product: str,
    profiles: list[dict[str, Any]],
    summary: dict[str, Any],
    messages: Messages,
) -> dict[str, Any]:
    """Describe a built TensorRT engine: {"runtime", "version", "compute_capabilities", "bytes",
    "io", "profiles", "layers", "modules", "kernels", "weights", "kept_packed", "warnings",
    "sparse"}.

    compute_capabilities: those of the engine's header, or of the GPU that built it.
    kernels: see inspect.read_layers; None if the engine cannot be opened on this machine.
    sparse: messages of the builder about kernels for 2:4 sparse weights.
    """
    weights, layers = summary["weights"], summary["layers"]
    if PRODUCTS[product].compute_capabilities:
        header = read_header(engine)
        made_by, capabilities = header.version, list(header.compute_capabilities)
    else:
        made_by, capabilities = str(import_product(product).__version__), _read_capability()
    length = engine.stat().st_size
    return {
        "runtime": product,
        "version": made_by,
        "compute_capabilities": capabilities,
        "bytes": length,
        "io": {"inputs": summary["inputs"], "outputs": summary["outputs"]},
        "profiles": profiles,
        "layers": layers,
        "modules": summary["modules"],
        "kernels": summary["kernels"],
        "weights": weights,
        "kept_packed": keeps_packed(length, weights["stored"], weights["widened"], len(layers)),
        "warnings": sorted({m for kind, m in messages if kind == "warning"}),
        "sparse": sorted({m for kind, m in messages if kind == "sparsity"}),
    }


def _read_capability() -> list[str]:
    """Return the compute capability of CUDA's first device, e.g. "89" for 8.9."""
    from ...machine import describe_machine

    device = first_device()
    if device is not None:
        return [device[1].replace(".", "")]
    gpu = describe_machine().gpu
    return [gpu.compute_capability.replace(".", "")] if gpu is not None else []


def keeps_packed(length: int, stored: int, widened: int, layers: int) -> bool | None:
    """Return True if a TensorRT engine is so small that its weights must still be quantized.

    length: bytes of the engine.
    stored: bytes of all weights as in the network.
    widened: bytes of all weights if quantized ones were stored as floats.
    layers: number of layers.
    Returns None if `stored` and `widened` differ too little to decide.
    """
    if widened - stored < 0.1 * length:
        return None
    return length < (stored + widened) / 2 + OVERHEAD * layers
