"""compress: one walk over the blocks, from the float checkpoint to a compressed state.

out/state.json, tensors.safetensors   the state (optimizer/state.py)
out/modules.json                      a line per weighted module: scheme, errors, saturation, why
out/corrections.safetensors           {bias: what bias_correction added}, where it was asked for

While it runs, out/progress/<segment>/ holds each finished segment as a state of its own, and the
newest also the stream behind it, so that a killed run goes on where it was, to the same bytes.
A segment is one block, or all uses of shared ones. The bytes depend on the thread count only
through float rounding of the activations, on the batch size also through gptq's token_limit,
which takes the median of each batch; weights rounded without calibration depend on neither.
"""

from __future__ import annotations

import json
import shutil
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from optimizer import safetensors_stream, state
from optimizer.compress import segment as segments
from optimizer.compress.apply import bias_correction
from optimizer.compress.apply import lm_head as outside
from optimizer.compress.apply.mixed_precision import allocated
from optimizer.compress.apply.rotation import RotatedTensors, rotated
from optimizer.compress.apply.rounding import ALONE
from optimizer.compress.apply.scale_tuning import tune
from optimizer.compress.data import calibration
from optimizer.compress.estimate import estimate
from optimizer.compress.segment import Row
from optimizer.compress.selection import Selection, select
from optimizer.compress.walk import blocks as walk
from optimizer.compress.walk import freed_memory
from optimizer.compress.walk.activation_buffer import Budget, Buffer
from optimizer.compress.walk.capture import Batch, Entry, capture
from optimizer.errors import RecipeError
from optimizer.load.architecture import family
from optimizer.load.checkpoint import Tensors, open_checkpoint
from optimizer.load.families import Family
from optimizer.load.model import materialize, release, skeleton
from optimizer.progress import bar, say
from optimizer.recipe.schema import Compression, Task
from optimizer.state import CompressedState
from optimizer.store import Stage, finish

VERSION = 1
LARGE, LARGEST = 1 << 23, 1 << 30  # bytes: what is smaller is kept, in wide layers and elsewhere
PROGRESS, ASSEMBLED, STREAM = "progress", "progress.done", "stream.safetensors"
MOMENTS = "head.safetensors"


def run(section: Compression, source: Path, out: Path) -> None:
    """source: what load wrote. Raises RecipeError before anything is computed when the recipe
    does not fit the model; CheckpointError for weights or activations that are not finite."""
    if (out / ASSEMBLED).exists():  # killed while tidying up after the end
        shutil.rmtree(out / ASSEMBLED)
        return
    if section.quantize.kept:
        keep(source, out)
        return
    compress(section, source, lambda: calibration.batches(section, source), out)


def check(section: Compression, source: Path) -> None:
    """Raise what `run` would of a recipe that does not fit the model, by its names and shapes."""
    checkpoint = open_checkpoint(source)
    facts = family(checkpoint.config)
    model = skeleton(checkpoint, section.task)
    select(model, facts, facts.prefix(section.task), section.quantize)


def compress(
    section: Compression, source: Path, batches: Callable[[], Sequence[Batch]], out: Path
) -> None:
    """As `run`, on batches of one's own, made once the recipe is known to fit the model."""
    checkpoint = open_checkpoint(source)
    model: Any = skeleton(checkpoint, section.task)
    facts = family(checkpoint.config)
    if facts.kind == "decoder":
        model.set_attn_implementation("sdpa")  # eager makes a score for every pair of tokens
    prefix = facts.prefix(section.task)
    selection = select(model, facts, prefix, section.quantize)
    progress = out / PROGRESS
    progress.mkdir(exist_ok=True)
    tensors: Tensors | RotatedTensors = checkpoint.tensors
    if "rotation" in section.quantize.transforms:
        asked = section.quantize.rotation
        tensors = rotated(checkpoint.tensors, model, facts, prefix, selection.blocks, asked)
    given = [*batches()]
    judges: list[Batch] = []
    if "scale_tuning" in section.quantize.rounders:
        given, judges = calibration.held_out(given, section.quantize.scale_tuning.held_out)
    if section.quantize.allocate:
        entry = _entry(facts, section.task)
        selection = allocated(
            model, tensors, facts, prefix, entry, given, section, selection, progress
        )
    more: list[Batch] = []
    if given and section.calibrate:
        own, more = _own_text(model, tensors, given, section, progress)
        given += own
    done = _walk(model, tensors, facts, section, selection, given, progress)
    if "scale_tuning" in section.quantize.rounders:
        tuned = _tuned(model, tensors, facts, prefix, given + more, judges, section, done, progress)
        done.insert(0, tuned)
    if selection.outside:
        folder = progress / "outside"
        if not folder.exists():
            embedding = f"{prefix}{facts.embeddings}.weight"
            made, rows = outside.compress(
                tensors, facts, embedding, section.quantize, selection, progress / MOMENTS
            )
            _keep(folder, made, rows, None)
        done.append(folder)
    _assemble(done, tensors, model, selection, out)
    progress.rename(out / ASSEMBLED)
    shutil.rmtree(out / ASSEMBLED)


def _own_text(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    given: Sequence[Batch],
    section: Compression,
    progress: Path,
) -> tuple[list[Batch], list[Batch]]:
    """Windows that the model writes itself: for everything, and for scale_tuning only."""
    calibrate, quantize = section.calibrate, section.quantize
    assert calibrate is not None
    only = quantize.scale_tuning.generated if "scale_tuning" in quantize.rounders else 0
    if not calibrate.generated + only:
        return [], []
    windows = calibration.generated(
        model, tensors, given, calibrate.generated + only, calibrate.seed, progress
    )
    parts = windows[: calibrate.generated], windows[calibrate.generated :]
    one, other = (calibration.batched(part, calibrate.batch_size) for part in parts)
    return one, other


def keep(source: Path, out: Path) -> None:
    """The codes the checkpoint came with, as the load stage read them."""
    given = source / "quantized"
    if not given.is_dir():
        raise RecipeError(
            "the checkpoint is not quantized, so there are no codes to take",
            where="quantize.method",
            accepted="pass_through, for a folder in GPTQ, AWQ or compressed-tensors format",
            fix="Use method: rtn, gptq or another that chooses codes.",
        )
    state.write(state.read(given), out)
    kept = state.read(out)
    rows = [
        Row(name.removesuffix(".weight"), segments.label(q.scheme, kept.activations), note="kept")
        for name, q in kept.weights.items()
    ]
    _write_rows(rows, out)


def _walk(
    model: nn.Module,
    tensors: Tensors | RotatedTensors,
    facts: Family,
    section: Compression,
    selection: Selection,
    batches: Sequence[Batch],
    progress: Path,
) -> list[Path]:
    """Compress every segment that is not yet under `progress`; returns all their folders."""
    budget = Budget(int(section.compress.memory_gb * 1e9))
    hidden = Buffer(budget, progress / "hidden")
    exact = Buffer(budget, progress / "exact") if segments.compares(section.quantize) else None
    entry = _entry(facts, section.task)
    stream = capture(model, selection.blocks, tensors, batches, entry, hidden, exact)
    stream.float = section.compress.precision
    groups = (
        walk.segments(stream.uses[0])
        if batches
        else [range(i, i + 1) for i in range(len(selection.blocks))]
    )
    folders = [progress / f"{i:04d}" for i in range(len(groups))]
    first = sum(folder.exists() for folder in folders)
    if first:
        say(f"compress: {first} of {len(groups)} blocks were done before; going on after them")
        if batches and first < len(groups):
            _load_stream(folders[first - 1], stream)
    wide = _wide(model, selection)
    freed_memory.keep(LARGE if wide else LARGEST)
    for i in bar(range(first, len(groups)), "compress"):
        blocks = _blocks(stream, groups[i], selection)
        schemes = {m: s for m, s in selection.quantized.items() if _inside(m, blocks)}
        for block in blocks if batches else ():
            materialize(model, block, tensors)
        made, rows, corrections = segments.compress(
            model,
            schemes,
            section.quantize,
            facts,
            stream if batches else None,
            groups[i],
            blocks,
            tensors,
            progress / "scratch",
        )
        for block in blocks:
            release(model, block)
        last = i + 1 == len(groups)
        if last and batches and outside.by_moments(section.quantize, selection, facts):
            prefix = facts.prefix(section.task)
            outside.keep_moments(model, tensors, facts, prefix, stream, progress / MOMENTS)
        rows = [segments.explained(row, selection.said.get(row.module, "")) for row in rows]
        _keep(folders[i], made, rows, None if last or not batches else stream, corrections)
        if i:
            (folders[i - 1] / STREAM).unlink(missing_ok=True)
        del made
        if wide or i % 4 == 3:  # to get the pages again costs 5 % of a narrow block (measured)
            freed_memory.give_back()
    freed_memory.keep(LARGEST)
    return folders


def _entry(facts: Family, task: Task) -> Entry:
    """A decoder's base model is run, and its embedding read row by row."""
    if facts.kind != "decoder":
        return Entry()
    prefix = facts.prefix(task)
    return Entry(prefix.removesuffix("."), f"{prefix}{facts.embeddings}", facts.head)


def _tuned(
    model: nn.Module,
    tensors: Tensors | RotatedTensors,
    facts: Family,
    prefix: str,
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    section: Compression,
    done: Sequence[Path],
    progress: Path,
) -> Path:
    """The blocks' codes with scales and gains tuned end to end; stands before them."""
    folder = progress / "tuned"
    if folder.exists():
        return folder
    parts = [state.read(part) for part in done]
    start = dict(_chained([p.weights for p in parts]))
    replaced = _chained([p.replaced for p in parts])
    say("compress: tuning scales and gains end to end; the whole model is in memory for it")
    dtype = torch.bfloat16 if section.compress.precision == "bf16" else torch.float32
    asked = section.quantize.scale_tuning
    made = tune(model, tensors, replaced, start, facts, prefix, batches, held_out, asked, dtype)
    say(f"compress: KL on held-out calibration text {made.before:.4f} -> {made.after:.4f}")
    rows = []
    for part in done:
        for row in json.loads((part / "modules.json").read_text(encoding="utf-8")):
            said = "; ".join(filter(None, (row["note"], "scales tuned end to end")))
            rows.append(Row(**{**row, "note": said}))
    _keep(folder, CompressedState(made.weights, made.gains), rows, None)
    return folder


def _wide(model: nn.Module, selection: Selection) -> bool:
    """Whether what a layer makes is large beside everything else in memory."""
    weights = (model.get_parameter(f"{name}.weight") for name in selection.quantized)
    return any(weight.numel() > ALONE for weight in weights)


def _blocks(stream: walk.Stream, group: range, selection: Selection) -> tuple[str, ...]:
    if not stream.uses:
        return selection.blocks[group.start : group.stop]
    return tuple(dict.fromkeys(stream.uses[0][use].block for use in group))


def _inside(module: str, blocks: Sequence[str]) -> bool:
    return any(module.startswith(f"{block}.") for block in blocks)


def _keep(
    folder: Path,
    made: CompressedState,
    rows: Sequence[Row],
    stream: walk.Stream | None,
    corrections: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Put a finished segment on disk, atomically; the stream is what the next one starts from."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    state.write(made, partial)
    _write_rows(rows, partial)
    bias_correction.write(corrections, partial)
    if stream is not None:
        safetensors_stream.write(_stream_entries(stream), partial / STREAM)
    finish(partial, folder)


def _stream_entries(stream: walk.Stream) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"{i:06d}", hidden) for i, hidden in enumerate(stream.hidden))
    yield from ((f"{i:06d}.exact", hidden) for i, hidden in enumerate(stream.exact or ()))


def _load_stream(folder: Path, stream: walk.Stream) -> None:
    from safetensors import safe_open

    with safe_open(folder / STREAM, "pt") as f:
        for i in range(len(stream.hidden)):
            stream.hidden[i] = f.get_tensor(f"{i:06d}").clone()
        for i in range(len(stream.exact or ())):
            assert stream.exact is not None
            stream.exact[i] = f.get_tensor(f"{i:06d}.exact").clone()


def _write_rows(rows: Sequence[Row], folder: Path) -> None:
    text = json.dumps([row.as_dict() for row in rows], indent=1, ensure_ascii=False)
    (folder / "modules.json").write_text(text, encoding="utf-8")


def _assemble(
    done: Sequence[Path],
    tensors: Tensors | RotatedTensors,
    model: nn.Module,
    selection: Selection,
    out: Path,
) -> None:
    """The segments' states as one, tensor by tensor, and the report in the model's own order."""
    parts = [state.read(folder) for folder in done]
    turned = [tensors.replaced] if isinstance(tensors, RotatedTensors) else []
    whole = CompressedState(
        weights=_chained([p.weights for p in parts]),
        replaced=_chained([*(p.replaced for p in parts), *turned]),
        ranges=_chained([p.ranges for p in parts]),
        factors=_chained([p.factors for p in parts]),
        activations=parts[-1].activations,
        notes=(*selection.notes, *(n for p in parts for n in p.notes)),
    )
    state.write(whole, out)
    bias_correction.write(_chained([bias_correction.read(folder) for folder in done]), out)
    rows = {
        row["module"]: Row(**row)
        for folder in reversed(done)  # as in the chains, the first has the last word
        for row in json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    }
    rows |= {n.module: Row(n.module, "float", note=n.why) for n in selection.notes}
    for part in parts:
        for n in part.notes:
            row = rows[n.module].as_dict()
            rows[n.module] = Row(**{**row, "note": "; ".join(filter(None, (row["note"], n.why)))})
    _write_rows([rows[name] for name, _ in model.named_modules() if name in rows], out)


def _chained(parts: Sequence[Mapping[str, Any]]) -> ChainMap[str, Any]:
    """The parts as one mapping, without reading or copying them."""
    return ChainMap(*parts)  # type: ignore[arg-type]  # read only: a Mapping is enough


def files(section: Compression) -> Mapping[str, str]:
    """The digest of the calibration rows."""
    from optimizer.load.datasets import digest

    return {"calibrate": digest(section.calibrate.data)} if section.calibrate else {}


STAGE = Stage(
    name="compress",
    version=VERSION,
    run=run,
    packages=("torch", "transformers", "tokenizers"),
    files=files,
    estimate=estimate,
    resumable=True,
)
