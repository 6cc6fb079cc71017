"""Check the model, its tokenizer and the data together, as `run` does before it compresses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from optimizer.checks.context import Context
from optimizer.checks.model_files import local_folder
from optimizer.compress.data import calibration
from optimizer.compress.selection import select
from optimizer.compress.walk.model_source import ModelSource
from optimizer.foundation.errors import collect
from optimizer.foundation.reading import reading
from optimizer.harness import tasks
from optimizer.harness.process.temporary import make_temporary_folder
from optimizer.load import source, weights
from optimizer.load.adapters import adapter
from optimizer.load.config.model_type import complete_config
from optimizer.load.onnx_model import files as onnx_files
from optimizer.load.onnx_model import stage as onnx_model
from optimizer.load.preparation import Described
from optimizer.load.providers import provider
from optimizer.load.stage import open_skeleton, write_inputs, write_json
from optimizer.load.torch_module import stage as torch_module
from optimizer.model.architectures.family_record import Family
from optimizer.model.graph.family import of_config
from optimizer.model.graph.module import GraphModel
from optimizer.recipe.schema import Recipe
from optimizer.validate.stage import check_inputs


def check(recipe: Recipe, context: Context) -> None:
    """Check before a run that the model can be loaded, that the data suits it, and that module
    patterns match. Reads the headers of the weights and every row of the data.

    Raises the errors of stage load, of the checks of data rows, and of the selection of modules.
    """
    if context.early and onnx_files.takes(recipe.model):
        _check_onnx(recipe, fetch=context.fetch)
        return
    folder = local_folder(recipe.model) if context.early else None
    if folder is None:
        return
    with reading(folder, own_faults=True), make_temporary_folder("check") as scratch:
        opened = open_skeleton(recipe.model, folder)
        collect(
            [
                partial(_check_contents, recipe, folder, opened, scratch),
                partial(_check_selection, recipe, opened),
            ]
        )


def _check_onnx(recipe: Recipe, *, fetch: bool) -> None:
    """Check before a run an ONNX file or torch module, the data, and module patterns. The model is
    checked as in stage load, but not compared with ONNX Runtime."""
    if not fetch and not source.is_local(recipe.model.source, recipe.model.base):
        return
    with make_temporary_folder("check") as scratch:
        of_module = torch_module.takes(recipe.model)
        opened = (torch_module if of_module else onnx_model).check(recipe.model, scratch)
        model = GraphModel(onnx_model.graph_of(opened))
        family = of_config(onnx_model.config(opened, recipe.model))
        collect(
            [
                partial(check_inputs, recipe.validation(recipe.targets[0]), scratch),
                partial(_check_selection, recipe, (None, model, family)),
            ]
        )


def _check_contents(
    recipe: Recipe, folder: Path, opened: tuple[Any, nn.Module, Family], scratch: Path
) -> None:
    """Check before a run names and shapes of the weights, the tokenizer or image settings, and the
    data.

    folder: folder of the model
    opened: config, skeleton and family of the model
    scratch: empty folder for temporary files
    """
    section, (config, model, family) = recipe.model, opened
    pairing = None
    if weights.is_only_pickled(folder, section):
        files = complete_config(folder, section.model_type, scratch)
    else:
        loaded = provider(section, folder).read(section, folder, config, scratch)
        merged = adapter.find(section, folder)
        stored = adapter.replace_tensors(loaded.weights, merged)
        pairing = weights.match(stored, model, section)
        named, own = pairing.source_names.items(), loaded.weights
        for one in merged:
            base = {parameter: own[name] for parameter, name in named if name in own}
            adapter.check_trained(one, str(one.folder), base)
        files = loaded.files
    checkpoint = scratch / "checkpoint"
    checkpoint.mkdir()
    described = Described(section, config, model, family, files, source.resolve(section).folder)
    write_json(scratch / "contract.json", write_inputs(described, checkpoint))
    if pairing is not None:
        weights.check_unused(pairing, model, section)
    check_inputs(recipe.validation(recipe.targets[0]), scratch)
    calibration.check_enough(recipe.compression, scratch)


def _check_selection(recipe: Recipe, opened: tuple[Any, nn.Module, Family]) -> None:
    """Check before a run that the recipe's module patterns and group sizes fit the names and shapes
    of the model."""
    _, model, family = opened
    if recipe.reduce is None:  # else they are those of the smaller model
        task = recipe.model.task
        prefix, inputs = family.prefix(task), tasks.find_task(task).inputs
        select(ModelSource(model, {}, family, prefix, inputs), recipe.quantize, recipe.sparsity)
