"""Write and read ONNX files, with the weights inside or beside them.

Weights that total more than `LIMIT` go to `<name>.data` beside the model, because a protobuf is
built in memory and cannot pass 2 GiB. `load` refuses an external tensor that
 1. is not a plain relative path below the model's folder (absolute, "..", a link leading out),
 2. names a file that is not there,
 3. has a negative offset, or reaches beyond the end of its file.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from optimizer.foundation.errors import CheckpointError

LIMIT = 1 << 28
SMALLEST = 1024  # bytes: a smaller weight stays in the protobuf
PAGE = 4096  # large weights start at a multiple of it, so that a runtime can map them
PROTOBUF_MARGIN = 1 << 24  # names, attributes and framing around the weights


def save(model: ir.Model, path: Path, limit: int = LIMIT) -> None:
    """Write `model` to `path`; weights totalling more than `limit` bytes go to `<path>.data`.

    The bytes depend on the model alone, and the file passes onnx.checker. Memory beyond the model:
    one weight with external data, otherwise all of them.
    """
    total = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value)
    beside = path.name + ".data" if total + PROTOBUF_MARGIN > limit else None
    if beside is None:  # external data of another file must not point there any more
        ir.external_data.load_to_model(model)
    ir.save(model, path, external_data=beside, size_threshold_bytes=SMALLEST, alignment=PAGE)
    onnx.checker.check_model(str(path))


def save_piece(piece: ir.Model, path: Path) -> None:
    """Write a part of a model that `load` opened. Weights in that model's external files are not
    copied: each file gets a hard link beside `path`, where the disk permits.
    """
    weights = [v for v in piece.graph.initializers.values() if v.const_value is not None]
    linked = [v for v in weights if isinstance(v.const_value, ir.ExternalTensor)]
    if not linked or not _link({Path(v.const_value.path) for v in linked}, path):
        save(piece, path)
        return
    others = [v for v in weights if v not in linked and v.const_value.nbytes > SMALLEST]
    written = ir.external_data.convert_tensors_to_external(
        [v.const_value for v in others], path.parent, path.name + ".data"
    )
    for value in linked:
        value.const_value = _moved(value.const_value, path)
    for value, tensor in zip(others, written, strict=True):
        value.const_value = tensor
    ir.save(piece, path)


def _link(files: Collection[Path], path: Path) -> bool:
    """Link `files` beside `path`. Returns False where that cannot be done."""
    try:
        for file in files:
            link = path.with_name(_link_name(file))
            if not link.exists():
                link.hardlink_to(file)
    except OSError:  # another disk, or a disk without links
        return False
    return True


def _link_name(file: Path) -> str:
    return f"linked-{file.name}"


def _moved(tensor: ir.ExternalTensor, path: Path) -> ir.ExternalTensor:
    """The tensor in the link beside `path`."""
    return ir.ExternalTensor(
        _link_name(Path(tensor.path)),
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name,
        base_dir=path.parent,
    )


def load(path: Path) -> ir.Model:
    """Open an ONNX file; external weights stay on disk until they are read.

    Raises CheckpointError for another kind of file, and for cases 1 to 3 above.
    """
    try:
        proto = onnx.load(path, load_external_data=False)
    except (OSError, ValueError, DecodeError) as e:
        raise CheckpointError(f"not a readable ONNX model ({e})", where=str(path)) from None
    if not proto.graph.node:
        raise CheckpointError("an ONNX model without any operator", where=str(path))
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _check_external(tensor, path)
    model = ir.from_proto(proto)
    ir.external_data.set_base_dir(model.graph, path.parent)
    return model


def _check_external(tensor: onnx.TensorProto, path: Path) -> None:
    fields = {e.key: e.value for e in tensor.external_data}
    location = fields.get("location", "")
    folder = path.parent.resolve()
    file = (folder / location).resolve()
    where = f"{path}: {tensor.name}"
    if not location or Path(location).is_absolute() or not file.is_relative_to(folder):
        raise CheckpointError(
            f"external data at {location!r}",
            where=where,
            accepted="a file below the model's own folder",
        )
    if not file.is_file():
        raise CheckpointError(f"external data {location!r} is missing", where=where)
    offset = int(fields.get("offset", 0))
    length = int(fields.get("length", file.stat().st_size - offset))
    if offset < 0 or length < 0 or offset + length > file.stat().st_size:
        raise CheckpointError(
            f"external data {location!r} ends at byte {file.stat().st_size}, before "
            f"{offset + length}",
            where=where,
            fix="The file was cut short; make it again.",
        )
