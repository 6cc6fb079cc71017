"""Runs of the stages on a small decoder whose weights are pruned, alone and with integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optimizer.recipe.schema import Recipe
from tests.validate.decoder_runs import INT4, decoder_recipe

FLOAT = {"method": "float_weights"}
GPTQ = {"method": "gptq", "weights": INT4}
HALF = {"pattern": "unstructured", "amount": 0.5}
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "magnitude": ({"method": "magnitude"}, FLOAT),
    "wanda": ({"method": "wanda", **HALF}, FLOAT),
    "sparsegpt": ({"method": "sparsegpt"}, FLOAT),
    "magnitude + rtn": ({"method": "magnitude", **HALF}, {"weights": INT4}),
    "sparsegpt + gptq": ({"method": "sparsegpt"}, GPTQ),
    "sparsegpt + gptq, tuned": (
        {"method": "sparsegpt"},
        {"methods": ("gptq", "scale_tuning"), "weights": INT4},
    ),
}
"""{name: (sparsity, quantize)}"""


def sparse_recipe(model: str, data: Path, name: str) -> Recipe:
    """As decoder_recipe."""
    sparsity, quantize = SCHEMES[name]
    plain = decoder_recipe(model, data, {})
    document = plain.model_dump(by_alias=True, exclude_unset=True)
    return Recipe.model_validate(document | {"sparsity": sparsity, "quantize": quantize})
