"""Look up the facts of an architecture: its row in families.py, or those recognise.py derives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimizer.model.architectures.families import FAMILIES
from optimizer.model.architectures.family_record import Family
from optimizer.model.architectures.recognise import recognise
from optimizer.model.graph.family import of_config
from optimizer.model.graph.record import MODEL_TYPE
from optimizer.recipe.schema import Task


def find_family(config: Any, task: Task, code: Path | None = None) -> Family:
    """Return the facts of the architecture that a config describes, for a model of `task`.

    config: a transformers config, or the dict of config.json
    code: folder whose *.py files are trusted to define the architecture; None: the checkpoint's own
        code is not run

    An architecture without a row in families.py needs a base model with one list of equal blocks
    that contains nearly all its linear layers; it gets no smooth pairs. A decoder also needs an
    embedding, a head, and blocks without weights outside linear layers. Raises CheckpointError for
    any other architecture.
    """
    fields = config if isinstance(config, Mapping) else config.to_dict()
    model_type = str(fields.get("model_type") or "")
    if model_type == MODEL_TYPE:
        return of_config(fields)
    if model_type in FAMILIES:
        return _as_configured(FAMILIES[model_type], fields).of_task(task)
    return recognise(model_type, config, code).of_task(task)


def _as_configured(row: Family, fields: Mapping[str, Any]) -> Family:
    """Return the row without the smooth pairs that do not hold for this config.

    Only OPT has options of this kind: OPT-350m normalizes after its sublayers, so that the residual
    reads the norm's output, and some OPT models have another activation than ReLU.
    """
    if row.model_type != "opt":
        return row
    norms = ("self_attn_layer_norm", "final_layer_norm")
    before = bool(fields.get("do_layer_norm_before", True))
    relu = fields.get("activation_function", "relu") == "relu"
    smooth = tuple(
        pair
        for pair in row.smooth
        if (before or pair.producer not in norms) and (relu or pair.producer != "fc1")
    )
    return replace(row, smooth=smooth, final_norm=row.final_norm if before else "")
