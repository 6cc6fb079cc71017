"""Trace equal models once per run of tests: tracing took half of the time of all tests.

A cleaned graph holds no values of weights, which are read when it is written
(optimizer/export/weights.py), so it is kept in a file that every worker reads. The key is
everything else that it depends on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import onnx
import onnx_ir as ir
import pytest
import torch
import torch._dynamo.config
import torch._export.utils
import torch.fx.config
from torch import Tensor, nn

from optimizer.export import onnx_from_torch, stage
from optimizer.export.interface import Interface
from optimizer.export.passes.clean import clean
from optimizer.export.weights import StoredInitializer
from tests.made_once import locked

NO_MATTER = ("_name_or_path", "transformers_version", "id2label", "label2id")
"""Fields of a config that no model computes with."""


class Untraced(NamedTuple):
    """Model in place of its graph, with the digest of all that the graph depends on."""

    model: nn.Module
    ports: Interface
    longest: int
    opset: int

    def key(self) -> str:
        """Digest of modules, config, parameters (type, shape, ties), buffers and interface."""
        model, config = self.model, getattr(self.model, "config", None)
        parts = [repr(model), type(model).__module__, repr(self[1:]), model.training]
        if hasattr(config, "to_json_string"):
            settings = json.loads(config.to_json_string(use_diff=False))
            parts += [{k: v for k, v in settings.items() if k not in NO_MATTER}]
        parts += [getattr(config, "_attn_implementation", "")]
        shared: dict[int, int] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            tied = shared.setdefault(id(parameter), len(shared))
            parts.append((name, tied, parameter.dtype, tuple(parameter.shape)))
        digest = hashlib.sha256(repr(parts).encode())
        for name, buffer in model.named_buffers(remove_duplicate=False):
            digest.update(f"{name} {buffer.dtype} {tuple(buffer.shape)}".encode())
            digest.update(buffer.detach().cpu().float().numpy().tobytes())
        return digest.hexdigest()


def export(model: nn.Module, ports: Interface, longest: int, opset: int) -> ir.Model | Untraced:
    """The model itself, which `Traces.clean` traces if it must."""
    if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return onnx_from_torch.export(model, ports, longest, opset)  # a fault that a test planted
    return Untraced(model, ports, longest, opset)


class Traces:
    """Cleaned graphs in a folder, {key}.onnx."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def clean(
        self,
        graph: ir.Model | Untraced,
        values: Mapping[str, Tensor],
        first: Mapping[str, str],
    ) -> ir.Model:
        if isinstance(graph, ir.Model):
            return clean(graph, values, first)
        names = repr((graph.key(), sorted(values), sorted(first.items())))
        file = self.folder / f"{hashlib.sha256(names.encode()).hexdigest()}.onnx"
        with locked(file):
            if file.exists():
                return self._read(file, values)
            with pytest.MonkeyPatch.context() as patch:
                # the lines of code behind each operator, which are not in a cleaned graph
                patch.setattr(torch.fx.config, "do_not_emit_stack_traces", True)
                made = clean(onnx_from_torch.export(*graph), values, first)
            self._write(made, file)
        return made

    @staticmethod
    def _write(graph: ir.Model, file: Path) -> None:
        """Write the graph, with the place of each weight's value in place of the value."""
        copy = graph.clone()
        for value in copy.graph.initializers.values():
            if isinstance(weight := value.const_value, StoredInitializer):
                value.const_value = ir.ExternalTensor(
                    "transposed" if weight.transposed else "stored",
                    0,
                    weight.nbytes,
                    weight.dtype,
                    shape=weight.shape,
                    name=str(weight.name),
                )
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(ir.to_proto(copy).SerializeToString())
        part.replace(file)

    @staticmethod
    def _read(file: Path, values: Mapping[str, Tensor]) -> ir.Model:
        graph = ir.from_proto(onnx.load(file, load_external_data=False))
        for value in graph.graph.initializers.values():
            if isinstance(place := value.const_value, ir.ExternalTensor):
                transposed = place.location == "transposed"
                shape = place.shape.numpy()
                whole = shape[::-1] if transposed else shape
                value.const_value = StoredInitializer(
                    values, place.name, place.dtype, whole, transposed
                )
        return graph


def trace_once(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Keep traced graphs in a folder, and the exporter's tables of operators in this process."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
    list_operators = cache(torch._export.utils._materialize_cpp_cia_ops)  # of all namespaces, each
    patch.setattr(torch._export.utils, "_materialize_cpp_cia_ops", list_operators)
    # its entries depend on the shapes of one model: making them takes longer than they save
    patch.setattr(torch._dynamo.config, "fake_tensor_cache_enabled", False)
    patch.setattr(stage, "export", export)
    patch.setattr(stage, "clean", Traces(folder).clean)


def trace_always(patch: pytest.MonkeyPatch) -> None:
    """Trace as the product does."""
    patch.setattr(stage, "export", onnx_from_torch.export)
    patch.setattr(stage, "clean", clean)
