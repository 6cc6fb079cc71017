"""Trace equal models once per process of tests: tracing took a third of the time of all tests.

A trace holds no values of weights, which are stand-ins of one number (optimizer/export/weights.py).
The key is everything else that it depends on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import onnx_ir as ir
import pytest
from torch import nn

from optimizer.export import stage
from optimizer.export.interface import Interface

Trace = Callable[[nn.Module, Interface, int, int], ir.Model]


def key(model: nn.Module, ports: Interface, longest: int, opset: int) -> str:
    """Digest of modules, config, parameters (type, shape, ties), buffers and interface."""
    digest = hashlib.sha256()
    config = getattr(model, "config", None)
    parts = [repr(model), type(model).__module__, repr(ports), longest, opset, model.training]
    parts += [config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else ""]
    parts += [getattr(config, "_attn_implementation", "")]
    shared: dict[int, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied = shared.setdefault(id(parameter), len(shared))
        parts.append((name, tied, parameter.dtype, tuple(parameter.shape)))
    digest.update(repr(parts).encode())
    for name, buffer in model.named_buffers(remove_duplicate=False):
        digest.update(f"{name} {buffer.dtype} {tuple(buffer.shape)}".encode())
        digest.update(buffer.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()


def remembered(trace: Trace) -> Trace:
    """Function that traces each key once and gives copies."""
    traced: dict[str, ir.Model] = {}

    def export(model: nn.Module, ports: Interface, longest: int, opset: int) -> ir.Model:
        if any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
            return trace(model, ports, longest, opset)  # a fault that a test planted
        name = key(model, ports, longest, opset)
        if name not in traced:
            traced[name] = trace(model, ports, longest, opset)
        return traced[name].clone()

    return export


def trace_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stage, "export", remembered(stage.export))
