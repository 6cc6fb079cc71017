"""Apply quantize.keep_float_auto (methods/precision/keep_float_auto.py), with the whole float model
in memory.

Modules are measured with the recipe's formats, but rounded to nearest, with ranges of the float
model's inputs, and unsmoothed. A file stores the choice for a run that is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optimizer.compress.apply.activations.activation_ranges import make_range_chooser
from optimizer.compress.apply.activations.folding import explain_bad_input
from optimizer.compress.apply.weights.rounding import QuantizedInputs
from optimizer.compress.data.calibration import split_batches
from optimizer.compress.methods.activations.activation_ranges import MagnitudeHistogram
from optimizer.compress.methods.precision.keep_float_auto import (
    FloatModules,
    RelativeError,
    choose_float_modules,
)
from optimizer.compress.methods.weights.rtn import rtn
from optimizer.compress.selection import Selection
from optimizer.compress.simulate import QuantInput
from optimizer.compress.walk import blocks as walk
from optimizer.compress.walk.capture import Batch
from optimizer.compress.walk.model_source import ModelSource
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.process.threads import map_in_threads
from optimizer.foundation.progress import bar, say
from optimizer.foundation.state import Note, Range
from optimizer.recipe.compression.quantize import KeepFloatAuto, Quantize

WHERE = "quantize.keep_float_auto"


def exclude_sensitive(
    source: ModelSource,
    batches: Sequence[Batch],
    quantize: Quantize,
    selection: Selection,
    folder: Path,
) -> Selection:
    """Measure, and return the selection without the modules that stay float, each with a note.

    folder: folder of the file with the choice

    Raises RecipeError where more modules would stay float than the section allows.
    """
    options = quantize.keep_float_auto
    assert options is not None
    file = folder / "kept_float.json"
    if not file.exists():
        say("compress: measuring what quantizing each module costs; the whole model is in memory")
        with source.filled():
            inputs = sample_evenly(split_batches(batches), options.samples)
            network = Network(source, inputs, quantize, selection)
            errors = network.errors_alone()
            kept = choose_float_modules(errors, network.error, options.max_error)
            _check(source, selection, kept, options)
        whys = {name: _why(errors[name], kept, options) for name in kept.modules}
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(whys, indent=1), encoding="utf-8")
        partial.rename(file)
    whys = json.loads(file.read_text(encoding="utf-8"))
    return replace(
        selection,
        quantized={n: s for n, s in selection.quantized.items() if n not in whys},
        notes=(*selection.notes, *(Note(name, "float", why) for name, why in whys.items())),
    )


def sample_evenly(inputs: Sequence[Batch], samples: int) -> Sequence[Batch]:
    """Take `samples` calibration inputs at equal distances: they may be in the order of their
    length."""
    return inputs[:: max(1, len(inputs) // samples)][:samples]


def _why(error: float, kept: FloatModules, options: KeepFloatAuto) -> str:
    return (
        f"keep_float_auto: quantized alone it moves the output by {error:.3g} (relative L2); all "
        f"together move it by {kept.before:.3g}, without those kept float by {kept.error:.3g}, and "
        f"{options.max_error:g} is allowed"
    )


def _check(
    source: ModelSource, selection: Selection, kept: FloatModules, options: KeepFloatAuto
) -> None:
    """Raise RecipeError where keep_float_auto would leave too much of the model float, or all of
    it; else print the choice."""
    sizes = {n: m.weight.numel() for n, m in source.linears(selection.quantized).items()}
    share = sum(sizes[name] for name in kept.modules) / sum(sizes.values())
    if len(kept.modules) == len(sizes) or share > options.max_share:
        raise RecipeError(
            f"to move the output by no more than {options.max_error:g} (all modules: "
            f"{kept.before:.3g}), {len(kept.modules)} of {len(sizes)} modules with {share:.1%} of "
            f"the weights would stay float",
            where=f"{WHERE}.max_error",
            accepted=f"what leaves at most {options.max_share:.0%} of the weights float",
            fix="Allow a larger error or share, or quantize more finely: smaller groups, "
            "activations per token.",
        )
    say(
        f"compress: {len(kept.modules)} of {len(sizes)} modules stay float ({share:.1%} of their "
        f"weights): output moved by {kept.error:.3g}, by {kept.before:.3g} without them"
    )


class Network:
    """The float model, in which keep_float_auto quantizes some modules and residual adds to measure
    the output's error."""

    def __init__(
        self,
        source: ModelSource,
        inputs: Sequence[Batch],
        quantize: Quantize,
        selection: Selection,
    ) -> None:
        self._source, self._inputs, self._selection = source, inputs, selection
        self._static = quantize.static_activations
        self._outputs = list(self._map(self._output))
        self._stand_ins = self._quantized_modules(quantize)

    def _map(self, function: Callable[[Batch], Any], count: int | None = None) -> Iterator[Any]:
        """Apply a function to each calibration input: in `count` threads on a CPU, one by one on a
        GPU."""
        if self._source.device.type != "cpu":
            return map(function, self._inputs)
        return map_in_threads(function, self._inputs, count)

    def errors_alone(self) -> dict[str, float]:
        """Return {module: relative change of the output when it alone is quantized}."""
        names = bar(list(self._selection.quantized), "sensitivity")
        return {name: self.error([name]) for name in names}

    def error(self, names: Sequence[str]) -> float:
        """Relative change of the output when these modules are quantized; of several outputs the
        largest."""
        errors, replaced = [RelativeError() for _ in self._outputs[0]], self._with_summands(names)
        with walk.swap_modules(self._source.model, {n: self._stand_ins[n] for n in replaced}):
            outputs = self._map(self._output)
            for floats, moved in zip(self._outputs, outputs, strict=True):
                for error, one, other in zip(errors, floats, moved, strict=True):
                    error.update(one, other)
        return max(error.value for error in errors)

    def _with_summands(self, names: Sequence[str]) -> tuple[str, ...]:
        return (*names, *self._summands(names))

    def _output(self, batch: Batch) -> list[Tensor]:
        """Compute the outputs (rows, features) of a batch for keep_float_auto, without padding; of
        a decoder its last hidden states."""
        with torch.no_grad():
            if self._source.decodes:
                outputs = [self._source.features(batch)]
            else:
                result = self._source.model(**self._source.moved(batch))
                outputs = [*result.values()] if type(result) is dict else [result[0]]
            return [walk.select_real_rows(states, self._real(batch)) for states in outputs]

    def _real(self, batch: Batch) -> Tensor:
        arrays = {name: values.numpy() for name, values in batch.items()}
        return torch.from_numpy(self._source.inputs.real(arrays))

    def _summands(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names of the identities at residual adds that are quantized together with
        these modules; () without ranges."""
        if not self._static:
            return ()
        return self._source.summands(set(names), self._selection.blocks)

    def _quantized_modules(self, quantize: Quantize) -> dict[str, nn.Module]:
        """Return {module or summand: its quantized replacement}."""
        schemes, activations = self._selection.quantized, quantize.activations
        ranges = (
            self._ranges(make_range_chooser(activations)) if activations and self._static else {}
        )
        inputs = QuantizedInputs(activations.mode if activations else None, ranges)
        linears = self._source.linears(schemes)
        modules: dict[str, nn.Module] = {
            name: inputs.quantized(name, linear, rtn(inputs.weight(name, linear), schemes[name]))
            for name, linear in linears.items()
        }
        return modules | {n: QuantInput(ranges[n]) for n in self._summands(schemes)}

    def _ranges(self, choose: Callable[[MagnitudeHistogram], Range]) -> dict[str, Range]:
        """Return {module or summand: range of its input in the float model}."""
        schemes, model = self._selection.quantized, self._source.model
        histograms = {name: MagnitudeHistogram() for name in (*schemes, *self._summands(schemes))}

        def observe(batch: Batch) -> None:
            real = self._real(batch)

            def look(name: str, x: Tensor, real: Tensor = real) -> None:
                whole = isinstance(model.get_submodule(name), nn.Conv2d | nn.Identity)
                try:
                    histograms[name].update(x if whole else walk.select_real_rows(x, real))
                except ValueError as e:
                    raise explain_bad_input(name, e) from e

            with walk.observed(model, histograms, look):
                self._output(batch)

        list(self._map(observe, 1))  # histograms are filled in order
        return {name: choose(histogram) for name, histogram in histograms.items()}
