"""Run an ONNX model with OpenVINO on a CPU, a GPU or an NPU (devices.py).

Every property that changes results is set, because OpenVINO's defaults depend on the processor
(measurements on CPUs: docs/decisions/0015):
 - INFERENCE_PRECISION_HINT: the default is bf16 on processors with bf16. On other processors bf16
   is emulated, 31 times slower, so unsupported precisions are refused.
 - DYNAMIC_QUANTIZATION_GROUP_SIZE: by default kernels of int4 and int8 weights round activations
   to int8.
 - INFERENCE_NUM_THREADS: one per usable core, as for ONNX Runtime.
 - ENABLE_CPU_PINNING: by default every process binds its threads to the same first cores.
 - KV_CACHE_PRECISION: by default the KV cache is rounded to 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...contract import Contract
from ...errors import BundleError, HarnessError, MachineError
from ...inputs import kv_cache
from ...inputs.batch import Array
from ...process.closing import Closing
from ..ort.run import check_array, check_names, cores
from ..slots import SeparateDecoders, Slots
from . import devices, stateful
from .core import core_for_strings, import_package, open_core
from .decoder import OpenVinoDecoder, PagedDecoder, identity_rows, read_states, write_states
from .devices import DEVICES, PRECISIONS
from .kernels import Kernel, list_kernels
from .paged import NotPagedError, Pages, blocks_bytes, rewrite_cache_as_pages
from .slots import PagedSlots

CACHES = PRECISIONS
ITEMSIZES = {"f32": 4, "bf16": 2, "f16": 2}
HINTS = {"latency": "LATENCY", "throughput": "THROUGHPUT"}
DTYPES: dict[str, np.dtype[Any]] = {
    "i64": np.dtype("int64"),
    "i32": np.dtype("int32"),
    "f32": np.dtype("float32"),
    "f16": np.dtype("float16"),
    "boolean": np.dtype("bool"),
    "i8": np.dtype("int8"),
    "u8": np.dtype("uint8"),
}
DAMAGED = "The file is damaged, or needs a newer OpenVINO."
KERNELS = "Use a processor that has its kernels, and do not forbid them (ONEDNN_MAX_CPU_ISA)."
NO_KERNEL = "could not create a primitive"
"""oneDNN's error for an operator without a kernel, at compilation or in the first run."""
Axes = Mapping[str, Sequence[str | int]]
Shape = tuple[int | str | None, ...]
Inputs = dict[str, tuple[np.dtype[Any] | None, Shape | None]]


@dataclass(frozen=True)
class OpenVinoSettings:
    """Settings that decide what OpenVINO computes and how it divides the work.

    precision: precision of float operators, a key of PRECISIONS
    hint: "latency": all threads work on one request; "throughput": several requests run at once on
        fewer threads each, and a batch is divided among them by rows
    block: number of inputs that share a scale when kernels of quantized weights round activations
        to int8; 0: activations are not rounded
    paged: a decoder uses a paged KV cache (paged.py); its masks must be causal
    cache: precision of the paged KV cache, "float" (that of `precision`) or "int8"; the arrays of
        `infer` are never rounded
    device: a key of devices.DEVICES
    """

    precision: str = "fp32"
    hint: str = "latency"
    block: int = 0
    paged: bool = False
    cache: str = "float"
    device: str = "cpu"

    @classmethod
    def from_fit(cls, fit: Mapping[str, Any]) -> OpenVinoSettings:
        """Read OpenVINO's settings from `fit` of an engine's manifest entry."""
        return cls(
            fit.get("float", "fp32"),
            fit.get("hint", "latency"),
            fit.get("dynamic_quantization", 0),
            fit.get("paged_cache", False),
            fit.get("kv_cache", "float"),
            fit.get("device", "cpu"),
        )

    @property
    def precision_properties(self) -> dict[str, Any]:
        """Return the OpenVINO properties {name: value} that change results."""
        return {
            "INFERENCE_PRECISION_HINT": PRECISIONS[self.precision],
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": self.block,
            "KV_CACHE_PRECISION": "u8" if self.cache == "int8" else CACHES[self.precision],
        }


class OpenVinoRunner(Closing):
    """A model that OpenVINO compiled for a device of this machine, for any shapes. Thread-safe.

    OpenVINO holds a decoder's KV cache, as states (stateful.py) or, with `settings.paged`, in
    blocks (paged.py); `infer` takes and returns it as arrays in both cases. The two forms of a
    paged decoder are compiled on first use.

    threads: 0 means one per core that this process may use.
    compiled: file written by `write_compiled` for the same model, settings and processor, which is
        opened instead; None: compile now.
    axes: {input: axes} by which contradicting inputs are refused; without them only ranks and fixed
        sizes are checked.
    Raises MachineError if the package or the device is missing, or the device does not support the
    precision or the model; BundleError for a file that this version cannot read.
    """

    device = "cpu"  # location of its arrays

    def __init__(
        self,
        model: Path,
        settings: OpenVinoSettings | None = None,
        *,
        threads: int = 0,
        compiled: Path | None = None,
        axes: Axes | None = None,
    ) -> None:
        self.model, self.settings = Path(model), settings or OpenVinoSettings()
        self.threads, self._file = threads or cores(), compiled
        self._axes, self._idle = axes or {}, list[Any]()
        if self.settings.paged:
            self._inputs, self._outputs = self._ports(_read(import_package(), self.model))
            self._cache = kv_cache.list_names(sum(map(kv_cache.is_past, self._inputs)) // 2)
            return
        self._cache = stateful.list_state_pairs([s.name for s in self.request().query_state()])
        self._inputs, self._outputs = self._ports(self._compiled)
        for past, present in self._cache:
            self._inputs[past] = (np.dtype("float32"), None)
            self._outputs.append(present)

    @cached_property
    def _compiled(self) -> Any:
        """Compile the model in OpenVINO, with a decoder's KV cache as states: an
        ov.CompiledModel."""
        settings = replace(self.settings, paged=False, cache="float")
        return _open(self.model, settings, self.threads, self._file)

    @cached_property
    def _results(self) -> list[str]:
        """Return the names of the OpenVINO model's outputs. Keys and values that a stateful model
        keeps inside are not among them."""
        return [_name(port) for port in self._compiled.outputs]

    @cached_property
    def _paged(self) -> Any:
        """Compile the model in OpenVINO with a paged KV cache: an ov.CompiledModel."""
        return _open(self.model, self.settings, self.threads, None)

    def _ports(self, model: Any) -> tuple[Inputs, list[str]]:
        """Return the ports of an ov.Model or ov.CompiledModel, without beam_idx.

        The inputs are {name: (dtype, shape)}, the outputs a list of names. A dtype is None if numpy
        lacks it, a shape if it is dynamic in rank or belongs to the KV cache.
        """
        inputs: Inputs = {}
        for port in model.inputs:
            name, kind = _name(port), str(port.get_element_type().get_type_name())
            if name != stateful.ROWS:
                axes = self._axes.get(name)
                shape = tuple(axes) if axes else _shape(port)
                inputs[name] = (DTYPES.get(kind), None if kv_cache.is_past(name) else shape)
        return inputs, [_name(port) for port in model.outputs]

    @property
    def inputs(self) -> dict[str, np.dtype[Any] | None]:
        return {name: dtype for name, (dtype, _) in self._inputs.items()}

    @property
    def outputs(self) -> list[str]:
        return list(self._outputs)

    def infer(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        check_names(set(arrays), set(self._inputs), self.model.name)
        sizes: dict[str, tuple[int, str]] = {}
        for name, (dtype, shape) in self._inputs.items():
            if shape is not None:
                check_array(name, arrays[name], dtype, shape, sizes)
        taken = dict(arrays)
        rows = min(self._streams, len(next(iter(taken.values()))))
        if rows > 1:
            return self._run_in_parts(taken, rows)
        request = self._request()
        if self._cache:
            pasts = {past: taken.pop(past) for past, _ in self._cache}
            write_states(import_package(), request, self._cache, pasts)
            taken[stateful.ROWS] = identity_rows(len(next(iter(taken.values()))))
        answers = self.run(request, taken)
        answers |= read_states(request, self._cache)
        self._idle.append(request)
        return answers

    @cached_property
    def _streams(self) -> int:
        """Return the number of OpenVINO requests among which the rows of one batch are divided, to
        run at the same time; 1: a batch is run undivided."""
        if self.settings.hint != "throughput" or self._cache:
            return 1
        taken = {axes[:1] for axes in self._axes.values()}
        sizes = {(_shape(port) or (0,))[:1] for port in self._compiled.outputs}
        if taken != {("batch",)} or sizes != {(None,)}:
            return 1
        return int(self._compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))

    def _run_in_parts(self, arrays: Mapping[str, Array], count: int) -> dict[str, Array]:
        """Run a batch in `count` concurrent requests of OpenVINO of about equal rows."""
        requests = [self._request() for _ in range(count)]
        shares = {name: np.array_split(array, count) for name, array in arrays.items()}
        with self._running():
            try:  # share_inputs: no copy into the buffers of the last run
                for i, request in enumerate(requests):
                    share = {name: parts[i] for name, parts in shares.items()}
                    request.start_async(share, share_inputs=True)
            finally:
                for request in requests:
                    request.wait()
            parts = [list(request.results.values()) for request in requests]
            values = [np.concatenate(same) for same in zip(*parts, strict=True)]
        self._idle.extend(requests)
        return dict(zip(self._results, values, strict=True))

    def _request(self) -> Any:
        try:
            return self._idle.pop()
        except IndexError:  # all are in use by other threads
            return self.request()

    def request(self) -> Any:
        """Make an infer request of OpenVINO, in which one generation runs, with an empty KV
        cache."""
        return self._compiled.create_infer_request()

    def run(self, request: Any, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Run one inference of an infer request of OpenVINO; return {output: array}.

        Raises BundleError if it fails, e.g. for arrays that the model does not take; MachineError
        if this processor has no kernel for it.
        """
        with self._running():
            results = request.infer(dict(arrays), share_inputs=True)
        return dict(zip(self._results, results.values(), strict=True))

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Inside, convert OpenVINO's errors of a run to BundleError, or to MachineError if a kernel
        is missing."""
        try:
            yield
        except Exception as e:  # the binding raises RuntimeError for everything
            problem = (
                f"OpenVINO cannot run it on this {self.settings.device} ({_cut_first_line(e)})"
            )
            if NO_KERNEL in str(e):
                fix = f"{KERNELS} Or give another engine (--runtime)."
                raise MachineError(problem, where=str(self.model), fix=fix) from e
            fix = "Model, contract and tokenizer do not match: package the model again."
            raise BundleError(problem, where=str(self.model), fix=fix) from e

    def pages(self, texts: int, tokens: int) -> Pages:
        """Return an empty paged KV cache in OpenVINO, initially for `texts` texts of `tokens`
        tokens.

        Steps of single tokens compute two more tokens, whose scores are discarded, where products
        are in integers: so the scores of a text are the same bits beside any other texts. That
        costs 3 % of the time of one text (SmolLM2); with float products it would cost a third, and
        is left out.
        """
        companion = self.settings.block > 0
        return Pages(import_package(), self._paged, texts, tokens, companion=companion)

    def decoder(self, contract: Contract, capacity: int = 0) -> OpenVinoDecoder | PagedDecoder:
        if self.settings.paged:
            return PagedDecoder(self, contract, capacity)
        return OpenVinoDecoder(self, contract)

    def slots(self, contract: Contract, rows: int, capacity: int) -> Slots:
        if self.settings.paged:
            return PagedSlots(self, contract, rows, capacity)
        return SeparateDecoders(self, contract, capacity)

    def cache_bytes(self, contract: Contract, tokens: int) -> int:
        """Return the bytes of OpenVINO's KV cache of one text; a paged cache is rounded up to
        blocks."""
        if self.settings.paged:
            return blocks_bytes(self._paged, tokens)
        itemsize = ITEMSIZES[CACHES[self.settings.precision]]
        return kv_cache.text_bytes(contract.decoder, tokens, itemsize)

    def kernels(self) -> list[Kernel]:
        """Return the kernel in which OpenVINO runs each layer; of a decoder, in the form used for
        generation."""
        return list_kernels(self._paged if self.settings.paged else self._compiled)

    def close(self) -> None:
        self._idle.clear()
        for form in ("_compiled", "_paged", "_results", "_streams"):
            self.__dict__.pop(form, None)


def write_compiled(model: Path, settings: OpenVinoSettings, threads: int, out: Path) -> None:
    """Compile a model by OpenVINO for this processor and write it to `out`, for OpenVinoRunner's
    `compiled`.

    threads: 0 means one per core that this process may use

    Raises MachineError and BundleError as OpenVinoRunner.
    """
    compiled = _open(model, settings, threads or cores(), None)
    out.write_bytes(compiled.export_model().getvalue())


def explain_unpaged(model: Path) -> str:
    """Return the reason why OpenVINO cannot page the KV cache of a decoder's file, or "".

    Raises BundleError for a file that OpenVINO cannot read.
    """
    ov = import_package()
    try:
        rewrite_cache_as_pages(ov, _read(ov, model))
    except NotPagedError as e:
        return str(e)
    return ""


def write_stateful(model: Path, settings: OpenVinoSettings, out: Path) -> None:
    """Convert a decoder's ONNX file to OpenVINO's format: `out` (.xml) and its weights (.bin).

    The KV cache becomes states; weights keep their types. The file stores the properties of
    `settings` as defaults, except the precision hint, which a file cannot store.
    """
    read = open_core().read_model(str(model))
    stateful.make_stateful(import_package(), read)
    for name, value in settings.precision_properties.items():
        read.set_rt_info(str(value), ["runtime_options", name])
    write_model(read, out)


def write_model(model: Any, out: Path) -> None:
    """Write an OpenVINO model to files, without rounding weights to half precision."""
    import_package().save_model(model, str(out), compress_to_fp16=False)


def open_string_model(path: Path) -> Callable[[str], dict[str, Array]]:
    """Open in OpenVINO a model with string operators: a function from a text to {output: array}.

    The caller imports openvino_tokenizers first, which registers the operators.
    """
    compiled = core_for_strings().compile_model(str(path), "CPU")
    names = [_name(port) for port in compiled.outputs]
    return lambda text: dict(zip(names, compiled([text]).values(), strict=True))


def _open(model: Path, settings: OpenVinoSettings, threads: int, compiled: Path | None) -> Any:
    """Compile a model with OpenVINO for its device.

    threads: 0 means one per core
    compiled: file of a compiled model to open instead; None compiles now
    """
    ov, device = import_package(), DEVICES[settings.device]
    properties = _properties(settings, threads)
    with _opening(ov, compiled or model):
        if compiled is not None:
            blob = ov.utils.data_helpers.tensor_from_file(str(compiled))
            return open_core().import_model(blob, device, properties)
        read = _read(ov, model)
        if stateful.is_decoder(name for port in read.inputs for name in port.get_names()):
            (rewrite_cache_as_pages if settings.paged else stateful.make_stateful)(ov, read)
        with _opening(ov, model, MachineError):
            return open_core().compile_model(read, device, properties)


def _properties(settings: OpenVinoSettings, threads: int) -> dict[str, Any]:
    """Return the OpenVINO properties with which a model is compiled. Raises MachineError if the
    device lacks support."""
    devices.check(settings.device)
    listed = devices.list_capabilities(settings.device)
    devices.refuse_emulation(listed, settings.precision, settings.device)
    properties = {
        **settings.precision_properties,
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": HINTS[settings.hint],
        "ENABLE_CPU_PINNING": False,
    }
    supported = open_core().get_property(DEVICES[settings.device], "SUPPORTED_PROPERTIES")
    return devices.select_supported(properties, list(supported), settings.device)


def _read(ov: Any, model: Path) -> Any:
    """Read a file as OpenVINO's ov.Model."""
    if not model.is_file():
        raise BundleError("the model is missing", where=str(model))
    with _opening(ov, model):
        return open_core().read_model(str(model))


@contextmanager
def _opening(ov: Any, file: Path, kind: type[HarnessError] = BundleError) -> Iterator[None]:
    """Inside, convert errors that OpenVINO raises while it opens a file to `kind`."""
    try:
        yield
    except (BundleError, MachineError):
        raise
    except Exception as e:  # the binding raises RuntimeError for everything
        fix, line = DAMAGED if kind is BundleError else KERNELS, _cut_first_line(e)
        raise kind(
            f"OpenVINO {ov.get_version()} cannot open it ({line})", where=str(file), fix=fix
        ) from e


def _name(port: Any) -> str:
    """Return the name that an OpenVINO model's input or output has in the file; OpenVINO may know
    it by further names."""
    name = str(port.get_node().get_friendly_name()).removesuffix("/sink_port_0")
    return name if name in port.get_names() else str(port.any_name)


def _shape(port: Any) -> Shape | None:
    """Return the sizes of the axes of an OpenVINO model's input, with None for a dynamic axis; None
    if the rank is dynamic."""
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        return None
    return tuple(d.get_length() if d.is_static else None for d in shape)


def _cut_first_line(error: BaseException) -> str:
    """Return the first line of OpenVINO's error message, without the source locations before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    informative = [line for line in lines if not line.startswith(("Exception from src", "Check '"))]
    return (informative or lines or [type(error).__name__])[0][:300]
