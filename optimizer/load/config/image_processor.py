"""The contract's `image` from the checkpoint's image processor, as transformers reads it.

transformers has each image processor twice: for Pillow and numpy (<name>Pil) and for torchvision.
Which one preprocessor_config.json names (ViTFeatureExtractor, ViTImageProcessor, ...Fast) says only
what the model was saved with; without torchvision transformers takes the first for all of them, and
so it is here. Their steps are those of a common class, but for the two in STEPS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import CheckpointError, MachineError
from optimizer.foundation.reading import reading
from optimizer.harness.errors import HarnessError
from optimizer.harness.image_settings import FILTERS, ImageSettings
from optimizer.harness.inputs import image_file
from optimizer.model.checkpoint.checkpoint import read_json

FILES = ("preprocessor_config.json", "processor_config.json")
OWN = ("process_image", "resize", "center_crop", "rescale", "normalize", "_preprocess")
"""Methods whose like in a subclass would do something else than the steps here."""
WARPED_FROM = 384  # ConvNext's processor: sides from which an image is resized and not cropped
SETTINGS = 1_000_000  # bytes of a file of them
FIX = (
    "Use the processor that the model was trained with; what it does must be resize, centre "
    "crop, rescale and normalize."
)


def settings(files: Path, channels: int) -> ImageSettings:
    """What the processor in `files` does to an image. channels: the model's. Raises CheckpointError
    where it does more, or makes images of different sizes."""
    where = next((files / name for name in FILES if (files / name).is_file()), None)
    if where is None:
        raise CheckpointError(
            "no image processor, so what is done to an image is not known",
            where=str(files),
            accepted=FILES[0],
            fix="Copy it from the model that this one was fine-tuned from.",
        )
    processor = transformers_processor(files)
    known = STEPS.get(_name(processor))
    if known is None and _does_more(processor):
        raise CheckpointError(
            f"{_name(processor)} does something of its own to images",
            where=f"{where}: image_processor_type",
            accepted=f"{', '.join(STEPS)}, and those that only set values",
            fix=FIX,
        )
    for name in ("do_pad", "do_flip_channel_order", "do_reduce_labels"):
        if getattr(processor, name, None):
            raise _uncovered(where, name, "true was found", "false")
    try:
        return (known or _steps)(processor, channels, where)
    except HarnessError as e:
        raise CheckpointError(
            f"{e.problem} for {e.where}", where=str(where), accepted=e.accepted, fix=FIX
        ) from None


def transformers_processor(files: Path) -> Any:
    """transformers' own, by Pillow and numpy. Raises CheckpointError for one that it does not
    read, MachineError without Pillow."""
    image_file.import_pillow()
    from transformers import AutoImageProcessor

    for file in (files / name for name in FILES):
        if file.is_file():
            read_json(file)
    with reading(files / FILES[0], fix=FIX):
        processor = AutoImageProcessor.from_pretrained(files, backend="pil", local_files_only=True)
    if getattr(processor, "backend", "") != "pil":
        raise MachineError(
            f"transformers has {type(processor).__name__} for torchvision only",
            where=str(files / FILES[0]),
            accepted="a processor that transformers has for Pillow",
        )
    return processor


def _name(processor: Any) -> str:
    return type(processor).__name__.removesuffix("Pil")


def _does_more(processor: Any) -> bool:
    from transformers.image_processing_backends import PilBackend

    return any(getattr(type(processor), n) is not getattr(PilBackend, n) for n in OWN)


def _steps(processor: Any, channels: int, where: Path) -> ImageSettings:
    """Resize, centre crop, rescale, normalize; each where it is on."""
    resize = _size(processor, "size", where) if processor.do_resize else None
    crop = None
    if getattr(processor, "do_center_crop", None):
        sides = _size(processor, "crop_size", where)
        if sorted(sides) != ["height", "width"]:
            raise _uncovered(where, "crop_size", f"{sides} was found", "height and width")
        crop = sides["height"], sides["width"]
    if crop is None and "height" not in (resize or {}):
        what = "images keep their proportions, so each would have a size of its own"
        accepted = "height and width, or a centre crop"
        raise _uncovered(where, "size", what, accepted)
    return _settings(processor, channels, resize, crop)


def _convnext(processor: Any, channels: int, where: Path) -> ImageSettings:
    """Below WARPED_FROM the shorter side becomes size / crop_pct and the middle is cut out."""
    if getattr(processor, "do_center_crop", None):
        raise _uncovered(where, "do_center_crop", "true was found, a second crop", "false")
    if not processor.do_resize:
        raise _uncovered(where, "do_resize", "false was found", "true")
    side = _size(processor, "size", where).get("shortest_edge")
    if side is None:
        raise _uncovered(where, "size", "it has no shortest_edge", "shortest_edge")
    if side >= WARPED_FROM:
        return _settings(processor, channels, {"height": side, "width": side}, None)
    resize = {"shortest_edge": int(side / processor.crop_pct)}
    return _settings(processor, channels, resize, (side, side))


def _efficientnet(processor: Any, channels: int, where: Path) -> ImageSettings:
    """With rescale_offset 1 is taken off; include_top divides by std once more."""
    plain = _steps(processor, channels, where)
    document = {**vars(plain), "offset": float(bool(processor.rescale_offset))}
    if processor.include_top:
        document["divide"] = _per_channel(processor.image_std, channels)
    return ImageSettings(**document)


def _settings(
    processor: Any,
    channels: int,
    resize: Mapping[str, int] | None,
    crop: tuple[int, int] | None,
) -> ImageSettings:
    sides = crop or ((resize or {}).get("height", 0), (resize or {}).get("width", 0))
    normal = bool(processor.do_normalize)
    return ImageSettings(
        channels=channels,
        height=sides[0],
        width=sides[1],
        resize=resize,
        resample=FILTERS[int(processor.resample)] if resize else FILTERS[0],
        crop=crop,
        rescale=float(processor.rescale_factor) if processor.do_rescale else None,
        offset=0.0,
        mean=_per_channel(processor.image_mean, channels) if normal else None,
        std=_per_channel(processor.image_std, channels) if normal else None,
        divide=None,
    )


def _per_channel(value: Any, channels: int) -> tuple[float, ...]:
    values = [value] * channels if isinstance(value, int | float) else value
    return tuple(map(float, values))


def _size(processor: Any, name: str, where: Path) -> dict[str, int]:
    value = getattr(processor, name)
    sides = {k: int(v) for k, v in dict(value or {}).items() if v}
    if sorted(sides) not in (["height", "width"], ["shortest_edge"]):
        shown = sides or "nothing"
        accepted = "height and width, or shortest_edge"
        raise _uncovered(where, name, f"{shown} was found", accepted)
    return sides


def _uncovered(where: Path, field: str, problem: str, accepted: str) -> CheckpointError:
    return CheckpointError(problem, where=f"{where}: {field}", accepted=accepted, fix=FIX)


STEPS: Mapping[str, Callable[[Any, int, Path], ImageSettings]] = {
    "ConvNextImageProcessor": _convnext,
    "EfficientNetImageProcessor": _efficientnet,
    "MobileNetV2ImageProcessor": _steps,
}
"""Processors with steps of their own, which are those of ImageSettings all the same."""
