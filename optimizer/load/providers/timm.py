"""Read a folder of timm as a checkpoint of transformers' class for the same architecture.

`pretrained_cfg` becomes an image processor of transformers: the shorter side is resized to
size / crop_pct and the centre is cropped. Where an odd number of rows or columns is cut off, timm
rounds the offset of the crop to even and transformers down: one pixel at most.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimizer.foundation.errors import CheckpointError, OptimizeError
from optimizer.harness.image_settings import FILTERS, LARGEST
from optimizer.load import weights
from optimizer.load.config import config_fields
from optimizer.load.config.image_processor import FILES
from optimizer.load.providers.provider import Loaded, Provider
from optimizer.load.providers.timm_architectures import COVERED, TimmArchitecture, find_architecture
from optimizer.load.weights import SourceWeights, Stored
from optimizer.model.checkpoint.checkpoint import open_checkpoint, read_json
from optimizer.recipe.schema import Model

WRAPPER = "timm_wrapper"
CONFIG = "pretrained_cfg"
CROP = "center"
FIX = "Use a model without arguments besides its architecture's name: others are not covered."


def takes(section: Model, folder: Path) -> bool:
    """Return True where the folder has a config.json of timm."""
    del section
    file = folder / "config.json"
    return file.is_file() and is_timm(read_json(file))


def is_timm(raw: Mapping[str, Any]) -> bool:
    """Return True if `raw`, the content of config.json, is timm's: pretrained_cfg marks it."""
    return raw.get("model_type", WRAPPER) == WRAPPER and CONFIG in raw


def config(folder: Path, raw: Mapping[str, Any]) -> Any:
    """The transformers config for timm's config.json `raw`. Raises CheckpointError for an
    architecture that is not covered, and for fields that change the model."""
    from transformers import AutoConfig

    file = folder / "config.json"
    record = _record(raw, file)
    image = read_settings(raw, file)
    _check_arguments(raw, record, image, file)
    labels = dict(enumerate(_label_names(raw, file)))
    fields = {
        **record.fields,
        "num_channels": image["channels"],
        "id2label": labels,
        "label2id": {name: i for i, name in labels.items()},
    }
    config_fields.check(fields, file)
    kind = fields.pop("model_type")
    return AutoConfig.for_model(kind, **fields)


def _label_names(raw: Mapping[str, Any], file: Path) -> list[str]:
    """Read from the source's config.json the names of a timm model's classes, or LABEL_0, ...;
    CheckpointError where some classes have no name."""
    count, names = raw.get("num_classes"), raw.get("label_names")
    if type(count) is int and 0 < count <= config_fields.LABELS:
        if names is None:
            return [f"LABEL_{i}" for i in range(count)]
        if isinstance(names, list) and len(names) == count and all(type(n) is str for n in names):
            return names
    raise CheckpointError(
        f"num_classes {str(count)[:80]} and label_names {str(names)[:80]} were found",
        where=f"{file}: num_classes, label_names",
        accepted=f"the number of classes of the classifier, up to {config_fields.LABELS:,}, and a "
        "list with a name for each, or no names",
        fix="Get config.json from where the weights came from.",
    )


def _record(raw: Mapping[str, Any], file: Path) -> TimmArchitecture:
    """Look up the architecture of a timm model from its config.json `raw`; CheckpointError if it is
    not covered."""
    name = str(raw.get("architecture") or "")
    record = find_architecture(name)
    if record is None:
        raise CheckpointError(
            f"timm's architecture {name!r} is not covered",
            where=f"{file}: architecture",
            accepted=COVERED,
            fix="Use a checkpoint of transformers' class. For tf_efficientnet_lite0, "
            "calibration/make_efficientnet_lite0.py writes one.",
        )
    return record


def _check_arguments(
    raw: Mapping[str, Any], record: TimmArchitecture, image: Mapping[str, Any], file: Path
) -> None:
    """Raise CheckpointError for model_args, global_pool or an input size that make the model differ
    from the one that the architecture's name stands for."""
    side, model_args = image["side"], raw.get("model_args")
    if model_args is not None and not isinstance(model_args, Mapping):
        raise CheckpointError(
            f"{str(model_args)[:80]} was found",
            where=f"{file}: model_args",
            accepted="a mapping, or nothing",
            fix="Get config.json from where the weights came from.",
        )
    if side != record.fields.get("image_size", side):
        raise CheckpointError(
            f"side {side} was found, but the architecture's is {record.fields['image_size']}",
            where=f"{file}: {CONFIG}.input_size",
            accepted="the side in the architecture's name",
            fix=FIX,
        )
    expected = {
        "num_classes": (raw.get("num_classes"),),
        "in_chans": (image["channels"],),
        "global_pool": (record.pool,),
        "img_size": (side, [side, side]),
    }
    arguments = {
        "global_pool": raw.get("global_pool", record.pool),
        **(model_args or {}),
    }
    for name, value in arguments.items():
        if value not in expected.get(name, ()):
            accepted = " or ".join(map(str, expected.get(name, ()))) or "no such argument"
            raise CheckpointError(
                f"{name}: {str(value)[:80]} was found",
                where=f"{file}: model_args, global_pool",
                accepted=accepted,
                fix=FIX,
            )


def read_settings(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return {"channels", "side", "resize", "filter", "mean", "std"} from `pretrained_cfg` in a
    timm source's config.json. Raises CheckpointError for a field that is missing or that no
    processor here supports."""
    document = raw[CONFIG] if isinstance(raw[CONFIG], Mapping) else {}

    def field(name: str, accepted: str, fits: Any) -> Any:
        value = document.get(name)
        if value is None or not fits(value):
            raise CheckpointError(
                f"{'nothing' if value is None else str(value)[:80]} was found",
                where=f"{file}: {CONFIG}.{name}",
                accepted=accepted,
                fix="Get config.json from where the weights came from.",
            )
        return value

    def numbers(count: int, least: float = -math.inf) -> Any:
        return lambda v: (
            isinstance(v, list)
            and len(v) == count
            and all(type(x) in (int, float) and least < x <= sys.float_info.max for x in v)
        )

    def square(v: Any) -> bool:
        return isinstance(v, list) and [type(x) for x in v] == [int] * 3 and v[1] == v[2] > 0 < v[0]

    shape = field("input_size", "[channels, side, side]", square)
    crop_share = field(
        "crop_pct",
        f"a number up to 1 that makes the resized side {LARGEST} at most",
        lambda v: type(v) in (int, float) and shape[1] <= LARGEST * v <= LARGEST,
    )
    interpolation = field("interpolation", ", ".join(FILTERS), lambda v: v in FILTERS)
    if document.get("crop_mode", CROP) != CROP:
        field("crop_mode", CROP, lambda v: v == CROP)
    return {
        "channels": shape[0],
        "side": shape[1],
        "resize": math.floor(shape[1] / crop_share),
        "filter": interpolation,
        "mean": field("mean", "a number per channel", numbers(shape[0])),
        "std": field("std", "a number above 0 per channel", numbers(shape[0], 0)),
    }


def build_processor(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The document of transformers' preprocessor_config.json, from timm's config.json `raw`."""
    s = read_settings(raw, file)
    return {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": s["resize"]},
        "resample": FILTERS.index(s["filter"]),
        "do_center_crop": True,
        "crop_size": {"height": s["side"], "width": s["side"]},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": s["mean"],
        "image_std": s["std"],
    }


def read(section: Model, folder: Path, model_config: Any, out: Path) -> Loaded:
    """Read the tensors of a timm model under transformers' names. Writes config.json and the
    processor's file. Raises CheckpointError as weights.find, and for a tensor that transformers'
    class does not have."""
    file = folder / "config.json"
    raw = read_json(file)
    model_config.save_pretrained(out)
    (out / FILES[0]).write_text(json.dumps(build_processor(raw, file), indent=1) + "\n")
    record, renamed = _record(raw, file), dict[str, Stored]()
    for name, stored in weights.find(folder, section).items():
        targets = record.renamed(name)
        if not targets:
            raise CheckpointError(
                f"transformers' class for {raw['architecture']} has no tensor for {name!r}",
                where=str(folder),
                fix="config.json and the weights are of different models: get both again.",
            )
        parts = [stored] if len(targets) == 1 else _rows(weights.read_values(stored), len(targets))
        renamed |= zip(targets, parts, strict=True)
    return Loaded(out, renamed)


def _rows(tensor: Tensor, parts: int) -> list[Stored]:
    return [rows.contiguous() for rows in tensor.chunk(parts)]


def verify(section: Model, folder: Path, pairing: SourceWeights, out: Path) -> None:
    """Raise OptimizeError for a tensor whose written rows, joined again, differ from the source's;
    tensors that the task does not use are skipped."""
    record = _record(read_json(folder / "config.json"), folder / "config.json")
    written, left_out = open_checkpoint(out).tensors.as_written, set(pairing.unused)
    taken = {source: parameter for parameter, source in pairing.source_names.items()}
    for name, stored in weights.find(folder, section).items():
        targets = [t for t in record.renamed(name) if t not in left_out]
        if not targets:
            continue
        joined = torch.cat([written[taken[t]].reshape(-1) for t in targets])
        if not torch.equal(joined, weights.read_values(stored).reshape(-1)):
            raise OptimizeError(
                f"{', '.join(targets)} was written with other values than {name} has in the source",
                where=str(folder),
            )


TIMM = Provider("timm", takes, read, verify)
