"""List the kinds of inputs whose models can be loaded."""

from __future__ import annotations

from collections.abc import Mapping

from optimizer.foundation.errors import RecipeError
from optimizer.harness.inputs.image import IMAGE
from optimizer.harness.inputs.text import TEXT
from optimizer.harness.tasks import Task
from optimizer.load.image_inputs import IMAGES
from optimizer.load.preparation import Preparation
from optimizer.load.text_inputs import TEXTS

PREPARATIONS: Mapping[str, Preparation] = {TEXT.name: TEXTS, IMAGE.name: IMAGES}


def preparation(task: Task) -> Preparation:
    """Look up the loading steps for a task's kind of inputs. Raises RecipeError for a kind without
    one."""
    if task.inputs.name not in PREPARATIONS:
        raise RecipeError(
            f"the task's inputs are {task.inputs.name}, a kind that no checkpoint is loaded for",
            where="model.task",
            accepted=f"tasks whose inputs are of kind {', '.join(PREPARATIONS)}",
        )
    return PREPARATIONS[task.inputs.name]
