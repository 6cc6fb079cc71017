"""Folders of a run and their contents, each opened once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optimizer.compress.apply.weights import bias_correction
from optimizer.export.names import GraphNames, from_dict
from optimizer.foundation import state as compressed_state
from optimizer.foundation.process import torch_device
from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.state import CompressedState
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.inputs import kv_cache
from optimizer.harness.process.temporary import make_private_folder, make_temporary_folder
from optimizer.model.architectures.architecture import find_family
from optimizer.model.architectures.family_record import Family
from optimizer.model.checkpoint.checkpoint import Checkpoint, open_checkpoint
from optimizer.model.checkpoint.mapped import Scratch, map_tensor, map_weight
from optimizer.model.checkpoint.model import (
    choose_auto_class,
    is_linear,
    join_outputs,
    load_torch_model,
    move_buffers,
    replace_parameters,
)
from optimizer.model.graph import record
from optimizer.recipe.schema import Validation
from optimizer.validate.ledger.depth import LARGE
from optimizer.validate.ledger.distance import Array

REFERENCE_DEVICE = "validate.reference_device"


@dataclass
class RunArtifacts:
    """Folders of a run that validate judges, each written by one stage, and their contents. The
    ledger compares the candidate with its own checkpoint (`source`); quality and speed compare it
    with the reference.

    source: folder of load, or of the last of reduce, recover and qat
    state_folder: folder of compress, or of qat
    graph, model, engine: folders of export, lower and build
    original, original_graph: folders of load and of its export, where source is another one
    smaller: folder of reduce, else of load
    untrained: checkpoint that was compressed, before qat: folder of recover, else `smaller`
    unreduced: folder with the reference's model.onnx quantized alike or in float, where a latency
        gain is measured on this target
    scratch: folder for arrays and weights on disk; None: the folder for temporary files
    texts_beside: side of texts of a model that embeds images and texts, for their captions
    """

    section: Validation
    source: Path
    state_folder: Path
    graph: Path
    model: Path
    engine: Path
    original: Path | None = field(default=None, kw_only=True)
    original_graph: Path | None = field(default=None, kw_only=True)
    smaller: Path | None = field(default=None, kw_only=True)
    untrained: Path | None = field(default=None, kw_only=True)
    unreduced: Path | None = field(default=None, kw_only=True)
    scratch: Path | None = field(default=None, kw_only=True)
    texts_beside: RunArtifacts | None = field(default=None, kw_only=True)

    def mapped(self, tensor: Tensor) -> Tensor:
        """Return the values of `tensor` of a model that is judged, in a mapped file where it is
        large, because several models do not fit into memory. Weights of a large decoder lie there
        in half precision where that is exact (mapped.py: map_weight)."""
        if self.halves_weights:
            return map_weight(tensor, self._widened, self.scratch)
        return map_tensor(tensor, self.scratch)

    @cached_property
    def _widened(self) -> Scratch:
        return Scratch()

    @cached_property
    def halves_weights(self) -> bool:
        """True for a decoder whose parameters exceed depth.LARGE. Torch times no decoder, so no
        measured time includes the conversion of its weights to float32."""
        tensors = self.checkpoint.tensors
        values = sum(math.prod(tensors.shape(name)) for name in tensors)
        return tasks.look_up(self.contract).generates and values > LARGE

    def in_files(self, outputs: Iterable[Mapping[str, Array]]) -> list[dict[str, Array]]:
        """Return the same outputs of each run, with large arrays in mapped files: the logits of all
        texts may be as large as the model."""
        return [
            {name: map_tensor(torch.from_numpy(a), self.scratch).numpy() for name, a in one.items()}
            for one in outputs
        ]

    def work_folder(self) -> AbstractContextManager[Path]:
        """Make an empty folder for pieces of graphs, removed at the end of the context. It is in
        `scratch`, and so on the disk of their weights."""
        if self.scratch is None:
            return make_temporary_folder("ledger")
        return make_private_folder(self.scratch, "optimize-ledger")

    @cached_property
    def reference_model(self) -> nn.Module:
        """The user's own model in torch, the reference of quality and speed."""
        if self.original is None:
            return self.float_model
        return load_torch_model(open_checkpoint(self.original), self.task, place=self.mapped)

    @cached_property
    def reference_device(self) -> torch.device:
        """Device on which the reference answers; the CPU for an ONNX file. Raises MachineError
        where the device cannot be used."""
        if record.is_graph(self.reference / "checkpoint"):
            return torch_device.CPU
        return torch_device.resolve(self.section.validate_.reference_device, REFERENCE_DEVICE)

    @cached_property
    def answering_model(self) -> nn.Module:
        """The reference on its device, for its answers; on the CPU `reference_model`."""
        device = self.reference_device
        if device == torch_device.CPU:
            return self.reference_model
        checkpoint = open_checkpoint(self.original or self.source)
        model = load_torch_model(checkpoint, self.task, place=lambda tensor: tensor.to(device))
        move_buffers(model, device)
        return model

    @cached_property
    def smaller_model(self) -> nn.Module:
        """The model that reduce made, before recover trained it."""
        return self._model_of(self.smaller)

    @cached_property
    def untrained_model(self) -> nn.Module:
        """The model that was compressed, before qat trained it."""
        return self._model_of(self.untrained)

    def _model_of(self, folder: Path | None) -> nn.Module:
        if folder in (None, self.source):
            return self.float_model
        return load_torch_model(open_checkpoint(folder), self.task, place=self.mapped)

    @cached_property
    def captions(self) -> dict[bool, dict[str, Any]]:
        """{True: {text: vector} of the float model, False: of its engine}: vectors of the texts
        that judge a model of images, filled by quality/answers.py."""
        return {True: {}, False: {}}

    @property
    def gains(self) -> bool:
        """True where a latency gain is measured."""
        return self.unreduced is not None

    @property
    def reference(self) -> Path:
        """Folder of the reference model, with checkpoint/ and contract.json."""
        return self.original or self.source

    @property
    def reference_graph(self) -> Path:
        """Folder of the reference's float graph."""
        return self.original_graph or self.graph

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return open_checkpoint(self.source)

    @cached_property
    def contract(self) -> Contract:
        return contracts.read(self.source / "contract.json")

    @cached_property
    def encoder(self) -> Any:
        """Encoder of the judged model's kind of input: for texts the tokenizer."""
        kind = tasks.look_up(self.contract).inputs
        return kind.open(self.source / "checkpoint", self.contract)

    @cached_property
    def state(self) -> CompressedState:
        return compressed_state.read(self.state_folder)

    @cached_property
    def corrections(self) -> dict[str, Tensor]:
        """{bias: values that bias correction added to it}."""
        return bias_correction.read(self.state_folder)

    @cached_property
    def names(self) -> GraphNames:
        """Names of modules and parameters in the exported graph (names.json)."""
        return from_dict(json.loads((self.graph / "names.json").read_text(encoding="utf-8")))

    @cached_property
    def lowering(self) -> dict[str, Any]:
        """Content of lowering.json, the record of stage lower."""
        document: dict[str, Any] = json.loads((self.model / "lowering.json").read_text("utf-8"))
        return document

    @cached_property
    def inspected(self) -> dict[str, Any]:
        """Content of engine.json, the record of stage build with the builder's inspection."""
        document: dict[str, Any] = json.loads((self.engine / "engine.json").read_text("utf-8"))
        return document

    @cached_property
    def float_model(self) -> nn.Module:
        """Reference that validate compares with: model of the checkpoint in `source`, in torch and
        float32."""
        return load_torch_model(self.checkpoint, self.task, place=self.mapped)

    def load_by_transformers(self) -> nn.Module:
        """Load the checkpoint in `source` by transformers, in its stored precision, and convert it
        to float32: the reference of the ledger's hop load. Parameters that equal the float model's
        share its memory."""
        tensors, kind = self.checkpoint.tensors, self.checkpoint.config.get("model_type")
        types = {tensors.entry(name).dtype for name in tensors.as_written}
        stored = next(iter(types)) if len(types) == 1 else torch.float32
        for dtype in dict.fromkeys((stored, torch.float32)):
            with quiet():
                model: nn.Module = choose_auto_class(self.task, kind).from_pretrained(
                    self.checkpoint.folder,
                    attn_implementation="eager",
                    dtype=dtype,
                    trust_remote_code=any(self.checkpoint.folder.glob("*.py")),  # copied by load
                )
            buffers = [b for b in model.buffers() if b.is_floating_point()]
            if all(b.dtype == torch.float32 for b in buffers):  # else computed in half precision
                break
        ours = self.parameters

        def place(name: str, tensor: Tensor) -> Tensor:
            value, same = tensor.float(), ours.get(name)
            return same if same is not None and torch.equal(value, same) else self.mapped(value)

        replace_parameters(model, place)
        join_outputs(model, self.task)
        return model.eval().requires_grad_(False)

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Parameters of the float model that validate compares with; a tied one by each of its
        names."""
        named = self.float_model.named_parameters(remove_duplicate=False)
        return {name: p.detach() for name, p in named}

    @cached_property
    def family(self) -> Family:
        return find_family(self.checkpoint.config, self.task, self.checkpoint.folder)

    @cached_property
    def rounded_alone(self) -> set[str]:
        """Names of the weights that every method rounds to nearest: a decoder's embedding, and its
        head where the method uses no statistic of the head's inputs."""
        family = self.family
        names = [f"{family.prefix(self.task)}{family.embeddings}"]
        names += [] if self.section.quantize.rounding.second_moments else [family.head]
        return {f"{name}.weight" for name in names if family.kind == "decoder"}

    def drop(self, names: Iterable[str]) -> None:
        """Free the cached properties `names` of the run that is judged, which are computed again at
        their next use."""
        for name in names:
            self.__dict__.pop(name, None)

    @property
    def matrices(self) -> Mapping[str, Any]:
        """{input of the graph: matrix} of the adapter that changes the models of this run; {}
        without one. A run of the graph may leave these inputs out."""
        return {}

    @property
    def task(self) -> Any:
        return self.contract.task

    @property
    def precision(self) -> str:
        """Float type in which the unquantized part of the judged model is stored, such as fp32."""
        return self.section.target.float_type

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs that the judged model's contract lists."""
        return [o.name for o in self.contract.outputs]

    @property
    def cache_names(self) -> tuple[list[str], list[str]]:
        """(names of inputs, names of outputs) of the KV cache in a decoder's graph, which the
        contract does not list."""
        if not tasks.look_up(self.contract).generates:
            return [], []
        layers = self.contract.decoder.layers
        names = kv_cache.list_names(layers)
        return [past for past, _ in names], [present for _, present in names]

    @property
    def compared(self) -> list[str]:
        """Outputs of a graph: the contract's, and a decoder's KV cache."""
        return [*self.outputs, *self.cache_names[1]]

    @property
    def modules(self) -> list[str]:
        """Names of the judged model's linear modules. Where a graph was exported, only modules that
        it names."""
        if self.section.target.export is not None:
            return list(self.names.modules)
        linear = (n for n, m in self.float_model.named_modules() if is_linear(m))
        return list(linear)
