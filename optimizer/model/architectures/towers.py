"""Table of towers: the image and text encoders of models that compare images with texts (CLIP,
SigLIP).

transformers' model of such a pair names the tensors of each encoder as the encoder's own class
does, so that a tower loads from a pair's folder as from its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optimizer.harness.inputs.image import IMAGE
from optimizer.harness.inputs.text import TEXT


@dataclass(frozen=True)
class Tower:
    """Encoder of one side (images or texts) of an image-text model.

    pair: model_type of the image-text model
    side: attribute of its config: "vision_config" or "text_config"
    inputs: kind of input
    model: name of transformers' class
    output: name of its output that holds one vector per input
    size: field of the config with the width of that vector
    projection: layer after the hidden states, whose last token gives the vector; "" where the class
        pools itself
    prefixes: beginnings of the names of its tensors in the pair's files
    padded_to: tokens to which each text is padded, because the model was trained without a mask and
        reads padding like other tokens; None for texts of any length
    sigmoid: True if the score is a sigmoid per label, False for a softmax over labels
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
        """Return the width of the vector of a tower (text or image encoder of a pair), as `config`
        states it."""
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
    """Look up the facts of one encoder of an image-text architecture: (model_type, tower) for a
    kind of input.

    pair: model_type of an image-text model, a key of PAIRS
    inputs: kind of input
    """
    return next((n, t) for n, t in TOWERS.items() if (t.pair, t.inputs) == (pair, inputs))
