"""EfficientNet-Lite as a transformers model: inverted residuals with ReLU6 and without squeeze and
excitation (https://github.com/tensorflow/tpu, efficientnet/lite), which transformers does not have.

make_efficientnet_lite0.py copies this file beside the checkpoint as its own code. The function is
that of timm's `tf_efficientnet_lite0`: convolutions of stride 2 are padded as TensorFlow pads
images of an even size, one row and column more below and on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndNoAttention,
    ImageClassifierOutputWithNoAttention,
)

EPSILON = 1e-3  # of every norm

# (kernel, stride, expansion, channels, blocks) of each stage
LITE0 = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)


class EfficientNetLiteConfig(PretrainedConfig):
    """stem, head: channels before the first and behind the last stage. stages: rows as LITE0."""

    model_type = "efficientnet_lite"

    def __init__(
        self,
        num_channels: int = 3,
        image_size: int = 224,
        stem: int = 32,
        stages: Sequence[Sequence[int]] = LITE0,
        head: int = 1280,
        **kwargs: Any,
    ) -> None:
        self.num_channels, self.image_size = num_channels, image_size
        self.stem, self.stages, self.head = stem, [list(stage) for stage in stages], head
        super().__init__(**kwargs)


class Convolution(nn.Module):
    """A convolution, its norm, and ReLU6 where there is an activation. pooled: what it gives passes
    through an identity, so that what is pooled can be quantized."""

    def __init__(
        self,
        channels: tuple[int, int],
        kernel: int = 1,
        stride: int = 1,
        groups: int = 1,
        activation: bool = True,
        pooled: bool = False,
    ) -> None:
        super().__init__()
        before, after = (kernel - stride) // 2, (kernel - stride + 1) // 2
        self.padding = nn.ZeroPad2d((before, after, before, after))
        self.convolution = nn.Conv2d(*channels, kernel, stride, groups=groups, bias=False)
        self.normalization = nn.BatchNorm2d(channels[1], EPSILON)
        self.activation = nn.ReLU6() if activation else None
        self.pooled = nn.Identity() if pooled else None

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.normalization(self.convolution(self.padding(hidden)))
        hidden = hidden if self.activation is None else self.activation(hidden)
        return hidden if self.pooled is None else self.pooled(hidden)


class Block(nn.Module):
    """expand (1x1), depthwise, project (1x1); where the shape is the same, what was read is added:
    then both operands pass through an identity, so that each can be quantized."""

    def __init__(self, channels: tuple[int, int], kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = channels[0] * expansion
        adds = stride == 1 and channels[0] == channels[1]
        self.expand = Convolution((channels[0], inner)) if expansion > 1 else None
        self.depthwise = Convolution((inner, inner), kernel, stride, groups=inner)
        self.project = Convolution((inner, channels[1]), activation=False)
        self.residual = nn.Identity() if adds else None
        self.shortcut = nn.Identity() if adds else None

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden if self.expand is None else self.expand(hidden)
        result = self.project(self.depthwise(wide))
        if self.residual is None or self.shortcut is None:
            return result
        return self.residual(result) + self.shortcut(hidden)


class Single(nn.Module):
    """A stage of one convolution: the first and the last."""

    def __init__(self, convolution: Convolution) -> None:
        super().__init__()
        self.layers = nn.ModuleList([convolution])

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layers[0](hidden)


class Stage(nn.Module):
    """Blocks, of which the first changes the size."""

    def __init__(
        self, channels: tuple[int, int], kernel: int, stride: int, expansion: int, blocks: int
    ) -> None:
        super().__init__()
        first = Block(channels, kernel, stride, expansion)
        same = (channels[1], channels[1])
        others = [Block(same, kernel, 1, expansion) for _ in range(blocks - 1)]
        self.layers = nn.ModuleList([first, *others])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class EfficientNetLitePreTrainedModel(PreTrainedModel):
    config_class = EfficientNetLiteConfig
    base_model_prefix = "efficientnet_lite"
    main_input_name = "pixel_values"


class EfficientNetLiteModel(EfficientNetLitePreTrainedModel):
    """last_hidden_state (images, channels, rows, columns); pooler_output: its mean over places."""

    def __init__(self, config: EfficientNetLiteConfig) -> None:
        super().__init__(config)
        stages: list[nn.Module] = [Single(Convolution((config.num_channels, config.stem), 3, 2))]
        width = config.stem
        for kernel, stride, expansion, channels, blocks in config.stages:
            stages.append(Stage((width, channels), kernel, stride, expansion, blocks))
            width = channels
        stages.append(Single(Convolution((width, config.head), pooled=True)))
        self.stages = nn.ModuleList(stages)
        self.pooler = nn.AdaptiveAvgPool2d((1, 1))
        self.post_init()

    def forward(self, pixel_values: Tensor, **_: Any) -> BaseModelOutputWithPoolingAndNoAttention:
        hidden = pixel_values
        for stage in self.stages:
            hidden = stage(hidden)
        pooled = self.pooler(hidden)
        return BaseModelOutputWithPoolingAndNoAttention(
            last_hidden_state=hidden, pooler_output=pooled
        )


class EfficientNetLiteForImageClassification(EfficientNetLitePreTrainedModel):
    """logits (images, labels)."""

    def __init__(self, config: EfficientNetLiteConfig) -> None:
        super().__init__(config)
        self.efficientnet_lite = EfficientNetLiteModel(config)
        self.classifier = nn.Linear(config.head, config.num_labels)
        self.post_init()

    def forward(self, pixel_values: Tensor, **_: Any) -> ImageClassifierOutputWithNoAttention:
        features = self.efficientnet_lite(pixel_values).pooler_output.flatten(1)
        return ImageClassifierOutputWithNoAttention(logits=self.classifier(features))
