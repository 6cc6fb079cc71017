"""Read the contract's `image` section from the checkpoint's image processor.

transformers has each processor for Pillow and numpy (<name>Pil) and for torchvision. The first is
used here whichever preprocessor_config.json names, as in transformers without torchvision. All
processors share the steps of one base class, except those in STEPS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import CheckpointError, MachineError
from optimizer.foundation.reading import reading
from optimizer.harness.errors import HarnessError
from optimizer.harness.image_settings import FILTERS, ImageSettings
from optimizer.harness.inputs import image_file
from optimizer.harness.inputs.boxes.warp import UNIT
from optimizer.model.checkpoint.checkpoint import read_json

FILES = ("preprocessor_config.json", "processor_config.json")
STEP_METHODS = ("process_image", "resize", "center_crop", "rescale", "normalize", "_preprocess")
"""Methods of the base class; a subclass that overrides one does other steps than those here."""
WARPED_FROM = 384  # ConvNext's processor resizes to sides from here on without cropping
REDUCED = "do_reduce_labels"  # of masks, not of images
FIX = (
    "Use the processor that the model was trained with; its steps must be resize, centre crop, "
    "rescale and normalize."
)


def read_settings(files: Path, channels: int, boxes: bool = False) -> ImageSettings:
    """Read the image settings of the processor in the folder `files`. Raises CheckpointError for a
    processor with other steps, or one that makes images of different sizes.

    channels: the model's
    boxes: True for a task that reads boxes of an image
    """
    where = next((files / name for name in FILES if (files / name).is_file()), None)
    if where is None:
        raise CheckpointError(
            "no image processor, so the preparation of images is not known",
            where=str(files),
            accepted=FILES[0],
            fix="Copy it from the model that this one was fine-tuned from.",
        )
    processor = open_processor(files)
    steps = STEPS.get(_name(processor))
    if steps is None and _overrides_steps(processor):
        raise CheckpointError(
            f"{_name(processor)} prepares images with steps of its own",
            where=f"{where}: image_processor_type",
            accepted=f"{', '.join(STEPS)}, and processors that only set values",
            fix=FIX,
        )
    if (steps is _boxed) != boxes:
        does = "reads no boxes" if boxes else "makes an image of each box"
        raise CheckpointError(
            f"{_name(processor)} {does}",
            where=f"{where}: image_processor_type",
            accepted="VitPoseImageProcessor for task keypoint-detection, others for other tasks",
            fix="Use the processor that the model was trained with.",
        )
    unused = () if steps is _warped else ("do_pad", REDUCED)  # it pads nothing
    for name in ("do_flip_channel_order", *unused):
        if getattr(processor, name, None):
            raise _uncovered(where, name, "true was found", "false")
    try:
        return (steps or _steps)(processor, channels, where)
    except HarnessError as e:
        raise CheckpointError(
            f"{e.problem} for {e.where}", where=str(where), accepted=e.accepted, fix=FIX
        ) from None


def open_processor(files: Path) -> Any:
    """Open the image processor of a source's folder `files`, as transformers computes it with
    Pillow and numpy. Raises CheckpointError for damaged files, MachineError without Pillow or for
    torchvision only.
    """
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


def _overrides_steps(processor: Any) -> bool:
    from transformers.image_processing_backends import PilBackend

    return any(getattr(type(processor), n) is not getattr(PilBackend, n) for n in STEP_METHODS)


def _steps(processor: Any, channels: int, where: Path) -> ImageSettings:
    """Read from the source's image processor the settings of the steps that most image processors
    share, where they are switched on: resize, centre crop, rescale, normalize.
    """
    resize = _size(processor, "size", where) if processor.do_resize else None
    crop = None
    if getattr(processor, "do_center_crop", None):
        sides = _size(processor, "crop_size", where)
        if sorted(sides) != ["height", "width"]:
            raise _uncovered(where, "crop_size", f"{sides} was found", "height and width")
        crop = sides["height"], sides["width"]
    if crop is None and "height" not in (resize or {}):
        what = "images keep their proportions, so their sizes would differ"
        accepted = "height and width, or a centre crop"
        raise _uncovered(where, "size", what, accepted)
    return _settings(processor, channels, resize, crop)


def _convnext(processor: Any, channels: int, where: Path) -> ImageSettings:
    """Read the settings of ConvNext's image processor for the contract: for sizes below WARPED_FROM
    the shorter side becomes size / crop_pct and the centre is cropped."""
    if getattr(processor, "do_center_crop", None):
        raise _uncovered(where, "do_center_crop", "true was found, a second crop", "false")
    if not processor.do_resize:
        raise _uncovered(where, "do_resize", "false was found", "true")
    side = _size(processor, "size", where).get("shortest_edge")
    if side is None:
        raise _uncovered(where, "size", "shortest_edge is missing", "shortest_edge")
    if side >= WARPED_FROM:
        return _settings(processor, channels, {"height": side, "width": side}, None)
    resize = {"shortest_edge": int(side / processor.crop_pct)}
    return _settings(processor, channels, resize, (side, side))


def _efficientnet(processor: Any, channels: int, where: Path) -> ImageSettings:
    """Return the settings of EfficientNet's image processor: the common ones, where rescale_offset
    subtracts 1 and include_top divides by std once more."""
    plain = _steps(processor, channels, where)
    document = {**vars(plain), "offset": float(bool(processor.rescale_offset))}
    if processor.include_top:
        document["divide"] = _per_channel(processor.image_std, channels)
    return ImageSettings(**document)


def _warped(processor: Any, channels: int, where: Path) -> ImageSettings:
    """Read the settings of an image processor that resizes without a crop, for the contract.
    Refuses one whose sizes depend on the image: a batch would pad the smaller ones, and a graph
    here has one size.
    """
    size = {k: v for k, v in dict(getattr(processor, "size", None) or {}).items() if v}
    sides = int(size.get("height") or 0), int(size.get("width") or 0)
    varying = size if not (processor.do_resize and all(sides)) else None
    for name in ("ensure_multiple_of", "size_divisor"):
        step = getattr(processor, name, None) or 1
        if any(side % step for side in sides):
            varying = {**size, name: step}
    if getattr(processor, "keep_aspect_ratio", False):
        varying = {**size, "keep_aspect_ratio": True}
    padded = getattr(processor, "pad_size", None)
    if getattr(processor, "do_pad", None) and padded:
        varying = {**size, "pad_size": dict(padded)}
    if varying is not None or not processor.do_resize:
        raise CheckpointError(
            f"{varying}, do_resize {bool(processor.do_resize)}: sizes depend on the image",
            where=f"{where}: size",
            accepted="a resize to one height and width, because a graph here has one size",
            fix='In a copy of the folder set "size": {"height": ..., "width": ...} near the size '
            'of its training, "do_resize": true, and where it is there "keep_aspect_ratio": false; '
            "transformers' pipeline then reads images in that size too. Check its accuracy.",
        )
    return _settings(processor, channels, {"height": sides[0], "width": sides[1]}, None)


def _boxed(processor: Any, channels: int, where: Path) -> ImageSettings:
    """Read the settings of VitPose's image processor for the contract, which warps each box to one
    size (inputs/boxes/warp.py)."""
    if find_spec("scipy") is None:
        raise MachineError(
            "transformers' image processor of VitPose needs scipy",
            where=str(where),
            fix="Install it: pip install scipy.",
        )
    if not processor.do_affine_transform:
        raise _uncovered(where, "do_affine_transform", "false was found", "true")
    if processor.normalize_factor != UNIT:
        problem = f"{processor.normalize_factor} was found"
        accepted = f"{UNIT:g}, by which keypoints are read"
        raise _uncovered(where, "normalize_factor", problem, accepted)
    size = _size(processor, "size", where)
    if sorted(size) != ["height", "width"]:
        raise _uncovered(where, "size", f"{size} was found", "height and width")
    processor.resample = FILTERS.index("bilinear")
    return _settings(processor, channels, size, None)


def _settings(
    processor: Any,
    channels: int,
    resize: Mapping[str, int] | None,
    crop: tuple[int, int] | None,
) -> ImageSettings:
    """Build the contract's ImageSettings from a processor's common options and its sizes of resize
    and crop."""
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
    "VitPoseImageProcessor": _boxed,
    "MobileNetV2ImageProcessor": _steps,
    **dict.fromkeys(
        (
            "ConditionalDetrImageProcessor",
            "DPTImageProcessor",
            "DeformableDetrImageProcessor",
            "DetrImageProcessor",
            "Mask2FormerImageProcessor",
            "RTDetrImageProcessor",
            "SegformerImageProcessor",
            "YolosImageProcessor",
        ),
        _warped,
    ),
}
"""Processors that override steps, but whose steps ImageSettings can express."""
