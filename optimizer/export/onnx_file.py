"""Write and read ONNX files, with the weights inside or beside them.

Weights that total more than `LIMIT` go to `<name>.data` beside the model, because a protobuf is
built in memory and cannot pass 2 GiB. `load` refuses an external tensor that
 1. is not a plain relative path below the model's folder (absolute, "..", a link leading out),
 2. names a file that is not there,
 3. has a negative offset, or reaches beyond the end of its file.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TypeAlias
from weakref import WeakValueDictionary

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.reading import check_external_data

LIMIT = 1 << 28
PAGE = 4096  # large weights start at a multiple of it, so that a runtime can map them
Mappings: TypeAlias = "WeakValueDictionary[str, mmap.mmap]"
PROTOBUF_MARGIN = 1 << 24  # names, attributes and framing around the weights


class MappedTensor(ir.ExternalTensor):
    """External weight of an ONNX file that maps the file once for all weights of the model.

    onnx_ir maps the complete file for each weight. To free one page the kernel visits every mapping
    that covers it. With 300 of them and little memory this took 95 % of the processor time.

    files: {path: mapping}, shared by the weights of a model
    """

    def __init__(self, tensor: ir.ExternalTensor, files: Mappings) -> None:
        self._mapping: mmap.mmap | None = None
        self._files = files
        super().__init__(
            tensor.location,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=ir.Shape(tensor.shape),
            name=tensor.name or "",
            base_dir=tensor.base_dir,
        )

    @property
    def raw(self) -> mmap.mmap | None:
        """Mapping of the weight's file; None before its values are read and after `release`."""
        return self._mapping

    @raw.setter
    def raw(self, value: mmap.mmap | None) -> None:
        self._mapping = None if value is None else self._files.setdefault(self.path, value)
        if value is not None and value is not self._mapping:
            value.close()

    def release(self) -> None:
        """Forget the weight's values. The mapping is closed with the last weight that uses it."""
        self._mapping = None
        super().release()


def save(model: ir.Model, path: Path, limit: int = LIMIT) -> None:
    """Write an exported or lowered ONNX model to `path`; weights totalling more than `limit` bytes
    go to `<path>.data`.

    The bytes depend on the model alone, and the file passes onnx.checker. Memory beyond the model:
    one weight with external data, otherwise all of them.
    """
    # drop torch's local build tag ("2.13.0+cpu"): the exported graph does not depend on it
    model.producer_version = (model.producer_version or "").partition("+")[0]
    total = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value)
    beside = path.name + ".data" if total + PROTOBUF_MARGIN > limit else None
    if beside is None:  # external data of another file must not point there any more
        ir.external_data.load_to_model(model)
    ir.save(model, path, external_data=beside, size_threshold_bytes=1024, alignment=PAGE)
    onnx.checker.check_model(str(path))


def load(path: Path) -> ir.Model:
    """Open an exported or lowered ONNX file; external weights stay on disk until they are read.

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
            fields = {e.key: e.value for e in tensor.external_data}
            check_external_data(fields, tensor.name, path)
    model = ir.from_proto(proto)
    ir.external_data.set_base_dir(model.graph, path.parent)
    files: Mappings = WeakValueDictionary()
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = MappedTensor(value.const_value, files)
    return model
