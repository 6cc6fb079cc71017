"""Prepare the contract of an image model: its processor's settings and its shapes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from optimizer.foundation.errors import CheckpointError, RecipeError
from optimizer.foundation.reading import quote_error
from optimizer.harness.image_settings import ImageSettings
from optimizer.harness.inputs.boxes.boxed_image import BOXED_IMAGE
from optimizer.harness.inputs.image import ARRAY
from optimizer.load.config import image_processor
from optimizer.load.preparation import Described, Preparation
from optimizer.model.architectures.towers import TOWERS
from optimizer.store import Shapes

CLASS_TOKEN = "cls_token"  # transformers' name of the parameter at the first position


def convert(d: Described, out: Path) -> ImageSettings:
    """Read the settings of the checkpoint's image processor, all of which go to the contract.

    out: folder for the harness's files, unused because an image model has none
    """
    del out
    channels = int(getattr(d.config, "num_channels", 3))
    boxes = d.task.inputs is BOXED_IMAGE
    return image_processor.read_settings(d.files, channels, boxes)


def sections(d: Described, settings: ImageSettings) -> dict[str, Any]:
    """Build the contract's sections for image inputs: {"image": settings}; for feature extraction
    also "pooling": "cls" or "mean"."""
    values: dict[str, Any] = {"image": settings.to_json()}
    if "pooling" in d.task.sections:
        has_class_token = any(
            n.rpartition(".")[2] == CLASS_TOKEN for n, _ in d.model.named_parameters()
        )
        if d.section.pooling not in (None, "cls", "mean"):
            raise RecipeError(
                f"{d.section.pooling} was found", where="model.pooling", accepted="cls, mean"
            )
        one = d.config.model_type in TOWERS  # one position, the vector
        values["pooling"] = d.section.pooling or ("cls" if has_class_token or one else "mean")
    if "normalize" in d.task.sections:
        values["normalize"] = True
    return values


def count_positions(shapes: Shapes) -> int:
    """Count an encoder's positions per image, from the shape of its position embeddings,
    (1, positions, width); 0 without any."""
    return max((s[1] for s in shapes.values() if len(s) == 3 and s[0] == 1), default=0)


def inputs(
    d: Described, sections: Mapping[str, Any]
) -> dict[str, tuple[str, tuple[str | int, ...]]]:
    """Describe for the contract a model's inputs for images, {input: (dtype, axes)}: one array of
    images of a fixed size."""
    del d
    image = sections["image"]
    return {ARRAY: ("float32", ("batch", image["channels"], image["height"], image["width"]))}


def widths(d: Described, sections: Mapping[str, Any]) -> dict[str, int]:
    """Return for the contract {axis of the output: size} for an image of the processor's size.
    Raises CheckpointError for a model that does not take such an image, or whose output is not the
    task's."""
    expected = {d.task.output: d.task.axes, **d.task.beside}
    widths: dict[str, int] = {}
    for name, shape in _output_shapes(d, sections["image"], tuple(expected)).items():
        if len(shape) != len(expected[name]):
            raise CheckpointError(
                f"its {name} has the shape {list(shape)}",
                where=f"{d.files / 'config.json'}: model_type",
                accepted=f"[{', '.join(expected[name])}] for task {d.task.name}",
                fix="Use an encoder that outputs a vector for each patch, such as a ViT."
                if d.task.headless
                else "Use a model of another architecture.",
            )
        widths |= dict(zip(expected[name][1:], shape[1:], strict=True))
    _check_classes(d, widths.get("classes"))
    return widths


def _check_classes(d: Described, classes: int | None) -> None:
    """Raise CheckpointError for a model whose classes are not its labels, of objects perhaps with
    one more for "no object"."""
    labels = len(d.config.id2label)
    accepted = (labels, labels + 1) if d.task.beside else (labels,)
    if classes is not None and classes not in accepted:
        raise CheckpointError(
            f"the model has {classes} classes and {labels} labels",
            where=f"{d.files / 'config.json'}: id2label",
            accepted=" or ".join(map(str, accepted)) + " classes",
            fix="Name each class of the model in id2label.",
        )


def _output_shapes(
    d: Described, image: Mapping[str, Any], names: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Return for the contract {output: shape} for one image, from a run on the meta device, of
    tensors in whose values transformers does not look."""
    model = copy.deepcopy(d.model).to("meta")
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            shape = 1, image["channels"], image["height"], image["width"]
            pixels = torch.empty(shape, device="meta")
            result = model(**{ARRAY: pixels}, return_dict=True)
        return {name: tuple(map(int, result[name].shape)) for name in names}
    except Exception as e:  # each architecture refuses differently
        raise CheckpointError(
            f"the processor makes images of {image['height']} x {image['width']}, and the model "
            f"does not take them ({quote_error(e)})",
            where=f"{d.files / 'config.json'}, {d.files / image_processor.FILES[0]}",
            fix="Use the processor that the model was trained with.",
        ) from e


IMAGES = Preparation(
    noun="image model",
    first=ARRAY,
    convert=convert,
    sections=sections,
    inputs=inputs,
    widths=widths,
)
