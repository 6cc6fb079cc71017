"""Hop `origin`: a torch module, or an ONNX file in float16, against the float32 graph of it.

Later hops start from original/model.onnx, the module's export or the converted file. `load` has run
the origin itself, whose code or type no later stage has, and judged it by correct runs; this entry
states its figures.
"""

from __future__ import annotations

import json

from optimizer.validate.ledger.distance import Distance
from optimizer.validate.ledger.entry import MEASURED, LedgerEntry
from optimizer.validate.ledger.limits.spread import Spread
from optimizer.validate.materials import Materials

FILE = "origin.json"


def has_origin(m: Materials) -> bool:
    """Return True for a model whose original was compared at `load` with the file that later stages
    read."""
    return (m.source / FILE).is_file()


def origin(m: Materials) -> LedgerEntry:
    """Hop `origin`: report the comparison of `load`, for the output nearest to its limit."""
    document = json.loads((m.source / FILE).read_text(encoding="utf-8"))
    outputs = document["outputs"]
    worst = {name: o["worst_example"] for name, o in outputs.items()}
    limits = {name: o["limit"] for name, o in outputs.items()}
    medians = {name: o["median"] for name, o in outputs.items()}
    spread = Spread(document["runs"], document["unit_roundoff"], medians, limits)
    nearest = max(outputs, key=lambda name: worst[name] / limits[name])
    of = outputs[nearest]
    measured = Distance(of["relative_l2"], of["max_abs"], of["cosine"], of["worst_example"])
    return LedgerEntry(
        "origin",
        document["name"],
        limits[nearest],
        measured,
        all(worst[name] <= limits[name] for name in outputs),
        MEASURED,
        unproven=f"judged by load, on {document['rows']}, none of validate.data",
        spread=spread.as_dict(worst),
    )
