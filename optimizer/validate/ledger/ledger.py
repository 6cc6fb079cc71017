"""Run the hops of the ledger: each step of a model against the step before it, on the same inputs.

    Materials -> [LedgerEntry], one per hop

    origin     the graph of a torch module or of   against the module or the file itself, at load
               an ONNX file in float16
    load       the torch model                     against transformers' own loader
    reduce     the smaller checkpoint              against the reference, where there is one
    recover    the trained smaller checkpoint      against itself before, and the recorded loss
    qat        the trained compressed model        against the same
    fold       float torch with replaced values    against the source model
    compress   the state de-quantized in torch     against the source model; laws of the state
    export     the float ONNX graph                against float torch with replaced values
    lower      the lowered graph, run as written   against the state de-quantized in torch
    cache      a decoder with its KV cache         against itself given the text in one piece
    engine     the built engine, kernels fused     against the lowered graph; its inspection
    harness    texts to answers                    against transformers' tokenizer and torch
    rows       the rows of the quality gates       against the engine (quality/engine_rows.py)

Limits are derived, or measured in the same run from the distance of correct runs (limits/).
Averages hide faults, so every hop also compares the worst example, ONNX hops run piece by piece
(pieces/), and laws/ check values for any data. A hop that cannot run here is an entry with ok None
and the reason. Called by the validate stage.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from optimizer import targets
from optimizer.foundation.errors import MachineError, OptimizeError
from optimizer.foundation.process import freed_memory
from optimizer.foundation.progress import bar, overdue, say
from optimizer.foundation.references import resolve
from optimizer.harness import errors as harness
from optimizer.harness import tasks
from optimizer.targets.missing_packages import explain_unjudged
from optimizer.validate.ledger import hops
from optimizer.validate.ledger.entry import LedgerEntry
from optimizer.validate.ledger.laws.decoder import cache_laws, generation_laws
from optimizer.validate.ledger.laws.reduce import structure_laws, student_laws, training_laws
from optimizer.validate.ledger.onnx_file import origin
from optimizer.validate.materials import Materials

Hop = Callable[[Materials], LedgerEntry]
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
    "engine": ("lowered_graph",),
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
"""{hop: large attributes of Materials that no later hop reads}."""


def run(materials: Materials, passed: Path | None = None) -> list[LedgerEntry]:
    """Run every hop in order, also after one that failed, and return their entries.

    passed: folder in which the entries of passed hops are kept, so that a killed run resumes
        without them; None: they are not kept

    A fault of the model or its files raises nothing: a hop that cannot run has failed, except where
    this machine is the reason.
    """
    entries = []
    with _collecting_new_objects_only():
        for i, hop in enumerate(bar(list_hops(materials), "ledger")):
            file = passed / f"{i}-{hop.__name__}.json" if passed else None
            if file and file.is_file():
                entries.append(LedgerEntry.read(file))
                say(f"ledger: hop {hop.__name__} passed before this run was stopped; not run again")
            else:
                with overdue(f"ledger: hop {hop.__name__}"):
                    entries.append(run_hop(hop, materials))
                if file and entries[-1].ok:
                    entries[-1].write(file)
            materials.drop(LAST_USED.get(hop.__name__, ()))
            gc.collect()  # graphs and models have reference cycles, and are as large as the weights
            freed_memory.give_back()  # the next hop's arrays do not fit this one's holes
    return entries


@contextmanager
def _collecting_new_objects_only() -> Iterator[None]:
    """Exclude the program's own objects from garbage collection, which searches them for a tenth
    of a second after every hop. Where the caller has frozen objects already, these stay frozen."""
    frozen = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


def list_hops(materials: Materials) -> tuple[Hop, ...]:
    """List the target's hops. Where the target has none, or packages that judge it are not
    installed: the hops of the compressed state, and one that reports the reason."""
    target = targets.look_up(materials.section.target.runtime)
    if not target.hops or explain_unjudged(materials.section.target):
        return _with_steps((*STATE_HOPS, make_unjudged_entry), materials)
    chosen: tuple[Hop, ...] = resolve(target.hops)(materials)
    return _with_steps(chosen, materials)


def _with_steps(chosen: tuple[Hop, ...], materials: Materials) -> tuple[Hop, ...]:
    """Insert the hops of the steps that changed the reference model (reduce, recover, qat) after
    `load`."""
    section = materials.section
    steps: list[Hop] = []
    if section.reduce:
        steps.append(student_laws.reduce if section.reduce.student else structure_laws.reduce)
    steps += [training_laws.recover] if section.recovery else []
    steps += [training_laws.qat] if section.training else []
    before: tuple[Hop, ...] = (origin.origin,) if origin.has_origin(materials) else ()
    return (*before, chosen[0], *steps, *chosen[1:])


def graph_hops(materials: Materials) -> tuple[Hop, ...]:
    """List the hops of the ledger for a target whose runtime reads an ONNX graph."""
    return DECODER_HOPS if tasks.look_up(materials.contract).generates else HOPS


def make_unjudged_entry(materials: Materials) -> LedgerEntry:
    """Make the entry, with its reason, of a target that has no hops or cannot be judged here."""
    section = materials.section.target
    why = explain_unjudged(section) or f"no hop here judges models lowered for {section.runtime}"
    return LedgerEntry("lower", "state in torch", None, None, None, why)


def run_hop(hop: Hop, materials: Materials) -> LedgerEntry:
    """Run one hop and return its entry. A hop that raises OptimizeError gets a failed entry.

    Raises MachineError, an OptimizeError whose cause is this machine and not the model."""
    try:
        return hop(materials)
    except (MachineError, harness.MachineError):
        raise
    except (OptimizeError, harness.HarnessError) as e:
        return LedgerEntry(hop.__name__, "", None, None, False, "it could not be run", (str(e),))
