"""Find or fetch the ONNX file of a model, and the files that its tensors are in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.external_data_helper import load_external_data_for_tensor

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.reading import check_external_data, check_regular, quote_error, reading
from optimizer.harness import tasks
from optimizer.load import source
from optimizer.recipe.schema import Model
from optimizer.store import digest_file

SUFFIX = ".onnx"
LARGEST = (1 << 31) - 1  # bytes of a protobuf
PATTERNS = ("*.onnx", "*.onnx_data*", "*.onnx.data", "*.data", "README.md", *source.LICENCES)
"""Files that are fetched from a hub."""


@dataclass(frozen=True)
class OnnxFile:
    """The recipe's ONNX file on this machine, from which load starts.

    root: folder of the source, or of the file that is the source
    revision: commit of a hub; "<distribution> <version>"; None for a file or folder
    """

    path: Path
    root: Path
    revision: str | None


def takes(section: Model) -> bool:
    """Return True for a model that is an ONNX file or a torch module, as its task says."""
    return tasks.find_task(section.task).of_file


def find(section: Model) -> OnnxFile:
    """The ONNX file of a recipe. Raises CheckpointError where there is none, or several."""
    path = source.expand_path(section.source, section.base)
    check_exists(section)
    if path.is_file() and not section.source.startswith(source.PACKAGE):
        if path.suffix != SUFFIX:
            raise CheckpointError(
                f"{section.source} is not an ONNX file",
                where="model.source",
                accepted="model.onnx, a folder with one, or a hub id",
            )
        return OnnxFile(_behind_link(path), path.resolve().parent, None)
    resolved = source.resolve(section, patterns=PATTERNS)
    folder = resolved.folder
    if section.onnx_file is not None:
        file = folder / section.onnx_file
        if not file.is_file():
            raise CheckpointError(
                "the file is missing",
                where=f"model.onnx_file: {file}",
                accepted=_listed(folder),
            )
        return OnnxFile(_behind_link(file), folder, resolved.revision)
    candidates = sorted(folder.rglob(f"*{SUFFIX}"))
    if len(candidates) != 1:
        raise CheckpointError(
            f"the folder has {len(candidates) or 'no'} ONNX files",
            where=f"model.source: {folder}",
            accepted="one file",
            fix=f"Name one: model.onnx_file: {_listed(folder)}" if candidates else "",
        )
    return OnnxFile(_behind_link(candidates[0]), folder, resolved.revision)


def _behind_link(file: Path) -> Path:
    """Find the real file behind a link to an ONNX file, as a hub's cache has them. Raises
    CheckpointError where its external data does not lie beside the real file."""
    real = file.resolve()
    if file.is_symlink():
        try:
            data_files(read(real), real)
        except CheckpointError as e:
            raise CheckpointError(
                f"it is a link, and {e.problem} beside the real file",
                where=str(file),
                accepted="real files in one folder",
                fix="Of a hub: hf download ID --local-dir FOLDER; then write model.source: FOLDER.",
            ) from e
    return real


def check_exists(section: Model) -> None:
    """Raise CheckpointError for the name of an ONNX file that is not there, which is otherwise
    taken for a model on a hub."""
    path = source.expand_path(section.source, section.base)
    if path.suffix == SUFFIX and not path.exists():
        raise CheckpointError(
            f"file {section.source} does not exist",
            where="model.source",
            accepted="model.onnx, a folder with one, or a hub id",
            fix=f"Correct the path; a relative one starts at {section.base or Path.cwd()}.",
        )


def _listed(folder: Path) -> str:
    names = sorted(str(f.relative_to(folder)) for f in folder.rglob(f"*{SUFFIX}"))
    return " | ".join(names[:12]) or "none"


def read(path: Path) -> onnx.ModelProto:
    """Read the content of the recipe's ONNX file, without external data; an axis of size -1, as
    paddle2onnx writes it, is one without a size. Raises CheckpointError for another file."""
    check_regular(path, LARGEST)
    with reading(path):
        try:
            model = onnx.load(path, load_external_data=False)
        except (DecodeError, ValueError) as e:
            raise CheckpointError(
                f"not a readable ONNX model ({str(e)[:200]})", where=str(path)
            ) from None
    if not model.graph.node:
        raise CheckpointError("an ONNX model without any operator", where=str(path))
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value < 0:
                dim.Clear()
    return model


def inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """List the inputs of an ONNX file that is loaded, without those that are weights, which old
    exporters list too."""
    weights = {t.name for t in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in weights]


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor of an ONNX file that is loaded: initializers, and values of attributes."""
    yield from model.graph.initializer
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t


def arrays(model: onnx.ModelProto, path: Path) -> dict[str, NDArray[Any]]:
    """Return {initializer of an ONNX file that is loaded: its values}. Raises CheckpointError for
    bytes that do not fit the shape."""
    values = {}
    for tensor in model.graph.initializer:
        try:
            values[tensor.name] = numpy_helper.to_array(tensor, str(path.parent))
        except ValueError as e:
            raise CheckpointError(
                f"its bytes do not fit its shape {list(tensor.dims)} ({quote_error(e)})",
                where=f"{path}: {tensor.name}",
                fix="Export the model again.",
            ) from e
    return values


def load_attributes(model: onnx.ModelProto, path: Path) -> None:
    """Read values of attributes that are external data of a loaded ONNX file into the model."""
    initializers = {id(t) for t in model.graph.initializer}
    for tensor in tensors(model):
        if id(tensor) not in initializers and tensor.data_location == onnx.TensorProto.EXTERNAL:
            load_external_data_for_tensor(tensor, str(path.parent))


def data_files(model: onnx.ModelProto, path: Path) -> list[Path]:
    """List the loaded ONNX file's files of external data, sorted. Raises CheckpointError as
    check_external_data."""
    files = {
        check_external_data({e.key: e.value for e in t.external_data}, t.name, path)
        for t in tensors(model)
        if t.data_location == onnx.TensorProto.EXTERNAL
    }
    return sorted(files)


def digests(section: Model) -> dict[str, str]:
    """Return {file: sha256} of the ONNX file and its external data; {hub id: commit} for one on a
    hub."""
    check_exists(section)
    if not source.is_local(section.source, section.base):
        return source.digest_source(section)
    return {name: digest_file(file) for name, file in by_name(find(section).path).items()}


def origin(section: Model) -> dict[str, Any]:
    """Return {"source", "revision", "files": {file: {sha256, size}}} of a recipe's ONNX file."""
    file = find(section)
    return {
        "source": section.source,
        "revision": file.revision,
        "files": describe(by_name(file.path)),
    }


def describe(files: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Return {name: {"sha256", "size"}} of an ONNX source's files by name, for source.json."""
    return {
        name: {"sha256": digest_file(file), "size": file.stat().st_size}
        for name, file in files.items()
    }


def by_name(path: Path) -> dict[str, Path]:
    """Return {name in the file's folder: file} of an ONNX file and its external data."""
    files = [path, *data_files(read(path), path)]
    return {str(file.relative_to(path.parent)): file for file in files}
