"""Build a recipe's torch module, read its weights and its example, and run it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from optimizer.foundation.errors import CheckpointError, RecipeError
from optimizer.foundation.rounding.random_rounding import Arithmetic
from optimizer.load.onnx_model.reference import FLOAT, Answers
from optimizer.load.torch_module import code
from optimizer.model.checkpoint.checkpoint import read_header
from optimizer.recipe.schema import Model

NAMED = 4
"""Maximum tensors named in a message."""
EXAMPLE = "a tensor, a tuple of tensors, or a dictionary {name of an input: tensor}"


@dataclass(frozen=True)
class TorchModule:
    """The recipe's torch module with its weights, in evaluation mode.

    example: {input: tensor}, rows first
    by_name: True where forward takes its inputs by name
    outputs: names, in the order of the results' tensors
    """

    name: str
    module: nn.Module
    example: Mapping[str, Tensor]
    by_name: bool
    outputs: tuple[str, ...]
    base: Path
    arithmetic: Arithmetic = FLOAT

    def answers(self, inputs: Mapping[str, Any]) -> Answers:
        """Return {output: array} of a batch through the recipe's torch module. Raises RecipeError
        where the module fails."""
        tensors = {name: torch.from_numpy(np.array(inputs[name])) for name in self.example}
        leaves = [tensor for _, tensor in _call(self, tensors)]
        return {n: t.numpy() for n, t in zip(self.outputs, leaves, strict=True)}


def _call(of: TorchModule, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Call the recipe's module on tensors; returns [(place in the result, tensor)]."""
    with code.translate_errors(f"model.module: {of.name}", of.base), torch.no_grad():
        result = of.module(**tensors) if of.by_name else of.module(*tensors.values())
    leaves = [(path, leaf) for path, leaf in pytree.tree_flatten_with_path(result)[0]]
    others = [type(leaf).__name__ for _, leaf in leaves if not isinstance(leaf, Tensor)]
    if others and set(others) != {"NoneType"}:
        raise RecipeError(
            f"forward returns a {next(o for o in others if o != 'NoneType')}",
            where=f"model.module: {of.name}",
            accepted="a tensor, or a tuple, list or dictionary of tensors",
        )
    return [("_".join(map(_key, path)), leaf.detach()) for path, leaf in leaves if leaf is not None]


def _key(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))


def find_weights(section: Model) -> Path:
    """Find the file of weights of the recipe's torch module. Raises RecipeError for one that is
    missing or not safetensors."""
    file = code.get_folder(section) / str(section.weights)
    if file.suffix != ".safetensors" or not file.is_file():
        raise RecipeError(
            f"{section.weights} is not a safetensors file"
            if file.is_file()
            else f"file {section.weights} does not exist",
            where=f"model.weights: {file.parent}",
            accepted="a file that safetensors.torch.save_model wrote",
            fix="Write it once: save_model(module, 'model.safetensors').",
        )
    return file


def build(section: Model, functions: Mapping[str, Any]) -> TorchModule:
    """Build the recipe's torch module, with its weights and its example.

    functions: {key of the recipe: function}, from code.import_references
    Raises RecipeError for a function that
    returns something else, CheckpointError for weights that are not the module's.
    """
    base, name = code.get_folder(section), str(section.module)
    with code.translate_errors(f"model.module: {name}", base):
        module = functions["module"]()
    if not isinstance(module, nn.Module):
        raise RecipeError(
            f"it returns a {type(module).__name__}",
            where=f"model.module: {name}",
            accepted="a torch.nn.Module",
        )
    _fill(module, section)
    module.eval().requires_grad_(False)
    with code.translate_errors(f"model.example: {section.example}", base):
        example = functions["example"]()
    by_name = isinstance(example, Mapping)
    tensors = _example(example, module, str(section.example))
    opened = TorchModule(name, module, tensors, by_name, (), base)
    places = [place for place, _ in _call(opened, tensors)]
    if not places:
        raise RecipeError("forward returns no tensor", where=f"model.module: {name}")
    return TorchModule(name, module, tensors, by_name, _output_names(places, tensors), base)


def _output_names(places: list[str], inputs: Mapping[str, Tensor]) -> tuple[str, ...]:
    names: list[str] = []
    for place in places:
        name = f"output_{place}" if place.isdecimal() else place or "output"
        while name in (*names, *inputs):
            name += "_output"
        names.append(name)
    return tuple(names)


def _fill(module: nn.Module, section: Model) -> None:
    """Read the weights of the recipe's torch module from its file. Raises CheckpointError for a
    tensor that is missing, left over, of another shape, or not float32 in the module."""
    from safetensors.torch import load_model

    file = find_weights(section)
    stored, own = read_header(file), module.state_dict()
    half = [n for n, t in own.items() if t.is_floating_point() and t.dtype != torch.float32]
    if half:
        raise CheckpointError(
            f"{half[0]} is {str(own[half[0]].dtype).removeprefix('torch.')} in the module",
            where=f"model.module: {section.module}",
            accepted="a module in float32; weights may be stored in a shorter type",
            fix="Return the module in float32: module.float().",
        )
    for name in sorted({*stored} & {*own}):
        if tuple(stored[name].shape) != tuple(own[name].shape):
            raise CheckpointError(
                f"{name} has shape {tuple(stored[name].shape)}, and {tuple(own[name].shape)} in "
                "the module",
                where=str(file),
                fix="Give the weights of this module.",
            )
    missing, left = load_model(module, file, strict=False)
    undefined = [n for n, t in module.state_dict().items() if bool(t.isnan().any())]
    if undefined:
        raise CheckpointError(
            f"{undefined[0]} holds NaN", where=str(file), accepted="finite numbers"
        )
    left = [n for n in left if not any(fnmatchcase(n, p) for p in section.ignore_tensors)]
    for names, problem, fix in (
        (sorted(missing), "lacks", "Save it from build()'s module: save_model(module, FILE)."),
        (sorted(left), "has, and the module has not,", "Or leave it out: model.ignore_tensors."),
    ):
        if names:
            shown = ", ".join(names[:NAMED]) + (", …" if len(names) > NAMED else "")
            raise CheckpointError(
                f"the file {problem} {len(names)} tensors: {shown}",
                where=str(file),
                accepted="every tensor of the module, by its name in state_dict()",
                fix=fix,
            )


def _example(example: Any, module: nn.Module, reference: str) -> dict[str, Tensor]:
    """Call the recipe's function that makes example inputs; returns {input: tensor}. Raises
    RecipeError for another result."""
    if isinstance(example, Tensor):
        example = (example,)
    if isinstance(example, list | tuple):
        names = _parameters(module, len(example))
        if len(names) != len(example):
            raise RecipeError(
                f"it returns {len(example)} tensors, and forward takes {len(names)}",
                where=f"model.example: {reference}",
                accepted=EXAMPLE,
            )
        example = dict(zip(names, example, strict=True))
    where = f"model.example: {reference}"
    if not isinstance(example, Mapping) or not example:
        raise RecipeError(f"it returns a {type(example).__name__}", where=where, accepted=EXAMPLE)
    for name, value in example.items():
        if not isinstance(value, Tensor) or not isinstance(name, str):
            raise RecipeError(
                f"{name!r} is a {type(value).__name__}", where=where, accepted=EXAMPLE
            )
        if not value.ndim or not value.numel():
            raise RecipeError(
                f"{name!r} has shape {tuple(value.shape)}",
                where=where,
                accepted="one row or more as the first axis",
            )
    if len({len(value) for value in example.values()}) > 1:
        lengths = ", ".join(f"{name}: {len(value)}" for name, value in example.items())
        raise RecipeError(
            f"the tensors have different numbers of rows ({lengths})",
            where=where,
            accepted="the rows of a batch as the first axis of each",
        )
    return {name: value.detach().cpu().contiguous() for name, value in example.items()}


def _parameters(module: nn.Module, count: int) -> list[str]:
    """List the first `count` positional inputs of forward of the recipe's torch module."""
    names: list[str] = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{i}" for i in range(count - len(names))]
        elif parameter.kind is not parameter.VAR_KEYWORD and len(names) < count:
            names.append(parameter.name)
    return names[:count]
