from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn
from transformers import BertConfig

from optimizer.export import stage
from optimizer.export.interface import Interface
from optimizer.export.passes import repeat
from optimizer.export.scopes import MODULE
from optimizer.export.weights import StoredInitializer, Values
from optimizer.harness.contract import Contract, TensorSpec, TokenizerSpec
from optimizer.model.checkpoint.model import build_skeleton_from_config
from optimizer.recipe.schema import Export


class Block(nn.Module):
    def __init__(self, layer_idx: int, width: int = 4) -> None:
        super().__init__()
        self.layer_idx, self.window = layer_idx, 8
        self.inner = nn.Linear(width, width, device="meta")


def blocks(count: int = 4) -> nn.ModuleList:
    return nn.ModuleList(Block(i) for i in range(count))


def test_blocks_that_differ_by_their_number_alone_are_alike() -> None:
    assert repeat.are_alike(blocks())


@pytest.mark.parametrize("fault", ["setting", "shape", "kind", "missing", "switch"])
def test_one_block_of_another_make_is_seen(fault: str) -> None:
    made: Any = blocks()
    if fault == "setting":
        made[3].window = None
    elif fault == "shape":
        made[3].inner = nn.Linear(4, 5, device="meta")
    elif fault == "kind":
        made[3].inner = nn.Identity()
    elif fault == "missing":
        made[3].inner.bias = None
    else:  # equal to the numbers 0 and 1 of its block, as Python has it
        made[0].window, made[1].window = False, True
        made[2].window = made[3].window = False
    assert not repeat.are_alike(made)


def chain(faulty: str = "") -> ir.Model:
    """x -> three blocks MatMul(., layers.i.w) -> end, in the names that clean gives."""
    x = ir.val("x", ir.DataType.FLOAT, [2, 2])
    values = {f"layers.{i}.w": torch.eye(2) * i for i in range(6)}
    held, nodes, last = [], [], x
    for i in range(3):
        weight = ir.val(f"layers.{i}.w", ir.DataType.FLOAT, [2, 2])
        weight.const_value = StoredInitializer(values, f"layers.{i}.w", ir.DataType.FLOAT, (2, 2))
        op = "Add" if faulty == "operator" and i == 2 else "MatMul"
        read = x if faulty == "input" and i == 2 else last
        node = ir.node(op, [read, weight], name=f"layers.{i}/{op}")
        node.metadata_props[MODULE] = f"layers.{i}"
        node.outputs[0].name = f"layers.{i}/{op}:0"
        held.append(weight)
        nodes.append(node)
        last = node.outputs[0]
    source = nodes[0].outputs[0] if faulty == "leak" else last
    end = ir.node("Relu", [source], name="Relu", metadata_props={MODULE: ""})
    end.outputs[0].name = "y"
    graph = ir.Graph(
        [x], [end.outputs[0]], nodes=[*nodes, end], initializers=held, opset_imports={"": 21}
    )
    return ir.Model(graph, ir_version=10)


PORTS = Interface(
    (
        stage.build_interface(
            {"inputs": [{"name": "x", "dtype": "float32", "axes": [2, 2]}], "outputs": []}
        ).inputs
    ),
    (
        stage.build_interface(
            {"inputs": [], "outputs": [{"name": "y", "dtype": "float32", "axes": [2, 2]}]}
        ).outputs
    ),
)


def test_later_blocks_follow_the_third_with_weights_of_their_own() -> None:
    model = chain()
    assert repeat.grow(model, "layers", PORTS, 6)
    nodes = list(model.graph)
    assert [n.name for n in nodes] == [*(f"layers.{i}/MatMul" for i in range(6)), "Relu"]
    assert [n.inputs[1].name for n in nodes[:6]] == [f"layers.{i}.w" for i in range(6)]
    assert nodes[6].inputs[0] is nodes[5].outputs[0]
    assert model.graph.initializers["layers.5.w"].const_value.numpy()[0, 0] == 5
    assert nodes[5].metadata_props[MODULE] == "layers.5"


@pytest.mark.parametrize("faulty", ["operator", "input", "leak"])
def test_a_graph_whose_blocks_do_not_follow_each_other_is_left_as_it_was(faulty: str) -> None:
    model = chain(faulty)
    assert not repeat.grow(model, "layers", PORTS, 6)
    assert len(list(model.graph)) == 4


def described(graph: ir.Model) -> list[object]:
    held = {n: (v.dtype, v.shape) for n, v in graph.graph.initializers.items()}
    nodes = [
        (
            n.name,
            n.op_type,
            [v and v.name for v in n.inputs],
            [v.name for v in n.outputs],
            {k: a.value for k, a in n.attributes.items()},
            n.metadata_props[MODULE],
        )
        for n in graph.graph
    ]
    return [[str(v) for v in (*graph.graph.inputs, *graph.graph.outputs)], held, nodes]


def test_blocks_that_nothing_follows_are_grown_with_the_models_answer_last() -> None:
    model = chain()
    relu = model.graph.node("Relu")
    last = relu.inputs[0]
    model.graph.outputs[0] = last
    model.graph.remove(relu, safe=True)
    last.name = "y"
    assert repeat.grow(model, "layers", PORTS, 6)
    nodes = list(model.graph)
    assert [n.outputs[0].name for n in nodes] == [*(f"layers.{i}/MatMul:0" for i in range(5)), "y"]
    assert model.graph.outputs[0] is nodes[5].outputs[0]


def test_a_grown_encoder_is_the_encoder_traced_whole() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(**sizes, num_hidden_layers=4, vocab_size=99, attn_implementation="eager")
    axes = ("batch", "sequence")
    contract = Contract(
        "feature-extraction",
        tuple(TensorSpec(n, "int64", axes) for n in ("input_ids", "attention_mask")),
        (TensorSpec("last_hidden_state", "float32", (*axes, 32)),),
        TokenizerSpec("tokenizer.json", 128, 0, "[PAD]"),
    ).to_json()
    made = []
    for blocks_at in (None, "encoder.layer"):
        model = build_skeleton_from_config(config, "feature-extraction")
        values = Values(model, {n: torch.zeros(1) for n, _ in model.named_parameters()}, {})
        made.append(stage.trace_float_graph(model, values, contract, Export(), blocks_at)[0])
    assert described(made[0]) == described(made[1])
