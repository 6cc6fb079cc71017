"""The ledger's float64 vectors bound the harness's float32 ones, and nothing wider."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optimizer.harness import tasks
from optimizer.harness.contract import POOLINGS, Contract
from optimizer.harness.embedding_settings import ACTIVATIONS
from optimizer.harness.inputs.batch import Batch
from optimizer.validate.ledger.laws import contract_laws
from tests.harness import small_model

WIDTH = small_model.WIDTH
DENSE: dict[str, Any] = {"kind": "dense", "inputs": WIDTH, "outputs": 24, "bias": True}
RESIDUAL = {**DENSE, "bias": False, "residual": True}
NORM = {"kind": "layer_norm", "inputs": 24}
LAYERS: dict[str, list[dict[str, Any]]] = {
    "a residual": [RESIDUAL],
    "a norm between": [DENSE, NORM, {"kind": "normalize"}, {**DENSE, "inputs": 24}],
    **{name: [{**DENSE, "activation": name}] for name in ACTIVATIONS},
}


def batch() -> tuple[dict[str, Any], Batch]:
    """(outputs of a model, its batch of 5 texts), one with tokens that are not pooled."""
    rng = np.random.default_rng(0)
    mask = np.arange(20)[None] < np.array([[20], [7], [1], [13], [20]])
    arrays = {"attention_mask": mask.astype(np.int64)}
    skipped = [4, 2, 0, 0, 0]
    hidden = rng.standard_normal((5, 20, WIDTH)).astype(np.float32) * 3
    return {"last_hidden_state": hidden}, Batch(arrays, [], [], mask, skipped=skipped)


def contract(layers: list[dict[str, Any]], **changes: Any) -> Contract:
    embedding = {"layers": layers, "dimensions": 20}
    sized = any(layer["kind"] != "normalize" for layer in layers)
    embedding["file"] = "layers.npy" if sized else None
    document = small_model.contract(embedding=embedding, **changes)
    made = Contract.from_json(json.loads(json.dumps(document)))
    values = np.random.default_rng(1).standard_normal(made.vectors.count).astype(np.float32)
    return replace(made, layer_weights=values)


def apart(made: Contract, moved: float = 0.0) -> float:
    """Largest distance of an answer over its bound; 0 where both are 0."""
    outputs, arrays = batch()
    expected, bound = contract_laws.evaluate(made, outputs, arrays)
    error = np.abs(tasks.decode(made, outputs, arrays) * (1 + moved) - expected)
    assert (error[bound == 0] == 0).all() or moved
    return float((error[bound > 0] / bound[bound > 0]).max(initial=0))


@pytest.mark.parametrize("pooling", [*POOLINGS, ("max", "mean", "lasttoken")])
@pytest.mark.parametrize("normalize", [True, False])
def test_every_pooling_is_within_its_bound(pooling: Any, normalize: bool) -> None:
    assert apart(contract([], pooling=pooling, normalize=normalize)) <= 1


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("normalize", [True, False])
def test_every_layer_is_within_its_bound(name: str, normalize: bool) -> None:
    made = contract(LAYERS[name], normalize=normalize)
    assert apart(made) <= 1
    assert apart(made, moved=1e-3) > 1
