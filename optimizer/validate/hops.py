"""The hops of the ledger, one function each: Materials -> Entry.

What a hop compares is in ledger.py's docstring, what it may change in tolerances.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.runtimes.ort import OrtRunner
from optimizer.load.model import auto_class, torch_model
from optimizer.lower import cut
from optimizer.validate import bisect, contract_laws, pieces, rounding_laws, state_laws, trace
from optimizer.validate.distance import Distance, distance
from optimizer.validate.judged import judged
from optimizer.validate.materials import Materials
from optimizer.validate.on_gpu import compared, not_here
from optimizer.validate.tolerances import LEARNING, ROUNDING, TABLE, UNCUT, Tolerance
from optimizer.validate.trace import Trace


@dataclass(frozen=True)
class Entry:
    """One hop (measured.worst: see judged.py). ok None: not run here. problems: what is wrong,
    worst first, with the checkpoint's names; empty when ok. unproven: what a hop that is ok could
    not judge, ""."""

    hop: str
    start: str
    tolerance: float | None
    measured: Distance | None
    ok: bool | None
    why: str
    problems: tuple[str, ...] = ()
    unproven: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "hop": self.hop,
            "from": self.start,
            "tolerance": self.tolerance,
            "measured": self.measured.as_dict() if self.measured else None,
            "ok": self.ok,
            "why": self.why,
            "problems": list(self.problems),
            "unproven": self.unproven,
        }


def _entry(
    hop: str, start: str, tolerance: Tolerance, at: float, measured: Distance, problems: list[str]
) -> Entry:
    """The verdict of a hop: its worst example within tolerance, and no problem of another kind."""
    if not measured.worst <= at:
        problems = [
            *problems,
            f"an example is {measured.worst:.2e} from {start}, {at:.1e} is declared",
        ]
    return Entry(hop, start, at, measured, not problems, tolerance.why, tuple(problems))


def load(m: Materials) -> Entry:
    """Our loader against transformers' own, and every parameter against the safetensors library."""
    from safetensors import safe_open

    with _quiet():
        theirs = auto_class(m.task).from_pretrained(
            m.source / "checkpoint", attn_implementation="eager", dtype="float32"
        )
    results = [trace.run(theirs.eval(), b, m.outputs) for b in m.batches]
    problems = []
    ours = dict(m.float_model.named_parameters())
    for file in sorted((m.source / "checkpoint").glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            problems += [
                f"{name} differs from the file"
                for name in f.keys()  # noqa: SIM118 - a safetensors handle is no mapping
                if name in ours and not bool((ours[name] == f.get_tensor(name).float()).all())
            ]
    measured = m.between(results, m.float_traces)
    return _entry("load", "transformers", TABLE["load"], TABLE["load"].at(0), measured, problems)


def fold(m: Materials) -> Entry:
    """What was folded into parameters must not change the float function; corrected biases and
    learned gains do, and are held to laws of their own."""
    quantize = m.section.quantize
    rotated = "rotate" in quantize.transforms
    tolerance = TABLE["fold rotated" if rotated else "fold"]
    problems = state_laws.replaced(m.state, m.parameters)
    learned = {}
    if LEARNING & set(quantize.rounders):
        problems += state_laws.gains(m.state, m.parameters, m.family, rotated)
        learned = {
            name: state_laws.folded_gain(m.state, m.parameters, name, m.family, rotated)
            for name in state_laws.learned_gains(m.state, m.parameters)
        }
    others = {name: _uncorrected(m, name) for name in m.state.replaced} | learned
    if not others:
        same = Distance(0.0, 0.0, 1.0, 0.0)
        return _entry("fold", "source torch", tolerance, tolerance.limit, same, problems)
    folded = torch_model(m.checkpoint, m.task, overrides=others)
    results = [trace.run(folded, b, m.outputs) for b in m.batches]
    measured = m.between(results, m.float_traces)
    return _entry("fold", "source torch", tolerance, tolerance.limit, measured, problems)


def _uncorrected(m: Materials, name: str) -> Tensor:
    """A replaced parameter without what bias correction added to it."""
    module = name.removesuffix(".bias")
    corrected = module != name and f"{module}.weight" in m.state.weights
    if m.section.quantize.bias_correction and corrected:
        return state_laws.folded_bias(m.state, m.parameters, module)
    return m.state.replaced[name]


def compress(m: Materials) -> Entry:
    """The state de-quantized in torch against the source: the recipe's budget, and the laws."""
    activations = m.section.quantize.activations
    problems = _rounding(m)
    if m.state.activations != (
        None
        if activations is None
        else "tensor"
        if activations.granularity == "tensor"
        else "token"
    ):
        problems.append(f"activations are {m.state.activations!r}, not as the recipe says")
    if activations is not None and m.state.activations == "tensor":
        problems += state_laws.ranges(m.state, activations, m.simulated_model, m.calibration())
    problems += state_laws.biases(m.state, m.parameters, m.simulated_traces)
    measured = m.between([t.result for t in m.simulated_traces], m.float_traces)
    budget = m.section.validate_.quantization_budget
    if not measured.relative_l2 <= budget:
        problems.append(
            f"quantization moves the output by {measured.relative_l2:.3g} (relative L2); "
            f"validate.quantization_budget is {budget}; compressing module by module, it is passed "
            f"at {bisect.in_torch(m, budget)}"
        )
    why = "validate.quantization_budget of the recipe"
    return Entry("compress", "source torch", budget, measured, not problems, why, tuple(problems))


def _rounding(m: Materials) -> list[str]:
    """What the codes of each weight must keep, by the method that chose them."""
    quantize = m.section.quantize
    if quantize.kept:
        return [
            f"{name} was kept with other values than the checkpoint has"
            for name, q in m.state.weights.items()
            if not bool((q.dequantize() == m.parameters[name]).all())
        ]
    method = quantize.rounders[-1]
    rounding = ROUNDING[method]
    problems = state_laws.weights(m.state, m.parameters, rounding, m.rounded_alone)
    if rounding.nearest:
        return problems
    coded, wanted = m.simulated_traces, {**m.parameters, **m.state.replaced}
    exact = m.folded_traces if method in LEARNING or quantize.asymmetric else coded
    asked = quantize.gptq.token_limit, m.family.head
    return problems + rounding_laws.outputs(m.state, wanted, rounding, coded, exact, *asked)


def export(m: Materials) -> Entry:
    """The float graph against torch, whole and piece by piece, and every parameter by value."""
    path = m.graph / "model.onnx"
    tolerance = TABLE[f"export {m.precision}"]
    problems = _graph_laws(m, path)
    asked = m.asked(m.folded_traces, path)
    problems += _pieces(m, path, asked, TABLE[f"piece {m.precision}"].limit, fuse=False)
    problems += [f"{p}: the graph holds other values" for p in _other_values(m, path)]
    results = pieces.whole(path, asked, m.compared, fuse=True)
    measured = m.between(results, asked, m.compared)
    return _entry("export", "float torch", tolerance, tolerance.at(0), measured, problems)


def _other_values(m: Materials, path: Path) -> list[str]:
    """Parameters whose initializer is not the value torch runs with, stored either way round."""
    stored = cut.initializers(path, m.names.parameters.values())
    ours = dict(m.folded_model.named_parameters(remove_duplicate=False))
    wrong = []
    for name, initializer in m.names.parameters.items():
        if name not in ours:
            continue
        value, found = ours[name].detach().numpy(), stored[initializer]
        value = value.astype(np.float16 if m.precision == "fp16" else np.float32)
        entry = m.names.modules.get(name.removesuffix(".weight"))
        turned = entry is not None and entry.parameter == name and entry.layout == "KN"
        same = found.dtype == value.dtype and (
            np.array_equal(found, value.T)
            if turned
            else np.array_equal(found, value) or np.array_equal(found, value.T)
        )
        if not same:
            wrong.append(name)
    return wrong


def _graph_laws(m: Materials, path: Path) -> list[str]:
    """Input and output names, and each LayerNorm's epsilon: too small for outputs to show."""
    facts = cut.facts(path)
    wanted = {*(i.name for i in m.contract.inputs), *m.cache_names[0]}
    problems = []
    if set(facts.inputs) != wanted:
        problems.append(f"inputs are {sorted(facts.inputs)}, the contract says {sorted(wanted)}")
    if set(m.compared) - set(facts.outputs):
        problems.append(f"outputs are {sorted(facts.outputs)}, the contract says {m.compared}")
    epsilons = {
        name: module.eps
        for name, module in m.float_model.named_modules()
        if isinstance(module, nn.LayerNorm)
    }
    for name, epsilon in facts.epsilons.items():
        if name in epsilons and not np.isclose(epsilon, epsilons[name], rtol=1e-6, atol=0):
            problems.append(f"{name}: epsilon is {epsilon:.3g}, torch's is {epsilons[name]:.3g}")
    return problems


def _pieces(
    m: Materials,
    path: Path,
    traces: Sequence[Trace],
    limit: float,
    fuse: bool,
    only: str = "",
    between: float | None = None,
    coded: bool = False,
) -> list[str]:
    """What is out of tolerance, module by module and between modules. coded: inputs of modules are
    coded by other arithmetic than torch's."""
    problems = []
    with _work() as work:
        at = cut.edges(path, m.modules)
        found = pieces.modules(path, at, traces, work, fuse, coded=coded)
        problems += [
            f"{name}: its output is {found[name].worst:.2e} from torch's on torch's input, "
            f"{limit:.0e} is declared"
            for name in pieces.beyond(found, limit)
        ]
        if only != "modules":
            rest = pieces.rest(path, at, traces, work, fuse)
            bound = TABLE[f"piece {m.precision}"].limit if between is None else between
            problems += [
                f"{name}: what comes before it is {rest[name].worst:.2e} from torch's, "
                f"{bound:.0e} is declared"
                for name in pieces.beyond(rest, bound)
            ]
    return problems


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers neither draws bars nor reports the pooler that the task has no use for."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _work() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="optimize-ledger-") as folder:
        yield Path(folder)


def _coded(m: Materials) -> str:
    return "float" if m.state.activations is None else "int8"


def lower(m: Materials) -> Entry:
    """The lowered graph, each operator as written, against the state de-quantized in torch."""
    path = m.model / "model.onnx"
    problems = _graph_laws(m, path)
    wanted = {p.removesuffix(".weight") for p in m.state.weights}
    lowered = set(m.lowering["modules"])
    problems += [f"{name}: left in float without saying so" for name in sorted(wanted - lowered)]
    problems += [f"{name}: lowered, but float in the state" for name in sorted(lowered - wanted)]
    problems += [
        f"{name}: the graph holds other codes than the state" for name in _other_codes(m, path)
    ]
    problems += _other_codings(m, path)
    carried = cut.changed(m.graph / "model.onnx", path, m.names.parameters.values())
    problems += [f"{name}: the float graph holds other values" for name in carried]
    problems += [
        f"{name}: the graph reads a float weight" for name in cut.float_weights(path, wanted)
    ]
    coded = "" if m.state.activations is None else "int8 "
    limit = TABLE[f"piece {coded}{m.precision}"].limit
    asked, other = m.asked(m.simulated_traces, path), m.lowering["dialect"] != "ort_qdq"
    problems += _pieces(m, path, asked, limit, fuse=False, coded=other)
    tolerance = TABLE[f"lower {m.precision} {_coded(m)}"]
    held = judged(m, m.lowered_outputs, asked, tolerance)
    return _entry("lower", "state in torch", tolerance, *held, problems)


def _other_codes(m: Materials, path: Path) -> list[str]:
    """Quantized parameters whose value in the graph is not the state's, bit for bit."""
    held = cut.dequantized(path, m.state.weights)
    return [
        n for n in m.state.weights if not np.array_equal(held[n], m.state.weights[n].dequantize())
    ]


def _other_codings(m: Materials, path: Path) -> list[str]:
    """Inputs whose scale, zero point or offset in the graph is not that of the state's range."""
    if m.state.activations != "tensor":
        return []
    found = cut.codings(path, {p.removesuffix(".weight") for p in m.state.weights})
    problems = []
    for site, wanted in m.state.ranges.items():
        name = site.removesuffix(":input")
        got = found.get(name)
        if got is None:
            problems.append(f"{name}: the graph does not code its input")
            continue
        # Unsigned codes carry the zero point; signed ones are shifted by 128 and by the offset.
        moved = got.zero_point * got.scale - got.offset
        signed = got.zero_point == 0 and wanted.zero_point != 0
        right = -wanted.offset if signed else wanted.zero_point * wanted.scale
        slack = wanted.scale / 64 + abs(right) * 2.0**-10  # an offset in fp16
        if got.scale != wanted.scale or abs(moved - right) > slack:
            problems.append(
                f"{name}: its input is coded with {got}; the state's range has scale "
                f"{wanted.scale:.6g}, zero point {wanted.zero_point}, offset {wanted.offset:.6g}"
            )
    return problems


def engine(m: Materials) -> Entry:
    """What was built against the lowered graph, and what the builder said of it."""
    document, target = m.inspected, m.section.target
    wider = (document.get("inspected") or {}).get("wider", [])
    problems = [] if target.allow_wider else [f"{n}: runs wider than asked" for n in wider]
    eligible = (document.get("inspected") or {}).get("eligible")
    if eligible is not None and eligible != len(m.state.weights):
        problems.append(f"{eligible} modules were inspected, the state has {len(m.state.weights)}")
    reason = not_here(m)
    if reason:
        ok = False if problems else None
        return Entry("engine", "lowered graph", None, None, ok, reason, tuple(problems))
    if target.device != "cpu":
        whole = _entry("engine", "lowered graph", *compared(m), problems)
        said = replace(whole, why=f"{whole.why}; {UNCUT}", unproven=UNCUT)
        return whole if m.state.activations is None else said  # no codes to flip, no wide limit
    blocks = m.state.activations is None
    tolerance = TABLE["engine blocks" if blocks else f"engine {m.precision} int8"]
    path = m.model / "model.onnx"
    limit = tolerance.limit if blocks else TABLE[f"piece int8 {m.precision}"].limit
    problems += _pieces(m, path, m.simulated_traces, limit, fuse=True, only="modules")
    asked = m.asked(m.simulated_traces, path)
    results = pieces.whole(path, asked, m.compared, fuse=True)
    lowered = [replace(t, result=o) for t, o in zip(asked, m.lowered_outputs, strict=True)]
    at, measured = judged(m, results, lowered, tolerance)
    at *= len(m.state.weights) ** 0.5 if blocks else 1
    return _entry("engine", "lowered graph", tolerance, at, measured, problems)


def harness(m: Materials) -> Entry:
    """From texts to answers as a bundle does it, against transformers' tokenizer and torch."""
    folder = m.bundle or m.source
    served = contracts.read(folder / "contract.json")
    tokens_folder = folder if m.bundle else folder / "checkpoint"
    tokenizer = contracts.load_tokenizer(tokens_folder, served)
    checkpoint = m.source / "checkpoint"
    problems = contract_laws.contract(m.contract, served, checkpoint)
    problems += contract_laws.tokens(checkpoint, m.contract, served, tokenizer, list(m.texts)[:8])
    problems += contract_laws.labels(m.contract, served, checkpoint, m.batches[1])
    found, wanted = [], []
    with OrtRunner(m.model / "model.onnx", threads=1) as runner:
        for batch in m.batches:
            given = tasks.encode(
                served, tokenizer, batch.texts, length=int(batch["input_ids"].shape[1])
            )
            outputs = runner.infer(given)
            values = tasks.decode(served, outputs, given)
            again = tasks.decode(served, runner.infer(given), given)
            if not np.array_equal(values, again):
                problems.append("the same texts answered twice give other bits")
            found += list(values)
            wanted += list(contract_laws.values(m.contract, outputs, batch))
    tolerance = TABLE["answers"]
    measured = distance(zip(found, wanted, strict=True))
    return _entry("harness", "torch", tolerance, tolerance.limit, measured, problems)
