"""Compute with torch, once each, the models, traces and outputs that the ledger compares.

    the folders of a run (run_artifacts.py) + inputs -> models, traces, limits of correct runs

Made by the validate stage; each hop and law reads it. ledger.py frees what later hops do not read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from optimizer.compress.simulate import simulate_state
from optimizer.data.datasets import cut_windows, encode_batches, read_calibration_rows, sort_by_size
from optimizer.foundation.conv_geometry import ConvGeometry
from optimizer.foundation.process import threads
from optimizer.foundation.rounding.random_rounding import Arithmetic
from optimizer.foundation.rounding.tolerance import UNIT
from optimizer.foundation.state import owner_of
from optimizer.harness import tasks
from optimizer.harness.inputs.batch import Batch
from optimizer.harness.runtimes.ort.run import cores
from optimizer.harness.tasks import text_generation
from optimizer.lower.onnx.graph_source import OpenGraph, open_graph
from optimizer.model.checkpoint.model import build_skeleton, materialize
from optimizer.recipe.data import Calibrate
from optimizer.recipe.validate import Depth
from optimizer.store import digest_file
from optimizer.validate import token_counts
from optimizer.validate.ledger import depth as depths
from optimizer.validate.ledger import inputs, trace
from optimizer.validate.ledger.distance import Distance, measure_distance, merge
from optimizer.validate.ledger.limits import monte_carlo, rounding_limits
from optimizer.validate.ledger.limits.correct_runs import CorrectRuns, LedgerSamples, TorchModel
from optimizer.validate.ledger.limits.rounding_limits import Rounding
from optimizer.validate.ledger.pieces import pieces
from optimizer.validate.ledger.trace import Trace
from optimizer.validate.run_artifacts import RunArtifacts
from optimizer.validate.token_counts import Counts


@dataclass
class Materials(RunArtifacts):
    """Models of a run, as compression and lowering left them, and their traces on the ledger's
    batches; each is made at its first use."""

    texts: Sequence[Any]  # held-out inputs of several sizes
    bundle: Path | None = None  # folder that the harness reads; None: the source's

    @cached_property
    def folded_model(self) -> nn.Module:
        """The float model with the parameters that compress changed without rounding them (folded
        factors, corrected biases); the other parameters share the float model's memory."""
        if not self.state.replaced:
            return self.float_model
        loaded = (*self.float_model.named_parameters(), *self.float_model.named_buffers())
        replaced = {name: self.mapped(value) for name, value in self.state.replaced.items()}
        model = build_skeleton(self.checkpoint, self.task)
        materialize(model, "", dict(loaded), replaced)
        return model

    @cached_property
    def simulated_model(self) -> nn.Module:
        """The compressed state, de-quantized in torch, as a model."""
        return simulate_state(self.float_model, self.state, place=self.mapped)

    @cached_property
    def modules_in_order(self) -> list[str]:
        """Names of the linear modules, in the order in which a forward pass first uses them."""
        seen: dict[str, None] = {}
        trace.observe(
            self.float_model, self.batches[0], self.modules, lambda name, _: seen.setdefault(name)
        )
        return list(seen)

    @cached_property
    def batches(self) -> list[Batch]:
        """The batches that every hop runs: inputs.make_usual_batches."""
        return inputs.make_usual_batches(
            self.texts, self.contract, self.encoder, self._bytes_per_token
        )

    @cached_property
    def extremes(self) -> list[Batch]:
        """The batch of many rows and that of the longest text: inputs.make_extreme_batches."""
        sizes = inputs.ExtremeSizes.of(self.section.target)
        return inputs.make_extreme_batches(
            self.texts, self.contract, self.encoder, self._bytes_per_token, sizes
        )

    @property
    def untested_sizes(self) -> str:
        """Sentence on the lengths and batch sizes that no hop runs: inputs.list_untested."""
        return inputs.list_untested(self.batches, self.extremes, self.contract)

    @cached_property
    def depth(self) -> Depth:
        """The recipe's `validate.ledger`, or its default for a model of this size."""
        parameters = sum(p.numel() for p in self.float_model.parameters())
        return depths.choose_depth(self.section.validate_.ledger, parameters)

    @cached_property
    def judged_alone(self) -> list[str]:
        """Names of the modules whose pieces are judged alone, by depth.py. They are drawn anew for
        another state."""
        sampled = self.depth == "sampled"
        seed = digest_file(self.state_folder / "tensors.safetensors") if sampled else ""
        return depths.choose(self.depth, self.modules, seed)

    @property
    def judged_summands(self) -> Collection[str]:
        """Residual adds that read integers, whose quantizers are judged."""
        return self.state.summands if self.depth == "full" else ()

    @property
    def not_judged_alone(self) -> str:
        """Sentence for the report on the modules whose pieces the ledger skips, because
        validate.ledger asks for a sample or for none; "" where it compares all."""
        return depths.describe_left_out(self.depth, len(self.modules), len(self.judged_alone))

    @property
    def _bytes_per_token(self) -> int:
        """Bytes of one token in a trace: float32 inputs and outputs of all linear modules."""
        return 4 * sum(sum(self._shape(name)) for name in self.modules)

    @cached_property
    def calibration_counts(self) -> tuple[Counts | None, Counts | None]:
        """Counts of the calibration data: (those that compress recorded, those that the recipe
        describes, computed by independent code); None where there is no such data."""
        expected = token_counts.count_calibration(self.section, self.source, self.contract)
        return token_counts.read_consumed(self.state_folder), expected

    def calibration(self, other: Calibrate | None = None) -> Iterator[Batch]:
        """Yield the calibration batches as compress read them; none where it read none.

        other: settings of another stage's calibration, such as reduce's; None: those of compress
        """
        settings = other or self.section.calibrate
        if settings is None:
            return
        task = tasks.look_up(self.contract)
        rows = read_calibration_rows(settings, task)
        if task.calibration_items == "windows":
            cut_up = cut_windows(rows, self.encoder, self.contract, settings.sequence_length)
            for ids in cut_up[: settings.samples]:
                yield text_generation.arrays(self.contract, [ids])
        else:
            rows = sort_by_size(rows, task)
            yield from encode_batches(
                rows, self.contract, self.encoder, settings.batch_size, settings.sequence_length
            )

    def _shape(self, module: str) -> tuple[int, ...]:
        return tuple(self.float_model.get_parameter(f"{module}.weight").shape)

    @cached_property
    def sampled(self) -> list[int]:
        """Indices of the batches on which graphs are cut into pieces and correct runs are made:
        the two texts that differ most in length, and a full batch (of images a batch of eight).
        For a decoder also one text alone, from which every graph can continue."""
        count = len(self.batches)
        alone = [0] if tasks.look_up(self.contract).generates else []
        return sorted({*alone, min(1, count - 1), count // 2})

    def traces(
        self,
        model: nn.Module,
        kept: Sequence[int],
        inputs: bool = False,
        summands: Collection[str] = (),
    ) -> list[Trace]:
        """Trace the model on every batch, with its outputs.

        kept: indices of the batches whose traces also hold the inputs and outputs of the modules
            that are judged alone, which are far larger
        inputs: True to hold the inputs of these modules in all batches
        summands: names of residual adds that read integers
        """

        def traced(i: int) -> Trace:
            modules = (*self.judged_alone, *summands) if inputs or i in kept else ()
            one = self._traced(model, self.batches[i], modules)
            return one if i in kept else replace(one, outputs={})

        return list(threads.map_in_threads(traced, range(len(self.batches)), cores()))

    def _traced(self, model: nn.Module, batch: Batch, modules: Collection[str] = ()) -> Trace:
        """Trace the model on one batch. The hooks are added to a copy of the model, because other
        threads may run it."""
        one = trace.trace_run(monte_carlo.copy_modules(model), batch, self.compared, modules)
        (one.result,) = self.in_files([one.result])
        return one

    def _trace_each(self, model: nn.Module, batches: Sequence[Batch]) -> list[Trace]:
        """Trace the model on each batch, without inputs and outputs of modules."""
        return list(threads.map_in_threads(lambda b: self._traced(model, b), batches, cores()))

    @cached_property
    def samples(self) -> LedgerSamples:
        """The batches, with the sample on which graphs are cut and correct runs are made."""
        return LedgerSamples(
            self.batches,
            self.extremes,
            self.sampled,
            self.outputs,
            self.compared,
            tasks.look_up(self.contract).generates and self.section.target.export is not None,
            self.scratch,
        )

    @cached_property
    def float_traces(self) -> list[Trace]:
        """Traces of the float model on the usual batches."""
        if not self.state.replaced:
            return self.traces(self.float_model, self.sampled, self.compares_outputs)
        return self.traces(self.float_model, ())

    @cached_property
    def folded_traces(self) -> list[Trace]:
        """Traces of the folded model on the usual batches."""
        if not self.state.replaced:
            return self.float_traces
        return self.traces(self.folded_model, self.sampled, self.compares_outputs)

    @cached_property
    def unpruned_traces(self) -> list[Trace]:
        """Traces of the float model that compression aims at: folded, not pruned."""
        if not self.state.pruned_floats:
            return self.folded_traces
        return self.traces(self.float_model, self.sampled, self.compares_outputs)

    @cached_property
    def simulated_traces(self) -> list[Trace]:
        """Traces of the compressed state in torch on the usual batches."""
        return self.traces(
            self.simulated_model, self.sampled, self.compares_outputs, self.judged_summands
        )

    @cached_property
    def folded_extremes(self) -> list[Trace]:
        """Traces of the folded model on the extreme batches, without inputs and outputs of
        modules."""
        return self._trace_each(self.folded_model, self.extremes)

    @cached_property
    def simulated_extremes(self) -> list[Trace]:
        """Traces of the compressed state on the extreme batches, without those of modules."""
        return self._trace_each(self.simulated_model, self.extremes)

    @property
    def compares_outputs(self) -> bool:
        """True where modules' outputs are compared with those of round-to-nearest or magnitude
        pruning: see laws/rounding_laws.py."""
        return any(self.compared_by_output(n) for n in (*self.state.weights, *self.state.sparsity))

    def compared_by_output(self, parameter: str) -> bool:
        """True where the weight `parameter` is judged by the output error of its module."""
        pruned, sparsity = parameter in self.state.sparsity, self.section.sparsity
        if pruned and sparsity is not None and sparsity.record.judged_by != "recomputed":
            return True
        return parameter in self.state.weights and self.rounding(parameter).compared

    @cached_property
    def correct(self) -> CorrectRuns:
        """Correct runs of this run's models, from which the limits of the ledger come."""
        folded = TorchModel(
            lambda: self.folded_model,
            lambda: self.folded_traces,
            lambda: self.folded_extremes,
            lambda: self.modules,
            self.graph / "model.onnx",
        )
        state = TorchModel(
            lambda: self.simulated_model,
            lambda: self.simulated_traces,
            lambda: self.simulated_extremes,
            lambda: [*self.modules, *self.state.summands],
            self.model / "model.onnx",
        )
        return CorrectRuns(self.samples, {"folded": folded, "state": state}, self.arithmetic)

    def arithmetic(self, precision: str, kind: str = "state", blocks: bool = False) -> Arithmetic:
        """Return the arithmetic of a judged graph, for correct runs.

        precision: type of the float operators
        kind: "folded" for the float model with replaced parameters, "state" for the compressed
            state
        blocks: True for fused kernels, which quantize their inputs

        Parameters that methods folded were computed in float32 beforehand; a rotation sums one term
        per input.
        """
        rotated = bool(self.section.quantize.of_kind("model-transform"))
        growth = {
            name: float(np.sqrt(self.state.replaced[name].shape[-1])) if rotated else 2.0
            for name in self.state.replaced
            if kind == "folded" and name not in self.state.pruned_floats
        }
        kernels = self.kernel_blocks if blocks else {}
        shifts = self.offset_biases if kind == "state" and precision != "fp32" else {}
        return Arithmetic(unit=UNIT[precision], blocks=kernels, replaced=growth, shifts=shifts)

    @cached_property
    def folded_parameters(self) -> dict[str, Tensor]:
        """{name: parameter} of the folded model; a tied one by each of its names."""
        named = self.folded_model.named_parameters(remove_duplicate=False)
        return {name: p.detach() for name, p in named}

    def filters(self, module: str) -> ConvGeometry | None:
        """Return the geometry (kernel, strides, padding) of a judged module that is a convolution;
        None for another module."""
        layer = self.float_model.get_submodule(module)
        return ConvGeometry.read(layer) if isinstance(layer, nn.Conv2d) else None

    def folded_bias(self, module: str) -> Tensor | None:
        """Return the expected bias (out,) of a linear module after folding and correction; None
        without one."""
        return self.folded_parameters.get(f"{module}.bias")

    def rounding(self, parameter: str) -> Rounding:
        """Return how far the integers of the weight `parameter` may lie from its float values, by
        the bounds of the methods that chose them."""
        bits = self.state.scheme(parameter).bits
        if parameter in self.rounded_alone:
            return rounding_limits.derive_nearest(bits)
        return rounding_limits.derive_limits(self.section.quantize, self.section.calibrate, bits)

    def rounded_weight(self, parameter: str) -> Tensor:
        """Return the float weight (out, in) that was rounded: folded, and divided by its input's
        factor."""
        replaced = self.state.replaced
        folded = parameter in replaced and parameter not in self.state.pruned_floats
        value = (replaced[parameter] if folded else self.parameters[parameter]).flatten(1)
        factor = self.state.factor_of(owner_of(parameter))
        return value.float() if factor is None else value.float() / factor[None]

    def kept_weight(self, parameter: str) -> Tensor:
        """Return the float weight (out, in) that the method rounded (`rounded_weight`), with 0
        where it was pruned before."""
        weight = self.rounded_weight(parameter)
        if parameter not in self.state.sparsity:
            return weight
        q = self.state.weights[parameter]
        return weight * q.nonzero() if q.integers.shape == weight.shape else weight

    @cached_property
    def offset_biases(self) -> dict[str, Tensor]:
        """{module: bias (out,) in a graph that first subtracts the offset of the module's input}.
        The bias adds the offset's share of the output back."""
        if not self.signed or self.state.activations != "tensor":
            return {}
        biases = {}
        for parameter, q in self.state.weights.items():
            name = owner_of(parameter)
            covered = self.state.range_of(name)
            if covered is not None and covered.offset and name in self.names.modules:
                bias = self.folded_bias(name)
                moved = q.dequantize().double().sum(1) * covered.offset
                biases[name] = (moved if bias is None else moved + bias.double()).float()
        return biases

    @cached_property
    def kernel_blocks(self) -> dict[str, int]:
        """{weight-only module: inputs per int8 block}, for the modules whose kernel quantizes its
        inputs."""
        schemes = {owner_of(name): self.state.scheme(name) for name in self.state.weights}
        blocks = {
            name: self.section.target.kernel_block(scheme.group_size or 0)
            for name, scheme in schemes.items()
            if name in self.names.modules and self.state.activations_of(name) is None
        }
        return {name: block for name, block in blocks.items() if block}

    @cached_property
    def kernel_traces(self) -> list[Trace]:
        """Traces of the state in kernels that quantize inputs (kernel_blocks), of all batches and
        then the extremes, without inputs and outputs of modules."""
        batches = (*self.batches, *self.extremes)
        with monte_carlo.quantize_in_kernels(self.simulated_model, self.kernel_blocks):
            return self._trace_each(self.simulated_model, batches)

    @property
    def signed(self) -> bool:
        """True where the lowered graph's integers are signed and have no zero point."""
        return bool(self.lowering["dialect"] != "ort_qdq")

    @cached_property
    def lowered_graph(self) -> OpenGraph:
        """The lowered ONNX graph that the ledger judges."""
        return open_graph(self.model / "model.onnx")

    @cached_property
    def lowered_outputs(self) -> list[dict[str, Any]]:
        """Outputs of the lowered graph, {name: array} for every trace, continuation and extreme
        batch."""
        path = self.model / "model.onnx"
        traces = self.samples.with_continuations(
            [*self.simulated_traces, *self.simulated_extremes], path
        )
        opener = pieces.change_opener(pieces.AS_WRITTEN, self.matrices)
        return self.in_files(pieces.run_graph(path, traces, self.compared, opener))

    def output_distance(
        self, outputs: Sequence[dict[str, Any]], expected: Sequence[Trace]
    ) -> Distance:
        """Measure the distance of outputs over the real tokens of every example, and return the
        worst value of each field over the contract's outputs.

        outputs: {name: array} of each run
        expected: trace of each run

        An output of length 0 in both is skipped.
        """
        return merge(
            measure_distance(
                pair
                for f, e in zip(outputs, expected, strict=True)
                for pair in e.pairs(f[name], e.result[name])
            )
            for name in self.outputs
        )
