"""compress: one walk over the blocks, from the float checkpoint to a compressed state.

out/state.json, tensors.safetensors   the state (optimizer/foundation/state.py)
out/modules.json                      a row per weighted module: scheme, errors, saturation, note
out/corrections.safetensors           {bias: shift added by bias_correction}, with that option
out/calibration.json                  {rows, tokens, digest} of the recipe's data that reached the
                                      first block, where a method reads activations

While it runs, out/progress/<segment>/ holds each finished segment as a state, and the newest also
the stream after it, so that a killed run resumes bit-identically. A segment is one block, or all
uses of shared blocks. Several processes may walk together (processes.py), each with a share of the
stream.

The bytes depend on the processor and the thread count only through float rounding of activations
(not with compress.deterministic), on compress.partial_sums through the rounding of sums, and on the
batch size also through gptq's token_limit, a median per batch. Weights rounded without calibration
depend on none of these.
"""

from __future__ import annotations

import shutil
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from optimizer.compress import graph_estimate, module_rows, predicted, processes
from optimizer.compress import segment as segments
from optimizer.compress.apply.precision.keep_float_auto import exclude_sensitive
from optimizer.compress.apply.precision.mixed_precision import allocate_bits
from optimizer.compress.apply.weights import bias_correction, lm_head
from optimizer.compress.apply.weights.rounding import ALONE
from optimizer.compress.data import calibration
from optimizer.compress.data.calibration import Windows
from optimizer.compress.estimate import estimate, estimate_device_memory
from optimizer.compress.module_rows import ModuleRow
from optimizer.compress.selection import Selection, select
from optimizer.compress.walk import blocks as walk
from optimizer.compress.walk import consumed, precision, products
from optimizer.compress.walk.activation_buffer import Buffer, BufferBudget
from optimizer.compress.walk.blocks import BlockGroup
from optimizer.compress.walk.capture import Batch, capture
from optimizer.compress.walk.deal import Deal
from optimizer.compress.walk.model_source import ModelSource, open_source
from optimizer.foundation import safetensors_stream, state
from optimizer.foundation.atomic import finish
from optimizer.foundation.process import freed_memory, portable_kernels, torch_device
from optimizer.foundation.process.launch import ALONE as ONE
from optimizer.foundation.process.launch import Processes
from optimizer.foundation.process.torch_device import CPU
from optimizer.foundation.progress import bar, say
from optimizer.foundation.references import resolve
from optimizer.foundation.state import CompressedState
from optimizer.model.checkpoint import attention_operands, cache_operands
from optimizer.model.checkpoint.model import list_parameter_shapes
from optimizer.model.graph import record
from optimizer.model.graph.needs import GraphShapes
from optimizer.recipe.compression import methods
from optimizer.recipe.compression import sparsity as sparse
from optimizer.recipe.compression.quantize import Quantize
from optimizer.recipe.schema import Compression
from optimizer.store import Estimate, Shapes, Stage

VERSION = 1
LARGE, LARGEST = 1 << 23, 1 << 30  # bytes below which freed memory is reused: wide layers, others
PROGRESS, ASSEMBLED = "progress", "progress.done"
STREAM, STREAMS = "stream.safetensors", "stream*.safetensors"  # of one process, of all
MOMENTS = "head.safetensors"
WHERE = "compress.device"
FIX = (
    "Lower calibrate.batch_size or calibrate.sequence_length, raise device_memory_gb, end other "
    "processes on the GPU, or set compress.device: cpu."
)


def run(section: Compression, source: Path, out: Path) -> None:
    """Compress the model in load's folder `source`.

    Raises RecipeError, before any computation, when the recipe does not fit the model;
    CheckpointError for weights or activations that are not finite; MachineError where
    compress.deterministic is set and this process runs other kernels.
    """
    if (out / ASSEMBLED).exists():  # killed while removing progress after the end
        shutil.rmtree(out / ASSEMBLED)
        return
    if section.compress.deterministic:
        portable_kernels.check()
    for method in section.quantize.of_kind("pass-through"):
        resolve(method.apply)(source, out)
        return
    effective = section.effective
    if effective != section:
        say("compress: calibrate: not read: no method here reads activations")
    device = _device(effective, source)
    budget = section.compress.device_memory_bytes
    with torch_device.computing(device, budget, WHERE, FIX):
        compress(
            effective, source, lambda: calibration.make_batches(effective, source), out, device
        )


def check(section: Compression, source: Path) -> None:
    """Raise the error of `run` for a recipe that does not fit the model's names and shapes, or
    this machine's GPU."""
    select(open_source(section.task, source), section.quantize, section.sparsity)
    processes.check(section)
    _device(section.effective, source)


def _device(section: Compression, source: Path) -> torch.device:
    """The device of compress; of an ONNX file, whose operators are computed there, the CPU. Raises
    MachineError where it cannot be used, or its memory does not suffice."""
    if record.is_graph(source / "checkpoint"):
        return CPU
    chosen = section.compress
    device = torch_device.resolve(chosen.chosen_device, WHERE)
    if device.type != "cpu":
        shapes = list_parameter_shapes(open_source(section.task, source).model)
        needed = estimate_device_memory(section, shapes)
        torch_device.check_memory(device, needed, chosen.device_memory_bytes, WHERE, FIX)
        say(f"compress: on {torch_device.name_of(device)}, about {needed / 1e9:.1f} GB of it")
    return device


@dataclass(frozen=True)
class _Walk:
    """Inputs of the walk over the blocks.

    source: folder of load or reduce
    progress: folder of finished segments
    calibration_batches: number of leading batches that hold the recipe's calibration data
    """

    source: Path
    section: Compression
    selection: Selection
    batches: Sequence[Batch]
    progress: Path
    calibration_batches: int


def compress(
    section: Compression,
    source: Path,
    batches: Callable[[], Sequence[Batch]],
    out: Path,
    device: torch.device = CPU,
) -> None:
    """Compress the model in `source`, as `run` does, on batches from another source.

    batches: function that makes them, called after the recipe was checked
    """
    opened = replace(open_source(section.task, source), device=device)
    quantize = section.quantize
    selection = select(opened, quantize, section.sparsity)
    progress = out / PROGRESS
    progress.mkdir(exist_ok=True)
    walked = precision.decide(section.compress, opened, progress, "compress")
    section = section.model_copy(update={"compress": walked})
    opened = _transformed(opened, quantize)
    windows = Windows([*batches()], [])
    if quantize.model_tuning:
        where = f"quantize.{quantize.of_kind('model-tuning')[0].name}.held_out"
        windows = calibration.split(windows.train, quantize.model_tuning.held_out, where)
    if quantize.allocate:
        selection = allocate_bits(opened, windows.train, section, selection, progress)
    if quantize.keep_float_auto:
        selection = exclude_sensitive(opened, windows.train, quantize, selection, progress)
    own, tuning_only = _generated_windows(opened, windows.train, section, progress)
    tuning_only += calibration.make_tuning_batches(section, source)
    train = [*windows.train, *own]
    parts = _walk(_Walk(source, section, selection, train, progress, len(windows.train)), opened)
    if quantize.model_tuning:
        windows = Windows(train + tuning_only, windows.held_out)
        parts.insert(0, _tune(opened, windows, section, parts, progress))
    if selection.outside:
        folder = progress / "outside"
        if not folder.exists():
            part, rows = lm_head.compress(opened, quantize, selection, progress / MOMENTS)
            _write_segment(folder, part, rows, None)
        parts.append(folder)
    _assemble(parts, opened, selection, out)
    for name in (products.FILE, consumed.FILE):
        if (progress / name).exists():
            shutil.copyfile(progress / name, out / name)
    progress.rename(out / ASSEMBLED)
    shutil.rmtree(out / ASSEMBLED)


def _transformed(source: ModelSource, quantize: Quantize) -> ModelSource:
    """The source as the walk reads it: with operands of attention and of caches, and rotated."""
    if quantize.integer_attention:
        attention = source.family.attention_products
        attention_operands.install(source.model, [f"{b}.{attention}" for b in source.blocks])
    if quantize.kv_cache == "float8":
        names = cache_operands.list_attentions(source.model, source.blocks)
        cache_operands.install(source.model, names)
    for method in quantize.of_kind("model-transform"):
        source = resolve(method.apply)(source, quantize)
    return source


def _generated_windows(
    source: ModelSource, prompts: Sequence[Batch], section: Compression, progress: Path
) -> tuple[list[Batch], list[Batch]]:
    """Generated windows as (batches for calibration, batches only for tuning the whole model)."""
    calibrate, tuning = section.calibrate, section.quantize.model_tuning
    if not prompts or calibrate is None:
        return [], []
    count = calibrate.generated + (tuning.generated if tuning else 0)
    if not count:
        return [], []
    windows = calibration.generate_windows(
        source, prompts, count, calibrate.seed, progress, step="compress"
    )
    parts = windows[: calibrate.generated], windows[calibrate.generated :]
    one, other = (calibration.batch_windows(part, calibrate.batch_size) for part in parts)
    return one, other


def _walk(job: _Walk, source: ModelSource) -> list[Path]:
    """Compress every segment that is not under `progress` yet; returns all their folders."""
    sums = Deal.of(len(job.batches), job.section.compress.partial_sums).sizes
    count = min(processes.count_of(job.section), len(sums))
    if why := processes.explain_alone(job.section):
        say(f"compress: it runs in one process, because {why}")
    if count == 1:
        _walk_blocks(job, source, ONE)
    else:
        processes.start(_share, count, job.progress, job, source.device.type)
    return processes.list_finished(job.progress)


def _share(these: Processes, job: _Walk, device: str) -> None:
    """Walk as one of several processes, with its share of the batches. device: cpu or cuda"""
    chosen, own = job.section.compress, torch.device(device)
    with ExitStack() as stack:
        if chosen.deterministic:
            stack.enter_context(portable_kernels.use_portable_kernels())
            portable_kernels.check()
        if device == "cuda":
            own = torch.device(device, these.rank % torch.cuda.device_count())
            stack.enter_context(torch.cuda.device(own))
        stack.enter_context(torch_device.computing(own, chosen.device_memory_bytes, WHERE, FIX))
        opened = replace(open_source(job.section.task, job.source), device=own)
        _walk_blocks(job, _transformed(opened, job.section.quantize), these)


def _walk_blocks(job: _Walk, source: ModelSource, these: Processes) -> None:
    """Capture the stream at the first block, and compress every segment not yet in progress/."""
    selection, progress, chosen = job.selection, job.progress, job.section.compress
    folder = _own_folder(progress, these)
    budget = BufferBudget(chosen.memory_bytes // these.count)
    hidden = Buffer(budget, folder / "hidden")
    reference = Buffer(budget, folder / "reference") if job.section.float_reference else None
    deal = Deal.of(len(job.batches), chosen.partial_sums, these)
    own = job.batches[deal.own.start : deal.own.stop]
    stream = capture(source, selection.blocks, own, hidden, reference)
    stream.float, stream.deal = chosen.decided, deal
    counted = [one for those in these.gather(stream.consumed) for one in those]
    if job.calibration_batches and these.first:
        consumed.write(counted[: job.calibration_batches], progress)
    groups = (
        walk.split_segments(stream.uses[0])
        if job.batches
        else [range(i, i + 1) for i in range(len(selection.blocks))]
    )
    folders = [progress / f"{i:04d}" for i in range(len(groups))]
    first = sum(folder.exists() for folder in folders)
    if first:
        say(f"compress: resuming after {first} of {len(groups)} blocks")
        if job.batches and first < len(groups):
            _load_stream(folders[first - 1], stream)
    wide = _has_wide_layers(source, selection)
    with freed_memory.keep_freed_memory(LARGE if wide else LARGEST):
        for i in bar(range(first, len(groups)), "compress"):
            last = i + 1 == len(groups)
            _segment(job, source, stream, groups[i], folders[i], last=last)
            if i and these.first:
                for file in folders[i - 1].glob(STREAMS):
                    file.unlink()
            if wide or i % 4 == 3:  # new pages cost 5 % of a narrow block
                freed_memory.give_back()


def _own_folder(progress: Path, these: Processes) -> Path:
    """Return the folder for the activations of one process of the walk."""
    return progress if these.first else progress / f"process-{these.rank}"


def _segment(
    job: _Walk,
    source: ModelSource,
    stream: walk.CalibrationStream,
    uses: range,
    folder: Path,
    *,
    last: bool,
) -> None:
    """Compress the blocks of some uses in the walk; write the result into the folder."""
    quantize, selection, these = job.section.quantize, job.selection, stream.deal.processes
    blocks = _blocks(stream, uses, selection)
    schemes, sparsity = selection.inside(source, blocks)
    corrections: Mapping[str, Tensor] = {}
    if job.batches:
        for block in blocks:
            source.fill(block)
        group = BlockGroup(
            source.model,
            source.family,
            stream,
            uses,
            blocks,
            schemes,
            sparsity,
            (*source.summands(schemes, blocks), *source.operands(blocks))
            if quantize.static_activations
            else (),
            source.caches(blocks),
        )
        scratch = _own_folder(job.progress, these) / "scratch"
        part, rows, corrections = segments.compress(group, quantize, scratch)
        processes.check_same(part, blocks[0], these)
        for block in blocks:
            source.empty(block)
    else:
        part, rows = segments.compress_uncalibrated(
            schemes, sparsity, source.tensors, quantize, source.device
        )
    if last and job.batches and lm_head.needs_hessian(quantize, selection, source.family.head):
        lm_head.write_moments(source, stream, job.progress / MOMENTS)
    rows = [row.explained(selection.reasons.get(row.module, "")) for row in rows]
    left = None if last or not job.batches else stream
    _write_segment(folder, part, rows, left, corrections, these)


def _tune(
    source: ModelSource,
    windows: Windows,
    section: Compression,
    done: Sequence[Path],
    progress: Path,
) -> Path:
    """Tune the compressed model from the states in `done`; returns an overriding state's folder."""
    folder = progress / "tuned"
    if folder.exists():
        return folder
    parts = [state.read(part) for part in done]
    start = CompressedState(
        dict(_chain([p.weights for p in parts])), _chain([p.replaced for p in parts])
    )
    method = section.quantize.of_kind("model-tuning")[0]
    tuned, remark = resolve(method.apply)(source, start, windows, section)
    rows = [row.explained(remark) for part in done for row in module_rows.read(part)]
    _write_segment(folder, CompressedState(tuned.weights, tuned.norm_weights), rows, None)
    return folder


def _has_wide_layers(source: ModelSource, selection: Selection) -> bool:
    """Return True where a selected weight has more than ALONE values: its temporaries dominate
    memory."""
    weights = (
        source.model.get_parameter(f"{name}.weight")
        for name in {**selection.quantized, **selection.pruned}
    )
    return any(weight.numel() > ALONE for weight in weights)


def _blocks(stream: walk.CalibrationStream, group: range, selection: Selection) -> tuple[str, ...]:
    if not stream.uses:
        return selection.blocks[group.start : group.stop]
    return tuple(dict.fromkeys(stream.uses[0][use].block for use in group))


def _write_segment(
    folder: Path,
    part: CompressedState,
    rows: Sequence[ModuleRow],
    stream: walk.CalibrationStream | None,
    corrections: Mapping[str, Tensor] = MappingProxyType({}),
    these: Processes = ONE,
) -> None:
    """Write a segment that the walk compressed atomically, with the stream that the next one starts
    from: each process its share, the first the rest."""
    partial = folder.with_suffix(".partial")
    if these.first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        state.write(part, partial)
        module_rows.write(rows, partial)
        bias_correction.write(corrections, partial)
    these.wait()
    if stream is not None:
        file = partial / (STREAM if these.first else STREAMS.replace("*", f"-{these.rank}"))
        safetensors_stream.write(_stream_entries(stream), file)
    these.wait()
    if these.first:
        finish(partial, folder)


def _stream_entries(stream: walk.CalibrationStream) -> Iterator[tuple[str, Tensor]]:
    """Yield {number among all batches, ".reference" for the float model's: hidden states}."""
    for suffix, states in (("", stream.hidden), (".reference", stream.float_reference or ())):
        for i, hidden in zip(stream.deal.own, states, strict=False):
            yield f"{i:06d}{suffix}", hidden


def _load_stream(folder: Path, stream: walk.CalibrationStream) -> None:
    """Read this process's share of the walk's stream, whichever processes wrote it."""
    from safetensors import safe_open

    files = [safe_open(file, "pt") for file in folder.glob(STREAMS)]
    places = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    for suffix, states in (("", stream.hidden), (".reference", stream.float_reference or [])):
        for i in range(len(states)):
            states[i] = (
                places[f"{stream.deal.own[i]:06d}{suffix}"]
                .get_tensor(f"{stream.deal.own[i]:06d}{suffix}")
                .clone()
            )


def _assemble(done: Sequence[Path], source: ModelSource, selection: Selection, out: Path) -> None:
    """Merge the walk's states, tensor by tensor, and write the report in the model's order."""
    parts = [state.read(folder) for folder in done]
    merged = CompressedState(
        weights=_chain([p.weights for p in parts]),
        replaced=_chain([*(p.replaced for p in parts), source.replaced]),
        ranges=_chain([p.ranges for p in parts]),
        factors=_chain([p.factors for p in parts]),
        activations=parts[-1].activations,
        sparsity=_chain([p.sparsity for p in parts]),
        notes=(*selection.notes, *(n for p in parts for n in p.notes)),
    )
    state.write(merged, out)
    bias_correction.write(_chain([bias_correction.read(folder) for folder in done]), out)
    # as in the chains, the first takes precedence
    rows = {row.module: row for folder in reversed(done) for row in module_rows.read(folder)}
    rows |= {n.module: ModuleRow(n.module, "float", note=n.why) for n in selection.notes}
    for note in (n for part in parts for n in part.notes):
        rows[note.module] = rows[note.module].explained(note.why)
    names = [name for name, _ in source.model.named_modules() if name in rows]
    module_rows.write([rows[name] for name in names], out)


def _chain(parts: Sequence[Mapping[str, Any]]) -> ChainMap[str, Any]:
    """Chain the states of segments into one mapping, without reading tensors."""
    return ChainMap(*parts)  # type: ignore[arg-type]  # read only: a Mapping is enough


def files(section: Compression) -> Mapping[str, str]:
    """Return {name: digest} of calibration rows, and of the code of the methods in use."""
    from optimizer.data.datasets import digest_rows

    calibrate = section.effective.calibrate
    rows = {"calibrate": digest_rows(calibrate.data)} if calibrate else {}
    return (
        rows | methods.digest_code(section.quantize.in_use) | sparse.digest_code(section.sparsity)
    )


def estimate_of(section: Compression, shapes: Shapes) -> Estimate:
    """Predict memory, disk and time of stage compress for `optimize plan`."""
    if isinstance(shapes, GraphShapes):
        return graph_estimate.estimate(section, shapes)
    return estimate(section, shapes)


def remark(section: Compression) -> str:
    """Remark of `optimize plan` on keep_float_auto and several processes; "" without them."""
    remarks = []
    if section.quantize.keep_float_auto is not None:
        remarks.append(
            f"keep_float_auto measures which modules stay float; {module_rows.FILE} says why"
        )
    if why := processes.explain_alone(section):
        remarks.append(f"in one process: {why}")
    elif section.compress.processes > 1:
        remarks.append(f"in {section.compress.processes} processes")
    return "; ".join(remarks)


STAGE = Stage(
    name="compress",
    version=VERSION,
    run=run,
    packages=("torch", "transformers", "tokenizers"),
    files=files,
    estimate=estimate_of,
    shapes=predicted.predict_shapes,
    remark=remark,
    resumable=True,
)
