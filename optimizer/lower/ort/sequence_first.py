"""Rearrange an encoder's hidden states to [sequence, batch, width], to save copies in attention.

    Transpose(Reshape(q, [0, 0, heads, width]), perm) q' k' v alike -> perm of the first axis

Attention multiplies head by head, so transformers moves heads in front of positions: three copies
before its products and one behind. ONNX Runtime's FusedMatMul reads an operand in place where the
moved axis is the first (transBatchA, transBatchB), which holds for positions once the batch is
second. So the small ids and the output are transposed once, and one of each attention's four copies
is left, of integers (docs/decisions/0011). The graph uses ONNX's operators,
which ONNX Runtime fuses; no bit changes.

An attention takes part when
 1. q, k and v are [batch, sequence, heads * width] split by [0, 0, heads, width], and brought to
    [batch, heads, sequence, width], k with its last two axes exchanged; nothing else reads these
 2. the scores may be scaled by a constant, and an unrelated value added to them
 3. the heads are laid side by side again
Operators between attentions take part where they compute each token alone (TOKENWISE). Values at
the border to others are transposed; the graph is unchanged where that saves no copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from optimizer.export.scopes import MODULE, module_of
from optimizer.lower.onnx.attention_pattern import OtherPattern, find_user, get_perm
from optimizer.lower.onnx.examine import find_maker, find_only_user, read_constant

Perm = tuple[int, ...]
FORWARD: Perm = (0, 2, 1, 3)
KEYS: Perm = (0, 2, 3, 1)
# the same of [sequence, batch, heads, width]
FIRST: dict[Perm, Perm] = {FORWARD: (1, 2, 0, 3), KEYS: (1, 2, 3, 0)}
BACK = (2, 0, 1, 3)  # to [sequence, batch, heads, width]
SAVED = 3  # copies of each attention
SWAPPED = "sequence_first"  # metadata of a product with such input and output

ELEMENTWISE = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Neg", "Abs", "Exp", "Erf", "Tanh", "Sigmoid"}
    | {"Relu", "Gelu", "Identity", "Cast", "Min", "Max", "Clip"}
)
QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear"})
TOKENWISE = ELEMENTWISE | QUANTIZERS | {"MatMul", "LayerNormalization"}

Ranks = Mapping[str, int]  # {value other than an initializer: rank}


@dataclass(frozen=True)
class _SequenceFirstAttention:
    """Attention of one layer in a lowered encoder, with the nodes that reorder its axes.

    splits, turned: Reshapes and Transposes of q, k and v
    back, merged: Transpose and Reshape that lay heads side by side
    """

    splits: tuple[ir.Node, ...]
    turned: tuple[ir.Node, ...]
    back: ir.Node
    merged: ir.Node


@dataclass
class _Region:
    """Part of the lowered graph that becomes [sequence, batch, ..].

    values, nodes: values, and the nodes that read and compute them
    gathers: lookups whose ids are transposed
    entering: values of other nodes, transposed first
    leaving: values that other nodes read, transposed back
    """

    values: dict[ir.Value, None] = field(default_factory=dict)
    nodes: dict[ir.Node, None] = field(default_factory=dict)
    gathers: dict[ir.Node, None] = field(default_factory=dict)
    entering: dict[ir.Value, None] = field(default_factory=dict)
    leaving: dict[ir.Value, None] = field(default_factory=dict)


def rearrange(model: ir.Model) -> tuple[str, ...]:
    """Change an encoder's graph in place so that its hidden states are [sequence, batch, width], as
    the module says. Returns the names of the attentions whose copies that saves; () where it saves
    too few, and the graph is unchanged."""
    inferred = model.clone()  # so that no inferred shape is written
    ShapeInferencePass()(inferred)
    graph = inferred.graph
    values = (v for v in (*graph.inputs, *(o for n in graph for o in n.outputs)))
    ranks = {str(v.name): len(v.shape) for v in values if v.shape is not None}
    attentions = list(_attentions(model))
    region = _grow(attentions, ranks)
    if len(region.entering) + len(region.leaving) >= SAVED * len(attentions):
        return ()
    _rewrite(model, attentions, region)
    return tuple(module_of(a.back) for a in attentions)


def is_sequence_first(product: ir.Node) -> bool:
    """Test that the product's input and output in a lowered graph are [sequence, batch, width]."""
    return SWAPPED in product.metadata_props


def _attentions(model: ir.Model) -> Iterable[_SequenceFirstAttention]:
    for softmax in model.graph:
        if softmax.op_type == "Softmax":
            try:
                yield _recognise(softmax)
            except OtherPattern:
                continue


def _recognise(softmax: ir.Node) -> _SequenceFirstAttention:
    """Recognise the attention behind a Softmax as one that can run with the sequence before the
    batch (cases 1 to 3). Raises OtherPattern for another."""
    axis = softmax.attributes.get("axis")
    if axis is not None and axis.as_int() not in (-1, 3):
        raise OtherPattern(f"{softmax.name} is along another axis than the keys")
    weighted = find_user(softmax.outputs[0], "MatMul")
    if weighted.inputs[0] is not softmax.outputs[0]:
        raise OtherPattern(f"{weighted.name} has the weights behind the values")
    back = find_user(weighted.outputs[0], "Transpose", perm=FORWARD)
    merged = find_user(back.outputs[0], "Reshape")
    _keeps_two(merged, 3)
    product = _product(softmax.inputs[0])
    turned = (
        _turned(product.inputs[0], FORWARD),
        _turned(product.inputs[1], KEYS),
        _turned(weighted.inputs[1], FORWARD),
    )
    splits = []
    for node in turned:
        split = find_maker(node.inputs[0], "Reshape")
        if split is None or find_only_user(split.outputs[0]) is not node:
            raise OtherPattern(f"{node.name} turns something other than a split")
        _keeps_two(split, 4)
        splits.append(split)
    return _SequenceFirstAttention(tuple(splits), turned, back, merged)


def _product(value: ir.Value | None) -> ir.Node:
    """Find the product of queries and keys behind the softmax's input `value` in a lowered encoder
    (case 2)."""
    added = find_maker(value, "Add")
    for scores in added.inputs if added is not None else (value,):
        scaled = find_maker(scores, "Mul") or find_maker(scores, "Div")
        operands = [scores]
        if scaled is not None:
            numbers = [read_constant(v) for v in scaled.inputs]
            operands = [v for v, n in zip(scaled.inputs, numbers, strict=True) if n is None]
            if not any(n is not None and len(n) == 1 for n in numbers):
                continue
        product = find_maker(operands[0], "MatMul")
        if product is not None and find_maker(product.inputs[0], "Transpose") is not None:
            return product
    raise OtherPattern("the scores are not a product of heads")


def _turned(value: ir.Value | None, perm: Perm) -> ir.Node:
    node = find_maker(value, "Transpose")
    if node is None or get_perm(node) != perm or find_only_user(node.outputs[0]) is None:
        raise OtherPattern("an operand is not heads brought before the positions")
    return node


def _keeps_two(reshape: ir.Node, rank: int) -> None:
    """Raise OtherPattern, so that the graph stays as it is, unless `reshape` has `rank` axes and
    leaves the first two as they are."""
    shape = read_constant(reshape.inputs[1])
    if shape is None or len(shape) != rank or shape[0] != 0 or shape[1] not in (0, -1):
        raise OtherPattern(f"{reshape.name} splits or joins more than the last axes")


def _grow(attentions: Iterable[_SequenceFirstAttention], ranks: Ranks) -> _Region:
    """Find the part of the graph that runs with the sequence first: collect the attentions' inputs
    and outputs, and token-wise operators between them."""
    region = _Region()
    splits = {s: None for a in attentions for s in a.splits}
    merged = {a.merged: None for a in attentions}
    pending = [v for s in splits for v in s.inputs[:1]] + [m.outputs[0] for m in merged]
    while pending:
        value = pending.pop()
        if value is None or value in region.values:
            continue
        region.values[value] = None
        producer = value.producer()
        if producer is not None and _tokenwise(producer, ranks):
            _join(region, producer, pending, ranks)
        elif producer is not None and _looks_up(producer, ranks):
            region.gathers[producer] = None
        elif producer not in merged:
            region.entering[value] = None
        for reader, _ in value.uses():
            if _tokenwise(reader, ranks):
                _join(region, reader, pending, ranks)
            elif reader not in splits:
                region.leaving[value] = None
        if value.is_graph_output():
            region.leaving[value] = None
    for value in region.entering:  # readers outside keep the original
        region.leaving.pop(value, None)
    return region


def _join(region: _Region, node: ir.Node, pending: list[ir.Value | None], ranks: Ranks) -> None:
    region.nodes[node] = None
    pending.append(node.outputs[0])
    pending.extend(v for v in node.inputs if v is not None and _rank(v, ranks) == 3)


def _rank(value: ir.Value, ranks: Ranks) -> int | None:
    """Return the number of axes of a value in the lowered graph; None for initializers, which have
    neither batch nor sequence."""
    return None if value.is_initializer() else ranks.get(str(value.name))


def _tokenwise(node: ir.Node, ranks: Ranks) -> bool:
    """Return True where `node` computes each token of [batch, sequence, width] from that token
    alone, and so gives the same values with the axes [sequence, batch, width]."""
    inputs = [v for v in node.inputs if v is not None]
    if node.op_type not in TOKENWISE or node.domain or len(node.outputs) != 1:
        return False
    of_tokens = [v for v in inputs if _rank(v, ranks) == 3]
    others = [v for v in inputs if v not in of_tokens]
    if not of_tokens or ranks.get(str(node.outputs[0].name)) != 3:
        return False
    if node.op_type == "MatMul":
        return of_tokens == inputs[:1] and _rank_of_any(inputs[1], ranks) == 2
    if node.op_type == "LayerNormalization":
        return node.attributes.get_int("axis", -1) in (-1, 2) and of_tokens == inputs[:1]
    if node.op_type in QUANTIZERS:  # by one scale
        return of_tokens == inputs[:1] and all(_rank_of_any(v, ranks) == 0 for v in others)
    ranks_of_others = [_rank_of_any(v, ranks) for v in others]
    return all(r is not None and r < 2 for r in ranks_of_others)


def _rank_of_any(value: ir.Value, ranks: Ranks) -> int | None:
    if value.is_initializer():
        return None if value.shape is None else len(value.shape)
    return ranks.get(str(value.name))


def _looks_up(node: ir.Node, ranks: Ranks) -> bool:
    """Test, to move the sequence first, that `node` is a Gather of a table's rows by ids [batch,
    sequence]."""
    if node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0:
        return False
    table, ids = node.inputs
    return (
        table is not None
        and ids is not None
        and (_rank_of_any(table, ranks) == 2 and _rank_of_any(ids, ranks) == 2)
    )


def _rewrite(
    model: ir.Model, attentions: Iterable[_SequenceFirstAttention], region: _Region
) -> None:
    """Put the sequence before the batch in all values of the region, in place."""
    inside = {*region.nodes, *(s for a in attentions for s in a.splits)}
    turned: dict[ir.Value, ir.Value] = {}
    for node in [n for n in model.graph if n in region.gathers]:
        ids = node.inputs[1]
        assert ids is not None
        if ids not in turned:
            turned[ids] = _transposed(model, ids, (1, 0), before=node)
        node.replace_input_with(1, turned[ids])
    for value in region.entering:
        readers = [(n, i) for n, i in value.uses() if n in inside]
        swapped = _transposed(model, value, (1, 0, 2), before=_first(model, readers))
        for node, index in readers:
            node.replace_input_with(index, swapped)
    for value in region.leaving:
        _leave(model, value, inside)
    for attention in attentions:
        for node in attention.turned:
            _permute(node, FIRST[get_perm(node)])
        _permute(attention.back, BACK)
    for node in region.nodes:
        if node.op_type == "MatMul":
            node.metadata_props[SWAPPED] = "true"


def _leave(model: ir.Model, value: ir.Value, inside: Iterable[ir.Node]) -> None:
    """Insert a Transpose of a value back to [batch, sequence, ..] for readers outside the region
    and for the graph's outputs."""
    producer, name = value.producer(), str(value.name)
    assert producer is not None
    readers = [(n, i) for n, i in value.uses() if n not in inside]
    swapped = _transposed(model, value, (1, 0, 2), after=producer)
    for node, index in readers:
        node.replace_input_with(index, swapped)
    if value.is_graph_output():
        place = list(model.graph.outputs).index(value)
        swapped.type, swapped.shape = value.type, value.shape
        model.graph.outputs[place] = swapped
        value.name, value.shape, swapped.name = f"{name}/{SWAPPED}", None, name


def _transposed(
    model: ir.Model,
    value: ir.Value,
    perm: Perm,
    *,
    before: ir.Node | None = None,
    after: ir.Node | None = None,
) -> ir.Value:
    """Insert a Transpose into the lowered graph outside every module, so that cuts exclude it;
    return its output."""
    name = f"{value.name}/{SWAPPED}"
    node = ir.node("Transpose", [value], {"perm": perm}, name=name, metadata_props={MODULE: ""})
    node.outputs[0].name = name if before is not None else f"{value.name}/batch_first"
    if before is not None:
        model.graph.insert_before(before, node)
    elif after is not None:
        model.graph.insert_after(after, node)
    return node.outputs[0]


def _first(model: ir.Model, readers: Iterable[tuple[ir.Node, int]]) -> ir.Node:
    nodes = {n for n, _ in readers}
    return next(n for n in model.graph if n in nodes)


def _permute(node: ir.Node, perm: Perm) -> None:
    node.attributes["perm"] = ir.AttrInt64s("perm", perm)
