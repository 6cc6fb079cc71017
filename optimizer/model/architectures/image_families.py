"""Table of facts about image architectures; families.py explains the names."""

from __future__ import annotations

from dataclasses import replace

from optimizer.harness.inputs.image import IMAGE
from optimizer.harness.inputs.text import TEXT
from optimizer.model.architectures.family_record import Family
from optimizer.model.architectures.linear_blocks import SmoothPair
from optimizer.model.architectures.residual_blocks import (
    BatchNorms,
    Chain,
    ConvolutionAndNorm,
    Summand,
)

_QKV = ("query", "key", "value")

_VIT = Family(
    model_type="vit",
    base="vit",
    blocks="layers",
    embeddings="embeddings",
    linears=(*(f"attention.{n}_proj" for n in "qkvo"), "mlp.fc1", "mlp.fc2"),
    smooth=(
        SmoothPair("layernorm_before", tuple(f"attention.{n}_proj" for n in "qkv")),
        SmoothPair("attention.v_proj", ("attention.o_proj",)),
        SmoothPair("layernorm_after", ("mlp.fc1",)),
    ),
    inputs=IMAGE.name,
    stored_as=(
        (".encoder.layer.", ".layers."),
        *((f".attention.attention.{n}", f".attention.{n[0]}_proj") for n in _QKV),
        (".attention.output.dense", ".attention.o_proj"),
        (".intermediate.dense", ".mlp.fc1"),
        (".output.dense", ".mlp.fc2"),
    ),
)
_DINOV2 = replace(
    _VIT,
    model_type="dinov2",
    base="dinov2",
    blocks="encoder.layer",
    smooth=(
        SmoothPair("norm1", tuple(f"attention.{n}_proj" for n in "qkv")),
        SmoothPair("attention.v_proj", ("attention.o_proj",)),
        SmoothPair("norm2", ("mlp.fc1",)),
    ),
    stored_as=_VIT.stored_as[1:5],
)

_CLIP = Family(
    model_type="clip_vision_model",
    base="vision_model",
    blocks="vision_model.encoder.layers",
    embeddings="vision_model.embeddings",
    linears=(*(f"self_attn.{n}_proj" for n in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2"),
    smooth=(
        SmoothPair("layer_norm1", tuple(f"self_attn.{n}_proj" for n in "qkv")),
        SmoothPair("self_attn.v_proj", ("self_attn.out_proj",)),
        SmoothPair("layer_norm2", ("mlp.fc1",)),
    ),
    inputs=IMAGE.name,
)

_RESNET = Family(
    model_type="resnet",
    base="resnet",
    blocks="encoder.stages.*.layers",
    embeddings="embedder",
    linears=(*(f"layer.{i}.convolution" for i in range(4)), "shortcut.convolution"),
    smooth=(),
    inputs=IMAGE.name,
    any_size=True,
    batch_norms=BatchNorms(),
    # a block's last convolution has no activation; a shortcut is the input, or a convolution whose
    # norm is folded
    summands=(
        *(Summand(f"layer.{i}.activation", f"layer.{i}.convolution") for i in (1, 2, 3)),
        Summand("shortcut", "layer.0.convolution", input=True),
        Summand("shortcut.normalization", "shortcut.convolution"),
    ),
)

# The code of calibration/efficientnet_lite.py. Blocks of the first and last stage are one
# convolution; other blocks have a residual add if they preserve the shape.
_EFFICIENTNET_LITE = Family(
    model_type="efficientnet_lite",
    base="efficientnet_lite",
    blocks="stages.*.layers",
    embeddings="stages",
    linears=(
        "convolution",
        *(f"{part}.convolution" for part in ("expand", "depthwise", "project")),
    ),
    smooth=(),
    inputs=IMAGE.name,
    any_size=True,
    batch_norms=BatchNorms((ConvolutionAndNorm(padding="padding"),), epsilon=1e-3),
    summands=(
        Summand("residual", "project.convolution"),
        Summand("shortcut", "expand.convolution", input=True),
        Summand("pooled", "convolution", pooled=True),
    ),
)

# The stem is a chain of two or three convolutions, the blocks are inverted residuals, and a last
# convolution precedes pooling.
_INVERTED = ("expand_1x1", "conv_3x3", "reduce_1x1")
_MOBILENET_V2 = Family(
    model_type="mobilenet_v2",
    base="mobilenet_v2",
    blocks="{conv_stem,layer,conv_1x1}",
    embeddings="conv_stem",
    linears=(
        "convolution",
        *(f"{part}.convolution" for part in ("first_conv", *_INVERTED)),
    ),
    smooth=(),
    inputs=IMAGE.name,
    any_size=True,
    batch_norms=BatchNorms(epsilon=1e-3, epsilon_of="layer_norm_eps", same="tf_padding"),
    chains=(
        Chain("MobileNetV2ConvLayer", ("convolution", "normalization", "activation")),
        Chain("MobileNetV2InvertedResidual", _INVERTED, adds="use_residual"),
    ),
    summands=(
        Summand("residual", "reduce_1x1.convolution"),
        Summand("shortcut", "expand_1x1.convolution", input=True),
        Summand("result", "convolution", pooled=True),
    ),
)

# Swish and the gates on channels (squeeze_excite) are computed in float between integers. The top
# convolution is outside all blocks and stays float, but its input is quantized, because otherwise
# the convolution before it would output floats.
_PARTS = ("expansion", "depthwise_conv", "squeeze_excite", "projection")
_DEPTHWISE = "depthwise_conv.depthwise_conv"
_EFFICIENTNET = Family(
    model_type="efficientnet",
    base="efficientnet",
    blocks="{embeddings,encoder.blocks}",
    embeddings="embeddings",
    linears=("convolution", "expansion.expand_conv", _DEPTHWISE, "projection.project_conv"),
    smooth=(),
    inputs=IMAGE.name,
    any_size=True,
    batch_norms=BatchNorms(
        (
            ConvolutionAndNorm("convolution", "batchnorm", "padding"),
            ConvolutionAndNorm("expand_conv", "expand_bn"),
            ConvolutionAndNorm("depthwise_conv", "depthwise_norm", "depthwise_conv_pad"),
            ConvolutionAndNorm("project_conv", "project_bn"),
            ConvolutionAndNorm("top_conv", "top_bn"),
        ),
        epsilon=1e-3,
        epsilon_of="batch_norm_eps",
    ),
    global_pool="pooler",
    chains=(
        Chain("EfficientNetBlock", _PARTS, adds="projection.apply_dropout"),
        Chain("EfficientNetFinalBlockLayer", ("project_conv", "project_bn")),
    ),
    summands=(
        Summand("batchnorm", "convolution", whole=True),
        Summand("expansion.expand_bn", "expansion.expand_conv", whole=True),
        Summand("depthwise_conv.depthwise_norm", _DEPTHWISE, whole=True),
        Summand("residual", "projection.project_conv"),
        Summand("shortcut", "expansion.expand_conv", input=True),
        Summand("shortcut", _DEPTHWISE, input=True),
        Summand("result", "projection.project_conv", whole=True, last=True),
    ),
)

# Linear layers on positions (rows, columns, channels). A LayerNorm reads the depthwise convolution
# and the downsampled image, so both are float, and no sums of integers are needed.
_CONVNEXT = Family(
    model_type="convnext",
    base="convnext",
    blocks="encoder.stages.*.{downsampling_layer,layers}",
    embeddings="embeddings",
    linears=("pwconv1", "pwconv2"),
    smooth=(SmoothPair("layernorm", ("pwconv1",)),),
    inputs=IMAGE.name,
    any_size=True,
)

# Windows of positions, shifted in every other block; between stages four positions become one.
_SWIN = Family(
    model_type="swin",
    base="swin",
    blocks="encoder.layers.*.{blocks,downsample}",
    embeddings="embeddings",
    linears=(*_VIT.linears, "reduction"),
    smooth=(*_VIT.smooth, SmoothPair("norm", ("reduction",))),
    inputs=IMAGE.name,
    any_size=True,
    stored_as=(
        *((f".attention.self.{n}", f".attention.{n[0]}_proj") for n in _QKV),
        (".attention.self.", ".attention.relative_position_bias."),
        *_VIT.stored_as[-3:],
    ),
)

CLIP_TEXT = replace(
    _CLIP,
    model_type="clip_text_model",
    base="text_model",
    blocks="text_model.encoder.layers",
    embeddings="text_model.embeddings",
    inputs=TEXT.name,
)
"""The side of texts of a pair, which has the blocks of the side of images."""
SIGLIP_TEXT = replace(
    CLIP_TEXT,
    model_type="siglip_text_model",
    blocks="encoder.layers",
    embeddings="embeddings",
)

# The names of ViT before they were shortened; heads of objects and depths lie outside the blocks.
_DPT = replace(
    _VIT,
    model_type="dpt",
    base="dpt",
    blocks="encoder.layer",
    linears=(
        *(f"attention.attention.{n}" for n in _QKV),
        "attention.output.dense",
        "intermediate.dense",
        "output.dense",
    ),
    smooth=(
        SmoothPair("layernorm_before", tuple(f"attention.attention.{n}" for n in _QKV)),
        SmoothPair("attention.attention.value", ("attention.output.dense",)),
        SmoothPair("layernorm_after", ("intermediate.dense",)),
    ),
    stored_as=(),
    any_size=True,
    reads_blocks=True,
)

# The head reads one stage of the backbone, in released models the last, through a norm.
_VITPOSE = replace(
    _DPT,
    model_type="vitpose",
    base="backbone",
    linears=(
        *(f"attention.attention.{n}" for n in _QKV),
        "attention.output.dense",
        "mlp.fc1",
        "mlp.fc2",
    ),
    smooth=(*_DPT.smooth[:2], SmoothPair("layernorm_after", ("mlp.fc1",))),
)

# A stage is a block: it ends with an image that the next one reads in patches. Keys and values read
# the norm through a convolution, so that norm has no pair. The longest stage of a released model
# (B5) has 40 layers.
_LAYERS = tuple(f"blocks.{i}" for i in range(64))
_SEGFORMER = Family(
    model_type="segformer",
    base="segformer",
    blocks="{stages}",
    embeddings="stages",
    linears=tuple(f"{layer}.{linear}" for layer in _LAYERS for linear in _VIT.linears),
    smooth=tuple(
        pair
        for layer in _LAYERS
        for pair in (
            SmoothPair(f"{layer}.attention.v_proj", (f"{layer}.attention.o_proj",)),
            SmoothPair(f"{layer}.layernorm_after", (f"{layer}.mlp.fc1",)),
        )
    ),
    inputs=IMAGE.name,
    any_size=True,
    batch_norms=BatchNorms((ConvolutionAndNorm("linear_fuse", "batch_norm"),)),
)

# The decoder begins with zeros and not with what the encoder gives, so the model without its heads
# is one block; its first values are those of zeros, and have no range. Released models have 6
# layers of each kind, and a ResNet of 50 or 101 layers; the longest stage of one of 152 has 36.
_ZEROS = "decoder.layers.0.self_attn.v_proj"
_BACKBONE = tuple(
    f"backbone.model.encoder.stages.{i}.layers.{k}" for i in range(4) for k in range(36)
)
_DETR = Family(
    model_type="detr",
    base="",
    blocks="{model}",
    embeddings="model",
    linears=(
        *(f"{layer}.{name}" for layer in _BACKBONE for name in _RESNET.linears),
        *(
            name
            for stack, attentions in (("encoder", ("self",)), ("decoder", ("self", "encoder")))
            for layer in (f"{stack}.layers.{i}" for i in range(16))
            for name in (
                *(f"{layer}.{a}_attn.{n}_proj" for a in attentions for n in "qkvo"),
                f"{layer}.mlp.fc1",
                f"{layer}.mlp.fc2",
            )
            if name != _ZEROS
        ),
    ),
    smooth=(),
    inputs=IMAGE.name,
    any_size=True,
    batch_norms=BatchNorms(),
    summands=tuple(
        replace(s, module=f"{layer}.{s.module}", convolution=f"{layer}.{s.convolution}")
        for layer in _BACKBONE
        for s in _RESNET.summands
    ),
    left_float=(
        (f"model.{_ZEROS}", "it reads zeros"),
        (
            "model.backbone.model.embedder.embedder.convolution",
            "it reads the image, and its error reaches every layer",
        ),
        ("model.input_projection", "the encoder reads it in float, so that no integers follow"),
    ),
)

# Masks and queries are computed from all stages, so the model without its head of classes is one
# block. Released backbones have up to 18 layers in a stage, the pixel decoder has 6 of its encoder
# and the decoder 9, whose torch MultiheadAttention reads its weights without calling a layer.
_PIXELS = "pixel_level_module"
_SWIN_LAYERS = tuple(f"{_PIXELS}.encoder.swin.encoder.layers.{i}" for i in range(4))
_MASK2FORMER = Family(
    model_type="mask2former",
    base="",
    blocks="{model}",
    embeddings="model",
    linears=(
        *(
            f"{stage}.{name}"
            for stage in _SWIN_LAYERS
            for name in (
                *(f"blocks.{i}.{linear}" for i in range(24) for linear in _VIT.linears),
                "downsample.reduction",
            )
        ),
        *(
            f"{_PIXELS}.decoder.encoder.layers.{i}.{name}"
            for i in range(12)
            for name in (
                *(f"self_attn.{n}" for n in ("attention_weights", "value_proj", "output_proj")),
                "fc1",
                "fc2",
            )
        ),
        *(
            f"transformer_module.decoder.layers.{i}.{name}"
            for i in range(16)
            for name in (*(f"self_attn.{n}_proj" for n in ("q", "k", "v", "out")), "fc1", "fc2")
        ),
    ),
    smooth=(),
    inputs=IMAGE.name,
    any_size=True,
    per_layer="model.transformer_module:intermediate_hidden_states",
    # transformers calls these parts through lists, not by their names
    chains=(
        Chain("Mask2FormerMLPPredictionHead", ("0", "1", "2")),
        Chain("Mask2FormerPredictionBlock", ("0", "1")),
    ),
    stored_as=(
        *_SWIN.stored_as,
        (f"{_PIXELS}.encoder.embeddings.", f"{_PIXELS}.encoder.swin.embeddings."),
        (f"{_PIXELS}.encoder.encoder.", f"{_PIXELS}.encoder.swin.encoder."),
    ),
    left_float=(
        (
            f"model.{_PIXELS}.encoder.swin.embeddings.patch_embeddings.projection",
            "it reads the image, and its error reaches every layer",
        ),
        *(
            (f"model.{_PIXELS}.decoder.{name}.0", "a GroupNorm reads it in float")
            for name in ("adapter_1", "layer_1", *(f"input_projections.{i}" for i in range(3)))
        ),
        *(
            (
                f"model.{_PIXELS}.decoder.encoder.layers.{i}.self_attn.sampling_offsets",
                "it gives the places that attention reads",
            )
            for i in range(12)
        ),
        *(
            (
                f"model.transformer_module.decoder.layers.{i}.cross_attn.out_proj",
                "torch's MultiheadAttention reads its weight without calling it",
            )
            for i in range(16)
        ),
        *(
            (f"model.{name}", "a mask is a product with it")
            for name in (
                f"{_PIXELS}.decoder.mask_projection",
                *(
                    f"transformer_module.decoder.mask_predictor.mask_embedder.{i}.0"
                    for i in range(3)
                ),
            )
        ),
    ),
)

IMAGE_FAMILIES = (
    _VIT,
    replace(_VIT, model_type="deit", base="deit"),
    _DINOV2,
    replace(_DINOV2, model_type="dinov2_with_registers", base="dinov2_with_registers"),
    _RESNET,
    replace(_RESNET, model_type="regnet", base="regnet"),
    _EFFICIENTNET_LITE,
    _MOBILENET_V2,
    _EFFICIENTNET,
    _CONVNEXT,
    _SWIN,
    _CLIP,
    replace(
        _CLIP, model_type="siglip_vision_model", blocks="encoder.layers", embeddings="embeddings"
    ),
    _DPT,
    replace(_DPT, model_type="yolos", base="vit", added_between=True, reads_blocks=False),
    replace(
        _DINOV2, model_type="depth_anything", base="backbone", any_size=True, reads_blocks=True
    ),
    _VITPOSE,
    _SEGFORMER,
    _MASK2FORMER,
    _DETR,
    replace(
        _DETR,
        model_type="table-transformer",
        linears=tuple(n.replace("mlp.", "").replace(".o_proj", ".out_proj") for n in _DETR.linears),
    ),
)
"""Architectures that take images."""
