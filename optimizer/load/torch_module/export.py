"""Export a torch module to an ONNX file with torch.onnx.export(dynamo=True).

The first axis of inputs and outputs stays open where torch.export can leave it so; else the file
takes one row (ports.free_batch). The exporter numbers the weights that it transposes; they get the
module's names back, proven by value.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.progress import say
from optimizer.foundation.reading import quote_error
from optimizer.load.onnx_model.passes import TURNED
from optimizer.load.torch_module import code
from optimizer.load.torch_module.module import TorchModule

ROWS = 2  # of the traced example: torch.export makes sizes of 0 and 1 constants
BATCH = "batch"


def to_file(of: TorchModule, folder: Path) -> Path:
    """Export the recipe's torch module, when it is loaded, to an ONNX file in a folder. Raises
    CheckpointError for one that torch.export does not trace."""
    several = {n: t[torch.arange(ROWS) % len(t)] for n, t in of.example.items()}
    try:
        program = _export(of, several, dynamic=True)
    except Exception as e:  # exporter, tracer and decompositions have no common class
        try:
            program = _export(of, {n: t[:1] for n, t in of.example.items()}, dynamic=False)
        except Exception:
            raise _refusal(of, e) from e
        say(f"load: {of.name} is traced for one row, because several fail ({_cause(e, of)})")
    _restore_names(program.model.graph, of)
    file = folder / f"{of.name.replace(':', '.')}.onnx"
    program.save(str(file))
    return file


def _export(of: TorchModule, example: Mapping[str, Tensor], *, dynamic: bool) -> Any:
    axes = {0: torch.export.Dim(BATCH)} if dynamic else {}
    shapes: Any = dict.fromkeys(example, axes)
    with quiet(logging.ERROR), torch.no_grad():
        program = torch.onnx.export(
            of.module,
            () if of.by_name else tuple(example.values()),
            kwargs=dict(example) if of.by_name else None,
            dynamo=True,
            dynamic_shapes=shapes if of.by_name else tuple(shapes.values()),
            input_names=list(example),
            output_names=list(of.outputs),
            verbose=False,
        )
    assert program is not None
    return program


def _cause(e: BaseException, of: TorchModule) -> str:
    first = e.__cause__ or e
    return quote_error(first) + code.locate_line(first, of.base)


def _refusal(of: TorchModule, e: Exception) -> CheckpointError:
    return CheckpointError(
        f"torch.onnx.export does not export it ({_cause(e, of)})",
        where=f"model.module: {of.name}",
        accepted="a module that torch.export traces: no branch on values of tensors, sizes that "
        "depend on shapes only",
        fix="Change forward, or export it yourself and give the ONNX file as model.source.",
    )


def _restore_names(graph: Any, of: TorchModule) -> None:
    """Name each initializer of the ONNX file of a recipe's torch module that the exporter numbered
    and that is a transposed weight of the module, "<weight>:t"."""
    own = of.module.state_dict()
    turned = [(n, t.t()) for n, t in own.items() if t.ndim == 2]
    for name, value in list(graph.initializers.items()):
        if name in own or value.const_value is None or len(value.shape) != 2:
            continue
        array = torch.from_numpy(value.const_value.numpy().copy())
        equal = [n for n, t in turned if t.shape == array.shape and torch.equal(t, array)]
        new = f"{equal[0]}{TURNED}" if equal else name
        if new not in graph.initializers:
            value.name = new
