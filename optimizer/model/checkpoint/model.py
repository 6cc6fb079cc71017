"""The torch model of a checkpoint: as a skeleton without weights, filled block by block, or whole.

A skeleton has its parameters on the meta device and its non-persistent buffers (position ids,
rotary frequencies) computed by its own constructor, on the CPU: only the parameters cost memory
that grows with the model, and only they can be filled from a checkpoint.

transformers' Conv1D (GPT-2: a linear layer that holds its weight as (in, out)) is an nn.Linear in
a skeleton, so that every later stage meets one kind of linear layer; `Checkpoint.tensors` yields
those weights as (out, in).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.reading import DOUBT, words
from optimizer.harness import tasks
from optimizer.model.architectures.families import FAMILIES
from optimizer.model.checkpoint import batch_norms, chains, whole_pools
from optimizer.model.checkpoint.checkpoint import Checkpoint
from optimizer.recipe.schema import Task

STORED_TRANSPOSED = "stored_transposed"  # attribute of a Linear that stands for a Conv1D
BESIDE = ("contact_head",)  # of a base model (ESM): no output of forward is made of it


def auto_class(task: Task) -> Any:
    """The transformers Auto class that builds the model of a task."""
    module, _, name = tasks.task(task).model.partition(":")
    return getattr(import_module(module), name)


def skeleton(checkpoint: Checkpoint, task: Task) -> nn.Module:
    """The model of the task in eval mode, eager attention, every parameter on the meta device, and
    norms folded into their convolutions (batch_norms.py).

    Of a task without a head (tasks.Task.headless) a pooler that has weights is removed: the output
    is last_hidden_state. Of every task, modules that no output is made of (BESIDE) are. Raises
    CheckpointError when transformers has no such model.
    """
    from transformers import AutoConfig

    # the load stage copies a model's own code only when the recipe trusts it
    trusted = any(checkpoint.folder.glob("*.py"))
    config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trusted)
    model = skeleton_from_config(config, task, trusted)
    family = FAMILIES.get(str(config.model_type))
    if family is not None and family.batch_norms is not None:
        norms = family.batch_norms.configured(config.to_dict())
        chains.rebuild(model, family.chains)
        same = bool(norms.same and getattr(config, norms.same))
        batch_norms.fold_skeleton(model, norms, same)
        if family.whole_pool:
            whole_pools.replace(model, family.prefix(task) + family.whole_pool)
    return model


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
    except Exception as e:  # each architecture fails in its own way
        raise CheckpointError(
            f"transformers builds no {task} model of type {config.model_type!r} ({words(e)})",
            where=_culprit(config),
            fix="Use a checkpoint of a model that transformers has for this task, with the "
            f"config.json it was saved with. {DOUBT}",
        ) from e
    _linear_for_conv1d(model)
    pooler = getattr(model, "pooler", None)
    if tasks.task(task).headless and pooler is not None and any(True for _ in pooler.parameters()):
        model.pooler = None
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    for name in BESIDE:
        if getattr(base, name, None) is not None:
            setattr(base, name, None)
    return cast(nn.Module, model.eval().requires_grad_(False))


def has_sdpa(model: nn.Module) -> bool:
    """Whether torch's scaled_dot_product_attention, which keeps no score for every pair of tokens,
    computes what the architecture's own attention does: of one that caps its scores (Gemma 2) it
    does not."""
    return bool(getattr(model, "_supports_sdpa", False))  # transformers says it nowhere else


def _culprit(config: Any) -> str:
    """The field that a model is most often not built for, or the file."""
    file = str(Path(str(config.name_or_path or "")) / "config.json")
    pad, rows = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    if isinstance(pad, int) and isinstance(rows, int) and not -rows <= pad < rows:
        return f"{file}: pad_token_id ({pad}; vocab_size is {rows})"
    return file


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


def _linear_for_conv1d(model: nn.Module) -> None:
    """Put an nn.Linear on the meta device in the place of each Conv1D."""
    from transformers.pytorch_utils import Conv1D

    for path, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            linear: Any = nn.Linear(inputs, outputs, device="meta")
            setattr(linear, STORED_TRANSPOSED, True)
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, linear)


class _Home(NamedTuple):
    """One of the places that hold a parameter."""

    name: str
    owner: nn.Module
    attribute: str

    @property
    def parameter(self) -> nn.Parameter:
        return cast(nn.Parameter, getattr(self.owner, self.attribute))


def _homes(module: nn.Module) -> list[list[_Home]]:
    """For each parameter, in order, its places; more than one when it is tied."""
    by_id: dict[int, list[_Home]] = {}
    for path, owner in module.named_modules():
        for attribute, parameter in owner.named_parameters(recurse=False):
            name = f"{path}.{attribute}".lstrip(".")
            by_id.setdefault(id(parameter), []).append(_Home(name, owner, attribute))
    return list(by_id.values())


def tied_names(module: nn.Module) -> dict[str, str]:
    """{second name of a tied parameter: its first}, e.g. a head's weight: the embedding's."""
    return {h.name: homes[0].name for homes in _homes(module) for h in homes[1:]}


def parameter_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """{name: shape} of all that a checkpoint must hold: each parameter once (tied ones under
    their first name) and the persistent buffers."""
    shapes = {homes[0].name: tuple(homes[0].parameter.shape) for homes in _homes(module)}
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

    module: the whole skeleton, so that names are the checkpoint's; prefix: "encoder.layer.3", or
    "" for all of it. overrides: values that stand in for the checkpoint's. Values are float32 on
    the CPU.
    Tied parameters stay tied, have the value of their first name, and are filled when any of
    their names lies below `prefix`. But a second name with a value of its own, in overrides or
    tensors, is untied: it becomes a parameter of its own, now and for later calls.
    Raises KeyError naming a parameter that neither holds, ValueError when a shape does not match.
    """
    overrides = overrides or {}
    available = {
        *overrides,
        *tensors,
    }  # `in` of a mapping may read the tensor; its names cost nothing

    def value(name: str, like: Tensor) -> Tensor:
        stored = overrides[name] if name in overrides else tensors[name]
        if stored.shape != like.shape:
            raise ValueError(f"{name}: {tuple(stored.shape)} for {tuple(like.shape)}")
        return stored.float() if stored.is_floating_point() else stored

    for homes in _homes(module):
        own = [h for h in homes[1:] if h.name in available]
        for home in own:  # untied: no longer the parameter of the others, whatever that holds
            _place([home], nn.Parameter(home.parameter.to("meta"), requires_grad=False))
        for group in ([h for h in homes if h not in own], *([h] for h in own)):
            if any(_below(h.name, prefix) for h in group):
                filled = value(group[0].name, group[0].parameter)
                _place(group, nn.Parameter(filled, requires_grad=False))
    persistent = module.state_dict(keep_vars=True).keys()
    for name, buffer in module.named_buffers():
        if name in persistent and _below(name, prefix) and name in available:
            owner_path, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner_path), attribute, value(name, buffer))


def _place(homes: list[_Home], parameter: nn.Parameter) -> None:
    for home in homes:
        setattr(home.owner, home.attribute, parameter)


def release(module: nn.Module, prefix: str = "") -> None:
    """Send the parameters with a name below `prefix` back to the meta device, freeing their
    memory."""
    for homes in _homes(module):
        if any(_below(h.name, prefix) for h in homes):
            _place(homes, nn.Parameter(homes[0].parameter.to("meta"), requires_grad=False))


def torch_model(
    checkpoint: Checkpoint, task: Task, overrides: Mapping[str, Tensor] | None = None
) -> nn.Module:
    """The whole model, float32, eval, with `overrides` in place of the checkpoint's values."""
    model = skeleton(checkpoint, task)
    materialize(model, "", checkpoint.tensors, overrides)
    return model
