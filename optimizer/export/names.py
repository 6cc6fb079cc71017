"""Pair the parameters of a checkpoint with initializers and nodes of a graph, by value.

A parameter is paired with an initializer when every element is equal, after transposing a weight
stored [K, N] and casting to the graph's float type. A name alone is never trusted: a layer silently
left in float is the typical fault of such tools.

names.json
    modules     {module: {parameter, initializer, layout, node, op, input, site, also}}
                layout   "KN" the initializer is [inputs, outputs]; "NK" it is transposed by a
                         node before the MatMul (a weight that something else uses as well);
                         "OIHW" of a convolution
                node     the operator's name; input: the tensor whose range "site" describes
                also     [{node, input}, ...] further uses of a shared module
    lookups     {module: {parameter, initializer, nodes}} of each embedding whose rows, [V, H], the
                Gathers `nodes` look up; one whose ids are constants may be folded away
    summands    {module: [{input, node}, ...]} of each identity whose result is quantized for an
                operator without weights: the tensor and its readers; absent where there are none
    operands    {module: {input, node}} of each identity around the products of an attention
    parameters  {parameter: initializer}
    folded      [parameter, ...] parameters with no initializer: not used by the graph, or
                folded into another value; never a weight of a module
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimizer.export.scopes import module_of
from optimizer.export.weights import ROWS_OF, read_rows
from optimizer.foundation.errors import OptimizeError
from optimizer.foundation.state import input_name
from optimizer.model.architectures.residual_blocks import Summand

Array = NDArray[Any]


@dataclass(frozen=True)
class OperatorInput:
    """An operator of the exported graph, by name, and a tensor that it reads, by name."""

    node: str
    input: str


@dataclass(frozen=True)
class ModuleInGraph:
    """A linear module's weight in the exported graph and the operators that multiply by it.

    Fields as in names.json; `node`, `op` and `input` describe the first operator.
    """

    parameter: str
    initializer: str
    layout: str
    node: str
    op: str
    input: str
    site: str
    also: tuple[OperatorInput, ...] = ()


@dataclass(frozen=True)
class Lookup:
    """An embedding's table in the exported graph, and the Gathers (`nodes`) that take rows of
    it."""

    parameter: str
    initializer: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class GraphNames:
    """Pairing of a checkpoint with its exported graph, the content of names.json."""

    modules: Mapping[str, ModuleInGraph]
    parameters: Mapping[str, str]
    folded: tuple[str, ...] = field(default=())
    lookups: Mapping[str, Lookup] = field(default_factory=dict)
    summands: Mapping[str, tuple[OperatorInput, ...]] = field(default_factory=dict)
    operands: Mapping[str, OperatorInput] = field(default_factory=dict)

    @property
    def parameter_of(self) -> dict[str, str]:
        """Return {module: parameter name of its weight} of linear modules and embeddings."""
        multiplied = {m: entry.parameter for m, entry in self.modules.items()}
        return multiplied | {m: entry.parameter for m, entry in self.lookups.items()}

    def as_dict(self) -> dict[str, Any]:
        summands = {m: [asdict(use) for use in uses] for m, uses in self.summands.items()}
        operands = {m: asdict(use) for m, use in self.operands.items()}
        return {
            **({"summands": summands} if summands else {}),
            **({"operands": operands} if operands else {}),
            "modules": {m: asdict(entry) for m, entry in self.modules.items()},
            "lookups": {m: asdict(entry) for m, entry in self.lookups.items()},
            "parameters": dict(self.parameters),
            "folded": list(self.folded),
        }


def from_dict(document: Mapping[str, Any]) -> GraphNames:
    """Read the pairing of a checkpoint with a graph from the content of names.json."""
    modules = {
        name: ModuleInGraph(**{**m, "also": tuple(OperatorInput(**u) for u in m["also"])})
        for name, m in document["modules"].items()
    }
    lookups = {
        name: Lookup(**{**entry, "nodes": tuple(entry["nodes"])})
        for name, entry in document["lookups"].items()
    }
    summands = {
        name: tuple(OperatorInput(**use) for use in uses)
        for name, uses in document.get("summands", {}).items()
    }
    operands = {name: OperatorInput(**use) for name, use in document.get("operands", {}).items()}
    folded = tuple(document["folded"])
    return GraphNames(modules, document["parameters"], folded, lookups, summands, operands)


def pair(
    model: ir.Model,
    parameters: Mapping[str, Tensor],
    linear: Iterable[str],
    quantized: Iterable[str] = (),
    first: Mapping[str, str] | None = None,
    tables: Iterable[str] = (),
) -> GraphNames:
    """Pair every parameter of the checkpoint with an initializer of the exported graph by value.

    parameters: {name: value in the checkpoint or its replacement}, read one at a time
    linear: modules whose `weight` is multiplied by an activation
    quantized: parameters that will be quantized
    first: {parameter: name of a tied parameter's initializer}
    tables: modules whose `weight` is looked up by row
    Raises OptimizeError naming the first linear module or quantized parameter that no operator of
    the graph can be proven to hold.
    """
    index = _Index(model)
    paired: dict[str, tuple[ir.Value, bool]] = {}
    folded = []
    for name in sorted(parameters):
        match = index.find(name, parameters, (first or {}).get(name, name))
        if match is None:
            folded.append(name)
        else:
            paired[name] = match
    modules = {}
    for module in sorted(linear):
        weight = f"{module}.weight"
        if weight not in paired:
            raise _unpaired(weight, model)
        modules[module] = _module(module, weight, *paired[weight], _sharing(paired, weight))
    lookups = _lookups(tables, paired)
    initializer_of = {p: _name(v) for p, (v, _) in paired.items()}
    names = GraphNames(modules, initializer_of, tuple(folded), lookups)
    covered = set(names.parameter_of.values())
    for weight in sorted(quantized):
        if weight not in covered:
            raise _unpaired(weight, model)
    return names


def _lookups(
    tables: Iterable[str], paired: Mapping[str, tuple[ir.Value, bool]]
) -> dict[str, Lookup]:
    """Return {module: Lookup} of those embeddings whose initializer in the exported graph is read
    by Gathers.

    tables: parameter names of embeddings
    paired: {parameter: (initializer, True where it is stored transposed)}
    """
    lookups = {}
    for module in sorted(tables):
        weight = f"{module}.weight"
        value, _ = paired.get(weight, (None, False))
        if value is None:
            continue
        nodes = [n for n, i in value.uses() if n.op_type == "Gather" and i == 0 and _by_row(n)]
        if _sharing(paired, weight):
            nodes = [n for n in nodes if module_of(n) == module]
        if nodes:
            lookups[module] = Lookup(weight, _name(value), tuple(str(n.name) for n in nodes))
    return lookups


def _by_row(gather: ir.Node) -> bool:
    axis = gather.attributes.get("axis")
    return axis is None or axis.as_int() == 0


class _Index:
    """Initializers of a graph, found by name or by value, to pair them with the checkpoint's
    parameters."""

    def __init__(self, model: ir.Model) -> None:
        self._by_name = dict(model.graph.initializers)
        self._by_value: dict[str, ir.Value] | None = None

    def find(
        self, name: str, parameters: Mapping[str, Tensor], tied: str
    ) -> tuple[ir.Value, bool] | None:
        """Return the initializer equal to a parameter, and True where it is stored transposed.

        Tries the initializer of the same name, then that of the tied parameter, then others by
        digest: a graph may keep one copy of equal parameters.
        """
        candidate = self._by_name.get(name, self._by_name.get(tied))
        if candidate is not None:
            transposed = compare_parameter(candidate, name, parameters)
            return None if transposed is None else (candidate, transposed)
        array = parameters[name].detach().float().numpy()
        for transposed in (True, False) if array.ndim == 2 else (False,):
            oriented = array.T if transposed else array
            for kind in (np.float32, np.float16):
                hit = self._digests().get(_digest(oriented.astype(kind)))
                if hit is not None:
                    return hit, transposed
        return None

    def _digests(self) -> dict[str, ir.Value]:
        if self._by_value is None:
            self._by_value = {
                _digest(_read(v)): v
                for v in self._by_name.values()
                if v.const_value is not None and v.const_value.dtype.is_floating_point()
            }
        return self._by_value


def _read(initializer: ir.Value) -> Array:
    """Copy the values of an exported graph's initializer into memory; an external file is mapped
    only meanwhile."""
    tensor = initializer.const_value
    assert tensor is not None
    array: Array = np.array(tensor.numpy())
    if isinstance(tensor, ir.ExternalTensor):
        tensor.release()
    return array


def _digest(array: Array) -> str:
    head = f"{array.dtype} {array.shape}".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()


def compare_parameter(
    initializer: ir.Value, name: str, parameters: Mapping[str, Tensor]
) -> bool | None:
    """Compare an initializer of the exported graph with the parameter `name`, some rows at a time
    if it is large.

    Returns False for equal values, True if the parameter's transpose is equal, None otherwise. A
    symmetric matrix counts as transposed unless an operator transposes it.
    """
    tensor = initializer.const_value
    assert tensor is not None
    if tensor.size > ROWS_OF and len(tensor.shape) == 2:
        of_rows = (t for t in _orders(initializer, 2) if _rows_equal(tensor, t, name, parameters))
        return next(of_rows, None)
    stored = torch.from_numpy(_read(initializer))
    cast = parameters[name].detach().float().to(stored.dtype)
    for transposed in _orders(initializer, cast.ndim):
        oriented = cast.t() if transposed and cast.ndim == 2 else cast
        if oriented.shape == stored.shape and torch.equal(oriented.contiguous(), stored):
            return transposed
    return None


def _orders(initializer: ir.Value, axes: int) -> tuple[bool, bool]:
    """Return the two layouts in which an initializer of the exported graph may hold a parameter,
    the likelier one first: True transposed, False as it is."""
    transposed_in_graph = any(n.op_type == "Transpose" for n, _ in initializer.uses())
    return (True, False) if axes == 2 and not transposed_in_graph else (False, True)


def _rows_equal(
    tensor: ir.TensorProtocol, transposed: bool, name: str, parameters: Mapping[str, Tensor]
) -> bool:
    """Test that a matrix of the exported graph, or its transpose, equals the parameter."""
    mapped = tensor.numpy()
    stored, start = mapped.T if transposed else mapped, 0
    for rows in read_rows(parameters, name):
        read = stored[start : start + len(rows)]
        array = rows.detach().numpy().astype(read.dtype, copy=False)
        if read.shape != array.shape or not np.array_equal(read, array):
            return False
        start += len(rows)
    same = start == len(stored)
    if isinstance(tensor, ir.ExternalTensor):
        del mapped, stored, read
        tensor.release()
    return same


def _sharing(paired: Mapping[str, tuple[ir.Value, bool]], weight: str) -> bool:
    """Test that a parameter other than `weight` is paired with the same initializer of the exported
    graph."""
    return sum(v is paired[weight][0] for v, _ in paired.values()) > 1


def _module(
    module: str, weight: str, value: ir.Value, transposed: bool, shared: bool
) -> ModuleInGraph:
    """Build the record in names.json of the linear layer `module`, whose weight is the initializer
    `value`.
    shared: the initializer holds several parameters, so only operators traced in `module` count
    """
    if len(value.shape or ()) == 4:
        return _convolution(module, weight, value)
    products = value if transposed else None
    if not transposed:  # W -> Transpose -> MatMul
        transposes = [n.outputs[0] for n, _ in value.uses() if n.op_type == "Transpose"]
        products = transposes[0] if transposes else None
    uses = [n for n, i in products.uses() if n.op_type == "MatMul" and i == 1] if products else []
    if shared:
        uses = [n for n in uses if module_of(n) == module]
    if not uses:
        raise OptimizeError(
            f"{weight} is initializer {value.name!r} of the exported graph, and no MatMul of "
            f"{module} multiplies by it",
            where="export",
            fix=f"Add {module} to quantize.keep_float, and report the architecture.",
        )
    read_by = [OperatorInput(str(n.name), _name(n.inputs[0])) for n in uses]
    return ModuleInGraph(
        parameter=weight,
        initializer=_name(value),
        layout="KN" if transposed else "NK",
        node=read_by[0].node,
        op="MatMul",
        input=read_by[0].input,
        site=input_name(module),
        also=tuple(read_by[1:]),
    )


def _convolution(module: str, weight: str, value: ir.Value) -> ModuleInGraph:
    """Build the record of a convolution in the exported graph; OptimizeError unless a single Conv
    reads its weight."""
    uses = [n for n, i in value.uses() if n.op_type == "Conv" and i == 1]
    if len(uses) != 1:
        raise OptimizeError(
            f"{weight} is initializer {value.name!r} of the exported graph, and {len(uses)} Conv "
            "multiply by it, not one",
            where="export",
            fix=f"Add {module} to quantize.keep_float, and report the architecture.",
        )
    node = uses[0]
    return ModuleInGraph(
        weight,
        _name(value),
        "OIHW",
        str(node.name),
        "Conv",
        _name(node.inputs[0]),
        input_name(module),
    )


def find_residual_adds(
    model: ir.Model,
    modules: Mapping[str, ModuleInGraph],
    summands: Mapping[str, tuple[str, Summand]],
) -> dict[str, tuple[OperatorInput, ...]]:
    """Find the operators of the exported graph that read the tensors which the identities
    `summands` stand for.

    Returns {identity: each reader with the tensor}. By its record, the readers are the residual
    add of its block, a pooling, or all operators.

    summands: {name of an identity: (name of its block, its record)}
    Raises OptimizeError where no operator reads the tensor, or several add or pool it.
    """
    nodes = {str(n.name): n for n in model.graph}
    uses = {}
    for name, (block, summand) in summands.items():
        entry = modules.get(f"{block}.{summand.convolution}")
        tensor = None if entry is None else _handed_on(nodes[entry.node], summand)
        readers = [] if tensor is None else [n for n, _ in tensor.uses()]
        if not summand.pooled and not summand.whole:
            readers = [n for n in readers if n.op_type == "Add" and _within(n, block)]
        if len(readers) != 1 and not (summand.whole and readers):
            what = "pooling reads" if summand.pooled else f"a residual add of {block} reads"
            raise OptimizeError(
                f"{name} hands on what {'an operator reads' if summand.whole else what}, and the "
                f"exported graph has {len(readers)} such operators, not one",
                where="export",
                fix=f"Add {block}.* to quantize.keep_float, and report the architecture.",
            )
        uses[name] = tuple(OperatorInput(str(reader.name), _name(tensor)) for reader in readers)
    return uses


def _within(node: ir.Node, block: str) -> bool:
    """Return True for a node of the exported graph of the module `block`, or of one inside it."""
    return f"{module_of(node)}.".startswith(f"{block}.")


def _handed_on(convolution: ir.Node, summand: Summand) -> ir.Value | None:
    """The tensor of the exported graph to quantize: the convolution's input, its output, or
    (pooled) its activation's."""
    if summand.input:
        return convolution.inputs[0]
    result = convolution.outputs[0]
    users = [n for n, _ in result.uses()]
    return users[0].outputs[0] if summand.pooled and len(users) == 1 else result


def _name(value: ir.Value | None) -> str:
    assert value is not None
    return str(value.name)


def _unpaired(parameter: str, model: ir.Model) -> OptimizeError:
    """Build the error of an export for a parameter that no initializer equals."""
    same = model.graph.initializers.get(parameter)
    why = (
        "no initializer of the exported graph equals it"
        if same is None
        else "the initializer of that name holds other values"
    )
    return OptimizeError(
        f"{parameter} cannot be found in the exported graph: {why}",
        where="export",
        fix=f"Add {parameter.removesuffix('.weight')} to quantize.keep_float, and report the "
        "architecture.",
    )
