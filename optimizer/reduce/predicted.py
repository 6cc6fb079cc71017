"""Predict the memory, disk, time and shapes of reduce from the checkpoint's headers alone.

memory = libraries
         + the larger of (the weights outside the blocks; of a decoder only where its answers are
           needed, for fisher or measured depth) and (one block, twice, with the sums over the
           inputs of its widest layer and the matrices that are solved with them)
         + the streams of hidden states, up to compress.memory_gb
         + the intermediate values of one batch in a block
disk   = the smaller checkpoint, and one more where sizes are compared + the streams, for resuming
         and where they exceed memory + the inputs of each block, for measured depth or gradients
time   = multiply-adds of all passes at a measured rate

Texts are assumed to fill half the sequence length, windows of a decoder all of it.
"""

from __future__ import annotations

from collections import defaultdict
from math import prod

from optimizer.foundation.errors import RecipeError
from optimizer.harness import tasks
from optimizer.model.architectures.families import FAMILIES
from optimizer.model.architectures.family_record import BLOCK, Family
from optimizer.recipe.schema import Reduction
from optimizer.reduce.learn.estimate import LIBRARIES, RATE
from optimizer.reduce.structure.latency_table import CANDIDATES
from optimizer.reduce.structure.sizes import SizeChoices, Sizes, solve
from optimizer.reduce.structure.structure import list_multiples
from optimizer.store import Estimate, Shapes

SOLVED = {"magnitude": 0, "activations": 0, "fisher": 56, "second_order": 64}
"""Bytes per pair of inputs of a layer: two sums in float32, both in float64, and the solver's."""


def write_remark(section: Reduction) -> str:
    """Write the remark of `plan` on a reduction to a time (reduce.latency_gain), whose sizes are
    known only once the model was timed; "" for other reductions."""
    if section.reduce.latency_gain is None:
        return ""
    several = f", and for {CANDIDATES} sizes that are compared" if _compares(section) else ""
    text = "sizes follow from times, so this and later stages are predicted for the unreduced model"
    return text + several


def _compares(section: Reduction) -> bool:
    """Return True where several sizes may be equally fast and there is text to compare them on.
    (With `width` alone there is one size for an architecture that keeps its heads.)"""
    chosen = {*section.reduce.chosen}
    kinds = len(chosen - {"width"}) + 2 * ("width" in chosen)
    return section.reduce.latency_gain is not None and section.calibrate is not None and kinds > 1


def predict_shapes(section: Reduction, reference: Shapes) -> Shapes:
    """Return the shapes of the smaller model, assuming that it keeps all heads, because their size
    is not in the headers. This is an upper bound where heads are removed. Returns the reference's
    shapes where its neurons are not known, or sizes are chosen by measured times."""
    match, goal = _family(reference), section.reduce.goal
    if match is None or goal is None or goal.latency_gain is not None:
        return reference
    family, prefix, blocks = match
    ffn = family.feed_forward
    assert ffn is not None
    first = f"{prefix}{blocks[0]}."
    count = reference[f"{first}{ffn.down}.weight"][1]
    names = {f"{linear}.{p}" for linear in ffn.up for p in ("weight", "bias")}
    each = sum(prod(reference.get(f"{first}{n}", (0,))) for n in names) // count
    each += reference[f"{first}{ffn.down}.weight"][0]
    own = sum(prod(s) for n, s in reference.items() if n.startswith(first))
    total, chosen = sum(map(prod, reference.values())), section.reduce
    model = SizeChoices(
        full=Sizes(len(blocks), count, 1),
        each_ffn=each,
        each_heads=0,
        fixed=own - count * each,
        outside=total - len(blocks) * own,
        blocks=range(1, len(blocks) + 1) if "depth" in chosen.chosen else (len(blocks),),
        ffn=list_multiples(count, chosen.multiple_of) if chosen.chosen != ("depth",) else (count,),
        heads=(1,),
    )
    try:
        kept = solve(goal, model)
    except RecipeError:  # raised by the stage itself, which counts heads too
        return reference
    smaller = {}
    for name, shape in reference.items():
        block = next((b for b in blocks if name.startswith(f"{prefix}{b}.")), None)
        if block is None or blocks.index(block) < kept.blocks:
            inner = name.removeprefix(f"{prefix}{block}.") if block else ""
            if inner in names:
                shape = (shape[0] // count * kept.ffn, *shape[1:])
            elif inner == f"{ffn.down}.weight":
                shape = (shape[0], kept.ffn)
            smaller[name] = shape
    return smaller


def _family(reference: Shapes) -> tuple[Family, str, list[str]] | None:
    """Return (the family whose linear layers all blocks have, prefix of the base model, names of
    the blocks); None if no family fits."""
    for family in FAMILIES.values():
        for prefix in (f"{family.base}.", ""):
            start = f"{prefix}{family.blocks}."
            inside = [n.removeprefix(start) for n in reference if n.startswith(start)]
            numbers = {int(n.split(".")[0]) for n in inside if n.split(".")[0].isdigit()}
            blocks = [f"{family.blocks}.{i}" for i in sorted(numbers)]
            needed = {f"{prefix}{b}.{n}.weight" for b in blocks for n in family.linears}
            if family.feed_forward is not None and blocks and needed <= reference.keys():
                return family, prefix, blocks
    return None


def estimate(section: Reduction, reference: Shapes) -> Estimate:
    """Predict memory, disk and time of stage reduce. reference: {tensor of the checkpoint:
    shape}"""
    blocks: dict[str, int] = defaultdict(int)
    outside = linear = hidden = widest = 0
    for name, shape in reference.items():
        block = BLOCK.search(name)
        if block is None:
            outside += prod(shape)
            continue
        blocks[name[: block.end()]] += prod(shape)
        if len(shape) == 2:
            linear += prod(shape)
            hidden, widest = max(hidden, min(shape)), max(widest, *shape)
    chosen, calibrate = section.reduce, section.calibrate
    written = 4 * sum(map(prod, predict_shapes(section, reference).values()))
    if calibrate is None:
        largest = max(map(prod, reference.values()), default=0)
        return Estimate(memory=LIBRARIES + 16 * largest, disk=written, seconds=5 + linear / 1e8)
    width = chosen.chosen != ("depth",) and chosen.importance != "magnitude"
    deep, gradients = "depth" in chosen.chosen, width and chosen.importance == "fisher"
    generates = tasks.find_task(section.task).generates
    tokens, batch = calibrate.samples, calibrate.batch_size
    tokens, batch = tokens * calibrate.sequence_length, batch * calibrate.sequence_length
    full = tokens if generates else tokens / 2
    stream = 4 * full * hidden
    some = stream * min(1.0, chosen.depth_samples / calibrate.samples)
    states = max(stream * len(blocks) * gradients, some * len(blocks) * deep)
    one_block = max(blocks.values(), default=0)
    solved = SOLVED[chosen.importance] * widest**2 if width else 0
    compares = _compares(section)
    left_out = chosen.depth_importance == "measured" and deep
    answers = generates and (gradients or left_out or compares)
    looked_up = outside if answers or not generates else 0
    logits = 0
    if answers:
        vocabulary = max((max(s) for s in reference.values()), default=0)
        logits = 24 * calibrate.sequence_length * vocabulary
    streams = min(int(3 * stream + states), section.compress.memory_bytes)
    walked = max(4 * looked_up + logits, 8 * one_block + solved)
    inside = 12 * batch * widest
    work = full * linear * (7 * width + 6 * gradients)
    if deep and chosen.depth_importance == "measured":
        share = some / max(stream, 1)
        work += share * full * (linear * len(blocks) / 2 + len(blocks) * looked_up)
    work += widest**3 * len(blocks) if width else 0
    if compares:  # each candidate, and then the final model on all texts
        work *= 1 + CANDIDATES
        written = 2 * written + int(stream)
    return Estimate(
        memory=LIBRARIES + walked + streams + inside,
        disk=int(written + 2 * stream * width + states),
        seconds=5 + work / RATE,
    )
