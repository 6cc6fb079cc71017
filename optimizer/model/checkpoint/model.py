"""Build the torch model of a checkpoint: a skeleton without weights, filled by block or at once.

A skeleton has its parameters on the meta device; its non-persistent buffers (position ids, rotary
frequencies) are computed on the CPU by the constructor, because a checkpoint does not have them.

transformers' Conv1D (GPT-2's linear layer with a weight (in, out)) becomes an nn.Linear in a
skeleton, so that later stages see one kind of linear layer; `Checkpoint.tensors` yields its weight
as (out, in).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import register_module_parameter_registration_hook

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.reading import DOUBT, quote_error
from optimizer.harness import tasks
from optimizer.model.architectures.families import FAMILIES, has_encoder
from optimizer.model.architectures.towers import TOWERS
from optimizer.model.checkpoint import (
    batch_norms,
    chains,
    global_pools,
    last_of_layers,
    tower_model,
)
from optimizer.model.checkpoint.checkpoint import Checkpoint
from optimizer.model.graph import record
from optimizer.model.graph.module import GraphModel
from optimizer.recipe.schema import Task

STORED_TRANSPOSED = "stored_transposed"  # attribute of a Linear that replaces a Conv1D
UNUSED = ("contact_head",)  # modules of a base model (ESM) that forward's outputs do not depend on


def choose_auto_class(task: Task, model_type: object) -> Any:
    """Return the transformers Auto class that builds the model of a task. Two kinds of model have a
    class of their own: encoders of an encoder-decoder (T5) for tasks on hidden states, and encoders
    of an image-text model."""
    chosen = tasks.find_task(task)
    module, _, name = chosen.model.partition(":")
    if model_type in TOWERS:
        return tower_model.choose_tower_class(str(model_type), task)
    if chosen.headless and has_encoder(model_type):
        name = "AutoModelForTextEncoding"
    return getattr(import_module(module), name)


def build_skeleton(checkpoint: Checkpoint, task: Task) -> nn.Module:
    """Build the model of the task in eval mode, with eager attention, parameters on the meta
    device, and norms folded into convolutions (batch_norms.py).

    Modules that the output does not depend on are removed: those in UNUSED and, for a task without
    a head (Task.headless, whose output is last_hidden_state), a pooler with weights. Raises
    CheckpointError when transformers has no such model.
    """
    from transformers import AutoConfig

    if record.is_graph(checkpoint.folder):
        shapes = {name: checkpoint.shape(name) for name in checkpoint.tensors}
        graph = GraphModel(record.read(checkpoint.folder, shapes))
        return graph.eval().requires_grad_(False)
    # the load stage copies a model's own code only when the recipe trusts it
    trusted = any(checkpoint.folder.glob("*.py"))
    config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trusted)
    model = build_skeleton_from_config(config, task, trusted)
    family = FAMILIES.get(str(config.model_type))
    if family is not None:
        chains.rebuild(model, family.chains)
        if family.per_layer:
            last_of_layers.keep_last(model, family.per_layer)
    if family is not None and family.batch_norms is not None:
        norms = family.batch_norms.with_config(config.to_dict())
        same = bool(norms.same and getattr(config, norms.same))
        batch_norms.fold_skeleton(model, norms, same)
        if family.global_pool:
            global_pools.replace(model, family.prefix(task) + family.global_pool)
    return model


UNINSTALLED = (
    "Install the package. Of a detector whose backbone is timm's, a revision without timm will do, "
    "such as model.revision: no_timm of facebook/detr-resnet-50."
)


def build_skeleton_from_config(
    config: Any, task: Task, trust_remote_code: bool = False
) -> nn.Module:
    """Build a torch model without weights as `build_skeleton` does, but from a transformers config
    and without folding norms."""
    try:
        with _parameters_on_meta():
            model = choose_auto_class(task, config.model_type).from_config(
                config,
                attn_implementation="eager",
                dtype=torch.float32,
                trust_remote_code=trust_remote_code,
            )
    except Exception as e:  # each architecture fails differently
        raise CheckpointError(
            f"transformers cannot build a {task} model of type {config.model_type!r} "
            f"({quote_error(e)})",
            where=_culprit(config),
            fix=UNINSTALLED
            if isinstance(e, ImportError)
            else _name_task(config)
            + "Use a checkpoint of a model that transformers has for this task, with its "
            f"original config.json. {DOUBT}",
        ) from e
    if not tasks.find_task(task).generates:
        model.config.use_cache = False  # a decoder's answer is one run
    _linear_for_conv1d(model)
    pooler = getattr(model, "pooler", None)
    if (
        tasks.find_task(task).headless
        and pooler is not None
        and any(True for _ in pooler.parameters())
    ):
        model.pooler = None
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    for name in UNUSED:
        if getattr(base, name, None) is not None:
            setattr(base, name, None)
    join_outputs(model, task)
    return cast(nn.Module, model.eval().requires_grad_(False))


def _name_task(config: Any) -> str:
    """Return a sentence on the task that the head of a checkpoint's model is trained for, "" for no
    head of a task."""
    (head, *_) = getattr(config, "architectures", None) or [""]
    named = [name for name in tasks.list_names() if head.endswith(tasks.find_task(name).heads)]
    return f"Its head, {head}, is for model.task: {named[0]}. " if named else ""


def join_outputs(model: nn.Module, task: Task) -> None:
    """Make a transformers model return the task's output where the task joins several outputs of
    the model into one (Task.joined). Changes the model in place."""
    from transformers.modeling_outputs import TokenClassifierOutput

    joined = tasks.find_task(task)

    def join(_model: nn.Module, _inputs: Any, result: Any) -> Any:
        ends = torch.stack([result[name] for name in joined.joined], -1)
        return TokenClassifierOutput(**{joined.output: ends})

    if joined.joined:
        model.register_forward_hook(join)


def is_linear(module: nn.Module) -> bool:
    """Return True for a linear layer of a torch model whose forward is called. torch's
    MultiheadAttention reads the weight of its out_proj without calling it."""
    return isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear)


def has_sdpa(model: nn.Module) -> bool:
    """Return True if torch's scaled_dot_product_attention, which does not store all scores, can
    compute the architecture's attention. It cannot where scores are capped (Gemma 2)."""
    return bool(getattr(model, "_supports_sdpa", False))  # transformers has no public flag


def _culprit(config: Any) -> str:
    """Name the likely cause of a config from which transformers builds no torch model: the path of
    config.json, and pad_token_id where its value is outside the vocabulary."""
    file = str(Path(str(config.name_or_path or "")) / "config.json")
    pad, rows = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    if isinstance(pad, int) and isinstance(rows, int) and not -rows <= pad < rows:
        return f"{file}: pad_token_id ({pad}; vocab_size is {rows})"
    return file


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, build a torch model without weights: parameters go to the meta device; buffers
    stay."""

    def to_meta(_module: nn.Module, _name: str, parameter: Tensor | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # a second meta parameter would untie it
            return None
        on_meta: Any = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        on_meta._is_hf_initialized = True  # transformers draws no values, which are not kept here
        return cast(nn.Parameter, on_meta)

    hook = register_module_parameter_registration_hook(cast(Any, to_meta))  # stub: returns None
    try:
        yield
    finally:
        hook.remove()


def _linear_for_conv1d(model: nn.Module) -> None:
    """Replace each transformers Conv1D in a torch model without weights by an nn.Linear on the meta
    device."""
    from transformers.pytorch_utils import Conv1D

    for path, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            linear: Any = nn.Linear(inputs, outputs, device="meta")
            setattr(linear, STORED_TRANSPOSED, True)
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, linear)


class _Home(NamedTuple):
    """Place where a torch model's parameter is registered: a module and an attribute. A tied
    parameter has several."""

    name: str
    owner: nn.Module
    attribute: str

    @property
    def parameter(self) -> nn.Parameter:
        return cast(nn.Parameter, getattr(self.owner, self.attribute))


def _homes(module: nn.Module) -> list[list[_Home]]:
    """List the parameters of the torch model `module`, in order, each as the list of places where
    it is registered."""
    by_id: dict[int, list[_Home]] = {}
    for path, owner in module.named_modules():
        for attribute, parameter in owner.named_parameters(recurse=False):
            name = f"{path}.{attribute}".lstrip(".")
            by_id.setdefault(id(parameter), []).append(_Home(name, owner, attribute))
    return list(by_id.values())


def find_tied_names(module: nn.Module) -> dict[str, str]:
    """Return of a checkpoint's torch model {other name of a tied parameter: its first name}, e.g. a
    head's weight: the embedding's."""
    return {h.name: homes[0].name for homes in _homes(module) for h in homes[1:]}


def list_parameter_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of the tensors that a checkpoint of `module` holds: each parameter once
    (tied ones under their first name) and the persistent buffers."""
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
    place: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> None:
    """Fill every parameter and persistent buffer of the torch model `module` below `prefix` from a
    checkpoint, float32 on the CPU.

    module: the skeleton of the complete model, so that names are the checkpoint's
    prefix: "encoder.layer.3", or "" for everything
    overrides: values that replace the checkpoint's
    place: function that moves a value to where it stays, such as a mapped file

    Tied parameters stay tied, have the value of their first name, and are filled when any of
    their names lies below `prefix`. If overrides or tensors have another value for a second name,
    it becomes a separate parameter, also for later calls. Raises KeyError for a parameter without
    a value, ValueError when a shape does not match.
    """
    overrides = overrides or {}
    available = {*overrides, *tensors}  # `in` of a mapping may read the tensor; iterating does not

    def value(name: str, like: Tensor) -> Tensor:
        stored = overrides[name] if name in overrides else tensors[name]
        if stored.shape != like.shape:
            raise ValueError(f"{name}: {tuple(stored.shape)} for {tuple(like.shape)}")
        return stored.float() if stored.is_floating_point() else stored

    for homes in _homes(module):
        extra = [h for h in homes[1:] if h.name in available]
        for home in extra:  # untie: replace the shared parameter here
            _place([home], nn.Parameter(home.parameter.to("meta"), requires_grad=False))
        for group in ([h for h in homes if h not in extra], *([h] for h in extra)):
            if any(_below(h.name, prefix) for h in group):
                filled = place(value(group[0].name, group[0].parameter))
                _place(group, nn.Parameter(filled, requires_grad=False))
    persistent = module.state_dict(keep_vars=True).keys()
    for name, buffer in module.named_buffers():
        if name in persistent and _below(name, prefix) and name in available:
            owner_path, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner_path), attribute, value(name, buffer))


def _place(homes: list[_Home], parameter: nn.Parameter) -> None:
    for home in homes:
        setattr(home.owner, home.attribute, parameter)


def replace_parameters(module: nn.Module, value: Callable[[str, Tensor], Tensor]) -> None:
    """Replace every parameter of a torch model by value(its first name, its tensor). Tied names
    stay tied; the memory of each parameter is freed before the next is replaced."""
    for homes in _homes(module):
        before = homes[0].parameter
        after = value(homes[0].name, before.data)
        before.data = torch.empty(0)
        _place(homes, nn.Parameter(after, requires_grad=False))


def release(module: nn.Module, prefix: str = "") -> None:
    """Move a torch model's parameters below `prefix` back to the meta device, which frees their
    memory."""
    for homes in _homes(module):
        if any(_below(h.name, prefix) for h in homes):
            _place(homes, nn.Parameter(homes[0].parameter.to("meta"), requires_grad=False))


def copy_module(module: nn.Module) -> nn.Module:
    """Copy a torch model; the copy shares its parameters and buffers."""
    return copy.deepcopy(module, {id(t): t for t in (*module.parameters(), *module.buffers())})


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of a torch model's `module` and of the modules inside it to a device."""
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.device != device:
                setattr(owner, name, buffer.to(device))


def load_torch_model(
    checkpoint: Checkpoint,
    task: Task,
    overrides: Mapping[str, Tensor] | None = None,
    place: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> nn.Module:
    """Build the torch model of a checkpoint with all its weights, float32, in eval mode.

    overrides, place: see `materialize`
    """
    model = build_skeleton(checkpoint, task)
    materialize(model, "", checkpoint.tensors, overrides, place)
    return model
