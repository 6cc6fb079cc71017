"""A model skeleton and the source of its weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from optimizer.foundation.process.torch_device import CPU
from optimizer.harness import tasks
from optimizer.harness.inputs.kind import InputKind
from optimizer.harness.inputs.text import TEXT
from optimizer.model.architectures.architecture import find_family
from optimizer.model.architectures.family_record import Family
from optimizer.model.architectures.operands import CACHE, CACHED, HOLDER, OPERANDS
from optimizer.model.checkpoint import cache_operands
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import (
    build_skeleton,
    has_sdpa,
    materialize,
    move_buffers,
    release,
)
from optimizer.model.graph.module import GraphModel, PartModule
from optimizer.model.graph.record import BODY
from optimizer.recipe.schema import Task


@dataclass(frozen=True)
class ModelSource:
    """The model that a walk over its blocks fills and empties block by block: skeleton and tensors.

    model: skeleton; code that fills it empties it again
    tensors: {parameter: tensor}, read one by one; with `rows` for embeddings
    prefix: prefix of the base model's names
    inputs: kind of input
    replaced: entries of `tensors` that differ from the checkpoint
    device: device of what is filled; the skeleton's buffers stay on the CPU
    """

    model: nn.Module
    tensors: Mapping[str, Tensor]
    family: Family
    prefix: str
    inputs: InputKind = TEXT
    replaced: Mapping[str, Tensor] = field(default_factory=dict)
    device: torch.device = CPU

    @property
    def decodes(self) -> bool:
        """True where the walked model is a decoder, which runs without its head and whose embedding
        is read by rows."""
        return self.family.kind == "decoder"

    @property
    def base(self) -> Any:
        """The walked model without its head."""
        return self.model.get_submodule(self.prefix.removesuffix("."))

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the blocks that the walk visits, in the order in which they run."""
        path, starred, inner = self.family.blocks.rpartition("*.")
        around = (
            self._children(f"{self.prefix}{path}".rstrip("."))
            if starred
            else (self.prefix.rstrip("."),)
        )
        places = [f"{a}.{n}".lstrip(".") for a in around for n in inner.strip("{}").split(",")]
        return tuple(block for place in places for block in self._listed(place))

    def _listed(self, path: str) -> tuple[str, ...]:
        """Paths of the children of a module list of the walked model; (path,) for another module,
        () for none."""
        parent, _, name = path.rpartition(".")
        module = getattr(self.model.get_submodule(parent), name, None)
        if module is None:
            return ()
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        return self._children(path) if listed else (path,)

    def _children(self, path: str) -> tuple[str, ...]:
        return tuple(f"{path}.{n}" for n, _ in self.model.get_submodule(path).named_children())

    def summands(self, quantized: Collection[str], blocks: Collection[str]) -> tuple[str, ...]:
        """Return the names of the identities in these blocks at inputs and outputs of quantized
        convolutions, through which residual adds read integers."""
        modules, last = dict(self.model.named_modules()), self.blocks[-1]
        names = (
            name
            for block in blocks
            for name, s in self.family.summands_of(self.around(block), modules).items()
            if f"{self.around(block)}.{s.convolution}" in quantized
            and (block == last or not s.last)
            and self.inside(name, (block,))
        )
        return tuple(n for n in names if isinstance(modules.get(n), nn.Identity))

    def paths(self, block: str) -> tuple[str, ...]:
        """Return the paths of the modules and parameters that a block of the walk holds; of a part
        of a graph, those that its operators read."""
        module = self.model.get_submodule(block)
        return module.part.paths if isinstance(module, PartModule) else (block,)

    def around(self, block: str) -> str:
        """Return the prefix of the names of a walked block's modules: the block's name, or for a
        part of a graph that of the graph."""
        return BODY if isinstance(self.model, GraphModel) else block

    def inside(self, name: str, blocks: Collection[str]) -> bool:
        """Return True where a module or parameter lies in one of the walk's blocks; a block is not
        in itself."""
        paths = (path for block in blocks if name != block for path in self.paths(block))
        return any(name == path or name.startswith(f"{path}.") for path in paths)

    def operands(self, blocks: Collection[str]) -> tuple[str, ...]:
        """Return the names of the identities in these blocks through which operands go into the
        products of attention, and where they are quantized."""
        attentions = [f"{block}.{self.family.attention_products}" for block in blocks]
        return tuple(
            f"{name}.{HOLDER}.{operand}"
            for name in attentions
            if self.family.attention_products and hasattr(self.model.get_submodule(name), HOLDER)
            for operand in OPERANDS
        )

    def caches(self, blocks: Collection[str]) -> tuple[str, ...]:
        """Return the names of the identities in these blocks through which keys and values go into
        the KV cache, and where FP8 caches are simulated."""
        return tuple(
            f"{name}.{CACHE}.{operand}"
            for name in cache_operands.list_attentions(self.model, blocks)
            if hasattr(self.model.get_submodule(name), CACHE)
            for operand in CACHED
        )

    @property
    def widest(self) -> tuple[int, int]:
        """(out, in) of the largest matrix in the first block of the walk."""
        first = self.blocks[:1]
        shapes = [p.shape for n, p in self.model.named_parameters() if self.inside(n, first)]
        rows, columns = max((s for s in shapes if len(s) == 2), key=lambda s: s.numel())
        return rows, columns

    @property
    def embedding(self) -> str:
        """Name of the token embedding's module in the model that compress walks."""
        return f"{self.prefix}{self.family.embeddings}"

    @property
    def final_norm(self) -> str:
        """The name of the walked model's norm after the last block, or ""."""
        return f"{self.prefix}{self.family.final_norm}" if self.family.final_norm else ""

    @property
    def head(self) -> Tensor:
        """The head's weight (vocabulary, features) of a walked model that is filled."""
        return cast(Tensor, self.model.get_submodule(self.family.head).weight)

    @contextmanager
    def filled(self, overrides: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Inside, the entire walked model is in memory; overrides replace values of tensors."""
        self.fill("", overrides)
        try:
            yield
        finally:
            self.empty("")

    def fill(self, prefix: str, overrides: Mapping[str, Tensor] | None = None) -> None:
        """Put the parameters and buffers of the module `prefix` on the walk's device; "": of the
        model."""
        for path in self.paths(prefix):
            materialize(self.model, path, self.tensors, overrides, lambda t: t.to(self.device))
        move_buffers(self.model.get_submodule(prefix), self.device)

    def empty(self, prefix: str) -> None:
        """Free the parameters of the module `prefix` after the walk left it, and put its buffers
        back on the CPU."""
        for path in self.paths(prefix):
            release(self.model, path)
        move_buffers(self.model.get_submodule(prefix), CPU)

    def moved(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the batch, moved to the device on which the walk computes."""
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def features(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Run the walked model, filled, without its head; returns the last hidden states (batch,
        sequence, features)."""
        states = self.base(**self.moved(batch), use_cache=False).last_hidden_state
        return cast(Tensor, states)

    def linears(self, names: Mapping[str, Any]) -> dict[str, nn.Linear]:
        """Return {name: module of the walked model} for names of modules or of parameters
        "<module>.weight"."""
        modules = {n: self.model.get_submodule(n.removesuffix(".weight")) for n in names}
        return {n: cast(nn.Linear, m) for n, m in modules.items()}


def open_source(task: Task, folder: Path) -> ModelSource:
    """Open the model in a folder of load or reduce for a walk over its blocks."""
    checkpoint = open_checkpoint(folder)
    architecture = find_family(checkpoint.config, task, checkpoint.folder)
    model: Any = build_skeleton(checkpoint, task)
    if architecture.kind == "decoder" and has_sdpa(model):
        model.set_attn_implementation("sdpa")  # eager makes a score for every pair of tokens
    prefix, inputs = architecture.prefix(task), tasks.find_task(task).inputs
    return ModelSource(model, checkpoint.tensors, architecture, prefix, inputs)
