"""The facts of an architecture: its row in families.py, or what recognise.py can read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimizer.model.architectures.families import FAMILIES
from optimizer.model.architectures.family_record import Family
from optimizer.model.architectures.recognise import recognised


def family(config: Any, code: Path | None = None) -> Family:
    """The facts of a config (a transformers config, or the dict of config.json).

    code: a folder whose own *.py, if it has any, is trusted to define the architecture.

    An architecture without a row is understood when its base model has one list of equal blocks
    that holds all but a few of its linear layers; it then has no smooth pairs. A decoder also
    needs an embedding and a head, and no weights in its blocks outside linear layers. Raises
    CheckpointError saying what is missing otherwise.
    """
    fields = config if isinstance(config, Mapping) else config.to_dict()
    model_type = str(fields.get("model_type") or "")
    if model_type in FAMILIES:
        return _as_configured(FAMILIES[model_type], fields)
    return recognised(model_type, config, code)


def _as_configured(row: Family, fields: Mapping[str, Any]) -> Family:
    """Drop the smooth pairs that an option of the config makes untrue.

    OPT's smallest-but-one model normalizes after its sublayers, so that the residual reads what
    the norm gives; models of its architecture with another activation than ReLU exist.
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
