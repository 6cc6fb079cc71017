"""Grow the graph of a model with equal blocks from the graph of its first three.

Tracing and folding take time in proportion to the blocks or more, so three blocks are traced and
the third is repeated, after two checks:

 1. are_alike   in torch, every block has the same modules with the same settings and shapes,
                except for numbers of the block such as layer_idx
 2. grow        in the graph, the third block is the second with every number one higher: the
                same operators and attributes, on inputs that are the same or the next block's;
                only its outputs are read outside
A model that fails either check is traced in full. The stage compares a grown graph with the full
torch model like any other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from optimizer.export.interface import Interface
from optimizer.export.scopes import module_of
from optimizer.export.weights import StoredInitializer
from optimizer.harness.inputs.kv_cache import PAST, PRESENT

TRACED = 3
"""Number of traced blocks: the first may hold shared values; two more show how blocks follow."""

INTERNAL = frozenset(nn.Module().__dict__)
"""Attributes of every torch module."""


def are_alike(blocks: nn.Module) -> bool:
    """Test that all blocks of a list in a torch model without values have the same modules,
    settings and shapes."""
    first, *others = ([*block.named_modules()] for block in blocks.children())
    return all(
        [path for path, _ in first] == [path for path, _ in other]
        and all(_same(a, b, 0, index) for (_, a), (_, b) in zip(first, other, strict=True))
        for index, other in enumerate(others, start=1)
    )


def _same(a: nn.Module, b: nn.Module, first: int, second: int) -> bool:
    """Test, before only three blocks are traced, that two modules differ in parameters' values and
    block numbers (first, second) only."""
    if type(a) is not type(b):
        return False
    for name in ("_parameters", "_buffers"):
        tensors, other = getattr(a, name), getattr(b, name)
        if tensors.keys() != other.keys() or not all(_equal(tensors[k], other[k]) for k in tensors):
            return False
    settings = [{k: v for k, v in vars(m).items() if k not in INTERNAL} for m in (a, b)]
    return settings[0].keys() == settings[1].keys() and all(
        _equal(mine, settings[1][key])
        or (type(mine) is int and (mine, settings[1][key]) == (first, second))
        for key, mine in settings[0].items()
    )


def _equal(a: Any, b: Any) -> bool:
    """Test, before only three blocks are traced, that two settings or tensors of blocks are equal:
    type and value; tensors by shape, dtype and values, meta tensors (a skeleton's parameters) by
    shape and dtype."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype or a.is_meta != b.is_meta:
            return False
        return a.is_meta or torch.equal(a, b)
    return a is b or (type(a) is type(b) and bool(a == b))


@contextmanager
def shorten(model: nn.Module, blocks: str, count: int) -> Iterator[None]:
    """Inside, shorten the torch model's list of blocks named `blocks` to the `count` to be
    traced."""
    path, _, attribute = blocks.rpartition(".")
    parent = model.get_submodule(path)
    whole = getattr(parent, attribute)
    setattr(parent, attribute, nn.ModuleList(list(whole)[:count]))
    try:
        yield
    finally:
        setattr(parent, attribute, whole)


def grow(graph: ir.Model, blocks: str, ports: Interface, count: int) -> bool:
    """Grow the exported graph: repeat the last of TRACED blocks up to `count`, in place. Returns
    False, with the graph unchanged, where check 2 fails.

    blocks: name of the list of blocks
    ports: interface of the full model
    """
    numbers = Numbers(blocks)
    answers = _answers(graph, numbers)
    for answer in answers:
        answer.as_block()
    template = _template(graph, numbers)
    if template is None:
        for answer in answers:
            answer.as_answer(answer.value)
        return False
    known = _known(graph)
    outside = [n for n in graph.graph if numbers.of(module_of(n)) is None]
    last = template[-1][0]
    for k in range(TRACED, count):
        for node, shifts in template:
            copy = _copy(graph, node, shifts, partial(numbers.shift, by=k - TRACED + 1), known)
            graph.graph.insert_after(last, copy)
            last = copy
    _read_last(outside, numbers, known, count)
    for answer in answers:
        last_value = known[numbers.shift(str(answer.value.name), count - TRACED)]
        answer.as_answer(last_value)
        known[answer.name] = last_value
    _expose(graph, ports, known)
    graph.graph.sort()
    return True


class Numbers:
    """Reader of block numbers in an exported graph's names of modules, nodes and KV cache tensors.

    blocks: name of the list of blocks, such as model.layers
    """

    def __init__(self, blocks: str) -> None:
        cache = f"{PAST}|{PRESENT}"
        self._pattern = re.compile(rf"^({re.escape(blocks)}|{cache})\.(\d+)(?=[./]|$)")

    def of(self, name: str | None) -> int | None:
        """Return the block number in a name of the exported graph; None where the name has none."""
        match = self._pattern.match(name or "")
        return int(match[2]) if match else None

    def shift(self, name: str, by: int) -> str:
        """Return the exported graph's name with `by` added to its block number."""
        return self._pattern.sub(lambda m: f"{m[1]}.{int(m[2]) + by}", name)


@dataclass
class BlockOutput:
    """Value of the exported graph's third block that is also an output of the model.

    An output's name and type differ from those of other blocks' values, which hides that the blocks
    are equal, so it takes a block's name and type while blocks are compared and repeated.

    like: same value of the second block
    following: name of `like` with the next block number
    """

    value: ir.Value
    like: ir.Value
    following: str

    def __post_init__(self) -> None:
        self.name, self.type, self.shape = str(self.value.name), self.value.type, self.value.shape

    def as_block(self) -> None:
        """Inside a comparison of the exported graph's blocks, give the value the name and type that
        it would have inside a block."""
        self.value.name = self.following
        self.value.type, self.value.shape = self.like.type, self.like.shape

    def as_answer(self, value: ir.Value) -> None:
        """Give `value`, the last block's in the grown graph, the name and type of the model's
        output."""
        value.name, value.type, value.shape = self.name, self.type, self.shape


def _answers(model: ir.Model, numbers: Numbers) -> list[BlockOutput]:
    """List the outputs of the graph that its third block computes, and that the last of all blocks
    computes once it is grown. Those of the KV cache, one per block, are left out."""
    by_name = {str(n.name): n for n in model.graph}
    answers = []
    for value in model.graph.outputs:
        node = value.producer()
        if (
            node is None
            or numbers.of(module_of(node)) is None
            or numbers.of(value.name) is not None
        ):
            continue
        before = by_name.get(numbers.shift(str(node.name), -1))
        if before is None or len(before.outputs) != len(node.outputs):
            continue  # the check of the template fails
        like = before.outputs[node.outputs.index(value)]
        answers.append(BlockOutput(value, like, numbers.shift(str(like.name), 1)))
    return answers


Template = list[tuple[ir.Node, list[bool]]]


def _template(model: ir.Model, numbers: Numbers) -> Template | None:
    """Return the nodes of the exported graph's third block, each with one flag per input; None
    where check 2 fails.

    A flag is True for an input that is another tensor in every block, such as a weight, False for
    one that all blocks share.
    """
    by_block: dict[int, dict[str, ir.Node]] = {}
    for node in model.graph:
        number = numbers.of(module_of(node))
        if number is not None:
            by_block.setdefault(number, {})[str(node.name)] = node
    second, third = by_block.get(TRACED - 2, {}), by_block.get(TRACED - 1, {})
    if not second or [numbers.shift(n, 1) for n in second] != list(third):
        return None
    template: Template = []
    for before, node in zip(second.values(), third.values(), strict=True):
        shifts = _follows(before, node, numbers)
        if shifts is None:
            return None
        template.append((node, shifts))
    if any(_leaks(n, numbers) for nodes in by_block.values() for n in nodes.values()):
        return None
    return template


def _follows(before: ir.Node, node: ir.Node, numbers: Numbers) -> list[bool] | None:
    """Compare a node of the exported graph with `before`, the same node of the block before it.

    Returns a flag per input, True where the two read different tensors; None where the nodes differ
    in more than block numbers.
    """
    attributes = [{k: a.value for k, a in n.attributes.items()} for n in (before, node)]
    if before.op_type != node.op_type or before.domain != node.domain:
        return None
    if attributes[0] != attributes[1] or len(before.inputs) != len(node.inputs):
        return None
    pairs = [*zip(before.inputs, node.inputs, strict=True)]
    for a, b in [*pairs, *zip(before.outputs, node.outputs, strict=True)]:
        if a is not b and (a is None or b is None or numbers.shift(str(a.name), 1) != b.name):
            return None
    moving = [a is not b for a, b in pairs]
    leaves = [v for (_, v), moves in zip(pairs, moving, strict=True) if moves and v is not None]
    stored = [v.const_value for v in leaves if v.is_initializer()]
    return moving if all(isinstance(t, StoredInitializer) for t in stored) else None


def _leaks(node: ir.Node, numbers: Numbers) -> bool:
    """Test that `node` of the exported graph is not in the last traced block and an operator
    outside blocks reads it."""
    number = numbers.of(module_of(node))
    return number != TRACED - 1 and any(
        numbers.of(module_of(user)) is None for value in node.outputs for user, _ in value.uses()
    )


def _known(model: ir.Model) -> dict[str, ir.Value]:
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    values += [v for node in model.graph for v in node.outputs]
    return {str(v.name): v for v in values}


def _copy(
    model: ir.Model,
    node: ir.Node,
    shifts: list[bool],
    rename: Callable[[str], str],
    known: dict[str, ir.Value],
) -> ir.Node:
    """Copy `node` of the exported graph for a later block; its weights and inputs are made on first
    use."""
    inputs: list[ir.Value | None] = []
    for value, moves in zip(node.inputs, shifts, strict=True):
        if value is None or not moves:
            inputs.append(value)
            continue
        name = rename(str(value.name))
        if name not in known:
            known[name] = _next_leaf(model, value, name)
        inputs.append(known[name])
    attributes = list(node.attributes.values())
    metadata = {k: rename(v) for k, v in node.metadata_props.items()}
    copy = ir.Node(
        node.domain,
        node.op_type,
        inputs,
        attributes,
        name=rename(str(node.name)),
        num_outputs=len(node.outputs),
        metadata_props=metadata,
    )
    for value, old in zip(copy.outputs, node.outputs, strict=True):
        value.name, value.type, value.shape = rename(str(old.name)), old.type, old.shape
        known[str(value.name)] = value
    return copy


def _next_leaf(model: ir.Model, like: ir.Value, name: str) -> ir.Value:
    """Make, for a later block of the grown graph, the weight or graph input `name` after `like`,
    the third block's."""
    leaf = ir.Value(name=name, type=like.type, shape=like.shape)
    if like.is_graph_input():
        return leaf
    tensor = like.const_value
    assert isinstance(tensor, StoredInitializer)
    leaf.const_value = tensor.of(name)
    model.graph.register_initializer(leaf)
    return leaf


def _read_last(
    outside: list[ir.Node], numbers: Numbers, known: Mapping[str, ir.Value], count: int
) -> None:
    """Let the nodes behind the blocks of the grown graph read the outputs of the last block in
    place of the third's."""
    for node in outside:
        for i, value in enumerate(node.inputs):
            producer = value.producer() if value is not None else None
            if producer is not None and numbers.of(module_of(producer)) is not None:
                assert value is not None
                node.replace_input_with(i, known[numbers.shift(str(value.name), count - TRACED)])


def _expose(model: ir.Model, ports: Interface, known: Mapping[str, ir.Value]) -> None:
    """Set the inputs and outputs of the grown graph, in the contract's order."""
    for listed, interface in (
        (model.graph.inputs, ports.inputs),
        (model.graph.outputs, ports.outputs),
    ):
        listed.clear()
        listed.extend(known[port.name] for port in interface)
