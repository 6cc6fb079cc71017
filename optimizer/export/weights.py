"""Hold a model's parameters during export, one tensor in memory at a time.

The model is traced with stand-ins (shape and type, no values). While its graph is folded,
parameters are graph inputs, so that nothing reads, merges or renames them. Then each becomes an
initializer whose value is read from the checkpoint when it is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from optimizer.model.checkpoint.checkpoint import Tensors

Owners = list[tuple[nn.Module, str]]

ROWS_OF = 1 << 24
"""Values of a matrix from which its rows are read some at a time, and the number of those."""


def find_owners(model: nn.Module) -> dict[str, tuple[list[str], Owners]]:
    """Find the owners of the parameters to export: {first name of a parameter: (all its names, the
    module and attribute of each)}."""
    first_names: dict[int, str] = {}
    groups: dict[str, tuple[list[str], Owners]] = {}
    for path, owner in model.named_modules():
        for attribute, parameter in owner.named_parameters(recurse=False):
            name = f"{path}.{attribute}".lstrip(".")
            first = first_names.setdefault(id(parameter), name)
            names, places = groups.setdefault(first, ([], []))
            names.append(name)
            places.append((owner, attribute))
    return groups


def untie(model: nn.Module, replaced: Mapping[str, Tensor]) -> None:
    """Prepare the model for export: give a tied parameter its own copy where `replaced` has a value
    under its name, in place.

    A value under the first of the tied names applies to all of them, so it unties nothing.

    replaced: {parameter: value}, from the compress stage
    """
    for names, places in find_owners(model).values():
        for name, (owner, attribute) in list(zip(names, places, strict=True))[1:]:
            if name in replaced:
                apart = nn.Parameter(getattr(owner, attribute).clone(), requires_grad=False)
                setattr(owner, attribute, apart)


class Values(Mapping[str, Tensor]):
    """{parameter: float32 value}, read at each access from `replaced`, else from the checkpoint.

    All names of a tied parameter have its one stored value. A parameter that neither mapping holds
    raises KeyError.

    stored: {parameter: value} of the checkpoint
    replaced: {parameter: value} from the compress stage
    """

    def __init__(
        self, model: nn.Module, stored: Mapping[str, Tensor], replaced: Mapping[str, Tensor]
    ) -> None:
        self._from: dict[str, tuple[Mapping[str, Tensor], str]] = {}
        self.first: dict[str, str] = {}
        for first, (names, _) in find_owners(model).items():
            self.first.update(dict.fromkeys(names, first))
            for kind in (replaced, stored):
                available = [n for n in names if n in kind]
                if available:
                    self._from.update(
                        {n: (kind, n if n in available else available[0]) for n in names}
                    )
                    break

    def __getitem__(self, name: str) -> Tensor:
        kind, stored = self._from[name]
        value = kind[stored]
        return value.float() if value.is_floating_point() else value

    def stored(self, name: str) -> Tensor:
        """Read a parameter in the type of its file: bfloat16 takes half the memory of float32."""
        kind, stored = self._from[name]
        if type(kind) is Tensors:
            return kind.as_stored(stored, kind.stored(stored))
        return kind[stored]

    def __iter__(self) -> Iterator[str]:
        return iter(self._from)

    def __len__(self) -> int:
        return len(self._from)

    def __contains__(self, name: object) -> bool:
        return name in self._from


def stand_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Prepare the model for tracing: replace every parameter, in place, by a CPU tensor of its
    shape that stores one number.

    dtype: type of the floating-point stand-ins
    Buffers keep their type: rotary frequencies in half precision would change every position.
    """
    for _, places in find_owners(model).values():
        old = getattr(*places[0])
        kind = dtype if old.is_floating_point() else old.dtype
        new = nn.Parameter(torch.zeros((), dtype=kind).expand(old.shape), requires_grad=False)
        for owner, attribute in places:
            setattr(owner, attribute, new)


def fill_buffers(
    model: nn.Module, stored: Mapping[str, Tensor], replaced: Mapping[str, Tensor]
) -> None:
    """Prepare the model for tracing: set its persistent buffers from `replaced`, else `stored`, in
    place.

    stored: {parameter or buffer: value} of the checkpoint
    replaced: {parameter or buffer: value} from the compress stage
    """
    persistent = model.state_dict(keep_vars=True).keys()
    for name, _ in list(model.named_buffers()):
        kind = replaced if name in replaced else stored
        if name in persistent and name in kind:
            path, _, attribute = name.rpartition(".")
            value = kind[name]
            value = value.float() if value.is_floating_point() else value
            setattr(model.get_submodule(path), attribute, value)


@contextmanager
def hide(model: ir.Model, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Turn the initializers named in `values` into graph inputs inside the context.

    On exit they become initializers again, whose values are read when the graph is written; unused
    ones are removed.
    """
    graph = model.graph
    inputs = [v for v in graph.initializers.values() if v.name in values]
    for value in inputs:
        value.const_value = None
        del graph.initializers[str(value.name)]
        graph.inputs.append(value)
    yield
    for value in inputs:
        graph.inputs.remove(value)
        if value.uses() or value.is_graph_output():
            assert value.dtype is not None
            assert value.shape is not None
            shape = tuple(value.shape.numpy())
            value.const_value = StoredInitializer(values, str(value.name), value.dtype, shape)
            graph.register_initializer(value)


def read_rows(
    values: Mapping[str, Tensor], name: str, transposed: bool = False
) -> Iterator[Tensor]:
    """Yield a matrix to be written to the ONNX file in parts of consecutive rows, each part with at
    most ROWS_OF values, in float32.

    transposed: True for rows of the transposed matrix
    """
    whole = values.stored(name) if isinstance(values, Values) else values[name]
    matrix = whole.t() if transposed else whole
    for rows in torch.split(matrix, max(1, ROWS_OF // matrix.shape[1])):
        yield rows.float()


class StoredInitializer(ir.LazyTensor):
    """Initializer whose value is read from the checkpoint when the graph is written.
    shape: shape in the checkpoint
    transposed: True where the graph stores it as [K, N]
    """

    def __init__(
        self,
        values: Mapping[str, Tensor],
        name: str,
        dtype: ir.DataType,
        shape: tuple[int, ...],
        transposed: bool = False,
    ) -> None:
        self.values, self.transposed, self.whole = values, transposed, shape

        def read() -> ir.TensorProtocol:
            value = values[name].detach()
            value = value.t().contiguous() if transposed else value  # five times faster than numpy
            array = value.numpy().astype(dtype.numpy(), copy=False)
            return ir.tensor(np.ascontiguousarray(array), name=name)

        file_shape = ir.Shape(shape[::-1] if transposed else shape)
        super().__init__(read, dtype=dtype, shape=file_shape, name=name)

    def tofile(self, file: Any) -> None:
        """Write the parameter's values into the ONNX file; a large matrix some rows at a time,
        without a copy in float32."""
        kind = {ir.DataType.FLOAT: torch.float32, ir.DataType.FLOAT16: torch.float16}
        if self.size <= ROWS_OF or len(self.whole) != 2 or self.dtype not in kind:
            super().tofile(file)
            return
        for rows in read_rows(self.values, str(self.name), self.transposed):
            file.write(rows.to(kind[self.dtype]).contiguous().numpy().data)

    def of(self, name: str) -> StoredInitializer:
        """Return an initializer of the parameter `name` with this one's shape, type and layout."""
        return StoredInitializer(self.values, name, self.dtype, self.whole, self.transposed)

    def transpose(self) -> StoredInitializer:
        """Return the initializer of the same parameter, transposed."""
        return StoredInitializer(
            self.values, str(self.name), self.dtype, self.whole, not self.transposed
        )
