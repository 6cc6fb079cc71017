"""Table of the towers, the sides of models that compare images with texts.

transformers' model of a pair has the tensors of both sides under the names that the class of each
side gives them, so that a tower loads from a pair's folder as from its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optimizer.harness.inputs.image import IMAGE
from optimizer.harness.inputs.text import TEXT


@dataclass(frozen=True)
class Tower:
    """One side of a pair.

    pair: model_type of the pair
    side: part of the pair's config: config.vision_config or config.text_config
    inputs: kind of input
    model: transformers' class
    output: its output that holds a vector per input
    size: the config's name for the numbers of that vector
    projection: layer behind the hidden states, whose last token is the vector; "" where the class
        pools itself
    prefixes: beginnings of the names of its tensors in the pair's files
    padded_to: tokens to which each text is padded, with padding that the model reads as it reads
        other tokens, because it is trained without a mask; None for a text of any length
    sigmoid: True if the pair's score is a sigmoid per label, False for a softmax over labels
    """

    pair: str
    side: str
    inputs: str
    model: str
    output: str
    size: str
    prefixes: tuple[str, ...]
    projection: str = ""
    padded_to: int | None = None
    sigmoid: bool = False

    def width(self, config: Any) -> int:
        """Numbers of the vector of a tower with this config."""
        return int(getattr(config, self.size))


TOWERS: Mapping[str, Tower] = {
    "clip_vision_model": Tower(
        pair="clip",
        side="vision_config",
        inputs=IMAGE.name,
        model="CLIPVisionModelWithProjection",
        output="image_embeds",
        size="projection_dim",
        prefixes=("vision_model.", "visual_projection."),
    ),
    "clip_text_model": Tower(
        pair="clip",
        side="text_config",
        inputs=TEXT.name,
        model="CLIPTextModelWithProjection",
        output="text_embeds",
        size="projection_dim",
        projection="text_projection",
        prefixes=("text_model.", "text_projection."),
    ),
    "siglip_vision_model": Tower(
        pair="siglip",
        side="vision_config",
        inputs=IMAGE.name,
        model="SiglipVisionModel",
        output="pooler_output",
        size="hidden_size",
        prefixes=("vision_model.",),
        sigmoid=True,
    ),
    "siglip_text_model": Tower(
        pair="siglip",
        side="text_config",
        inputs=TEXT.name,
        model="SiglipTextModel",
        output="pooler_output",
        size="projection_size",
        projection="head",
        padded_to=64,
        prefixes=("text_model.",),
        sigmoid=True,
    ),
}
"""{model_type: tower}."""
PAIRS = frozenset(tower.pair for tower in TOWERS.values())


def find_tower(pair: str, inputs: str) -> tuple[str, Tower]:
    """(model_type, tower) of the side of a pair of PAIRS that takes a kind of input."""
    return next((n, t) for n, t in TOWERS.items() if (t.pair, t.inputs) == (pair, inputs))
