"""Settings of the server of the candidate that a search found (search.over.server).

The candidate's bundle is packaged, and the settings of its server are tried as `optimize
tune-serving` tries them, under the objectives of section `slo` (stages/served.py). The recipe with
the best settings is then judged by stage slo, as `optimize run` judges it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optimizer import pipeline
from optimizer.foundation.progress import say
from optimizer.foundation.verdicts import Verdict
from optimizer.load_test import stage as slo
from optimizer.load_test import tuned_server
from optimizer.recipe.schema import Recipe
from optimizer.recipe.serving import Serve
from optimizer.search.stages import served
from optimizer.search.workbench import find_deciding_gate
from optimizer.shared_store import Root
from optimizer.store import Store

Json = dict[str, Any]


@dataclass(frozen=True)
class TunedServer:
    """Candidate found by a search, with the best settings of its server.

    recipe: recipe of the candidate, with these settings in section serve
    why: reason of a verdict other than pass, a sentence
    document: trials and result (load_test/tuned_server.py), with the gates of stage slo
    """

    recipe: Recipe
    verdict: Verdict
    why: str
    document: Json


def tune(recipe: Recipe, root: Root) -> TunedServer:
    """Tune the server of a candidate whose gates passed, and judge it by section slo.

    root: place of the store

    Raises MachineError and InputError where its server does not start on this machine.
    """
    assert recipe.slo is not None
    bundle = _outcome(recipe, root, "package").bundle
    assert bundle is not None
    say("search: tuning the server of the candidate that was found")
    section = recipe.slo.model_copy(update={"rate": None})  # the highest rate is searched
    store = Store(root)
    store.recipe = recipe.name
    document = json.loads(
        (store.step(served.STAGE, section, bundle).path / served.FILE).read_text()
    )
    if document["verdict"] == "fail":
        return TunedServer(recipe, "fail", "no settings meet slo at any rate", document)
    if document["verdict"] == "inconclusive":
        why = "runs were too short to decide if settings meet slo; increase slo.seconds"
        return TunedServer(recipe, "inconclusive", why, document)
    fields = recipe.serve.model_dump(exclude_unset=True) if recipe.serve else {}
    serve = Serve.model_validate(fields | document["serve"])
    recipe = recipe.model_copy(update={"serve": serve})
    judged = _outcome(recipe, root, "slo").slo
    assert judged is not None
    report = json.loads((judged.path / slo.FILE).read_text("utf-8"))
    verdict: Verdict = report["verdict"]
    gate = find_deciding_gate(report["gates"], verdict)
    why = "" if verdict == "pass" else f"gate {gate['name']}: {gate['message']}"
    return TunedServer(recipe, verdict, why, document | {"gates": report["gates"]})


def _outcome(recipe: Recipe, root: Root, until: str) -> pipeline.Outcome:
    return pipeline.run(recipe, Store(root, until=until))


def write_sentence(document: Mapping[str, Any]) -> str:
    """Write for a search's result a sentence on the best settings of the server, their highest
    rate, and that of the recipe's own.

    document: trials and result, where some settings met the objectives
    """
    best, trials = document["serve"], document["trials"]
    rate = f"{document['highest_rate']['met']:.4g} requests a second meet slo"
    settings = tuned_server.format_settings(best)
    first = trials[0]["settings"]
    if all(best[name] == value for name, value in first.items()):
        return f"Server: {settings}; {rate}. No other settings that were tried are better."
    before = [t["met"] for t in trials if t["settings"] == first][-1]
    own = "none" if before is None else f"{before:.4g}"
    return f"Server: {settings}; {rate}, with {tuned_server.format_settings(first)} {own}."
