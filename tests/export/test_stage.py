from __future__ import annotations

import copy
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from optimizer.export import check, onnx_file, reference, stage
from optimizer.foundation.errors import LedgerError
from optimizer.foundation.state import CompressedState
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.recipe.schema import Export
from tests.export.folders import Exported, exported, loaded
from tests.traced_once import trace_always


def interface(values: Any) -> list[tuple[str, int, list[Any]]]:
    return [
        (
            v.name,
            v.type.tensor_type.elem_type,
            [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim],
        )
        for v in values
    ]


@pytest.fixture(scope="module")
def half(tiny: Exported, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The tiny encoder in half precision."""
    return exported(tiny.source, tmp_path_factory.mktemp("half") / "export", precision="fp16")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_inputs_and_outputs_are_the_contracts(
    tiny: Exported, half: Exported, precision: str
) -> None:
    made = half if precision == "fp16" else tiny
    contract = json.loads((tiny.source / "contract.json").read_text())
    graph = onnx.load(made.graph / "model.onnx").graph
    for found, wanted in ((graph.input, "inputs"), (graph.output, "outputs")):
        kinds = {"int64": onnx.TensorProto.INT64, "float32": onnx.TensorProto.FLOAT}
        assert interface(found) == [
            (t["name"], kinds[t["dtype"]], t["axes"]) for t in contract[wanted]
        ]


def test_every_parameter_is_an_initializer_of_its_own_name(tiny: Exported) -> None:
    graph = onnx.load(tiny.graph / "model.onnx").graph
    assert set(tiny.tensors) <= {t.name for t in graph.initializer}
    assert tiny.names.folded == ()
    assert len(tiny.names.modules) == 12


def test_the_same_checkpoint_exports_to_the_same_bytes_wherever_it_lies(
    tiny: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace_always(monkeypatch)
    again = exported(shutil.copytree(tiny.source, tmp_path / "elsewhere"), tmp_path / "again")
    assert {f.name for f in again.graph.iterdir()} == {"model.onnx", "names.json"}
    for file in ("model.onnx", "names.json"):
        assert (again.graph / file).read_bytes() == (tiny.graph / file).read_bytes()


def test_the_file_does_not_say_where_it_was_made(tiny: Exported) -> None:
    data = (tiny.graph / "model.onnx").read_bytes()
    assert b"site-packages" not in data
    assert b".py" not in data


def test_node_names_say_the_module(tiny: Exported) -> None:
    graph = onnx.load(tiny.graph / "model.onnx").graph
    assert len({n.name for n in graph.node}) == len(graph.node)
    entry = tiny.names.modules["encoder.layer.0.output.dense"]
    assert entry.node == "encoder.layer.0.output.dense/MatMul"
    assert entry.input == "encoder.layer.0.intermediate.intermediate_act_fn/Gelu:0"


def test_the_graph_equals_torch_on_a_shape_that_was_not_traced(tiny: Exported) -> None:
    contract = json.loads((tiny.source / "contract.json").read_text())
    checkpoint = open_checkpoint(tiny.source)
    model = load_torch_model(checkpoint, contract["task"])
    inputs = check.draw_inputs(
        contract, check.list_vocabulary_sizes(checkpoint.config, contract), 5, 31
    )
    wanted = reference.run_torch(model, contract, inputs)["last_hidden_state"]
    with OrtRunner(tiny.graph / "model.onnx", threads=1) as runner:
        got = runner.infer(inputs)["last_hidden_state"]
    assert check.measure_distance(got, wanted, inputs["attention_mask"]) < 1e-6


def test_replaced_parameters_are_in_the_graph(tiny: Exported, tmp_path: Path) -> None:
    name = "encoder.layer.1.output.dense.bias"
    value = torch.arange(64.0)
    made = exported(tiny.source, tmp_path / "e", CompressedState({}, replaced={name: value}))
    held = {t.name: t for t in onnx.load(made.graph / "model.onnx").graph.initializer}
    assert np.array_equal(onnx.numpy_helper.to_array(held[name]), value.numpy())


def test_a_classifier_exports_with_its_head(tiny_classifier: Path, tmp_path: Path) -> None:
    source = loaded(tiny_classifier, tmp_path / "l", task="text-classification")
    made = exported(source, tmp_path / "e")
    assert {"bert.pooler.dense", "classifier"} <= set(made.names.modules)


def test_a_model_that_is_traced_without_a_bias_is_refused(
    tiny: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = stage.export

    def export(model: nn.Module, *rest: Any) -> Any:
        model = copy.deepcopy(model)  # the stage compares the graph with the model it gave
        model.get_submodule("encoder.layer.0.output.dense").bias = None
        return real(model, *rest)

    monkeypatch.setattr(stage, "export", export)
    with pytest.raises(LedgerError, match="last_hidden_state of the exported graph"):
        exported(tiny.source, tmp_path / "e")


def plant(fault: str, graph: ir.Graph) -> None:
    if fault == "epsilon":
        norms = [n for n in graph if n.op_type == "LayerNormalization"]
        assert norms
        for node in norms:
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 1e-2)
    elif fault == "position":
        table = graph.initializers["embeddings.position_embeddings.weight"]
        assert table.const_value is not None
        rows = table.const_value.numpy()
        moved = np.concatenate([rows[:20], rows[21:], rows[-1:]])  # from the twentieth on
        table.const_value = ir.tensor(moved, name=table.name)
    else:
        mask = next(v for v in graph.inputs if v.name == "attention_mask")
        uses = [*mask.uses()]
        same = ir.node("Equal", [mask, mask])
        ones = ir.node("Cast", [same.outputs[0]], {"to": ir.DataType.INT64})
        for node, index in uses:
            node.replace_input_with(index, ones.outputs[0])
        graph.insert_before(graph[0], [same, ones])


@pytest.mark.parametrize(
    ("fault", "precision"), [("epsilon", "fp32"), ("mask", "fp16"), ("position", "fp16")]
)
def test_a_graph_that_computes_something_else_is_refused(
    tiny: Exported, half: Exported, tmp_path: Path, fault: str, precision: Literal["fp32", "fp16"]
) -> None:
    made = half if precision == "fp16" else tiny
    graph = onnx_file.load(made.graph / "model.onnx")
    plant(fault, graph.graph)
    onnx_file.save(graph, tmp_path / "model.onnx")
    checkpoint = open_checkpoint(made.source)
    contract = json.loads((made.source / "contract.json").read_text())
    model = load_torch_model(checkpoint, contract["task"])
    limits = check.list_vocabulary_sizes(checkpoint.config, contract)
    batches = [check.draw_inputs(contract, limits, *s) for s in check.check_shapes(contract)]
    answer = partial(reference.run_torch, model, contract)
    given = (batches, limits, precision, answer, "encoder.layer", model)
    check.check(made.graph / "model.onnx", contract, *given)
    with pytest.raises(LedgerError, match="last_hidden_state of the exported graph"):
        check.check(tmp_path / "model.onnx", contract, *given)


def test_a_classifier_that_is_undecided_on_the_texts_of_the_check_is_exported(
    tiny_classifier: Path, tmp_path: Path
) -> None:
    """Their logits are near 0, so differences are rounding alone."""
    from transformers import AutoModelForSequenceClassification

    source = loaded(tiny_classifier, tmp_path / "load", task="text-classification")
    contract = json.loads((source / "contract.json").read_text())
    checkpoint = open_checkpoint(source)
    model = load_torch_model(checkpoint, contract["task"])
    limits = check.list_vocabulary_sizes(checkpoint.config, contract)
    batches = [check.draw_inputs(contract, limits, *s) for s in check.check_shapes(contract)]
    logits = [reference.run_torch(model, contract, b)["logits"] for b in batches]
    shutil.copytree(tiny_classifier, tmp_path / "model")
    undecided = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        undecided.classifier.bias -= torch.from_numpy(logits[0][0])
    undecided.save_pretrained(tmp_path / "model")
    source = loaded(tmp_path / "model", tmp_path / "again", task="text-classification")
    made = exported(source, tmp_path / "e", precision="fp16")
    model = load_torch_model(open_checkpoint(source), contract["task"])
    wanted = reference.run_torch(model, contract, batches[0])["logits"]
    with OrtRunner(made.graph / "model.onnx", threads=1) as runner:
        given = runner.infer(batches[0])["logits"]
    assert check.measure_distance(given, wanted) > 0.1  # of its own norm, as no example is judged


def test_padding_is_drawn_in_every_checked_batch(tiny: Exported) -> None:
    contract = json.loads((tiny.source / "contract.json").read_text())
    limits = {"input_ids": 50, "attention_mask": 2}
    for batch, sequence in check.check_shapes(contract):
        mask = check.draw_inputs(contract, limits, batch, sequence)["attention_mask"]
        assert mask[0].all()
        assert batch == 1 or (mask.sum(1) < sequence).sum() == batch - 1
        assert mask.any(1).all()


def test_rows_of_padding_do_not_count_in_the_distance() -> None:
    wanted = np.ones((1, 2, 3), np.float32)
    got = wanted.copy()
    got[0, 1] = 9
    assert check.measure_distance(got, wanted, np.array([[1, 0]])) == 0
    assert check.measure_distance(got, wanted, np.array([[1, 1]])) > 1


@pytest.mark.parametrize(("value", "limit"), [(np.nan, 1.0), (np.inf, 1.0), (0.5, np.inf)])
def test_a_model_without_finite_answers_is_refused(value: float, limit: float) -> None:
    expected = {"logits": np.array([[1.0, value]], np.float32)}
    one = check.Asked({"input_ids": np.ones((1, 4), np.int64)}, expected, [])
    apart = check.Scatter({"logits": limit}, {"logits": 1.0})
    with pytest.raises(LedgerError, match="not a number"):
        check.compare("", expected, one, apart, "fp16")


def test_an_estimate_is_half_the_disk_in_half_precision() -> None:
    shapes = {"a.weight": (1000, 1000), "a.bias": (1000,)}
    full, half = (stage.estimate(Export(float=f), shapes) for f in ("fp32", "fp16"))
    assert full.disk == 2 * half.disk == 4 * 1_001_000


def test_memory_is_not_expected_to_grow_with_the_depth_of_a_large_model() -> None:
    few, many = (
        stage.estimate(Export(), {f"{i}.weight": (4096, 4096) for i in range(n)}) for n in (50, 500)
    )
    assert few.memory == many.memory
