"""Fuse each attention of a decoder to GroupQueryAttention, an operator of ONNX Runtime.

It updates the KV cache in place when past and present share a buffer, and rotates inside; plain
operators copy the KV cache for every token. A layer is recognised by:

 1. the pattern of lower/onnx/attention_pattern.py
 2. rotary position embedding of q and k, halves rotated; cosines and sines of every position up
    to the context become two tables
      2.1 absent (learned positions): the operator does not rotate
 3. q, k, v are the outputs of linear modules, or heads after another operator (a norm of each
    head), which are flattened first

Masks and angles are evaluated on examples rather than recognised by their nodes:
 4. the mask must be causal and hide exactly the columns where attention_mask is 0, up to the
    whole context (a sliding window is not)
 5. a position's angle must depend on that position alone and grow by equal steps

The operator numbers positions by column of the KV cache, so rows padded on the left start later
than their position_ids, and their keys are rotated by the padding. By 5 only differences of
positions matter, which are the same. Hence
 6. a padded row's attention_mask may be 0 only before its first token, and columns of the KV cache
    may not be dropped or moved;
 7. a batch of several rows is resumed by at most one token at a time (the operator refuses more,
    naming batch_size): prefill in one piece, or row by row;
 8. a row ends before the trailing zeros of its attention_mask: the column and the angle of its new
    token follow from its last 1, independently of other rows (harness/runtimes/ort/slots.py).
A layer that is not recognised stays as it is, and the reason is returned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from optimizer.export.scopes import MODULE, module_of
from optimizer.harness.inputs.kv_cache import PARTS, past_name, present_name
from optimizer.lower.onnx.attention_pattern import (
    Fused,
    OtherPattern,
    find_user,
    get_perm,
    recognise,
)
from optimizer.lower.onnx.causal_mask import NOT_CAUSAL, is_causal
from optimizer.lower.onnx.examine import (
    DecoderExamples,
    add_initializer,
    evaluate,
    find_maker,
    read_constant,
    take_over,
)

DOMAIN = "com.microsoft"
SHARED = ("kv_cache", "shared")  # metadata: past and present may be one buffer
STEP_TOLERANCE = 2e-2  # radians: float32 angles at position 131,072 are off by 8e-3

Array = NDArray[Any]


@dataclass(frozen=True)
class _AttentionLayer:
    """Attention of one layer in an exported graph, recognised as one that can be fused for ONNX
    Runtime.

    q, k, v: (value, True if its heads are an axis, False if flat)
    repeats: query heads per key-value head
    rotary: cosines and sines; None where the layer does not rotate
    output: node that lays heads side by side
    """

    module: str
    index: int
    q: tuple[ir.Value, bool]
    k: tuple[ir.Value, bool]
    v: tuple[ir.Value, bool]
    repeats: int
    scale: float
    mask: ir.Value
    rotary: tuple[ir.Value, ir.Value] | None
    output: ir.Node


def fuse(model: ir.Model, context: int) -> Fused:
    """Fuse a decoder's attentions for ONNX Runtime: rewrite `model` in place. Returns the fused
    modules, and {layer: reason} of the others.

    context: maximum tokens of a sequence
    """
    fusion = _Fusion(model, context)
    done, left, index = [], {}, 0
    while past_name(index, "key") in fusion.inputs:
        try:
            layer = _recognise(fusion, index)
            fusion.rewrite(layer)
            done.append(layer.module)
        except OtherPattern as e:
            left[f"layer {index}"] = str(e)
        index += 1
    fusion.finish(bool(done), bool(left))
    return Fused(tuple(done), left)


def _recognise(fusion: _Fusion, index: int) -> _AttentionLayer:
    """Recognise the attention of layer `index` as one that GroupQueryAttention computes, by cases 1
    to 5. Raises OtherPattern for another."""
    attention = recognise(fusion.inputs, fusion.outputs, index)
    merged = find_user(attention.weighted.outputs[0], "Transpose", perm=(0, 2, 1, 3))
    output = find_user(merged.outputs[0], "Reshape")
    _check_merged(output)
    query, rotary = _unrotated(attention.query)
    new_key, also = _unrotated(attention.appended[0])
    if rotary != also:
        raise OtherPattern("queries and keys are rotated differently")
    fusion.check_mask(attention.mask)
    if rotary is not None:
        fusion.check_rotary(*rotary)
    q, k, v = (_flat(x) for x in (query, new_key, attention.appended[1]))
    module = module_of(attention.softmax)
    return _AttentionLayer(
        module, index, q, k, v, attention.repeats, attention.scale, attention.mask, rotary, output
    )


def _unrotated(x: ir.Value) -> tuple[ir.Value, tuple[ir.Value, ir.Value] | None]:
    """Find in an exported attention the input of a rotary embedding (case 2), x = y cos + (-second
    half, first half of y) sin, before which keys or queries are not rotated.

    Returns y and (cos, sin); x and None where x is not rotated (2.1).
    """
    total = find_maker(x, "Add")
    if total is None:
        return x, None  # 2.1
    parts = [find_maker(v, "Mul") for v in total.inputs]
    for straight, crossed in (parts, parts[::-1]):
        if straight is None or crossed is None:
            break
        halves = next((n for v in crossed.inputs if (n := find_maker(v, "Concat"))), None)
        inner = _halves_of(halves) if halves is not None else None
        if inner is None or inner not in straight.inputs:
            continue
        cos = next(v for v in straight.inputs if v is not inner)
        sin = next(v for v in crossed.inputs if v is not halves.outputs[0])  # type: ignore[union-attr]
        assert cos is not None
        assert sin is not None
        return inner, (cos, sin)
    raise OtherPattern(f"{x.name} is rotated in another way than by halves")


def _halves_of(concat: ir.Node) -> ir.Value | None:
    """Return y where `concat` of an exported attention is y with its halves exchanged and one
    negated, as rotary embeddings have it: Concat(-y[..., half:], y[..., :half]); else None."""
    negated = find_maker(concat.inputs[0], "Neg")
    second = find_maker(negated.inputs[0], "Slice") if negated is not None else None
    first = find_maker(concat.inputs[1], "Slice")
    if first is None or second is None or first.inputs[0] is not second.inputs[0]:
        return None
    (start, half, axis), (middle, _, _) = (
        [read_constant(v) for v in n.inputs[1:4]] for n in (first, second)
    )
    same = start == [0] and half is not None and half == middle and axis in ([3], [-1])
    return first.inputs[0] if same else None


def _flat(heads: ir.Value) -> tuple[ir.Value, bool]:
    """Find the heads of q, k or v before they were split (case 3): (value, False) if they lie side
    by side in one axis; (value, True) if [batch, sequence, heads, width]."""
    transpose = find_maker(heads, "Transpose")
    if transpose is None or get_perm(transpose) != (0, 2, 1, 3) or transpose.inputs[0] is None:
        raise OtherPattern(f"{heads.name} is not heads brought before the sequence")
    split = find_maker(transpose.inputs[0], "Reshape")
    source = split.inputs[0] if split is not None else None
    if source is not None and (find_maker(source, "MatMul") or find_maker(source, "Add")):
        return source, False
    return transpose.inputs[0], True


def _check_merged(reshape: ir.Node) -> None:
    """Check before fusing an attention: raise OtherPattern unless heads lie side by side: [batch,
    sequence, width] or [-1, width]."""
    target = read_constant(reshape.inputs[1])
    if target is None or not (len(target) == 3 or (len(target) == 2 and target[0] == -1)):
        raise OtherPattern(f"{reshape.name} lays heads out in another way than side by side")


@dataclass
class _Fusion:
    """Graph whose attentions are being fused, with values that its layers share.

    float: type of the KV cache, and of all that the operator reads with it
    """

    model: ir.Model
    context: int
    inputs: dict[str, ir.Value] = field(init=False)
    outputs: dict[str, ir.Value] = field(init=False)
    float: Any = field(init=False)
    _checked: dict[object, Any] = field(default_factory=dict)
    _shared: dict[str, ir.Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.model.graph
        self.inputs = {str(v.name): v for v in graph.inputs}
        self.outputs = {str(v.name): v for v in graph.outputs}
        self.float = self.inputs[past_name(0, PARTS[0])].dtype.numpy()

    def check_mask(self, mask: ir.Value) -> None:
        """Raise OtherPattern where a mask is not causal, or hides other columns than those where
        attention_mask is 0 (case 4). Each mask is evaluated once."""
        if mask in self._checked:
            return
        if not is_causal(self.model, mask, self.context):
            raise OtherPattern(NOT_CAUSAL)
        self._checked[mask] = True

    def check_rotary(self, cos: ir.Value, sin: ir.Value) -> None:
        """Raise OtherPattern where a position's angle depends on more than its position (case 5),
        and make the tables of cosines and sines; once."""
        if (cos, sin) in self._checked:
            return
        if self._checked.get("rotary"):
            raise OtherPattern("its angles are not those of the layers before")
        tables = [self._table(v, np.arange(self.context)) for v in (cos, sin)]
        probe = [p for p in (0, 1, self.context // 3, self.context - 1) if p < self.context]
        for table, source in zip(tables, (cos, sin), strict=True):
            alone = np.concatenate([self._table(source, np.array([p])) for p in probe])
            if not np.allclose(alone, table[probe], atol=1e-5):
                raise OtherPattern("an angle depends on other positions than its own")
        half = tables[0].shape[1] // 2
        rotation = tables[0][:, :half] + 1j * tables[1][:, :half]
        if any(not np.array_equal(t[:, :half], t[:, half:]) for t in tables):
            raise OtherPattern("the halves of a head are rotated by different angles")
        steps = rotation[1:] * rotation[:-1].conj()
        if self.context > 1 and not np.abs(steps - steps[:1]).max() < STEP_TOLERANCE:
            raise OtherPattern("angles do not grow by equal steps")
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self._constant(f"rotary_{name}", np.ascontiguousarray(table[:, :half], self.float))
        self._checked[cos, sin] = self._checked["rotary"] = True

    def _table(self, value: ir.Value, positions: Array) -> Array:
        """Evaluate cosines or sines [1, 1, positions, head width] of the graph for given positions,
        as a table [positions, head width] that the fused attention reads."""
        inputs = DecoderExamples(self.model, np.ones((1, len(positions)), int), 0, positions[None])
        table = evaluate(self.model, value, inputs)
        return table.reshape(len(positions), table.shape[-1])

    def _constant(self, name: str, array: Array) -> ir.Value:
        if name not in self._shared:
            self._shared[name] = add_initializer(self.model.graph, name, array)
        return self._shared[name]

    def rewrite(self, layer: _AttentionLayer) -> None:
        """Replace the layer by GroupQueryAttention; outputs keep their names."""
        kv_heads, before = self._kv_heads(layer.index), layer.output
        pasts = [self.inputs[past_name(layer.index, n)] for n in PARTS]
        parts = zip("qkv", (layer.q, layer.k, layer.v), strict=True)
        heads = [self._laid_flat(before, f"{layer.module}/{n}", *part) for n, part in parts]
        tables = [self._shared.get(f"rotary_{n}") if layer.rotary else None for n in ("cos", "sin")]
        lengths, total, bias = self._of_mask()
        attributes = {
            "num_heads": kv_heads * layer.repeats,
            "kv_num_heads": kv_heads,
            "scale": layer.scale,
            "do_rotary": int(layer.rotary is not None),
        }
        node = ir.node(
            "GroupQueryAttention",
            [*heads, *pasts, lengths, total, *tables, None, bias],
            attributes,
            domain=DOMAIN,
            num_outputs=3,
            name=f"{layer.module}/GroupQueryAttention",
            metadata_props={MODULE: layer.module},
        )
        self.model.graph.insert_before(before, node)
        if self.float != np.float32:  # which onnx takes where it infers no type
            node.outputs[0].type = ir.TensorType(ir.DataType.from_numpy(self.float))
        shape = read_constant(before.inputs[1])
        if shape is not None and len(shape) == 3:
            take_over(before.outputs[0], node.outputs[0])
        else:
            before.replace_input_with(0, node.outputs[0])
        for name, present in zip(PARTS, node.outputs[1:], strict=True):
            take_over(self.outputs[present_name(layer.index, name)], present)

    def _kv_heads(self, index: int) -> int:
        shape = self.inputs[past_name(index, "key")].shape
        if shape is None or len(shape) != 4 or not isinstance(shape[1], int):
            raise OtherPattern("its cache has no fixed number of heads")
        return shape[1]

    def _laid_flat(self, before: ir.Node, name: str, value: ir.Value, apart: bool) -> ir.Value:
        if not apart:
            return value
        shape = self._constant("heads_together", np.array([0, 0, -1]))
        return self._insert(before, "Reshape", [value, shape], name)

    def _insert(
        self, before: ir.Node, op: str, inputs: list[ir.Value], name: str, /, **attributes: Any
    ) -> ir.Value:
        node = ir.node(op, inputs, attributes, name=name, metadata_props={MODULE: ""})
        node.outputs[0].name = name
        self.model.graph.insert_before(before, node)
        return node.outputs[0]

    def _of_mask(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Insert nodes that compute from attention_mask, once: the last real column of each row
        (case 8), int32 [batch]; the number of columns, int32; a mask, float [batch, 1, sequence,
        total]."""
        if "bias" in self._shared:
            return self._shared["lengths"], self._shared["total"], self._shared["bias"]
        first = self.model.graph[0]
        mask, ids = self.inputs["attention_mask"], self.inputs["input_ids"]

        def add(op: str, inputs: list[ir.Value], what: str, /, **attributes: Any) -> ir.Value:
            return self._insert(first, op, inputs, f"attention/{what}", **attributes)

        def number(name: str, value: Any, kind: Any) -> ir.Value:
            return self._constant(f"attention_{name}", np.array(value, kind))

        int32 = int(ir.DataType.INT32)
        sizes = add("Shape", [mask], "sizes")
        columns = add("Gather", [sizes, number("one", 1, np.int64)], "columns")
        total = add("Cast", [columns], "total", to=int32)
        zero, step = (number(f"{n}_column", i, np.int32) for i, n in enumerate(("zero", "one")))
        numbers = add("Range", [zero, total, step], "numbers")
        real = add("Mul", [add("Cast", [mask], "real", to=int32), numbers], "real_numbers")
        axis = number("columns_axis", [1], np.int64)
        lengths = add("ReduceMax", [real, axis], "lengths", keepdims=0)
        padded = add("Equal", [mask, number("zero", 0, np.int64)], "padded")
        lowest = number("hidden", np.finfo(self.float).min, self.float)
        bias = add("Where", [padded, lowest, number("seen", 0, self.float)], "columns_bias")
        wide = add("Unsqueeze", [bias, number("axes", [1, 2], np.int64)], "wide_bias")
        rows = add("Shape", [ids], "rows", start=1, end=2)
        one = number("ones", [1], np.int64)
        shape = add("Concat", [one, one, rows, one], "bias_shape", axis=0)
        self._shared["lengths"], self._shared["total"] = lengths, total
        self._shared["bias"] = add("Expand", [wide, shape], "bias")
        return lengths, total, self._shared["bias"]

    def finish(self, done: bool, left: bool) -> None:
        """Remove nodes that no output needs after the fusions, and sort the others."""
        if done:
            self.model.opset_imports[DOMAIN] = 1
        if done and not left:
            self.model.metadata_props.update([SHARED])
        RemoveUnusedNodesPass()(self.model)
        self.model.graph.sort()
