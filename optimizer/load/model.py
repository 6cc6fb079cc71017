"""The torch model of a checkpoint: as a skeleton without weights, filled block by block, or whole.

A skeleton has its parameters on the meta device and its non-persistent buffers (position ids,
rotary frequencies) computed by its own constructor, on the CPU: only the parameters cost memory
that grows with the model, and only they can be filled from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from optimizer.errors import CheckpointError
from optimizer.load.checkpoint import Checkpoint
from optimizer.recipe import Task

HEADLESS: tuple[Task, ...] = ("sentence-embedding", "feature-extraction")


def auto_class(task: Task) -> Any:
    """The transformers Auto class that builds the model of a task."""
    import transformers

    return {
        "sentence-embedding": transformers.AutoModel,
        "feature-extraction": transformers.AutoModel,
        "text-classification": transformers.AutoModelForSequenceClassification,
        "token-classification": transformers.AutoModelForTokenClassification,
        "text-generation": transformers.AutoModelForCausalLM,
    }[task]


def skeleton(checkpoint: Checkpoint, task: Task) -> nn.Module:
    """The model of the task in eval mode, eager attention, every parameter on the meta device.

    For sentence-embedding and feature-extraction the pooler is removed: the output is
    last_hidden_state. Raises CheckpointError when transformers has no such model.
    """
    from transformers import AutoConfig

    # the load stage copies a model's own code only when the recipe trusts it
    trusted = any(checkpoint.folder.glob("*.py"))
    config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trusted)
    return skeleton_from_config(config, task, trusted)


def skeleton_from_config(config: Any, task: Task, trust_remote_code: bool = False) -> nn.Module:
    """As `skeleton`, from a transformers config object."""
    try:
        with _parameters_on_meta():
            model = auto_class(task).from_config(
                config,
                attn_implementation="eager",
                dtype=torch.float32,
                trust_remote_code=trust_remote_code,
            )
    except ValueError as e:
        raise CheckpointError(
            f"transformers builds no {task} model of type {config.model_type!r} "
            f"({str(e).splitlines()[0][:200]})",
            where="config.json: model_type",
            fix="Use a checkpoint of an encoder that transformers has for this task.",
        ) from e
    if task in HEADLESS and getattr(model, "pooler", None) is not None:
        model.pooler = None
    return cast(nn.Module, model.eval().requires_grad_(False))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters registered inside are replaced by meta ones; buffers stay real."""

    def to_meta(_module: nn.Module, _name: str, parameter: Tensor | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # already there: a second one would untie it
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(cast(Any, to_meta))  # stub: returns None
    try:
        yield
    finally:
        hook.remove()


def _homes(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """{first name of a parameter: every (owner, attribute) that holds it}; ties share a list."""
    by_id: dict[int, list[tuple[nn.Module, str]]] = {}
    names: dict[str, list[tuple[nn.Module, str]]] = {}
    for path, owner in module.named_modules():
        for attribute, parameter in owner.named_parameters(recurse=False):
            if id(parameter) not in by_id:
                by_id[id(parameter)] = names[f"{path}.{attribute}".lstrip(".")] = []
            by_id[id(parameter)].append((owner, attribute))
    return names


def parameter_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """{name: shape} of all that a checkpoint must hold: each parameter once (tied ones under
    their first name) and the persistent buffers."""
    shapes = {name: tuple(getattr(*homes[0]).shape) for name, homes in _homes(module).items()}
    persistent = module.state_dict(keep_vars=True).keys()
    buffers = {n: tuple(b.shape) for n, b in module.named_buffers() if n in persistent}
    return {**shapes, **buffers}


def _below(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(prefix + ".")


def materialize(
    module: nn.Module,
    prefix: str,
    tensors: Mapping[str, Tensor],
    overrides: Mapping[str, Tensor] | None = None,
) -> None:
    """Fill every parameter and persistent buffer of `module` whose name lies below `prefix`.

    module: the whole skeleton, so that names are the checkpoint's and tied parameters stay tied;
    prefix: "encoder.layer.3", or "" for all of it. overrides: values that stand in for the
    checkpoint's. Values are float32 on the CPU. Raises KeyError naming a parameter that
    neither holds, ValueError when a shape does not match.
    """
    overrides = overrides or {}

    def value(name: str, like: Tensor) -> Tensor:
        found = overrides[name] if name in overrides else tensors[name]
        if found.shape != like.shape:
            raise ValueError(f"{name}: {tuple(found.shape)} for {tuple(like.shape)}")
        return found.float() if found.is_floating_point() else found

    for name, homes in _homes(module).items():
        if not _below(name, prefix):
            continue
        owner, attribute = homes[0]
        old = getattr(owner, attribute)
        new = nn.Parameter(value(name, old), requires_grad=False)
        for owner, attribute in homes:
            setattr(owner, attribute, new)
    persistent = module.state_dict(keep_vars=True).keys()
    for name, buffer in module.named_buffers():
        if name in persistent and _below(name, prefix) and (name in overrides or name in tensors):
            owner_path, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner_path), attribute, value(name, buffer))


def release(module: nn.Module, prefix: str = "") -> None:
    """Send the parameters below `prefix` back to the meta device, freeing their memory."""
    for name, homes in _homes(module).items():
        if _below(name, prefix):
            owner, attribute = homes[0]
            meta = nn.Parameter(getattr(owner, attribute).to("meta"), requires_grad=False)
            for owner, attribute in homes:
                setattr(owner, attribute, meta)


def torch_model(
    checkpoint: Checkpoint, task: Task, overrides: Mapping[str, Tensor] | None = None
) -> nn.Module:
    """The whole model, float32, eval, with `overrides` in place of the checkpoint's values."""
    model = skeleton(checkpoint, task)
    materialize(model, "", checkpoint.tensors, overrides)
    return model
