"""Predict the parameters of a model from its config.json, before any weight is read or fetched."""

from __future__ import annotations

from optimizer.foundation.reading import reading
from optimizer.load import source
from optimizer.load.config.config import check_task, read_config
from optimizer.load.config.model_folder import model_folder
from optimizer.load.onnx_model import files as onnx_files
from optimizer.load.onnx_model import stage as onnx_model
from optimizer.load.torch_module import stage as torch_module
from optimizer.model.checkpoint import own_code
from optimizer.model.checkpoint.model import build_skeleton_from_config, list_parameter_shapes
from optimizer.recipe.schema import Model
from optimizer.store import Shapes


def read_shapes(section: Model) -> Shapes:
    """Read the shapes of a checkpoint's parameters without its values: {parameter: shape} under the
    load stage's names. Raises as the load stage for a source or a config it cannot use."""
    if torch_module.takes(section):
        return torch_module.shapes(section)
    if onnx_files.takes(section):
        return onnx_model.shapes(section)
    folder = model_folder(source.peek(section).folder)
    with own_code.contain(folder), reading(folder, own_faults=True):
        config = read_config(folder, section)
        check_task(config, section, folder)
        model = build_skeleton_from_config(config, section.task, section.trust_remote_code)
        return list_parameter_shapes(model)
