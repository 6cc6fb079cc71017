"""Choose the modules of a graph whose pieces the ledger judges alone: `validate.ledger`.

    full        all of them, and the operators between them
    sampled     of each kind of module (all q_proj, ...) the first, the last and two at random
    end_to_end  none

The laws of the state, and the distances from end to end, do not depend on it. Called by
materials.py; the hops export, lower and engine say what was left out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from optimizer.recipe.validate import Depth

LARGE = 500_000_000
"""Parameters above which the default is `sampled`: a choice, not a measurement. A module that is
judged alone is multiplied in float64 and in float32 for each graph, its inputs and outputs lie in
memory, and the operators between modules need correct runs of their own."""
AT_RANDOM = 2  # modules of each kind, besides the first and the last
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def choose_depth(depth: Depth | None, parameters: int) -> Depth:
    """Return the recipe's depth; None: the default for a model with `parameters` values."""
    return depth or ("sampled" if parameters > LARGE else "full")


def choose(depth: Depth, modules: Sequence[str], seed: str) -> list[str]:
    """Choose the modules to judge alone, in the order of the model.

    modules: names in the order of the model; those that differ by numbers only are of one kind
    seed: text that differs from run to run, so that over several runs every module is judged
    """
    if depth != "sampled":
        return list(modules) if depth == "full" else []
    kinds: dict[str, list[str]] = {}
    for name in modules:
        kinds.setdefault(NUMBER.sub("*", name), []).append(name)
    chosen: set[str] = set()
    for kind, names in kinds.items():
        between = names[1:-1]
        drawn = random.Random(f"{seed} {kind}").sample(between, min(AT_RANDOM, len(between)))
        chosen |= {names[0], names[-1], *drawn}
    return [name for name in modules if name in chosen]


def describe_left_out(depth: Depth, modules: int, judged: int) -> str:
    """Write a sentence on the modules that were not judged alone; "" where all were.

    modules: number of modules
    judged: number of modules that were judged alone
    """
    if depth == "full" or not modules:
        return ""
    missed = 1 - judged / modules
    return (
        f"validate.ledger is {depth}: {judged} of {modules} modules were judged alone, without the "
        f"operators between them; this misses a fault of one module with probability "
        f"{missed:.0%}, which then shows only where it moves an output beyond its limit"
    )
