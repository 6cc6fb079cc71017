"""Tiny vision models with an image processor, and images that tell processors apart."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from optimizer.model.checkpoint.model import choose_auto_class
from optimizer.recipe.schema import Recipe
from tests.conftest import heavy_tailed

SIDE = 32
METRICS = {
    "detr": "agreement",
    "table-transformer": "agreement",
    "yolos": "agreement",
    "segformer": "agreement",
    "mask2former": "agreement",
}
LABELS = ("cat", "dog", "bird")
TASKS = {  # of other kinds: image-classification
    "detr": "object-detection",
    "table-transformer": "object-detection",
    "yolos": "object-detection",
    "segformer": "image-segmentation",
    "mask2former": "universal-segmentation",
    "dpt": "depth-estimation",
    "depth_anything": "depth-estimation",
    "vitpose": "keypoint-detection",
}
KEYPOINTS = tuple(f"joint {i}" for i in range(17))


OWN_CODE = Path(__file__).parents[1] / "calibration" / "efficientnet_lite.py"
STAGES = [[3, 1, 1, 6, 1], [3, 2, 2, 12, 1], [5, 2, 2, 16, 2]]


def config(kind: str, **changes: Any) -> Any:
    """A transformers config of width 32 with two blocks (of a ResNet two stages)."""
    from transformers import AutoConfig

    if kind == "efficientnet_lite":
        return efficientnet_lite(**changes)
    shape: dict[str, Any] = {
        "image_size": SIDE,
        "patch_size": 8,
        "hidden_size": 32,
        "num_attention_heads": 2,
    }
    shape |= {"num_hidden_layers": 2, "intermediate_size": 64}
    if kind == "resnet":
        shape = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
        shape["layer_type"] = "basic"
    if kind == "regnet":
        shape = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "x"}
        shape["groups_width"] = 1  # depthwise
    if kind == "mobilenet_v2":  # 17 blocks, however small
        shape = {"depth_multiplier": 0.1, "finegrained_output": False, "depth_divisible_by": 4}
        shape |= {"min_depth": 4, "expand_ratio": 2.0, "output_stride": 16}  # the last are dilated
    if kind == "efficientnet":  # a residual add without an expansion and one with it; both paddings
        shape = {
            "in_channels": [32, 16, 24],
            "out_channels": [16, 24, 40],
            "kernel_sizes": [3, 5, 3],
        }
        shape |= {"strides": [1, 2, 2], "expand_ratios": [1, 2, 3], "num_block_repeats": [2, 2, 1]}
        shape |= {"width_coefficient": 0.25, "depth_coefficient": 1.0, "hidden_dim": 320}
        shape |= {"depthwise_padding": [4], "num_hidden_layers": 20}
    if kind == "convnext":
        shape = {"hidden_sizes": [16, 32], "depths": [1, 2], "num_stages": 2, "patch_size": 4}
    if kind == "swin":  # 8 x 8 patches in windows of 4, then 4 x 4 in one
        shape = {"image_size": SIDE, "patch_size": 4, "embed_dim": 16, "depths": [2, 1]}
        shape |= {"num_heads": [2, 4], "window_size": 4, "mlp_ratio": 2.0}
    if kind == "yolos":  # wider than high, and not of the size that it is used at
        shape |= {"image_size": [SIDE, SIDE + 8], "num_detection_tokens": 6}
    if kind == "segformer":  # with and without a convolution before keys and values
        shape = {"depths": [1, 2], "hidden_sizes": [16, 32], "num_encoder_blocks": 2}
        shape |= {"num_attention_heads": [1, 2], "sr_ratios": [2, 1], "mlp_ratios": [2, 2]}
        shape |= {"patch_sizes": [7, 3], "strides": [4, 2], "decoder_hidden_size": 16}
    if kind in ("dpt", "depth_anything"):
        return depth(kind, shape, **changes)
    if kind == "vitpose":
        return pose(shape, **changes)
    if kind in ("detr", "table-transformer"):
        backbone = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
        backbone |= {"layer_type": "basic", "out_features": ["stage2"]}
        shape = {"backbone_config": AutoConfig.for_model("resnet", **backbone), "d_model": 32}
        shape |= {"num_queries": 6, "backbone": None, "use_timm_backbone": False}
        for part in ("encoder", "decoder"):
            shape |= {f"{part}_layers": 2, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 64}
    if kind == "mask2former":  # windows of 2 x 2 patches, of which odd numbers are padded
        backbone = {"image_size": SIDE, "patch_size": 4, "embed_dim": 16, "depths": [1] * 4}
        backbone |= {"num_heads": [2] * 4, "window_size": 2, "mlp_ratio": 2.0}
        backbone |= {"out_features": [f"stage{i}" for i in range(1, 5)]}
        shape = {"backbone_config": AutoConfig.for_model("swin", **backbone), "num_queries": 6}
        shape |= {"encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2}
        shape |= dict.fromkeys(("feature_size", "mask_feature_size", "hidden_dim"), 64)
        shape |= dict.fromkeys(("encoder_feedforward_dim", "dim_feedforward"), 64)
    if kind == "deit":  # without it transformers has the classifier of two heads
        shape["architectures"] = ["DeiTForImageClassification"]
    named = {"id2label": dict(enumerate(LABELS)), "label2id": {n: i for i, n in enumerate(LABELS)}}
    return AutoConfig.for_model(kind, **{**shape, **named, **changes})


def pose(shape: dict[str, Any], **changes: Any) -> Any:
    """A model of keypoints, of images that are higher than wide."""
    from transformers import AutoConfig

    own = {"image_size": [SIDE + 16, SIDE], "patch_size": [8, 8], "mlp_ratio": 2}
    own |= {"out_features": ["stage2"]}
    backbone = AutoConfig.for_model("vitpose_backbone", **{**shape, **own})
    named = {"id2label": dict(enumerate(KEYPOINTS)), "scale_factor": 2}
    return AutoConfig.for_model("vitpose", backbone_config=backbone, **{**named, **changes})


def depth(kind: str, shape: dict[str, Any], **changes: Any) -> Any:
    """A model of depths: a ViT, or a DINOv2 of which two hidden states are read."""
    from transformers import AutoConfig

    neck = {"neck_hidden_sizes": [8, 16], "reassemble_factors": [2, 0.5], "fusion_hidden_size": 8}
    if kind == "dpt":
        more = {**neck, "backbone_out_indices": [0, 1]}
        return AutoConfig.for_model(kind, **{**shape, **more, "is_hybrid": False, **changes})
    more = {"out_features": ["stage1", "stage2"], "reshape_hidden_states": False}
    backbone = AutoConfig.for_model("dinov2", **{**shape, **more})
    head = {"patch_size": 8, "reassemble_hidden_size": 32, "head_hidden_size": 8}
    return AutoConfig.for_model(kind, backbone_config=backbone, **neck, **head, **changes)


def efficientnet_lite(**changes: Any) -> Any:
    """Of the checkpoint's own code: a depthwise convolution of each kind, and one residual add."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    names = {"AutoConfig": "Config", "AutoModel": "Model"}
    names["AutoModelForImageClassification"] = "ForImageClassification"
    own = {auto: f"{OWN_CODE.stem}.EfficientNetLite{name}" for auto, name in names.items()}
    kind = get_class_from_dynamic_module(own["AutoConfig"], str(OWN_CODE.parent))
    shape = {"image_size": SIDE, "stem": 8, "stages": STAGES, "head": 24}
    labels = dict(enumerate(LABELS))
    named = {"id2label": labels, "label2id": {n: i for i, n in labels.items()}}
    made = kind(**{**shape, **named, **changes}, auto_map=own)
    made.name_or_path = str(OWN_CODE.parent)
    return made


def processor(name: str = "vit", **settings: Any) -> Any:
    """transformers' own, for Pillow."""
    from importlib import import_module

    module = import_module(f"transformers.models.{name}.image_processing_pil_{name}")
    (kind,) = (v for n, v in vars(module).items() if n.endswith("ImageProcessorPil"))
    return kind(**settings)


def write(folder: Path, kind: str = "vit", seed: int = 0, **changes: Any) -> Path:
    """A Hugging Face folder: a random heavy-tailed classifier, and its processor."""
    folder.mkdir(parents=True, exist_ok=True)
    own_code = kind == "efficientnet_lite"
    kept = 1.5 if kind == "efficientnet" else 1  # gates and swish halve what passes
    model = choose_auto_class(TASKS.get(kind, "image-classification"), kind).from_config(
        config(kind, **changes), trust_remote_code=own_code
    )
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            values = heavy_tailed(tuple(parameter.shape), seed * 1000 + i, 0.15)
            gain = parameter.ndim == 1 and name.endswith(("weight", "lambda1"))
            certain = ("class_labels_classifier.layers.2", "class_labels_classifier.weight")
            head = 8 if name.startswith(certain) else 1  # certain of its objects
            queries = ("query_position_embeddings.weight", "queries_features.weight")
            head = 20 if name.endswith(queries) else head  # unlike each
            head = 0.2 if "mask_embedder.2" in name else head  # masks of both signs
            parameter.copy_(values + kept if gain else head * values)
        for i, (name, buffer) in enumerate(model.named_buffers()):
            if name.endswith("running_mean"):
                buffer.copy_(heavy_tailed(tuple(buffer.shape), 500 + i, 0.1))
            if name.endswith("running_var"):
                buffer.copy_(0.5 + heavy_tailed(tuple(buffer.shape), 700 + i, 0.1).abs())
    model.save_pretrained(folder)
    if own_code:
        shutil.copy(OWN_CODE, folder)
        document = json.loads((folder / "config.json").read_text())
        auto_map = config(kind, **changes).auto_map
        (folder / "config.json").write_text(json.dumps({**document, "auto_map": auto_map}))
    own_processor(kind).save_pretrained(folder)
    return folder


def own_processor(kind: str) -> Any:
    """That of its published checkpoints, for images as small."""
    if kind in ("resnet", "regnet", "convnext"):
        return processor("convnext", size={"shortest_edge": SIDE})
    each = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3]}  # of a channel its own
    if kind == "efficientnet":  # of an odd size behind two convolutions of stride 2
        return processor(kind, size={"height": SIDE + 4, "width": SIDE + 4}, **each)
    if TASKS.get(kind) == "object-detection":
        name = "yolos" if kind == "yolos" else "detr"
        return processor(name, size={"height": SIDE, "width": SIDE + 16}, **each)
    if kind in ("segformer", "mask2former"):
        return processor(kind, size={"height": SIDE + 32, "width": SIDE + 32}, **each)
    if kind in ("dpt", "depth_anything"):
        return processor("dpt", size={"height": SIDE, "width": SIDE}, ensure_multiple_of=8, **each)
    if kind == "vitpose":
        return processor(kind, size={"height": SIDE + 16, "width": SIDE}, **each)
    if kind == "mobilenet_v2":  # of an odd size behind two convolutions of stride 2
        crop = {"height": SIDE + 4, "width": SIDE + 4}
        return processor(kind, size={"shortest_edge": SIDE + 8}, crop_size=crop, **each)
    return processor(size={"height": SIDE, "width": SIDE}, **each)


def recipe(folder: Path, kind: str, quantize: dict[str, Any], **changes: Any) -> Recipe:
    """Of a model that `write` makes there, and 16 pictures; with a budget that it keeps."""
    write(folder / kind, kind, **changes)
    for i in range(16):
        (folder / f"{i}.png").write_bytes(encoded(picture(35, 40, seed=100 + i)))
    rows: list[dict[str, Any]] = [{"image": f"{i}.png"} for i in range(16)]
    columns = {"image": "image"}
    if kind == "vitpose":  # one box, or two of which one is partly outside
        columns["keypoints"] = "poses"
        for i, row in enumerate(rows):
            boxes = [[3.5, 2, 20, 25], [-2, 10, 30, 40 - i]]
            row["poses"] = [{"bbox": box} for box in boxes[: 1 + i % 2]]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": "json", "files": ("rows.jsonl",), "columns": columns}
    made = Recipe.model_validate(
        {
            "name": f"tiny-{kind}",
            "model": {
                "source": str(folder / kind),
                "task": TASKS.get(kind, "image-classification"),
                "trust_remote_code": kind == "efficientnet_lite",
            },
            "calibrate": {"data": data, "samples": 16},
            "quantize": quantize,
            "targets": ({"runtime": "onnxruntime", "threads": 1},),
            "validate": {
                "data": data,
                "metric": METRICS.get(kind, "cosine"),
                "quantization_budget": 0.5,
            },
        }
    )
    assert made.calibrate is not None
    placed = made.calibrate.data.model_copy(update={"base": str(folder)})
    calibrate = made.calibrate.model_copy(update={"data": placed})
    return made.model_copy(update={"calibrate": calibrate})


def picture(height: int, width: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Blobs and edges at several scales, so that filters, shifts and channels show."""
    rng = np.random.default_rng(seed)
    channels = len(Image.new(mode, (1, 1)).getbands())
    coarse = rng.integers(0, 256, (4, 5, channels), dtype=np.uint8)
    coarse = np.asarray(
        [np.asarray(Image.fromarray(c).resize((width, height))) for c in np.moveaxis(coarse, -1, 0)]
    )
    fine = rng.integers(-40, 40, coarse.shape)
    values = np.moveaxis(np.clip(coarse + fine, 0, 255).astype(np.uint8), 0, -1)
    return (
        Image.fromarray(values[..., 0] if channels == 1 else values, mode=None)
        if mode in ("L", "RGB", "RGBA")
        else Image.merge(mode, [Image.fromarray(v) for v in np.moveaxis(values, -1, 0)])
    )


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file."""
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()
