"""Judge each adapter that stays apart from the compressed model, on inputs of the ledger and
its own texts, else those of validate.data.

    adapter NAME    the float model with the adapter      against peft's own model
    compress NAME   the de-quantized state with it        against that model, by the recipe's budget
    lower NAME      the lowered graph given its matrices  against the state with it
    engine NAME     the same in the runtime's kernels     against the state with it
    harness NAME    generation, from prompt to text       against each complete text
    rows NAME       the rows of its gates                 against the engine

and the quality gates of the recipe, called adapter.NAME.quality..., with the float model changed by
the adapter as the baseline. Limits are the ledger's, from correct runs of the changed models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.progress import say
from optimizer.harness.contract import adapter_file
from optimizer.load.adapters.merge import import_peft
from optimizer.recipe.schema import Validation
from optimizer.recipe.stage_sections import name_adapter_place
from optimizer.validate import sense, target_runner
from optimizer.validate.adapted import AdaptedMaterials
from optimizer.validate.gates import Gate
from optimizer.validate.ledger import ledger, trace
from optimizer.validate.ledger.breach import BUDGET, write_breach
from optimizer.validate.ledger.entry import HopOutputs, LedgerEntry, make_entry
from optimizer.validate.ledger.laws.decoder import generation_laws
from optimizer.validate.materials import Materials
from optimizer.validate.quality import generation_quality
from optimizer.validate.quality.engine_rows import EngineRows
from optimizer.validate.quality.evaluation import FIRST, Rows


def judge(
    m: Materials, data: Rows, device: str, entries: list[LedgerEntry], report: dict[str, Any]
) -> list[Gate]:
    """Judge every adapter of the recipe and return its gates.

    m: materials of the run without adapters
    data: rows by their place in the recipe
    device: device that the candidate is opened on
    entries: list to which the adapters' hops are appended
    report: report in which "adapters" is set to {name: its section of quality}
    """
    gates = list[Gate]()
    report["adapters"] = {}
    for name in m.contract.adapters:
        say(f"validate: adapter {name}")
        adapted = make_materials(m, name)
        entries += [replace(e, hop=f"{e.hop} {name}") for e in _entries(adapted)]
        place = place_of(m.section, name)
        seen = EngineRows(adapted, device, place=place)
        judged = generation_quality.judge_generation(adapted, {FIRST: data[place]}, seen)
        own, section = judged[FIRST]
        sensed = sense.check_comparison(adapted, own, section, place)
        report["adapters"][name] = {**section, "data": place, **sensed}
        entries.append(replace(seen.entry(), hop=f"rows {name}"))
        gates += [
            replace(g, name=f"adapter.{name}.{g.name}", message=f"adapter {name}: {g.message}")
            for g in own
        ]
    return gates


def place_of(section: Validation, name: str) -> str:
    """Return the key in the recipe under which the texts stand that judge LoRA adapter `name`: its
    own, else validate.data."""
    place = name_adapter_place(name)
    return "validate.data" if section.adapters.get(name) is None else place


def make_materials(m: Materials, name: str) -> AdaptedMaterials:
    """Make the ledger's materials for the models with adapter `name`."""
    values = {f.name: getattr(m, f.name) for f in fields(Materials)}
    return AdaptedMaterials(**values, plain=m, adapter=name)


def _entries(m: AdaptedMaterials) -> Iterator[LedgerEntry]:
    for hop in (adapter, compress, lower, engine, generation_laws.harness):
        yield ledger.run_hop(hop, m)


def adapter(m: Materials) -> LedgerEntry:
    """Hop `adapter`: compare the float model with the adapter as this project applies it with
    peft's own model, and require that the adapter changes the outputs by more than rounding does.
    """
    assert isinstance(m, AdaptedMaterials)
    peft = import_peft()
    folder = (m.source / adapter_file(m.adapter)).with_suffix("")
    with quiet():
        wrapped = peft.PeftModel.from_pretrained(
            m.load_by_transformers(), folder, local_files_only=True
        ).eval()
    results = [trace.run(wrapped.base_model.model, b, m.outputs) for b in m.batches]
    spread = m.correct.source_outputs()
    problems = []
    without = [trace.run(m.plain.float_model, b, m.outputs) for b in m.batches]
    moved = m.output_distance(without, m.float_traces)
    if not moved.worst > max(spread.limits.values()):
        problems.append(
            f"the adapter changes the outputs by {moved.worst:.2g} (relative L2), which rounding "
            "does as well: it is not trained, or not applied"
        )
    return make_entry("adapter", "peft", HopOutputs(results, m.float_traces, spread), problems)


def compress(m: Materials) -> LedgerEntry:
    """Hop `compress` with an adapter: compare the compressed state with the float model, both with
    the adapter. The limit is the recipe's quantization budget."""
    budget = m.section.validate_.quantization_budget
    measured = m.output_distance([t.result for t in m.simulated_traces], m.float_traces)
    moving = [n for n in m.state.replaced if not _keeps_inputs(m, n)]
    problems = [
        f"{name} was changed, and with it the inputs that the adapter was trained on"
        for name in moving
    ]
    if not measured.relative_l2 <= budget:
        moved, allowed = write_breach(measured.relative_l2, budget)
        problems.append(
            f"{BUDGET} {moved} (relative L2); validate.quantization_budget is {allowed}"
        )
    why = "validate.quantization_budget, chosen in the recipe"
    return LedgerEntry(
        "compress", "float torch", budget, measured, not problems, why, tuple(problems)
    )


def _keeps_inputs(m: Materials, parameter: str) -> bool:
    """Return True for a parameter that compress may change under a trained adapter: a corrected
    bias, a pruned float weight or the head, none of which rescales a linear module's inputs."""
    head = f"{m.family.head}.weight"
    return parameter.endswith(".bias") or parameter in m.state.pruned_floats or parameter == head


def lower(m: Materials) -> LedgerEntry:
    """Hop `lower` with an adapter: compare the lowered graph, which reads the adapter's matrices as
    inputs, with the compressed state in torch with the same adapter."""
    path = m.model / "model.onnx"
    traces = m.samples.with_continuations([*m.simulated_traces, *m.simulated_extremes], path)
    spread = m.correct.graph_outputs("state", m.precision)
    return make_entry("lower", "state in torch", HopOutputs(m.lowered_outputs, traces, spread), [])


def engine(m: Materials) -> LedgerEntry:
    """Hop `engine` with an adapter: compare the lowered graph in the runtime's own kernels with the
    compressed state in torch, both with the adapter."""
    path = m.model / "model.onnx"
    if m.kernel_blocks:
        start, spread = "state in torch, inputs quantized as in kernels", m.correct.kernel_outputs()
        quantized = m.samples.with_continuations(m.kernel_traces, path)
        results = target_runner.run_fused(m, quantized)
        entry = make_entry("engine", start, HopOutputs(results, quantized, spread), [])
        if entry.ok:
            return entry
    traces = m.samples.with_continuations([*m.simulated_traces, *m.simulated_extremes], path)
    lowered = [replace(t, result=o) for t, o in zip(traces, m.lowered_outputs, strict=True)]
    spread = (
        m.correct.kernel_quantization()  # kernels of another processor may quantize otherwise
        if m.kernel_blocks
        else m.correct.graph_outputs("state", m.section.target.computes_in)
    )
    results = target_runner.run_fused(m, traces)
    return make_entry("engine", "lowered graph", HopOutputs(results, lowered, spread), [])
