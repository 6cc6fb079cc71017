"""Build a TensorRT engine from ONNX, with any product of the family.

Networks are strongly typed: precision is what the ONNX says (Q/DQ and casts), never a builder
flag. TensorRT-RTX builds without a GPU; such an engine cannot be opened, so what is known about
it is collected from the network definition that was handed to the builder, and from the engine's
own header and size. With a GPU the engine itself is asked (inspect).

products.PRODUCTS is where the products of the TensorRT family differ from each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....errors import BuildError, MachineError
from ....process.collection import no_collection
from .. import caches
from ..cuda import first_device
from ..header import read_header
from ..inspect import inspect_engine
from ..products import PRODUCTS, Options, imported, refuse_options, version
from . import advice
from .network import summary
from .watch import Messages, Progress, interruptible, logger, monitor

__all__ = ["PRODUCTS", "Options", "Progress", "build", "configure", "kept_packed", "version"]

Span = tuple[int, int, int]

DEFAULTS = Options()
OVERHEAD = 8 << 10  # bytes of kernels and metadata per layer: MiniLM 8.7 k, two-layer BERT 8.2 k


@no_collection()
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
    that have one; others leave it alone. progress(phase, done, of) is called as the whole build
    advances; Ctrl-C stops it at the next step.
    Raises MachineError when the builder or a GPU it needs is missing, BuildError naming the
    module when it does not take the model or an option.
    """
    trt = imported(product)
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
    known = summary(network, modules or {})
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
    try:
        builder = trt.Builder(log)
    except TypeError:  # the binding's word for a null pointer
        builder = None
    if builder is None:
        raise MachineError(
            f"its builder did not start ({advice.errors(log.messages)[:300]})",
            where=f"target {product}",
            fix="It builds only where a GPU and its driver are; on_missing: defer leaves it to "
            "be built there."
            if PRODUCTS[product].needs_gpu
            else "",
        )
    return builder


def configure(trt: Any, config: Any, options: Options) -> None:
    """Set the options in a builder's config. DETAILED is what the inspector needs."""
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if options.workspace_gb is not None:
        config.set_memory_pool_limit(
            trt.MemoryPoolType.WORKSPACE, int(options.workspace_gb * (1 << 30))
        )
    flags = trt.BuilderFlag
    config.clear_flag(flags.TF32)  # on unless told: what the ONNX has in fp32 is computed in it
    if options.sparse_weights:
        config.set_flag(flags.SPARSE_WEIGHTS)
    if options.version_compatible:
        config.set_flag(flags.VERSION_COMPATIBLE)
    if options.refittable:
        config.set_flag(flags.REFIT)
    if options.strip_weights:
        config.set_flag(flags.STRIP_PLAN)
        if not options.refittable:  # the same weights are given back when it is loaded
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
    if not hasattr(levels, "SAME_COMPUTE_CAPABILITY"):
        raise BuildError(
            "same_compute_capability was asked for; this TensorRT is too old to have it",
            where="hardware_compatible",
            accepted="none, ampere_plus",
        )
    return levels.SAME_COMPUTE_CAPABILITY


def _add_profile(
    builder: Any, network: Any, config: Any, shapes: Mapping[str, Span], messages: Messages
) -> dict[str, dict[str, list[int]]]:
    """One optimization profile: {input: {"min", "opt", "max"}}, each a whole shape."""
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
        raise BuildError("the profile was refused", where="shapes", fix=advice.advice(messages))
    return ranges


def _refuse_bad_plan(
    plan: Any, messages: Messages, onnx: Path, product: str, options: Options
) -> None:
    inconsistent = any("not self-consistent" in m for _, m in messages)
    if plan is not None and not inconsistent:
        return
    gpu_only = [o for o in options.chosen() if o in PRODUCTS[product].with_gpu]
    if plan is None and gpu_only and "CUDA_SUCCESS" in advice.errors(messages):
        raise MachineError(
            f"{product} takes {', '.join(gpu_only)} only where a GPU is present, and none is here",
            where=f"target {product}",
            fix=f"Build there, or remove {', '.join(gpu_only)}.",
        )
    raise advice.plan_error(messages, onnx)


def _describe(
    engine: Path,
    product: str,
    profiles: list[dict[str, Any]],
    summary: dict[str, Any],
    messages: Messages,
) -> dict[str, Any]:
    """The sidecar: {"runtime", "version", "compute_capabilities", "bytes", "io", "profiles",
    "layers", "modules", "kernels", "weights", "kept_packed", "warnings", "sparse"}.

    compute_capabilities: those the engine names, or that of the GPU it was built on. kernels:
    see inspect.read_layers; None when the engine could not be opened here. sparse: what the builder
    said of kernels for 2:4 sparse weights.
    """
    weights, layers = summary["weights"], summary["layers"]
    if PRODUCTS[product].compute_capabilities:
        header = read_header(engine)
        made_by, capabilities = header.version, list(header.compute_capabilities)
    else:
        made_by, capabilities = str(imported(product).__version__), _present()
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
        "kept_packed": kept_packed(length, weights["stored"], weights["widened"], len(layers)),
        "warnings": sorted({m for kind, m in messages if kind == "warning"}),
        "sparse": sorted({m for kind, m in messages if kind == "sparsity"}),
    }


def _present() -> list[str]:
    """The compute capability of the GPU that is here, "89" for 8.9: CUDA's own first device."""
    from ...machine import this_machine

    device = first_device()
    if device is not None:
        return [device[1].replace(".", "")]
    gpu = this_machine().gpu
    return [gpu.compute_capability.replace(".", "")] if gpu is not None else []


def kept_packed(length: int, stored: int, widened: int, layers: int) -> bool | None:
    """Whether an engine of `length` bytes is so small that its codes must still be codes.

    stored, widened: bytes of all weights as the network has them, and with every code in its
    float type. None when the two are too near, beside the length, to tell.
    """
    if widened - stored < 0.1 * length:
        return None
    return length < (stored + widened) / 2 + OVERHEAD * layers
