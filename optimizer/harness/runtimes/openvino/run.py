"""Run an ONNX model with OpenVINO on a CPU, a GPU or an NPU (devices.py).

Every property that decides what is computed is given, none is left to a default that depends on
the processor (measured for them on CPUs: docs/decisions/0015):
 - INFERENCE_PRECISION_HINT: where the processor has bf16, OpenVINO's own default is bf16. Forced
   where it has none, bf16 is emulated, 31 times slower: that is refused, as is what another device
   does not list.
 - DYNAMIC_QUANTIZATION_GROUP_SIZE: kernels of int4 and int8 weights otherwise round what they
   multiply to int8 of their own accord.
 - INFERENCE_NUM_THREADS: one per usable core, as for ONNX Runtime.
 - ENABLE_CPU_PINNING: by itself every process binds its threads to the same first cores.
 - KV_CACHE_PRECISION, of a decoder: by itself a cache is rounded to 8 bits.
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
from .core import core, core_for_strings, package
from .decoder import OpenVinoDecoder, PagedDecoder, every, read_states, write_states
from .devices import DEVICES, PRECISIONS
from .kernels import Kernel, kernels
from .paged import NotPagedError, Pages, blocks_bytes, page_cache
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
"""oneDNN's words for an operator that it has no kernel of, at compilation or in the first run."""
Axes = Mapping[str, Sequence[str | int]]
Shape = tuple[int | str | None, ...]
Inputs = dict[str, tuple[np.dtype[Any] | None, Shape | None]]


@dataclass(frozen=True)
class Settings:
    """device: a key of devices.DEVICES. precision: what float operators compute in, a key of
    PRECISIONS. hint: "latency", all threads work on one request, or "throughput", several at once
    on fewer threads each, also of one batch: they share its rows. block:
    inputs per int8 block into which kernels of quantized weights may round what they multiply; 0:
    they multiply what they are given. paged: a decoder's texts share a cache of blocks (paged.py),
    which needs a file whose masks are causal. cache: what they are kept in there, "float", which is
    `precision`, or "int8"; the arrays of `infer` are never rounded."""

    precision: str = "fp32"
    hint: str = "latency"
    block: int = 0
    paged: bool = False
    cache: str = "float"
    device: str = "cpu"

    @classmethod
    def from_fit(cls, fit: Mapping[str, Any]) -> Settings:
        """Of an engine's entry in a manifest."""
        return cls(
            fit.get("float", "fp32"),
            fit.get("hint", "latency"),
            fit.get("dynamic_quantization", 0),
            fit.get("paged_cache", False),
            fit.get("kv_cache", "float"),
            fit.get("device", "cpu"),
        )

    @property
    def decides(self) -> dict[str, Any]:
        """The properties of OpenVINO's that decide what is computed."""
        return {
            "INFERENCE_PRECISION_HINT": PRECISIONS[self.precision],
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": self.block,
            "KV_CACHE_PRECISION": "u8" if self.cache == "int8" else CACHES[self.precision],
        }


class OpenVinoRunner(Closing):
    """A model compiled for a device of this machine, for any shapes; answers from several threads
    at once. A decoder's cache is kept by OpenVINO, as states (stateful.py) or, where the settings
    say `paged`, in blocks (paged.py); `infer` gives and takes it all the same. Of a paged decoder
    each of the two forms is compiled when it is first used.

    threads: 0 means one per core this process may use. compiled: what `write_compiled` wrote of the
    same model and settings on this processor, opened instead; None: it is compiled now. axes:
    {input: its axes}, names of those that vary, by which inputs that disagree are refused; without
    them only rank and fixed sizes are checked.
    Raises MachineError when the package or the device is missing, lacks the precision or does not
    compile it, BundleError for a file that this version does not read.
    """

    device = "cpu"  # where its arrays are

    def __init__(
        self,
        model: Path,
        settings: Settings | None = None,
        *,
        threads: int = 0,
        compiled: Path | None = None,
        axes: Axes | None = None,
    ) -> None:
        self.model, self.settings = Path(model), settings or Settings()
        self.threads, self._file = threads or cores(), compiled
        self._axes, self._idle = axes or {}, list[Any]()
        if self.settings.paged:
            self._inputs, self._outputs = self._named_by(_read(package(), self.model))
            self._cache = kv_cache.names(sum(map(kv_cache.is_past, self._inputs)) // 2)
            return
        self._cache = stateful.pairs([s.name for s in self.request().query_state()])
        self._inputs, self._outputs = self._named_by(self._compiled)
        for past, present in self._cache:
            self._inputs[past] = (np.dtype("float32"), None)
            self._outputs.append(present)

    @cached_property
    def _compiled(self) -> Any:
        """An ov.CompiledModel of the file, a decoder's cache as states."""
        settings = replace(self.settings, paged=False, cache="float")
        return _open(self.model, settings, self.threads, self._file)

    @cached_property
    def _results(self) -> list[str]:
        """What it gives itself: of a cache that is a state, no present."""
        return [_name(port) for port in self._compiled.outputs]

    @cached_property
    def _paged(self) -> Any:
        """The same, its cache in blocks."""
        return _open(self.model, self.settings, self.threads, None)

    def _named_by(self, model: Any) -> tuple[Inputs, list[str]]:
        """Inputs and outputs of an ov.Model or ov.CompiledModel, in its order, but for stateful's
        own."""
        inputs: Inputs = {}
        for port in model.inputs:
            name, kind = _name(port), str(port.get_element_type().get_type_name())
            if name != stateful.ROWS:
                known = self._axes.get(name)
                free = kv_cache.is_past(name)
                shape = None if free else tuple(known) if known else _shape(port)
                inputs[name] = (DTYPES.get(kind), shape)
        return inputs, [_name(port) for port in model.outputs]

    @property
    def inputs(self) -> dict[str, np.dtype[Any] | None]:
        """Name and element type of each input."""
        return {name: dtype for name, (dtype, _) in self._inputs.items()}

    @property
    def outputs(self) -> list[str]:
        """Names, in the graph's order."""
        return list(self._outputs)

    def infer(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Run once. Raises InputError naming the input that is missing, extra, or mis-shaped."""
        check_names(set(arrays), set(self._inputs), self.model.name)
        sizes: dict[str, tuple[int, str]] = {}
        for name, (dtype, shape) in self._inputs.items():
            if shape is not None:
                check_array(name, arrays[name], dtype, shape, sizes)
        taken = dict(arrays)
        rows = min(self._streams, len(next(iter(taken.values()))))
        if rows > 1:
            return self._at_once(taken, rows)
        request = self._request()
        if self._cache:
            pasts = {past: taken.pop(past) for past, _ in self._cache}
            write_states(package(), request, self._cache, pasts)
            taken[stateful.ROWS] = every(len(next(iter(taken.values()))))
        answers = self.run(request, taken)
        answers |= read_states(request, self._cache)
        self._idle.append(request)
        return answers

    @cached_property
    def _streams(self) -> int:
        """Requests at once into which a batch is divided by rows; 1: it is not."""
        if self.settings.hint != "throughput" or self._cache:
            return 1
        taken = {axes[:1] for axes in self._axes.values()}
        sizes = {(_shape(port) or (0,))[:1] for port in self._compiled.outputs}
        if taken != {("batch",)} or sizes != {(None,)}:
            return 1
        return int(self._compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))

    def _at_once(self, arrays: Mapping[str, Array], count: int) -> dict[str, Array]:
        """The rows of a batch in so many requests, of as many rows each as can be."""
        requests = [self._request() for _ in range(count)]
        shares = {name: np.array_split(array, count) for name, array in arrays.items()}
        with self._running():
            try:  # arrays are read where they are: a copy would go into those of the last run
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
        except IndexError:  # all are at work in other threads
            return self.request()

    def request(self) -> Any:
        """A new infer request, its cache empty."""
        return self._compiled.create_infer_request()

    def run(self, request: Any, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """One inference. Raises BundleError where it fails, as for arrays that the model does not
        take; MachineError where this processor has no kernel for it."""
        with self._running():
            results = request.infer(dict(arrays), share_inputs=True)
        return dict(zip(self._results, results.values(), strict=True))

    @contextmanager
    def _running(self) -> Iterator[None]:
        try:
            yield
        except Exception as e:  # the binding raises RuntimeError for everything
            problem = f"OpenVINO cannot run it on this {self.settings.device} ({_first_line(e)})"
            if NO_KERNEL in str(e):
                fix = f"{KERNELS} Or give another engine (--runtime)."
                raise MachineError(problem, where=str(self.model), fix=fix) from e
            fix = "Model, contract and tokenizer do not belong together: package it again."
            raise BundleError(problem, where=str(self.model), fix=fix) from e

    def pages(self, texts: int, tokens: int) -> Pages:
        """An empty cache in blocks, with room for so many texts of so many tokens at first.

        A companion makes steps of any texts the same where products are sums of integers, for 3 %
        of the time of one text (SmolLM2). Of floats it is a third, and none is given."""
        companion = self.settings.block > 0
        return Pages(package(), self._paged, texts, tokens, companion=companion)

    def decoder(self, contract: Contract, capacity: int = 0) -> OpenVinoDecoder | PagedDecoder:
        """A new batch of sequences to continue; see decoder.DecoderRunner."""
        if self.settings.paged:
            return PagedDecoder(self, contract, capacity)
        return OpenVinoDecoder(self, contract)

    def slots(self, contract: Contract, rows: int, capacity: int) -> Slots:
        """Places for texts that come and go; see slots.Slots."""
        if self.settings.paged:
            return PagedSlots(self, contract, rows, capacity)
        return SeparateDecoders(self, contract, capacity)

    def cache_bytes(self, contract: Contract, tokens: int) -> int:
        """What the cache of one text of so many tokens takes in memory: in blocks, whole ones."""
        if self.settings.paged:
            return blocks_bytes(self._paged, tokens)
        itemsize = ITEMSIZES[CACHES[self.settings.precision]]
        return kv_cache.text_bytes(contract.decoder, tokens, itemsize)

    def kernels(self) -> list[Kernel]:
        """What each layer runs in; of a decoder, where it continues texts."""
        return kernels(self._paged if self.settings.paged else self._compiled)

    def close(self) -> None:
        self._idle.clear()
        for form in ("_compiled", "_paged", "_results", "_streams"):
            self.__dict__.pop(form, None)


def write_compiled(model: Path, settings: Settings, threads: int, out: Path) -> None:
    """Write what this processor runs of the model: OpenVinoRunner's `compiled`. Raises as it."""
    compiled = _open(model, settings, threads or cores(), None)
    out.write_bytes(compiled.export_model().getvalue())


def unpaged(model: Path) -> str:
    """Why this version of OpenVINO makes no paged attention of a decoder's file, or "". Raises
    BundleError for a file that it does not read."""
    ov = package()
    try:
        page_cache(ov, _read(ov, model))
    except NotPagedError as e:
        return str(e)
    return ""


def write_stateful(model: Path, settings: Settings, out: Path) -> None:
    """Write a decoder's ONNX file as OpenVINO's own two: `out`, which ends in .xml, and the weights
    beside it, .bin. Its cache is a state; weights keep the types they have. Who opens it without
    properties gets those of `settings`, but for the precision hint, which a file cannot carry."""
    read = core().read_model(str(model))
    stateful.keep_cache(package(), read)
    for name, value in settings.decides.items():
        read.set_rt_info(str(value), ["runtime_options", name])
    write_model(read, out)


def write_model(model: Any, out: Path) -> None:
    """Write an ov.Model, nothing rounded."""
    package().save_model(model, str(out), compress_to_fp16=False)


def string_model(path: Path) -> Callable[[str], dict[str, Array]]:
    """What a model of texts gives, {output: array} of one text. Its operators must have been
    registered: importing openvino_tokenizers does."""
    compiled = core_for_strings().compile_model(str(path), "CPU")
    names = [_name(port) for port in compiled.outputs]
    return lambda text: dict(zip(names, compiled([text]).values(), strict=True))


def _open(model: Path, settings: Settings, threads: int, compiled: Path | None) -> Any:
    """An ov.CompiledModel."""
    ov, device = package(), DEVICES[settings.device]
    properties = _properties(settings, threads)
    with _opening(ov, compiled or model):
        if compiled is not None:
            blob = ov.utils.data_helpers.tensor_from_file(str(compiled))
            return core().import_model(blob, device, properties)
        read = _read(ov, model)
        if stateful.is_decoder(name for port in read.inputs for name in port.get_names()):
            (page_cache if settings.paged else stateful.keep_cache)(ov, read)
        with _opening(ov, model, MachineError):
            return core().compile_model(read, device, properties)


def _properties(settings: Settings, threads: int) -> dict[str, Any]:
    """What OpenVINO is told. Raises MachineError where the device is missing, or cannot do it."""
    devices.check(settings.device)
    listed = devices.capabilities(settings.device)
    devices.refuse_emulation(listed, settings.precision, settings.device)
    properties = {
        **settings.decides,
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": HINTS[settings.hint],
        "ENABLE_CPU_PINNING": False,
    }
    supported = core().get_property(DEVICES[settings.device], "SUPPORTED_PROPERTIES")
    return devices.known(properties, list(supported), settings.device)


def _read(ov: Any, model: Path) -> Any:
    """An ov.Model."""
    if not model.is_file():
        raise BundleError("the model is missing", where=str(model))
    with _opening(ov, model):
        return core().read_model(str(model))


@contextmanager
def _opening(ov: Any, file: Path, kind: type[HarnessError] = BundleError) -> Iterator[None]:
    """Raises `kind` in place of what the binding raises."""
    try:
        yield
    except (BundleError, MachineError):
        raise
    except Exception as e:  # the binding raises RuntimeError for everything
        fix, line = DAMAGED if kind is BundleError else KERNELS, _first_line(e)
        raise kind(
            f"OpenVINO {ov.get_version()} cannot open it ({line})", where=str(file), fix=fix
        ) from e


def _name(port: Any) -> str:
    """As the file has it: a tensor may have other names besides."""
    own = str(port.get_node().get_friendly_name()).removesuffix("/sink_port_0")
    return own if own in port.get_names() else str(port.any_name)


def _shape(port: Any) -> Shape | None:
    """Sizes of an input's axes, None where any is taken; None where any rank is."""
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        return None
    return tuple(d.get_length() if d.is_static else None for d in shape)


def _first_line(error: BaseException) -> str:
    """What the binding says after the place in its own sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("Exception from src", "Check '"))]
    return (telling or lines or [type(error).__name__])[0][:300]
