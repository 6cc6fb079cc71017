"""The page's pooling in node gives the harness's vectors."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import optimizer
from optimizer.foundation.errors import CheckpointError
from optimizer.harness import tasks
from optimizer.harness.contract import POOLINGS, Contract
from optimizer.harness.inputs.batch import Batch
from optimizer.lower.web import accepted
from tests.harness import small_model

PAGE = Path(optimizer.__file__).parent / "package/web/tasks.mjs"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


@needs_node
def test_the_page_pools_as_the_harness_does(tmp_path: Path) -> None:
    hidden = np.random.default_rng(0).standard_normal((1, 9, small_model.WIDTH)).astype("<f4")
    embedding = {"layers": [{"kind": "normalize"}], "dimensions": 20}
    changes: list[dict[str, Any]] = [{"pooling": p, "normalize": False} for p in POOLINGS]
    changes.append({"pooling": ["max", "mean"], "normalize": True, "embedding": embedding})
    contracts = [Contract.from_json(small_model.contract(**c)) for c in changes]
    script = (
        f"import {{ answer }} from {json.dumps(PAGE.as_uri())};\n"
        f"const data = Float32Array.from({json.dumps(hidden.ravel().tolist())});\n"
        f"const all = {json.dumps([c.to_json() for c in contracts])};\n"
        f"const dims = {json.dumps(hidden.shape)};\n"
        "console.log(JSON.stringify(all.map((c) => answer(c, { data, dims }).embedding)));\n"
    )
    (tmp_path / "ask.mjs").write_text(script)
    done = subprocess.run(["node", tmp_path / "ask.mjs"], capture_output=True, check=True)
    mask = np.ones((1, 9), np.int64)
    for contract, found in zip(contracts, json.loads(done.stdout), strict=True):
        batch = Batch({"attention_mask": mask}, [], [], mask.astype(bool))
        (expected,) = tasks.decode(contract, {"last_hidden_state": hidden}, batch)
        np.testing.assert_allclose(np.array(found), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("embedding", "words"),
    [
        ({"layers": [{"kind": "layer_norm", "inputs": 32}], "file": "a.npy"}, "Dense and LayerN"),
        ({"prompts": {"query": "a"}, "prompt": "query", "include_prompt": False}, "left out"),
    ],
)
def test_an_embedding_that_the_page_does_not_compute_is_refused(
    embedding: dict[str, Any], words: str
) -> None:
    contract = Contract.from_json(small_model.contract(embedding=embedding))
    with pytest.raises(CheckpointError, match=words):
        accepted.check_embedding(contract)
