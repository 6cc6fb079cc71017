"""Run an ONNX model with ONNX Runtime.

Session options are the same for evaluation, benchmarks and bundles (measurements:
docs/decisions/0007):
 - Worker threads spin between the operators of a run and sleep between runs, because idle pools
   that spin take the cores from other sessions of the process.
 - SkipLayerNormFusion and BiasGeluFusion are off on the CPU, where the fused kernels are slower
   than the LayerNormalization, Gelu and Add that they replace.
 - One worker per usable core, counted from the affinity mask, which differs from the machine's
   cores in a container.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from ...contract import Contract
from ...errors import BundleError, HarnessError, InputError, MachineError, UnopenedError
from ...inputs import kv_cache
from ...inputs.batch import Array
from ...process.closing import Closing
from ..slots import SeparateDecoders, Slots
from . import exact_integers
from .bound import GRAPH_ID, UNCAPTURED, BoundSession
from .decoder import OrtDecoder
from .device_slots import DeviceSlots
from .divided import DividedRuns, Run, can_divide_rows
from .fixed_step import FixedSteps, ReplayingDecoder, can_replay
from .privacy import disable_telemetry
from .providers import (
    RECORD_PLACEMENT,
    advise,
    count_placement,
    find_provider,
    list_nodes_on_cpu,
    refuse_fallback,
    start,
)
from .slots import OrtSlots, supports_slots

DTYPES = {
    "tensor(int64)": np.dtype("int64"),
    "tensor(int32)": np.dtype("int32"),
    "tensor(float)": np.dtype("float32"),
    "tensor(float16)": np.dtype("float16"),
    "tensor(bool)": np.dtype("bool"),
}
SLOW_ON_CPU = ["SkipLayerNormFusion", "BiasGeluFusion"]  # measured with 1.31
ERRORS_ONLY, FATAL_ONLY = 3, 4
FLOAT_ACTIVATIONS = ("session.qdq_matmulnbits_accuracy_level", "1")
"""Session entry that keeps the inputs of fused MatMulNBits in float32, for unfused sessions. With
exact_integers.EXACT these are optimized too, and ONNX Runtime fuses DequantizeLinear and MatMul
into MatMulNBits, which by default (level 4) quantizes its inputs to INT8. A MatMulNBits of the
file keeps its own level."""

NOT_PACKED = ("session.disable_prepacking", "1")
"""Session entry that makes no copies of weights in the layout of a kernel."""


class OrtRunner(Closing):
    """A model opened in ONNX Runtime for inference on one device. It never falls back to another
    device.

    device: a key of providers.PROVIDERS. (The attribute `device` is "cpu" or "cuda", where arrays
        are, and `provider` is the key.)
    threads: threads per operator; 0 means one per core that this process may use
    fuse: False runs the operators of the file without fusions, as the ledger needs it
    mapped: save memory at the cost of speed: weights stay in their external file, mapped into
        memory, kernels make no copies of them, values computed from weights are freed once read,
        and ConstantFolding is off unless `optimized` is given
    bound: run on buffers that stay on the device (bound.py)
    graphs: also replay CUDA graphs, one per combination of input shapes, or per size of a decoder's
        step; raises UnopenedError for a model that cannot be captured whole
    fixed: run a decoder's steps on the buffers of fixed_step.py, as with graphs
    divide: on a CPU, divide large batches among threads by rows (divided.py)
    answer: the only output to compute, if the model has it (harness/tasks/task.py: answer_output);
        "" computes all outputs
    optimized: file that receives the graph with this session's fusions, for inspection; its weights
        go to `<optimized>.data`
    profile: prefix of the file that `end_profiling` writes, with the time of each kernel

    Attributes: `placed`, {provider: number of nodes}; `on_cpu`, see providers.list_nodes_on_cpu;
    `adapters`, {name: this model with that adapter} for `slots`, empty unless the caller sets it.

    Raises BundleError if this version cannot run the file (UnopenedError on other devices than the
    CPU), MachineError if the package or the device is missing.
    """

    def __init__(
        self,
        model: Path,
        *,
        device: str = "cpu",
        threads: int = 0,
        fuse: bool = True,
        mapped: bool = False,
        bound: bool = False,
        graphs: bool = False,
        fixed: bool = False,
        divide: bool = False,
        answer: str = "",
        optimized: Path | None = None,
        profile: Path | None = None,
    ) -> None:
        self.model, self.provider, self.threads = Path(model), device, threads
        self.device = find_provider(device).device
        self._session = _session(
            self.model,
            device,
            threads,
            optimized=optimized,
            profile=profile,
            fuse=fuse,
            mapped=mapped,
            graphs=graphs,
        )
        self.placed = {} if device == "cpu" else count_placement(self._session)
        self.on_cpu = [] if device == "cpu" else list_nodes_on_cpu(self._session)
        refuse_fallback(device, self._session.get_providers(), self.placed)
        names = [o.name for o in self._session.get_outputs()]
        self._outputs = [answer] if answer in names else names
        self.bound = (
            BoundSession(_import(), self._session, self.device, self._outputs, graphs=graphs)
            if bound or graphs
            else None
        )
        self._inputs: dict[str, tuple[Any, tuple[Any, ...]]] = {
            i.name: (DTYPES.get(i.type), tuple(i.shape)) for i in self._session.get_inputs()
        }
        self._graphs = graphs
        steps = FixedSteps(self, self._release) if (graphs or fixed) and can_replay(self) else None
        self._steps = steps
        self.adapters: Mapping[str, OrtRunner] = {}
        self._adapter: Mapping[str, Array] = {}
        self._adapter_values: Mapping[str, Any] = {}
        self._run: Run = self._session.run
        self._divided: DividedRuns | None = None
        count = threads or cores()
        if divide and device == "cpu" and count > 1 and can_divide_rows(self._session):
            opener = partial(_session, self.model, device, 1, fuse=fuse, mapped=mapped)
            self._divided = DividedRuns(opener, self._session.run, count)
            self._run = self._divided.run

    def end_profiling(self) -> Path:
        """Write the profile of an ONNX Runtime session that was opened with `profile`; returns its
        file."""
        return Path(self._session.end_profiling())

    @property
    def fixes_steps(self) -> bool:
        """Return True if ONNX Runtime runs a decoder's steps on buffers of fixed size."""
        return self._steps is not None

    @property
    def inputs(self) -> dict[str, np.dtype[Any] | None]:
        return {name: dtype for name, (dtype, _) in self._inputs.items()}

    def infer(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        self._check(arrays)
        if self.bound is not None:
            with self._computing():
                return self.bound.infer(arrays)
        with self._computing():
            values = self._run(self._outputs, {**arrays, **self._adapter})
        return dict(zip(self._outputs, values, strict=True))

    @property
    def outputs(self) -> list[str]:
        return list(self._outputs)

    @property
    def metadata(self) -> dict[str, str]:
        """Return the metadata_props {key: value} of the ONNX file."""
        return dict(self._session.get_modelmeta().custom_metadata_map)

    def adapted(self, matrices: Mapping[str, Array]) -> Self:
        """Return this ONNX model changed by a LoRA adapter. It shares the session of this runner.

        matrices: {optional graph input: matrix}, as adapters.read returns them

        Raises BundleError for an input that the model does not have.
        """
        accepted = {i.name for i in self._session.get_overridable_initializers()}
        if unknown := sorted(matrices.keys() - accepted):
            raise BundleError(
                f"the adapter changes {unknown[0]}, which the model has no input for",
                where=str(self.model),
                fix="Adapter and model are of different runs: package the model again.",
            )
        if not matrices:
            return self
        view = copy(self)
        view._adapter = dict(matrices)
        view._adapter_values = {name: self.value(array) for name, array in matrices.items()}
        return view

    def decoder(self, contract: Contract, capacity: int = 0) -> OrtDecoder:
        if self._steps is not None and not self._adapter:
            return ReplayingDecoder(self, contract, capacity, self._steps)
        return OrtDecoder(self, contract, capacity)

    def slots(self, contract: Contract, rows: int, capacity: int) -> Slots:
        if self._steps is not None:
            try:
                return DeviceSlots(self, contract, rows, capacity, self._steps)
            except HarnessError:  # such as a graph that the contract does not describe
                raise
            except Exception as e:  # the binding raises a dozen unrelated classes
                size = rows * self.cache_bytes(contract, capacity)
                raise MachineError(
                    f"{rows} slots of {capacity:,} tokens take {size >> 20:,} MiB of KV cache, "
                    f"which the device {self.provider} does not allocate ({_cut_first_line(e)})",
                    where=str(self.model),
                    fix="Give fewer --slots, or a smaller --context.",
                ) from e
        if supports_slots(self):
            return OrtSlots(self, contract, rows, capacity)
        return SeparateDecoders(self, contract, capacity, self.adapters)

    def cache_bytes(self, contract: Contract, tokens: int) -> int:
        return kv_cache.text_bytes(contract.decoder, tokens, kv_cache.read_itemsize(self.inputs))

    def binding(self) -> Any:
        """Make ONNX Runtime's IOBinding, to which inputs and outputs of a run are bound as
        buffers."""
        binding = self._session.io_binding()
        for name, value in self._adapter_values.items():
            binding.bind_ortvalue_input(name, value)
        return binding

    def value(self, array: Array) -> Any:
        """Copy an array to this runner's device, as an OrtValue of ONNX Runtime."""
        return _import().OrtValue.ortvalue_from_numpy(array, self.device, 0)

    def run_bound(self, binding: Any, graph: int = UNCAPTURED) -> None:
        """Run ONNX Runtime once on inputs and outputs bound to buffers (an IOBinding).

        graph: gpu_graph_id to capture at its first run and replay later, in a session with graphs
        """
        with self._computing():
            self._session.run_with_iobinding(binding, self._options(graph))

    def _options(self, graph: int = UNCAPTURED) -> Any:
        options = _import().RunOptions()
        if self._graphs:
            options.add_run_config_entry(GRAPH_ID, str(graph))
        return options

    def _release(self, graph: int) -> None:
        if self._graphs and self._session is not None:
            self._session.release_captured_graph(graph)

    def run_values(self, feeds: Mapping[str, Any], fetches: Mapping[str, Any]) -> None:
        """Run ONNX Runtime once and write the outputs into `fetches`.

        feeds, fetches: {name: array, or OrtValue on this runner's device}

        Unlike a binding, it accepts the graph's optional inputs.
        """
        ort = _import()

        def vector(values: Mapping[str, Any]) -> Any:
            ort_values = ort.capi.onnxruntime_pybind11_state.OrtValueVector()
            for value in values.values():
                array = isinstance(value, np.ndarray)
                kept = ort.OrtValue.ortvalue_from_numpy(value) if array else value
                ort_values.push_back(kept._ortvalue)  # the vector's class has no public form
            return ort_values

        def device(value: Any) -> Any:
            name = "cpu" if isinstance(value, np.ndarray) else self.device
            return ort.OrtDevice.make(name, 0)._get_c_device()

        feeds = {**feeds, **self._adapter_values}
        inputs, outputs = vector(feeds), vector(fetches)
        devices = [device(value) for value in fetches.values()]
        with self._computing():
            self._session.run_with_ortvaluevector(
                self._options(), [*feeds], inputs, [*fetches], outputs, devices
            )

    def close(self) -> None:
        if self.bound is not None:
            self.bound.close()
        if self._steps is not None:
            self._steps.close()
        if self._divided is not None:
            self._divided.close()
        self.bound = self._divided = self._steps = self._session = self._run = None  # type: ignore[assignment]

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Inside, convert ONNX Runtime's errors of a run to BundleError, or to MachineError for
        memory and devices."""
        try:
            yield
        except Exception as e:  # the binding raises a dozen unrelated classes
            first = _cut_first_line(e)
            machine = self.provider != "cpu" or "alloc" in first.lower()
            kind = MachineError if machine else BundleError
            raise kind(
                f"ONNX Runtime cannot run it ({first})",
                where=str(self.model),
                fix="Give smaller batches, or another engine (--runtime)."
                if machine
                else "Model, contract and tokenizer do not match: package the model again.",
            ) from e

    def _check(self, arrays: Mapping[str, Array]) -> None:
        check_names(set(arrays), set(self._inputs), self.model.name)
        axes: dict[str, tuple[int, str]] = {}
        for name, (dtype, shape) in self._inputs.items():
            check_array(name, arrays[name], dtype, shape, axes)


def check_names(inputs: set[str], expected: set[str], model: str) -> None:
    """Check a batch before a runtime runs it: raise InputError if the given input names differ from
    the expected ones.

    model: name of the model, for the error
    """
    for problem, names in (("missing", expected - inputs), ("unknown", inputs - expected)):
        if names:
            raise InputError(
                f"{problem} input {', '.join(sorted(names))}",
                where=model,
                accepted=", ".join(sorted(expected)),
            )


def check_array(
    name: str,
    array: Array,
    dtype: np.dtype[Any] | None,
    shape: tuple[int | str | None, ...],
    axes: dict[str, tuple[int, str]],
) -> None:
    """Check a batch before a runtime runs it: raise InputError if an array has the wrong dtype,
    rank or size for its input.

    shape: expected size per axis; a str names an axis whose size may vary; None accepts any size
    axes: {named axis: (size, input that set it)}, filled by this function; a later input with
        another size is refused with both names
    """
    where = f"input {name}"
    if dtype is not None and array.dtype != dtype:
        raise InputError(f"{array.dtype} was given", where=where, accepted=str(dtype))
    if array.ndim != len(shape):
        raise InputError(f"shape {array.shape} was given", where=where, accepted=f"{list(shape)}")
    for size, axis in zip(array.shape, shape, strict=True):
        if size == 0:
            raise InputError(f"shape {array.shape} has an empty axis", where=where)
        if isinstance(axis, int) and size != axis:
            raise InputError(f"shape {array.shape} was given", where=where, accepted=f"{[*shape]}")
        if isinstance(axis, str):
            seen, first = axes.setdefault(axis, (size, name))
            if seen != size:
                raise InputError(
                    f"axis {axis} is {size} here and {seen} on input {first}", where=where
                )


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def version() -> str | None:
    """Return the installed version of ONNX Runtime, or None."""
    from importlib import metadata

    for distribution in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _session(
    model: Path,
    device: str,
    threads: int,
    optimized: Path | None = None,
    fuse: bool = True,
    mapped: bool = False,
    graphs: bool = False,
    profile: Path | None = None,
) -> Any:
    """Create ONNX Runtime's InferenceSession with the options described at OrtRunner."""
    ort = _import()
    options = ort.SessionOptions()
    levels = ort.GraphOptimizationLevel
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.intra_op_num_threads = threads or cores()
    options.inter_op_num_threads = 1
    options.log_severity_level = ERRORS_ONLY
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
        for key, value in (
            ("session.optimized_model_external_initializers_file_name", f"{optimized.name}.data"),
            ("session.optimized_model_external_initializers_min_size_in_bytes", "1024"),
        ):
            options.add_session_config_entry(key, value)
    entries: tuple[tuple[str, str], ...] = (RECORD_PLACEMENT,)
    if device == "cpu":
        unfused = () if fuse else (FLOAT_ACTIVATIONS,)
        entries = (*unfused, *exact_integers.list_settings(ort))
    if mapped:
        entries = (*entries, NOT_PACKED)
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    for entry in entries:
        options.add_session_config_entry(*entry)
    unfused_level = (
        levels.ORT_ENABLE_EXTENDED if exact_integers.EXACT in entries else levels.ORT_DISABLE_ALL
    )
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if fuse else unfused_level
    providers = start(ort, device, options, graphs=graphs)
    if not model.is_file():
        raise BundleError("the model is missing", where=str(model))
    disabled = SLOW_ON_CPU if device == "cpu" else []
    if mapped and optimized is None:  # folding holds a head that is tied to an embedding twice more
        disabled = [*disabled, exact_integers.FOLDING]
    attempts = [disabled]
    if exact_integers.EXACT in entries:
        attempts = [disabled, [*disabled, exact_integers.FOLDING]]
    try:
        return _open(ort, model, options, providers, attempts)
    except Exception as e:  # the binding raises a dozen unrelated classes
        # On a GPU, libraries or memory of the machine may be the cause.
        kind = BundleError if device == "cpu" else UnopenedError
        raise kind(
            f"ONNX Runtime {ort.__version__} cannot open it ({_cut_first_line(e)})",
            where=str(model),
            fix="The file is damaged, or needs a newer ONNX Runtime."
            if device == "cpu"
            else advise(device, str(e)),
        ) from e


def _open(
    ort: Any, model: Path, options: Any, providers: Any, attempts: Sequence[Sequence[str]]
) -> Any:
    """Open an ONNX Runtime session; return that of the first attempt that succeeds.

    attempts: names of the graph optimizers that each attempt disables
    """
    *earlier, last = attempts
    for disabled in earlier:
        options.log_severity_level = FATAL_ONLY  # the error is the last attempt's
        with suppress(Exception):
            return ort.InferenceSession(
                str(model), options, providers=providers or None, disabled_optimizers=disabled
            )
    options.log_severity_level = ERRORS_ONLY
    return ort.InferenceSession(
        str(model), options, providers=providers or None, disabled_optimizers=last
    )


def _import() -> Any:
    disable_telemetry()
    try:
        import onnxruntime
    except ImportError as e:
        raise MachineError(
            f"ONNX Runtime cannot be imported ({e})", fix="pip install onnxruntime"
        ) from None
    onnxruntime.disable_telemetry_events()  # on Windows, where the variable is not read
    return onnxruntime


def _cut_first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
