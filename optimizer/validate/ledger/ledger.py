"""The ledger: the same inputs through every form the model takes, each hop under limits
that are derived, or measured in the same run from how far correct runs lie apart
(limits/spread.py).

    load       the torch model                     against transformers' own loader
    reduce     the smaller checkpoint              against the reference, where there is one
    recover    what it learned                     against itself before, and what training said
    qat        the same of a compressed model
    fold       float torch with what was replaced  against the source model
    compress   the state de-quantized in torch     against the source model; laws of the state
    export     the float ONNX graph                against float torch with what was replaced
    lower      the lowered graph, run as written   against the state de-quantized in torch
    cache      a decoder continued from its cache  against itself given the text in one piece
    engine     the built engine, kernels fused     against the lowered graph; what was inspected
    harness    texts to answers                    against transformers' tokenizer and torch
    rows       what the quality gates judged       against the engine (quality/engine_rows.py)

Averages hide faults, so every hop also looks at the worst example; ONNX hops run piece by
piece (pieces/pieces.py); and laws that do not depend on data are checked (laws/state_laws.py,
laws/contract_laws.py). A hop that cannot run here is an entry with ok null and the reason.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from optimizer import targets
from optimizer.foundation.errors import LedgerError, MachineError, OptimizeError
from optimizer.foundation.process import freed_memory
from optimizer.foundation.progress import bar
from optimizer.foundation.references import resolve
from optimizer.harness import errors as harness
from optimizer.harness import tasks
from optimizer.targets.missing_packages import not_judged
from optimizer.validate.ledger import hops
from optimizer.validate.ledger.breach import breach
from optimizer.validate.ledger.entry import Entry
from optimizer.validate.ledger.laws.decoder import cache_laws, generation_laws
from optimizer.validate.ledger.laws.reduce import structure_laws, student_laws, training_laws
from optimizer.validate.materials import Materials

Hop = Callable[[Materials], Entry]
STATE_HOPS: tuple[Hop, ...] = (hops.load, hops.fold, hops.compress)
HOPS: tuple[Hop, ...] = (*STATE_HOPS, hops.export, hops.lower, hops.engine, hops.harness)
DECODER_HOPS: tuple[Hop, ...] = (
    *STATE_HOPS,
    hops.export,
    hops.lower,
    cache_laws.cache,
    hops.engine,
    generation_laws.harness,
)


LAST_USED = {
    "export": ("float_traces", "folded_traces", "folded_extremes", "unpruned_traces"),
    "harness": (
        "simulated_traces",
        "simulated_extremes",
        "kernel_traces",
        "lowered_outputs",
        "correct",
        "simulated_model",
        "folded_model",
        "folded_parameters",
    ),
}
"""{hop: what of Materials nothing after it looks at}, of what is large."""


def run(materials: Materials) -> list[Entry]:
    """Every hop in order, also after one that failed. Never raises for a fault of the artefacts:
    a hop that cannot be carried out is a hop that failed, unless this machine is why."""
    entries = []
    with _collecting_new_objects_only():
        for hop in bar(hops_of(materials), "ledger"):
            entries.append(run_hop(hop, materials))
            materials.drop(LAST_USED.get(hop.__name__, ()))
            gc.collect()  # graphs and models point at themselves, and are as large as the weights
            freed_memory.give_back()  # holes of this hop's arrays fit no array of the next
    return entries


@contextmanager
def _collecting_new_objects_only() -> Iterator[None]:
    """What the program is made of need not be searched again after every hop: a tenth of a second
    each time. In a program that called gc.freeze itself, what is frozen here stays so."""
    frozen = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


def hops_of(materials: Materials) -> tuple[Hop, ...]:
    """The target's; where it has none, or what they need is not installed, those of the state, and
    one that says so."""
    target = targets.of(materials.section.target.runtime)
    if not target.hops or not_judged(materials.section.target):
        return _with_steps((*STATE_HOPS, unjudged), materials)
    chosen: tuple[Hop, ...] = resolve(target.hops)(materials)
    return _with_steps(chosen, materials)


def _with_steps(chosen: tuple[Hop, ...], materials: Materials) -> tuple[Hop, ...]:
    """After the first, `load`, those of the steps that made another model of the reference."""
    section = materials.section
    steps: list[Hop] = []
    if section.reduce:
        steps.append(student_laws.reduce if section.reduce.student else structure_laws.reduce)
    steps += [training_laws.recover] if section.recovery else []
    steps += [training_laws.qat] if section.training else []
    return (chosen[0], *steps, *chosen[1:])


def graph_hops(materials: Materials) -> tuple[Hop, ...]:
    """Of a target that takes ONNX."""
    return DECODER_HOPS if tasks.of(materials.contract).generates else HOPS


def unjudged(materials: Materials) -> Entry:
    """In place of the hops of a target that has none, or that cannot be judged here."""
    section = materials.section.target
    why = not_judged(section) or f"nothing here judges what is lowered for {section.runtime}"
    return Entry("lower", "state in torch", None, None, None, why)


def run_hop(hop: Hop, materials: Materials) -> Entry:
    """One hop's entry. Raises MachineError: what this machine cannot do says nothing of a model."""
    try:
        return hop(materials)
    except (MachineError, harness.MachineError):
        raise
    except (OptimizeError, harness.HarnessError) as e:
        return Entry(hop.__name__, "", None, None, False, "it could not be run", (str(e),))


def check(entries: Sequence[Entry]) -> None:
    """Raise LedgerError naming the first hop out of its tolerance."""
    for entry in entries:
        if entry.ok is False:
            raise LedgerError(
                entry.problems[0] if entry.problems else "out of tolerance",
                where=f"ledger: {entry.hop}",
                accepted=_accepted(entry),
            )


def _accepted(entry: Entry) -> str:
    if entry.tolerance is None or entry.reached is None:
        return ""
    _, limit = breach(entry.reached, entry.tolerance)
    return f"relative L2 up to {limit} from {entry.start}"
