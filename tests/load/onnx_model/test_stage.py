"""Load ONNX files of several exporters: the torch model answers as ONNX Runtime does."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper

from optimizer.export import graph_file, onnx_file
from optimizer.export.weights import Values
from optimizer.foundation.errors import CheckpointError
from optimizer.load.onnx_model import stage, widen
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.model.graph import record
from optimizer.recipe.schema import Model
from tests.load.onnx_model import exported
from tests.load.onnx_model.exported import weights

node = helper.make_node


def section(file: Path, **more: object) -> Model:
    return Model.model_validate({"source": str(file), "task": "tensors", **more})


def load(file: Path, out: Path, **more: object) -> Path:
    out.mkdir()
    stage.run(section(file, **more), out)
    return out


def compared(file: Path, loaded: Path, rows: dict[str, np.ndarray]) -> float:
    """Largest difference of the torch model from ONNX Runtime on each row alone."""
    model = load_torch_model(open_checkpoint(loaded), "tensors")
    with torch.no_grad():
        ours = model(**{n: torch.from_numpy(a) for n, a in rows.items()})
    session = onnxruntime.InferenceSession(str(file))
    worst = 0.0
    for i in range(len(next(iter(rows.values())))):
        expected = session.run(None, {n: a[i : i + 1] for n, a in rows.items()})
        for mine, theirs in zip(ours.values(), expected, strict=True):
            worst = max(worst, float(np.abs(mine[i].numpy() - theirs[0]).max()))
    return worst


@pytest.mark.parametrize(("opset", "batch"), [(11, True), (17, True), (18, False)])
def test_a_traced_network_answers_as_the_file_for_batches_of_any_size(
    tmp_path: Path, opset: int, batch: bool
) -> None:
    inputs = exported.images(2 if batch else 1)
    file = exported.legacy(exported.Residual(), inputs, tmp_path / "m.onnx", opset, batch=batch)
    loaded = load(file, tmp_path / "out")
    assert compared(file, loaded, {"images": weights(5, 3, 16, 16)}) < 1e-5
    config = json.loads((loaded / "checkpoint" / "config.json").read_text())
    assert "wide" in config["modules"]
    assert "fc" in config["modules"]


def test_a_dynamo_export_keeps_the_names_of_its_weights(tmp_path: Path) -> None:
    ids, mask = torch.randint(0, 50, (2, 6)), torch.ones(2, 6, dtype=torch.int64)
    rows = torch.export.Dim("rows")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            exported.Attention().eval(),
            (ids, mask),
            dynamo=True,
            input_names=["ids", "mask"],
            output_names=["y"],
            dynamic_shapes=({0: rows}, {0: rows}),
            verbose=False,
        )
    assert program is not None
    program.save(str(tmp_path / "m.onnx"))
    loaded = load(tmp_path / "m.onnx", tmp_path / "out")
    config = json.loads((loaded / "checkpoint" / "config.json").read_text())
    assert config["modules"] == ["qkv", "out", "head"]
    assert config["ranges"]["ids"] == [0, 49]
    found = {"ids": np.arange(24).reshape(4, 6) % 50, "mask": np.tri(4, 6, 2, dtype=np.int64)}
    assert compared(tmp_path / "m.onnx", loaded, found) < 1e-5


def test_padding_by_a_word_norms_and_numbered_weights_are_read(tmp_path: Path) -> None:
    file = exported.by_hand(
        tmp_path / "m.onnx",
        [
            node("Transpose", ["x"], ["t"], perm=[0, 3, 1, 2]),
            node("Conv", ["t", "w"], ["c"], auto_pad="SAME_UPPER", strides=[2, 2]),
            node("BatchNormalization", ["c", "g", "b", "m", "v"], ["n"], epsilon=1e-3),
            node("Clip", ["n", "low", "high"], ["r"]),
            node("GlobalAveragePool", ["r"], ["p"]),
            node("Flatten", ["p"], ["f"]),
            node("MatMul", ["f", "onnx::MatMul_7"], ["h"]),
            node("Add", ["head.bias", "h"], ["y"]),
        ],
        {
            "w": weights(8, 3, 3, 3),
            **{name: np.abs(weights(8, seed=i)) + 0.1 for i, name in enumerate("gbmv")},
            "low": np.float32(0),
            "high": np.float32(6),
            "onnx::MatMul_7": weights(8, 4),
            "head.bias": weights(4),
        },
        ("n", 9, 9, 3),
        opset=12,
    )
    loaded = load(file, tmp_path / "out")
    assert compared(file, loaded, {"x": weights(3, 9, 9, 3, seed=4)}) < 1e-5
    config = json.loads((loaded / "checkpoint" / "config.json").read_text())
    assert config["modules"] == ["w", "head"]


def test_an_operator_that_torch_lacks_runs_in_onnx_runtime(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gates = weights(1, 12, 8), weights(1, 12, 3, seed=2)
    file = exported.by_hand(
        tmp_path / "m.onnx",
        [
            node("Transpose", ["x"], ["s"], perm=[1, 0, 2]),
            node("LSTM", ["s", "W", "R"], ["all", "last"], hidden_size=3, name="memory"),
            node("Squeeze", ["last", "first"], ["h"]),
            node("MatMul", ["h", "V"], ["y"]),
        ],
        {"W": gates[0], "R": gates[1], "first": np.array([0]), "V": weights(3, 4)},
        ("n", 5, 8),
    )
    loaded = load(file, tmp_path / "out")
    assert compared(file, loaded, {"x": weights(3, 5, 8)}) < 1e-5
    assert "node 'memory' (LSTM) stays float" in capsys.readouterr().err


DOUBLE = onnx.TensorProto(data_type=onnx.TensorProto.DOUBLE, dims=[1], double_data=[1.0])
LINEAR = [node("MatMul", ["x", "W"], ["h"], name="first"), node("Relu", ["h"], ["y"])]


@pytest.mark.parametrize(
    ("nodes", "arrays", "more", "words"),
    [
        (LINEAR, {"W": weights(8, 4) * np.nan}, {}, "'W' holds NaN.*node 'first' .MatMul"),
        (LINEAR, {"W": weights(8, 0)}, {}, "'W' has shape .8, 0."),
        (LINEAR, {"W": weights(8, 4).astype(np.float64)}, {}, "'W' is double"),
        ([node("Constant", [], ["c"], value=DOUBLE), *LINEAR], {}, {}, "'c' is double"),
        (LINEAR, {"W": weights(8, 4)}, {"shape": ("n", 0)}, "axis has size 0"),
        (
            LINEAR,
            {"W": weights(8, 4)},
            {"shape": ("n", "length", 8), "output": (onnx.TensorProto.FLOAT, 3)},
            "axis 1 .length.",
        ),
        (LINEAR, {"W": weights(8, 4)}, {"shape": (4, 8)}, "input 'x'.*batches of 4 rows"),
        (LINEAR, {"W": weights(8, 4)}, {"opset": 99}, "opset 99"),
        (LINEAR, {"W": weights(8, 4)}, {"kind": onnx.TensorProto.STRING}, "it is (object|str)"),
        ([node("Relu", ["x"], ["y"])], {}, {}, "nothing to compress"),
        (
            [node("MatMul", ["x", "x"], ["h"], name="square"), node("Relu", ["h"], ["y"])],
            {},
            {"shape": (1, 8)},
            "node 'square' .MatMul. stays float",
        ),
        (
            [
                node("Add", ["x", "b"], ["a"], name="one"),
                node("MatMul", ["a", "W"], ["b"]),
                node("Relu", ["b"], ["y"]),
            ],
            {"W": weights(8, 8)},
            {},
            "node 'one' .Add.*reads 'b' before it is made",
        ),
        (
            [
                node("MatMul", ["x", "W"], ["h"]),
                node("QuantizeLinear", ["h", "s"], ["y"], name="q"),
            ],
            {"W": weights(8, 8), "s": np.float32(1)},
            {},
            "node 'q'.*quantized already",
        ),
        (
            [*LINEAR[:1], node("Foo", ["h"], ["y"], name="own", domain="com.microsoft")],
            {"W": weights(8, 4)},
            {},
            "node 'own' .Foo.*refuses it",
        ),
        (
            [node("MatMul", ["x", "W"], ["h"]), node("ArgMax", ["h"], ["y"], axis=1)],
            {"W": weights(8, 8)},
            {"output": (onnx.TensorProto.INT64, 2)},
            "output 'y'.*it is int64",
        ),
        (
            [node("MatMul", ["x", "W"], ["h"]), node("ReduceMax", ["h", "a"], ["y"])],
            {"W": weights(8, 8), "a": np.array([0])},
            {"opset": 18},
            "output 'y'.*its shape is",
        ),
        (
            [
                node("MatMul", ["x", "W"], ["h"]),
                node("Softmax", ["h"], ["s"], axis=0, name="mix"),
                node("Neg", ["s"], ["y"]),
            ],
            {"W": weights(8, 8)},
            {},
            "first at node 'mix' .Softmax.*rows do not depend",
        ),
        (
            [
                node("MatMul", ["x", "W"], ["h"]),
                node("RandomNormalLike", ["h"], ["r"], name="noise"),
                node("Add", ["h", "r"], ["y"]),
            ],
            {"W": weights(8, 4)},
            {},
            "node 'noise' .RandomNormalLike.*at random",
        ),
        (
            [
                node("MatMul", ["x", "W"], ["h"]),
                node("Log", ["h"], ["l"], name="log"),
                node("Neg", ["l"], ["y"], name="last"),
            ],
            {"W": weights(8, 4)},
            {},
            "output 'y' of node 'last' .Neg.*NaN or infinity for drawn rows; .* node 'log' .Log",
        ),
        (
            [
                node("Concat", ["first", "x"], ["c"], axis=1, name="join"),
                node("MatMul", ["c", "W"], ["y"]),
            ],
            {"W": weights(8, 4), "first": weights(1, 1, 8)},
            {"shape": (1, 2, 8), "output": (onnx.TensorProto.FLOAT, 3)},
            "node 'join': Concat cannot be run",
        ),
        (
            [
                node("Reshape", ["x", "rows"], ["r"]),
                node("MatMul", ["r", "W"], ["h"]),
                node("Reshape", ["h", "flat"], ["y"]),
            ],
            {"W": weights(8, 4), "rows": np.array([-1, 8]), "flat": np.array([1, -1])},
            {"shape": (1, 2, 8)},
            "'y' of 8 rows has shape .1, 64",
        ),
    ],
)
def test_what_cannot_be_proven_is_refused_by_name(
    tmp_path: Path, nodes: list, arrays: dict, more: dict, words: str
) -> None:
    file = exported.by_hand(tmp_path / "m.onnx", nodes, arrays, **more)
    with pytest.raises(CheckpointError, match=f"(?s){words}"):
        load(file, tmp_path / "out")


HIDDEN = node("MatMul", ["x", "fc.weight"], ["h"])
IMAGE = ("n", 3, 6, 5)
CONVOLVED = node("Conv", ["x", "w"], ["h"])
FILTERS = {"w": weights(4, 3, 3, 3)}


@pytest.mark.parametrize(
    ("nodes", "arrays", "more", "module"),
    [
        (
            [CONVOLVED, node("Pad", ["h"], ["y"], pads=[0, 0, 1, 2, 0, 0, 0, 1], value=1.5)],
            FILTERS,
            {"shape": IMAGE, "opset": 9, "output": (onnx.TensorProto.FLOAT, 4)},
            "w",
        ),
        (
            [CONVOLVED, node("Upsample", ["h", "s"], ["y"], mode="linear")],
            {**FILTERS, "s": np.array([1, 1, 2, 3], np.float32)},
            {"shape": IMAGE, "opset": 9, "output": (onnx.TensorProto.FLOAT, 4)},
            "w",
        ),
        (
            [CONVOLVED, node("Resize", ["h", "s"], ["y"], mode="nearest")],
            {**FILTERS, "s": np.array([1, 1, 0.4, 0.8], np.float32)},
            {"shape": IMAGE, "opset": 10, "output": (onnx.TensorProto.FLOAT, 4)},
            "w",
        ),
        (
            [node("Gemm", ["x", "fc.weight", "fc.bias"], ["y"], alpha=0.3, beta=2.0, transB=1)],
            {"fc.weight": weights(4, 8), "fc.bias": weights(4)},
            {},
            "fc",
        ),
        (
            [HIDDEN, node("Relu", ["h"], ["r"]), node("Add", ["r", "fc.bias"], ["y"])],
            {"fc.weight": weights(8, 4), "fc.bias": weights(4)},
            {},
            "fc",
        ),
        (
            [HIDDEN, node("Add", ["h", "mask"], ["m"]), node("Softmax", ["m"], ["y"])],
            {"fc.weight": weights(8, 4), "mask": np.array([0, -np.inf, 0, 0], np.float32)},
            {},
            "fc",
        ),
    ],
    ids=[
        "pad of opset 9",
        "upsample",
        "smaller",
        "factors",
        "a bias of its own",
        "infinite mask",
    ],
)
def test_a_graph_that_changes_on_the_way_answers_as_the_file(
    tmp_path: Path, nodes: list, arrays: dict, more: dict, module: str
) -> None:
    file = exported.by_hand(tmp_path / "m.onnx", nodes, arrays, **more)
    loaded = load(file, tmp_path / "out")
    shape = more.get("shape", ("n", 8))[1:]
    assert compared(file, loaded, {"x": weights(3, *shape, seed=4)}) < 1e-5
    config = json.loads((loaded / "checkpoint" / "config.json").read_text())
    assert config["modules"] == [module]


def test_an_output_that_nothing_reads_keeps_no_operator(tmp_path: Path) -> None:
    nodes = [HIDDEN, node("Dropout", ["h"], ["d", "mask"]), node("Exp", ["d"], ["y"])]
    file = exported.by_hand(tmp_path / "m.onnx", nodes, {"fc.weight": weights(8, 4)}, opset=9)
    loaded = load(file, tmp_path / "out")
    assert compared(file, loaded, {"x": weights(3, 8, seed=4)}) < 1e-3
    graph = json.loads((loaded / "checkpoint" / "graph" / "graph.json").read_text())
    assert [n["op"] for n in graph["nodes"]] == ["Linear", "Exp"]


BIASED = node("Gemm", ["x", "A", "b"], ["h"], name="fc")
TURNED = node("MatMul", ["s", "A:t"], ["y"])


def relu(output: str, **more: str) -> onnx.NodeProto:
    return node("Relu", ["h"], [output], **more)


@pytest.mark.parametrize(
    ("nodes", "shape"),
    [
        ([BIASED, relu("h/product"), node("MatMul", ["h/product", "B"], ["y"])], (8,)),
        ([BIASED, relu("r", name="fc/Add"), node("MatMul", ["r", "B"], ["y"])], (8,)),
        ([BIASED, relu("graph.B.weight"), node("MatMul", ["graph.B.weight", "B"], ["y"])], (8,)),
        ([BIASED, relu("r"), node("MatMul", ["r", "A"], ["s"]), TURNED], (8,)),
        (
            [
                node("Conv", ["x", "w"], ["c"]),
                node("Sigmoid", ["c"], ["c/output"]),
                node("Mul", ["c", "c/output"], ["m"]),
                node("ReduceMax", ["m"], ["y"], axes=[2, 3], keepdims=0),
            ],
            (3, 6, 5),
        ),
    ],
)  # fmt: skip
def test_a_file_may_have_names_that_are_also_made_here(
    tmp_path: Path, nodes: list, shape: tuple[int, ...]
) -> None:
    arrays = {
        "A": weights(8, 8),
        "A:t": weights(8, 8, seed=4),
        "b": weights(8),
        "B": weights(8, 8, seed=5),
        "w": weights(4, 3, 3, 3),
    }
    read = {name for n in nodes for name in n.input}
    arrays = {n: a for n, a in arrays.items() if n in read}
    file = exported.by_hand(tmp_path / "m.onnx", nodes, arrays, ("n", *shape))
    loaded, rows = load(file, tmp_path / "out"), {"x": weights(3, *shape, seed=4)}
    assert compared(file, loaded, rows) < 1e-5
    checkpoint = open_checkpoint(loaded)
    shapes = {name: checkpoint.shape(name) for name in checkpoint.tensors}
    graph = record.read(loaded / "checkpoint", shapes)
    values = Values(load_torch_model(checkpoint, "tensors"), checkpoint.tensors, {})
    contract = json.loads((loaded / "contract.json").read_text())
    written, _ = graph_file.build_float_graph(graph, values, contract)
    onnx_file.save(written, tmp_path / "float.onnx")
    assert compared(tmp_path / "float.onnx", loaded, rows) < 1e-5


def test_operators_inside_of_a_function_are_checked(tmp_path: Path) -> None:
    file = exported.by_hand(tmp_path / "m.onnx", LINEAR, {"W": weights(8, 4)})
    model = onnx.load(file)
    body = [
        node("Constant", [], ["s"], value_float=0.1),
        node("QuantizeLinear", ["a", "s"], ["q"], name="inner"),
        node("DequantizeLinear", ["q", "s"], ["c"]),
    ]
    versions = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("own", "F", ["a"], ["c"], body, versions))
    model.opset_import.append(helper.make_opsetid("own", 1))
    model.graph.node[1].CopyFrom(node("F", ["h"], ["y"], domain="own"))
    file.write_bytes(model.SerializeToString())
    with pytest.raises(CheckpointError, match=r"inner.*quantized already"):
        load(file, tmp_path / "out")


def test_a_file_that_is_not_there_is_not_taken_for_a_hub_s(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"typo\.onnx does not exist"):
        stage.open_file(section(Path("typo.onnx"), base=str(tmp_path)))


def test_external_data_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    file = exported.by_hand(folder / "m.onnx", LINEAR, {"W": weights(8, 4)})
    model = onnx.load(file)
    onnx.save(
        model, folder / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.data"
    )
    assert load(file, tmp_path / "out").is_dir()
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "m.onnx").symlink_to(shutil.copy(file, tmp_path / "blob"))
    with pytest.raises(CheckpointError, match=r"it is a link.*m\.data.*hf download"):
        load(cache, tmp_path / "linked")
    (folder / "m.data").rename(tmp_path / "m.data")
    moved = onnx.load(file, load_external_data=False)
    for entry in moved.graph.initializer[0].external_data:
        entry.value = "../m.data" if entry.key == "location" else entry.value
    file.write_bytes(moved.SerializeToString())
    with pytest.raises(CheckpointError, match="a file below the model's own folder"):
        load(file, tmp_path / "again")


def test_a_file_in_float16_is_compared_as_it_is_and_computed_in_float32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    nodes = [
        node("Cast", ["x"], ["low"], to=half),
        node("MatMul", ["low", "fc.weight"], ["h"]),
        node("Constant", [], ["two"], value=onnx.numpy_helper.from_array(np.float16([2]))),
        node("Mul", ["h", "two"], ["m"]),
        node("Cast", ["m"], ["wide"], to=single),
        node("Sigmoid", ["wide"], ["y"]),
    ]
    arrays = {"fc.weight": weights(8, 4).astype(np.float16)}
    file = exported.by_hand(tmp_path / "m.onnx", nodes, arrays)
    loaded = load(file, tmp_path / "out")
    shares = capsys.readouterr().err
    assert "have the outputs of the file in float16: apart by at most" in shares
    compared_at_load = json.loads((loaded / "origin.json").read_text())
    assert compared_at_load["unit_roundoff"] == 2**-11
    assert compared_at_load["outputs"]["y"]["worst_example"] > 0
    assert compared(loaded / "original" / "model.onnx", loaded, {"x": weights(3, 8)}) < 1e-5
    assert compared(file, loaded, {"x": weights(3, 8)}) < 1e-2


def test_a_file_whose_only_float16_is_a_cast_is_computed_in_float32(tmp_path: Path) -> None:
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    nodes = [
        node("Cast", ["x"], ["low"], to=half),
        node("Cast", ["fc.weight"], ["w"], to=half),
        node("MatMul", ["low", "w"], ["h"], name="product"),
        node("Cast", ["h"], ["y"], to=single),
    ]
    file = exported.by_hand(tmp_path / "m.onnx", nodes, {"fc.weight": weights(8, 4)})
    loaded = load(file, tmp_path / "out")
    assert compared(loaded / "original" / "model.onnx", loaded, {"x": weights(3, 8)}) < 1e-5


def test_a_float16_file_that_answers_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [node("MatMul", ["x", "W"], ["h"], name="first"), node("Relu", ["h"], ["y"])]
    half = {"kind": onnx.TensorProto.FLOAT16, "output": (onnx.TensorProto.FLOAT16, 2)}
    arrays = {"W": weights(8, 4).astype(np.float16)}
    file = exported.by_hand(tmp_path / "m.onnx", nodes, arrays, **half)
    assert load(file, tmp_path / "out").is_dir()
    answers = widen.HalfFile.answers
    monkeypatch.setattr(
        widen.HalfFile, "answers", lambda *a: {n: y * 1.02 for n, y in answers(*a).items()}
    )
    with pytest.raises(CheckpointError, match=r"'y': a row .* answer of the file in float16"):
        load(file, tmp_path / "again")


@pytest.mark.parametrize(("shape", "key"), [(("n", "length", 8), "length"), ((-1, -1, 8), "x.1")])
def test_an_open_axis_takes_its_size_from_the_recipe(
    tmp_path: Path, shape: tuple, key: str
) -> None:
    weight = {"W": weights(8, 4)}
    file = exported.by_hand(
        tmp_path / "m.onnx", LINEAR, weight, shape, output=(onnx.TensorProto.FLOAT, 3)
    )
    loaded = load(file, tmp_path / "out", axes={key: 5})
    assert compared(file, loaded, {"x": weights(3, 5, 8, seed=4)}) < 1e-5
    contract = json.loads((loaded / "contract.json").read_text())
    assert contract["inputs"][0]["axes"] == ["batch", 5, 8]
    assert contract["outputs"][0]["axes"] == ["batch", 5, 4]
