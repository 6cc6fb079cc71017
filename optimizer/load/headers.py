"""What a model is made of, before any weight is read or fetched: for predictions."""

from __future__ import annotations

from optimizer.foundation.reading import reading
from optimizer.load import source
from optimizer.load.config.config import check_task, model_folder, read_config
from optimizer.model.checkpoint import own_code
from optimizer.model.checkpoint.model import parameter_shapes, skeleton_from_config
from optimizer.recipe.schema import Model
from optimizer.store import Shapes


def shapes(section: Model) -> Shapes:
    """{parameter: shape} of the model of this section, as the load stage will name them.

    They follow from config.json, so of a model on the hub nothing else is fetched.
    Raises what the load stage would for a source or a config it cannot use.
    """
    folder = model_folder(source.peek(section).folder)
    with own_code.contained(folder), reading(folder, own_faults=True):
        config = read_config(folder, section)
        check_task(config, section, folder)
        model = skeleton_from_config(config, section.task, section.trust_remote_code)
        return parameter_shapes(model)
