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
    """The facts of a config (a transformers config, or the dict of config.json) for a model of
    `task`.

    code: folder whose *.py files, if any, are trusted to define the architecture

    An architecture without a row needs a base model with one list of equal blocks that contains
    nearly all its linear layers; it gets no smooth pairs. A decoder also needs an embedding, a
    head, and blocks without weights outside linear layers. Otherwise raises CheckpointError.
    """
    fields = config if isinstance(config, Mapping) else config.to_dict()
    model_type = str(fields.get("model_type") or "")
    if model_type == MODEL_TYPE:
        return of_config(fields)
    if model_type in FAMILIES:
        return _as_configured(FAMILIES[model_type], fields).of_task(task)
    return recognise(model_type, config, code).of_task(task)


def _as_configured(row: Family, fields: Mapping[str, Any]) -> Family:
    """Drop the smooth pairs that options of the config invalidate.

    OPT-350m normalizes after its sublayers, so that the residual reads the norm's output; some
    models of this architecture have another activation than ReLU.
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
    return replace(row, smooth=smooth, pre_norm=before, final_norm=row.final_norm if before else "")
