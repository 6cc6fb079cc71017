"""The class of one side of a pair that compares images with texts; its output is its vector.

A zero-shot classifier of images is the side of images with a linear layer behind the vector of
unit length: its weights are the vectors of the labels' texts, which load computes.
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


def tower_class(model_type: str, task: Task) -> Any:
    """transformers' class of a tower, with the output of the task: for a zero-shot classifier
    logits and the vector of unit length; else hidden states, of images one position, the vector,
    and of texts the projection of each position."""
    import transformers
    from transformers.modeling_outputs import BaseModelOutput
    from transformers.utils import ModelOutput

    @dataclass
    class ComparedImage(ModelOutput):
        logits: Tensor | None = None
        image_embeds: Tensor | None = None

    tower, classifies = TOWERS[model_type], tasks.task(task).names_labels
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
                states = self.text_model(*inputs, **named).last_hidden_state
                projected = getattr(self, tower.projection)(states)
                return BaseModelOutput(last_hidden_state=projected)
            vector: Tensor = super().forward(*inputs, **named)[tower.output]
            if classifies:
                unit = vector / vector.norm(dim=-1, keepdim=True)
                return ComparedImage(logits=getattr(self, LABELS)(unit), image_embeds=unit)
            return BaseModelOutput(last_hidden_state=vector[:, None])

    return Side
