from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from optimizer.export import onnx_file
from optimizer.foundation.errors import CheckpointError
from optimizer.validate.ledger.pieces import pieces


def chain(*weights: np.ndarray | ir.TensorProtocol) -> ir.Model:
    """x [batch, K] times each weight in turn."""
    x = value = ir.val("x", ir.DataType.FLOAT, ["batch", weights[0].shape[0]])
    nodes, held = [], []
    for i, w in enumerate(weights):
        tensor = ir.tensor(w, name=f"w{i}") if isinstance(w, np.ndarray) else w
        initializer = ir.val(f"w{i}", ir.DataType.FLOAT, tensor.shape, const_value=tensor)
        node = ir.node("MatMul", [value, initializer], name=f"product{i}")
        nodes.append(node)
        held.append(initializer)
        value = node.outputs[0]
        value.name = f"y{i}"
    value.type, value.shape = x.type, ir.Shape(["batch", weights[-1].shape[1]])
    graph = ir.Graph(
        [x], [value], nodes=nodes, initializers=held, opset_imports={"": 21}, name="chain"
    )
    return ir.Model(graph, ir_version=10)


def weights(count: int = 2, size: int = 32) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(size, size)).astype(np.float32) for _ in range(count)]


def spoil(path: Path, **fields: str) -> None:
    """Rewrite the external-data fields of the first weight."""
    proto = onnx.load(path, load_external_data=False)
    entries = {e.key: e.value for e in proto.graph.initializer[0].external_data} | fields
    del proto.graph.initializer[0].external_data[:]
    for key, value in entries.items():
        proto.graph.initializer[0].external_data.add(key=key, value=value)
    path.write_bytes(proto.SerializeToString())


@pytest.mark.parametrize("limit", [onnx_file.LIMIT, 0])
def test_what_is_written_reads_back_wherever_the_weights_lie(tmp_path: Path, limit: int) -> None:
    given = weights()
    onnx_file.save(chain(*given), tmp_path / "model.onnx", limit=limit)
    assert (tmp_path / "model.onnx.data").is_file() == (limit == 0)
    held = onnx_file.load(tmp_path / "model.onnx").graph.initializers
    assert all(np.array_equal(held[f"w{i}"].const_value.numpy(), w) for i, w in enumerate(given))


def test_weights_read_from_beside_a_file_are_written_into_another(tmp_path: Path) -> None:
    given = weights()
    onnx_file.save(chain(*given), tmp_path / "model.onnx", limit=0)
    (tmp_path / "other").mkdir()
    onnx_file.save(onnx_file.load(tmp_path / "model.onnx"), tmp_path / "other" / "model.onnx")
    (tmp_path / "model.onnx.data").unlink()
    held = onnx_file.load(tmp_path / "other" / "model.onnx").graph.initializers
    assert all(np.array_equal(held[f"w{i}"].const_value.numpy(), w) for i, w in enumerate(given))


def test_external_weights_are_where_the_onnx_package_finds_them(tmp_path: Path) -> None:
    given = weights()
    onnx_file.save(chain(*given), tmp_path / "model.onnx", limit=0)
    read = {
        t.name: onnx.numpy_helper.to_array(t)
        for t in onnx.load(tmp_path / "model.onnx").graph.initializer
    }
    assert all(np.array_equal(read[f"w{i}"], w) for i, w in enumerate(given))


def test_all_weights_of_a_model_share_one_mapping_of_their_file(tmp_path: Path) -> None:
    made = weights(6)
    onnx_file.save(chain(*made), tmp_path / "model.onnx", limit=0)

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path / "model.onnx.data"))

    model = onnx_file.load(tmp_path / "model.onnx")
    tensors = [v.const_value for v in model.graph.initializers.values()]
    for tensor, values in zip(tensors, made, strict=True):
        assert np.array_equal(tensor.numpy(), values)
    assert mappings() == 1
    for tensor in tensors[1:]:
        tensor.release()
    assert np.array_equal(tensors[0].numpy(), made[0])
    assert np.array_equal(tensors[1].numpy(), made[1])
    for tensor in tensors:
        tensor.release()
    assert mappings() == 0


def test_the_bytes_depend_on_the_model_alone(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        onnx_file.save(chain(*weights()), tmp_path / name / "model.onnx", limit=0)
    for file in ("model.onnx", "model.onnx.data"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("location", ["/etc/passwd", "../secret", "sub/../../secret", ""])
def test_external_data_outside_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret").write_bytes(bytes(1 << 16))
    folder = tmp_path / "model"
    folder.mkdir()
    onnx_file.save(chain(*weights()), folder / "model.onnx", limit=0)
    spoil(folder / "model.onnx", location=location)
    with pytest.raises(CheckpointError, match="own folder"):
        onnx_file.load(folder / "model.onnx")


def test_a_link_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    path = tmp_path / "model" / "model.onnx"
    onnx_file.save(chain(*weights()), path, limit=0)
    outside = (tmp_path / "model" / "model.onnx.data").rename(tmp_path / "secret")
    (tmp_path / "model" / "model.onnx.data").symlink_to(outside)
    with pytest.raises(CheckpointError, match="own folder"):
        onnx_file.load(path)


def test_external_data_cut_short_is_refused_with_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx_file.save(chain(*weights()), path, limit=0)
    data = tmp_path / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="ends at byte 8191, before 8192"):
        onnx_file.load(path)


def test_missing_external_data_is_named(tmp_path: Path) -> None:
    onnx_file.save(chain(*weights()), tmp_path / "model.onnx", limit=0)
    (tmp_path / "model.onnx.data").unlink()
    with pytest.raises(CheckpointError, match=r"model\.onnx\.data' is missing"):
        onnx_file.load(tmp_path / "model.onnx")


@pytest.mark.parametrize("content", [b"no model", b"", b"\x00" * 64])
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(CheckpointError):
        onnx_file.load(tmp_path / "model.onnx")


@pytest.mark.slow
def test_a_model_above_two_gigabytes_is_written_checked_and_read(tmp_path: Path) -> None:
    size, count = 1 << 13, 9  # nine weights of 256 MiB, made one at a time

    def weight(i: int) -> ir.LazyTensor:
        def make() -> ir.TensorProtocol:
            return ir.tensor(np.full((size, size), i, np.float32))

        return ir.LazyTensor(make, ir.DataType.FLOAT, ir.Shape([size, size]), name=f"w{i}")

    onnx_file.save(chain(*(weight(i) for i in range(count))), tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx.data").stat().st_size == count * size * size * 4
    held = onnx_file.load(tmp_path / "model.onnx").graph.initializers
    assert held["w8"].const_value.numpy()[-1, -1] == 8


def test_a_piece_of_a_model_runs_from_weights_in_a_file_of_its_own(tmp_path: Path) -> None:
    """A hard link would do, but onnx_ir refuses to read a file of two names, and another run may be
    reading it."""
    given = weights(3)
    onnx_file.save(chain(*given), tmp_path / "model.onnx", limit=0)
    model = onnx_file.load(tmp_path / "model.onnx")
    piece = ir.convenience.extract(model.graph, ["y0"], ["y2"])
    piece.inputs[0].type, piece.inputs[0].shape = model.graph.inputs[0].type, ir.Shape([None, 32])
    work = tmp_path / "work"
    work.mkdir()
    onnx_file.save(ir.Model(piece, ir_version=10), work / "piece.onnx", limit=0)
    assert (tmp_path / "model.onnx.data").stat().st_nlink == 1
    x = np.eye(32, dtype=np.float32)
    with pieces.AS_WRITTEN.open(work / "piece.onnx") as runner:
        assert np.allclose(runner.infer({"y0": x})["y2"], x @ given[1] @ given[2], atol=1e-4)
