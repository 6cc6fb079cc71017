"""Choose bits per module by sensitivity (methods/precision/sensitivity.py and mixed_precision.py).

First the whole float model is in memory for one backward pass per window; the gradients of all
outputs are stored under the budget for activations. Then the blocks run one by one for their
inputs. A file stores the choice for a run that is resumed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from torch import Tensor

from optimizer.compress.data.calibration import split_batches
from optimizer.compress.methods.precision.language_model import LanguageModel
from optimizer.compress.methods.precision.mixed_precision import (
    Option,
    choose,
    compute_stored_sizes,
    sum_choices,
)
from optimizer.compress.methods.precision.sensitivity import (
    Curvature,
    predict_cost,
    visit_output_gradients,
)
from optimizer.compress.selection import Selection
from optimizer.compress.walk import blocks as walk
from optimizer.compress.walk.activation_buffer import Buffer, BufferBudget
from optimizer.compress.walk.blocks import BlockGroup
from optimizer.compress.walk.capture import Batch, capture
from optimizer.compress.walk.model_source import ModelSource
from optimizer.compress.walk.products import TYPES
from optimizer.foundation.errors import CheckpointError, RecipeError
from optimizer.foundation.progress import bar, say
from optimizer.foundation.qtensor import Scheme
from optimizer.recipe.compression.quantize import Allocate
from optimizer.recipe.schema import Compression

WHERE = "quantize.allocate"
Costs = Mapping[str, Mapping[Scheme, float]]


@dataclass(frozen=True)
class Sensitivity:
    """Predicted cost of quantizing each module in each scheme, from which bits are allocated.

    costs: {module: {scheme: predicted nats per token}}
    leader: {module: first module that reads the same tensor}
    shapes: {module: (out, in)}
    """

    costs: Costs
    leader: Mapping[str, str]
    shapes: Mapping[str, tuple[int, int]]


def allocate_bits(
    source: ModelSource,
    batches: Sequence[Batch],
    section: Compression,
    selection: Selection,
    folder: Path,
) -> Selection:
    """The selection with a scheme chosen for each module of its `choices`, and the reasons.

    folder: folder of the file with the choice

    Raises RecipeError when average_bits is less than the smallest choices need, CheckpointError
    when a gradient is not finite.
    """
    options = section.quantize.allocate
    assert options is not None
    file = folder / "allocation.json"
    if not file.exists():
        say("compress: measuring sensitivities; the whole model is in memory for it")
        measured = measure(source, batches, section, selection, folder)
        chosen = _choose_schemes(measured, options, selection)
        kept = {m: {"scheme": asdict(s), "why": why} for m, (s, why) in chosen.items()}
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        partial.rename(file)
    read = json.loads(file.read_text(encoding="utf-8"))
    schemes = {m: Scheme(**row["scheme"]) for m, row in read.items()}
    return replace(
        selection,
        quantized={**selection.quantized, **schemes},
        reasons={m: row["why"] for m, row in read.items()},
    )


def measure(
    source: ModelSource,
    batches: Sequence[Batch],
    section: Compression,
    selection: Selection,
    folder: Path,
) -> Sensitivity:
    """Predict the cost of each of the selection's `choices` on the windows of quantize.allocate.

    folder: scratch folder for gradients beyond the memory budget

    Raises CheckpointError when a gradient is not finite.
    """
    options = section.quantize.allocate
    assert options is not None
    windows, scratch = split_batches(batches)[: options.windows], folder / "slopes"
    try:
        slopes = _slopes(source, windows, section, selection, scratch)
        return _measure_costs(source, windows, section, selection, slopes, scratch)
    except ValueError as e:
        fix = "Leave allocate out of the recipe; of a search, set over.precision: recipe."
        raise CheckpointError(str(e), where=WHERE, fix=fix) from e
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _slopes(
    source: ModelSource,
    windows: Sequence[Batch],
    section: Compression,
    selection: Selection,
    scratch: Path,
) -> dict[str, Buffer]:
    """Backpropagate the log-probability of each window through the float model, to allocate bits by
    sensitivity. Returns {module: gradients at its output, (tokens, out) for each window}."""
    options = section.quantize.allocate
    assert options is not None
    budget = BufferBudget(section.compress.memory_bytes)
    kept = {n: Buffer(budget, scratch / str(i)) for i, n in enumerate(selection.choices)}
    with source.filled():
        visit_output_gradients(
            LanguageModel(source.features, source.head, source.linears(selection.choices)),
            bar(windows, "sensitivity"),
            lambda name, slope: kept[name].append(slope),
            seed=options.seed,
            dtype=TYPES[section.compress.decided],
        )
    return kept


def _measure_costs(
    source: ModelSource,
    windows: Sequence[Batch],
    section: Compression,
    selection: Selection,
    slopes: Mapping[str, Sequence[Tensor]],
    scratch: Path,
) -> Sensitivity:
    """Walk the float blocks for the inputs, and predict the cost of each choice."""
    hidden = Buffer(BufferBudget(section.compress.memory_bytes), scratch / "hidden")
    stream, model = capture(source, selection.blocks, windows, hidden), source.model
    stream.float = section.compress.decided
    leader: dict[str, str] = {}
    costs: dict[str, dict[Scheme, float]] = {}
    shapes: dict[str, tuple[int, int]] = {}
    for segment in walk.split_segments(stream.uses[0]):
        blocks = tuple(dict.fromkeys(stream.uses[0][use].block for use in segment))
        schemes = {m: selection.quantized[m] for m in selection.choices if source.inside(m, blocks)}
        group = BlockGroup(model, source.family, stream, segment, blocks, schemes)
        for block in blocks:
            source.fill(block)
        shared = walk.find_sharing(group, schemes)
        leader |= shared
        curved = _curvatures(group, shared, slopes)
        for name, curvature in curved.items():
            weight = cast(Tensor, model.get_submodule(name).weight).detach()
            shapes[name] = (weight.shape[0], weight.shape[1])
            costs[name] = {
                scheme: predict_cost(weight, scheme, curvature.outputs, curvature.inputs)
                for scheme in selection.choices[name]
            }
        for block in blocks:
            source.empty(block)
    return Sensitivity(costs, leader, shapes)


def _curvatures(
    group: BlockGroup, leader: Mapping[str, str], slopes: Mapping[str, Sequence[Tensor]]
) -> dict[str, Curvature]:
    """Return {module: curvature, by which a change of its weight costs nats} of one group of
    blocks; the calibration stream moves past the group."""
    curved: dict[str, Curvature] = {}
    window = dict.fromkeys(leader, 0)

    def hook(first: str, rows: Tensor, _real: Tensor) -> None:
        for name in (n for n in leader if leader[n] == first):
            slope = slopes[name][window[first]].to(rows.device)
            shape = slope.shape[1], rows.shape[1]
            curvature = curved.setdefault(name, Curvature(*shape, rows.device))
            curvature.add(slope, rows)
        window[first] += 1

    walk.advance(group, hook, dict.fromkeys(leader.values()))
    return curved


def _choose_schemes(
    measured: Sensitivity, options: Allocate, selection: Selection
) -> dict[str, tuple[Scheme, str]]:
    """Return {module: (its scheme, reason)}, no larger in any file than uniform weights or
    average_bits."""
    units: dict[str, list[str]] = {}
    for module in measured.costs:
        unit = measured.leader[module] if options.share_choice else module
        units.setdefault(unit, []).append(module)
    schemes = {u: _common(selection.choices[m] for m in members) for u, members in units.items()}
    menus = {
        unit: [_option(measured, members, scheme) for scheme in schemes[unit]]
        for unit, members in units.items()
    }
    uniform = {u: schemes[u].index(selection.quantized[m[0]]) for u, m in units.items()}
    cost, limits = sum_choices(menus, uniform)
    if options.average_bits is not None:
        weights = sum(out * inputs for out, inputs in measured.shapes.values())
        room = int(options.average_bits * weights / 8)
        limits = (limits[0] + room - limits[1], room)
    try:
        chosen = choose(menus, limits)
    except ValueError as e:
        raise RecipeError(
            f"{options.average_bits} is less than the smallest choices need ({e})",
            where=f"{WHERE}.average_bits",
            fix="Give more bits, or add a choice with larger groups.",
        ) from e
    if options.average_bits is None and sum_choices(menus, chosen)[0] > cost:
        chosen = uniform
    now, sizes = sum_choices(menus, chosen)
    share = max(size / limit for size, limit in zip(sizes, limits, strict=True))
    say(
        f"compress: {cost:.4f} nats predicted for uniform weights -> {now:.4f} by sensitivity, "
        f"in {share:.4f} of the size allowed"
    )
    result = {}
    for unit, members in units.items():
        scheme, before = schemes[unit][chosen[unit]], schemes[unit][uniform[unit]]
        for module in members:
            nats = measured.costs[module]
            why = f"by sensitivity: {nats[scheme]:.3g} nats predicted"
            if scheme != before:
                why += f", {nats[before]:.3g} as quantize.weights says"
            result[module] = (scheme, why)
    return {module: result[module] for module in measured.costs}


def _common(menus: Iterable[Sequence[Scheme]]) -> list[Scheme]:
    """Return the schemes that every module's menu has when bits are allocated, in the order of the
    first menu."""
    first, *others = menus
    return [s for s in first if all(s in menu for menu in others)]


def _option(measured: Sensitivity, members: Sequence[str], scheme: Scheme) -> Option:
    sizes = [compute_stored_sizes(scheme, *measured.shapes[m]) for m in members]
    cost = sum(measured.costs[m][scheme] for m in members)
    return Option(cost, tuple(map(sum, zip(*sizes, strict=True))))
