"""External data files are read from the bytes of a model as the onnx package reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from optimizer.harness.errors import BundleError
from optimizer.harness.runtimes.ort.onnx_external import check_inside, list_external_files
from tests.harness import small_model


def outside(name: str, location: str) -> TensorProto:
    """A tensor whose data is in another file."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[2])
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", location
    return tensor


def test_inline_weights_name_no_file(tmp_path: Path) -> None:
    assert list_external_files(small_model.model(tmp_path / "model.onnx")) == set()


def test_the_files_that_onnx_writes_are_found(tmp_path: Path) -> None:
    model = onnx.load(small_model.model(tmp_path / "inline.onnx"))
    onnx.save(
        model,
        tmp_path / "model.onnx",
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=0,
    )
    assert list_external_files(tmp_path / "model.onnx") == {"model.onnx.data"}


def test_every_place_a_tensor_can_hide_in_is_walked(tmp_path: Path) -> None:
    inner = helper.make_graph([], "inner", [], [], [outside("t", "in_subgraph")])
    nodes = [
        helper.make_node("Constant", [], ["a"], value=outside("v", "in_attribute")),
        helper.make_node("If", ["c"], ["b"], then_branch=inner, else_branch=inner),
    ]
    sparse = onnx.SparseTensorProto(
        values=outside("s", "in_sparse_values"), indices=outside("i", "in_sparse_indices")
    )
    graph = helper.make_graph(nodes, "g", [], [], [outside("w", "in_initializer")])
    graph.sparse_initializer.append(sparse)
    constant = helper.make_node("Constant", [], ["y"], value=outside("f", "in_function"))
    function = helper.make_function("d", "F", [], ["y"], [constant], [helper.make_opsetid("", 21)])
    model = helper.make_model(graph, functions=[function])
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    assert list_external_files(tmp_path / "model.onnx") == {
        "in_subgraph",
        "in_attribute",
        "in_sparse_values",
        "in_sparse_indices",
        "in_initializer",
        "in_function",
    }


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("../outside.data", "outside the bundle"),
        ("/etc/passwd", "outside the bundle"),
        ("unlisted.data", "not in the manifest"),
    ],
)
def test_weights_elsewhere_are_refused(location: str, message: str, tmp_path: Path) -> None:
    graph = helper.make_graph([], "g", [], [], [outside("w", location)])
    model = tmp_path / "model.onnx"
    model.write_bytes(helper.make_model(graph).SerializeToString())
    with pytest.raises(BundleError, match=message):
        check_inside(model, tmp_path, {"model.onnx"})
    check_inside(small_model.model(tmp_path / "good.onnx"), tmp_path, {"good.onnx"})


@pytest.mark.parametrize("cut", [1, 100, 700])
def test_a_cut_file_is_an_error_and_not_an_empty_answer(cut: int, tmp_path: Path) -> None:
    data = small_model.model(tmp_path / "model.onnx").read_bytes()
    (tmp_path / "cut.onnx").write_bytes(data[:-cut])
    with pytest.raises(BundleError, match=r"cut\.onnx"):
        list_external_files(tmp_path / "cut.onnx")


def test_random_bytes_never_hang_or_escape(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(200):
        path = tmp_path / "noise"
        path.write_bytes(rng.bytes(1 + i))
        found: Any
        try:
            found = list_external_files(path)
        except BundleError:
            found = set()
        assert isinstance(found, set)
