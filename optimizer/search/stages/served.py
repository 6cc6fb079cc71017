"""Stage `served`: the settings of a bundle's server that a search tries, each measured under load.

Section: `slo` of the recipe, whose objectives must be met. Writes served.json, the document of
load_test/tuned_server.py.
"""

from __future__ import annotations

import json
from pathlib import Path

from optimizer.data.datasets import read_samples
from optimizer.load_test import stage as slo
from optimizer.load_test import tuned_server
from optimizer.load_test.measure import Objectives, Schedule
from optimizer.recipe.serving import Slo
from optimizer.store import Stage

FILE = "served.json"


def run(section: Slo, packaged: Path, out: Path) -> None:
    """Tune the server of the candidate that a search found, and write served.json. Raises what
    tuned_server.tune raises.

    packaged: folder of stage package
    """
    server = tuned_server.ServerUnderTest(
        packaged / "bundle",
        [row.text for row in read_samples(section.data)] if section.data else [],
        Schedule(section.seconds, burst=section.burst),
        Objectives(section.limits, section.max_refused),
        section.new_tokens,
        slo.PATIENCE,
    )
    document = tuned_server.tune(server)
    (out / FILE).write_text(json.dumps(document, indent=1), encoding="utf-8")


STAGE = Stage("served", 1, run, packages=slo.STAGE.packages, files=slo.digest_inputs, measured=True)
