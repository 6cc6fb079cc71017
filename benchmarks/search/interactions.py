"""Compare two predictions of the error that quantized modules make together.

    python -m benchmarks.search.interactions [--draws 64] [--work FOLDER] [--results FOLDER]

    squares   sum of e_i^2, where e_i is the error of module i alone: what `optimize search` uses
    pairs     the same, and for each two neighbours i, j in the model's order that are both
              quantized e_ij^2 - e_i^2 - e_j^2, where e_ij is their measured error together

Errors are relative L2 of the model's output on calibration texts or images, measured as a search
does (search/stages/sensitivity.py). Two questions are answered for each of CASES:

    order    Kendall's tau of predicted and measured errors over random sets of quantized modules
    choice   the measured error if each prediction chooses the modules of a share that stays float

EfficientNet-Lite0 needs what its recipe names in its first lines.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import results
from benchmarks.measure.results import ROOT
from optimizer.compress.data import calibration
from optimizer.compress.selection import select
from optimizer.compress.walk.model_source import open_source
from optimizer.foundation.progress import say
from optimizer.load.stage import STAGE as LOAD
from optimizer.recipe import file as recipe_file
from optimizer.search.candidates import SHARES
from optimizer.search.expectation import kendall_tau
from optimizer.search.stages import sensitivity
from optimizer.store import Store

PLAIN = "quantize.bias_correction=false"
W4 = "quantize.weights={bits: 4, granularity: group, group_size: 32}"
CASES = {
    "MiniLM, INT8": ("minilm-int8", (PLAIN,)),
    "MiniLM, INT4 weights": (
        "minilm-int8",
        (PLAIN, W4, "quantize.activations=null", "quantize.method=rtn"),
    ),
    "EfficientNet-Lite0, INT8": ("efficientnet-lite0-int8", ()),
}
"""{model: (recipe, overrides)}"""
Corrections = Mapping[tuple[str, str], float]
"""{neighbours: squared error of both beyond the sum of each alone}"""


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--draws", type=int, default=64, help="random sets of modules")
    p.add_argument("--work", type=Path, default=Path("artifacts/interactions"), help="store")
    p.add_argument("--results", type=Path, help="folder for search_interactions.json and .md")
    asked = p.parse_args()
    load, started = os.getloadavg()[0], time.process_time()
    cases = {name: judge(*case, asked.work, asked.draws) for name, case in CASES.items()}
    document: dict[str, Any] = results.conditions(load, 1, "cpu") | {"cases": cases}
    document["processor_seconds"] = round(time.process_time() - started)
    page = show(document)
    if asked.results:
        results.write(document, page, asked.results, "search_interactions")
    else:
        print(page)


def judge(name: str, overrides: Sequence[str], work: Path, draws: int) -> dict[str, Any]:
    """Measure both predictions on the model of a shipped recipe."""
    recipe = recipe_file.read(ROOT / "recipes" / f"{name}.yaml", overrides)
    section = sensitivity.make_section(recipe.compression)
    base = Store(work / "store").step(LOAD, recipe.model).path
    source = open_source(section.task, base)
    selection = select(source, section.quantize)
    batches = calibration.make_batches(section, base)
    with source.filled():
        network = sensitivity.open_network(source, batches, section, selection)
        linears = source.linears(selection.quantized)
        weights = {name: linears[name].weight.numel() for name in selection.quantized}
        return measure(network, weights, draws)


def measure(network: Any, weights: Mapping[str, int], draws: int) -> dict[str, Any]:
    """Measure errors alone, of neighbours, of random sets and of both choices."""
    names = [*weights]
    squared = {name: error**2 for name, error in network.errors_alone().items()}
    corrections = {
        (one, other): network.error([one, other]) ** 2 - squared[one] - squared[other]
        for one, other in pairwise(names)
    }
    say("interactions: neighbours measured")
    draw = np.random.default_rng(0)
    sets = [[n for n in names if draw.random() < 0.5] for _ in range(draws)]
    measured = [network.error(one) ** 2 for one in sets]
    rules: dict[str, Corrections] = {"squares": {}, "pairs": corrections}
    order = {
        rule: kendall_tau(
            [(predict(one, squared, c), m) for one, m in zip(sets, measured, strict=True)]
        )
        for rule, c in rules.items()
    }
    choice: dict[str, dict[str, float]] = {}
    for share in SHARES:
        kept = {rule: keep(weights, squared, c, share) for rule, c in rules.items()}
        errors = {
            rule: network.error([n for n in names if n not in one]) for rule, one in kept.items()
        }
        choice[f"{share:g}"] = errors | {"differ": len(kept["squares"] ^ kept["pairs"])}
    return {"modules": len(names), "draws": draws, "order": order, "choice": choice}


def predict(
    quantized: Collection[str], squared: Mapping[str, float], corrections: Corrections
) -> float:
    """Predict the squared error of a set of quantized modules."""
    those = set(quantized)
    return sum(squared[n] for n in quantized) + sum(
        value for pair, value in corrections.items() if those.issuperset(pair)
    )


def keep(
    weights: Mapping[str, int],
    squared: Mapping[str, float],
    corrections: Corrections,
    share: float,
) -> set[str]:
    """Choose modules that stay float, one by one: that with the largest predicted decrease per
    weight, while their weights are at most `share` of all."""
    left, quantized = share * sum(weights.values()), [*weights]

    def decrease(name: str) -> float:
        others = [n for n in quantized if n != name]
        before = predict(quantized, squared, corrections)
        return (before - predict(others, squared, corrections)) / weights[name]

    while fits := [n for n in quantized if weights[n] <= left]:
        best = max(fits, key=decrease)
        left -= weights[best]
        quantized.remove(best)
    return set(weights) - set(quantized)


def show(document: Mapping[str, Any]) -> str:
    """Page with the figures."""
    parts = [show_case(name, one) for name, one in document["cases"].items()]
    machine = document["machine"]
    return f"""# Errors of modules, added with and without corrections for neighbours

Made by `python -m benchmarks.search.interactions`. Tau: Kendall's, of predicted and measured error
over random halves of the modules.

{"".join(parts)}{document["when"]}, {machine["cpu"]};
{document["processor_seconds"]} s of processor time.
"""


def show_case(name: str, one: Mapping[str, Any]) -> str:
    """Section of the page on one model."""
    rows = [
        [f"{float(share):.0%}", f"{of['squares']:.4f}", f"{of['pairs']:.4f}", str(of["differ"])]
        for share, of in one["choice"].items()
    ]
    taus = ", ".join(f"{value:.3f} by {rule}" for rule, value in one["order"].items())
    heads = ["share in float", "error, by squares", "error, by pairs", "modules that differ"]
    return f"""## {name}

{one["modules"]} modules, {one["draws"]} halves: tau {taus}.

{results.table(heads, rows)}

"""


if __name__ == "__main__":
    main()
