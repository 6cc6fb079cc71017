"""Torch class of one encoder (images or texts) of an image-text model, whose output is its vector.

A zero-shot classifier of images is the image encoder with a linear layer after the vector of unit
length. The layer's weights are the vectors of the labels' texts, which stage load computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import Tensor, nn

from optimizer.harness import tasks
from optimizer.model.architectures.towers import TOWERS
from optimizer.recipe.schema import Task

LABELS = "candidate_labels"  # name of the linear layer


def choose_tower_class(model_type: str, task: Task) -> Any:
    """Return a subclass of transformers' class of the encoder whose output suits the task.

    A zero-shot classifier returns logits and the vector of unit length. For other tasks the class
    returns hidden states. An image encoder has one position, its vector; a text encoder has one per
    token, each passed through the projection.
    """
    import transformers
    from transformers.masking_utils import create_bidirectional_mask
    from transformers.modeling_outputs import BaseModelOutput
    from transformers.utils import ModelOutput

    @dataclass
    class ComparedImage(ModelOutput):
        logits: Tensor | None = None
        image_embeds: Tensor | None = None

    tower, classifies = TOWERS[model_type], tasks.find_task(task).names_labels
    base: Any = getattr(transformers, tower.model)

    class Side(base):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            if classifies:
                setattr(self, LABELS, nn.Linear(tower.width(config), int(config.num_labels)))

        @classmethod
        def from_config(cls, config: Any, trust_remote_code: bool = False, **named: Any) -> Any:
            """As that of an Auto class."""
            del trust_remote_code
            return cls._from_config(config, **named)

        @wraps(base.forward)
        def forward(self, *inputs: Any, **named: Any) -> Any:
            if tower.projection:
                projected = getattr(self, tower.projection)(self._states(*inputs, **named))
                return BaseModelOutput(last_hidden_state=projected)
            vector: Tensor = super().forward(*inputs, **named)[tower.output]
            if classifies:
                unit = vector / vector.norm(dim=-1, keepdim=True)
                return ComparedImage(logits=getattr(self, LABELS)(unit), image_embeds=unit)
            return BaseModelOutput(last_hidden_state=vector[:, None])

        def _states(
            self, input_ids: Tensor, attention_mask: Tensor | None = None, **named: Any
        ) -> Tensor:
            """Hidden states of all positions. SigLIP's class gives them after its head has read one
            of them, and a module that is called twice has no one input to quantize."""
            if hasattr(self, "text_model"):
                output = self.text_model(input_ids, attention_mask, **named)
                return output.last_hidden_state  # type: ignore[no-any-return]
            embedded = self.embeddings(input_ids=input_ids)
            mask = create_bidirectional_mask(
                config=self.config, inputs_embeds=embedded, attention_mask=attention_mask
            )
            encoded = self.encoder(inputs_embeds=embedded, attention_mask=mask)
            return self.final_layer_norm(encoded.last_hidden_state)  # type: ignore[no-any-return]

    return Side
