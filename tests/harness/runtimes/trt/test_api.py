"""Every name of TensorRT and CUDA in our source exists in their releases.

A misspelt attribute would fail only on a machine with a GPU. So attributes are read from our
source, the class of their object is looked up in the tables below, and each attribute must be in
dir() of that class, for the installed TensorRT-RTX and for the releases in trt_api.json.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.runtimes import trt
from tests.harness import standin_gpu

FOLDER = Path(str(trt.__file__)).parent
PUBLISHED = json.loads((Path(__file__).parent / "trt_api.json").read_text())
# by file: name in our source -> class of TensorRT, or "" for our own
NAMES = {
    "build/builder.py": {
        "builder": "Builder",
        "network": "INetworkDefinition",
        "parser": "OnnxParser",
        "config": "IBuilderConfig",
        "profile": "IOptimizationProfile",
        "tensor": "ITensor",
        "flags": "BuilderFlag",
        "levels": "HardwareCompatibilityLevel",
    },
    "build/advice.py": {"parser": "OnnxParser", "e": "ParserError"},
    "inspect.py": {
        "runtime": "Runtime",
        "engine": "ICudaEngine",
        "context": "IExecutionContext",
        "inspector": "EngineInspector",
    },
    "build/network.py": {
        "network": "INetworkDefinition",
        "layer": "ILayer",
        "constant": "ILayer",
        "x": "ILayer",
        "tensor": "ITensor",
        "o": "ITensor",
        "t": "ITensor",
    },
    "run.py": {"context": "IExecutionContext"},
    "session.py": {
        "engine": "ICudaEngine",
        "context": "IExecutionContext",
        "runtime": "Runtime",
        "_runtime": "Runtime",
        "config": "IRuntimeConfig",
        "strategies": "CudaGraphStrategy",
        "kinds": "DynamicShapesKernelSpecializationStrategy",
        "_cache": "IRuntimeCache",
        "refitter": "Refitter",
    },
    "decoder.py": {"context": "IExecutionContext"},
    "caches.py": {"config": "IBuilderConfig"},
    "build/watch.py": {},
    "validity.py": {"runtime": "Runtime"},
}
# call or property -> class of its result
GIVES = {
    "get_input": "ITensor",
    "get_output": "ITensor",
    "get_layer": "ILayer",
    "get_error": "ParserError",
    "get_timing_cache": "ITimingCache",
    "get_tensor_dtype": "DataType",
}
# other objects with attributes in those files: ours, Python's, numpy's; a new name belongs in one
# of the two tables
OURS = """
    .arguments .compute_capability .dtype .inputs .log .model .outputs .parent .phases
    .profiles .session .type .Severity .advance .driver .memory .messages ._cache_file ._configs
    ._contexts ._device ._driver ._graphs ._output_shapes ._pinned ._row ._scratch ._session ._spec
    BITS GEMM KERNELS SOURCE TYPES a actual addresses advice array arrays beside buffer buffers
    caches constants consumers contract d description device driver dtype f file final_shapes
    gc gpu header host i json kernels known kv_cache log modules new node np old options os
    output_shapes path pinned producer ranges re REASONS room schemes self session shapes signal
    sizes spans threading typed types watching weights
"""
ONLY_RTX = {  # in branches of a product with runtime_config, or with GPUs to name
    "CudaGraphStrategy",
    "DynamicShapesKernelSpecializationStrategy",
    "dynamic_shapes_kernel_specialization_strategy",
    "ComputeCapability",
    "IRuntimeCache",
    "cuda_graph_strategy",
    "create_runtime_cache",
    "set_runtime_cache",
    "num_compute_capabilities",
    "set_compute_capability",
    "get_engine_validity",
    "engine_header_size",
    "EngineValidity",
}
NOT_IN_10_3 = {"SAME_COMPUTE_CAPABILITY", "create_runtime_config", "IRuntimeConfig"}  # asked for


def used(name: str) -> Iterator[tuple[str, str]]:
    """Yield (class or "module", attribute) of every use in a file."""
    names, tree = NAMES[name], ast.parse((FOLDER / name).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of = kind(node.value, names)
            if of is not None:
                yield of, node.attr


def kind(value: ast.expr, names: dict[str, str]) -> str | None:
    """Return the class of an expression: "module", a class of TensorRT, or None."""
    if isinstance(value, ast.Call):
        given = value.func
        if isinstance(given, ast.Attribute):
            return given.attr if kind(given.value, names) == "module" else GIVES.get(given.attr)
        return None
    if isinstance(value, ast.Attribute):
        if value.attr == "trt":
            return "module"
        if kind(value.value, names) == "module":
            return value.attr
        if kind(value.value, names) == "ILogger":
            return None
        return names.get(value.attr)
    if isinstance(value, ast.Name):
        return "module" if value.id == "trt" else names.get(value.id)
    return None


def untold() -> dict[str, set[str]]:
    """Return the names by file that have attributes but are in neither table."""
    found: dict[str, set[str]] = {}
    for name, names in NAMES.items():
        for node in ast.walk(ast.parse((FOLDER / name).read_text())):
            if not isinstance(node, ast.Attribute) or kind(node.value, names) is not None:
                continue
            value = node.value
            if isinstance(value, ast.Name | ast.Attribute):
                told = value.id if isinstance(value, ast.Name) else f".{value.attr}"
                if told not in OURS.split() and told not in ("tensor", "layer", "engine"):
                    found.setdefault(name, set()).add(told)
    return found


USES = sorted({use for name in NAMES for use in used(name)})


def test_every_file_that_is_handed_a_product_is_looked_at() -> None:
    handed = {
        f.relative_to(FOLDER).as_posix()
        for f in FOLDER.rglob("*.py")
        if any(
            isinstance(n, ast.Name) and n.id == "trt" for n in ast.walk(ast.parse(f.read_text()))
        )
    }
    assert handed <= set(NAMES)
    assert untold() == {}
    assert len(USES) > 90


def test_rtx_has_every_name() -> None:
    trt: Any = pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")
    absent = {
        (of, attr)
        for of, attr in USES
        if not hasattr(trt if of == "module" else getattr(trt, of, None), attr)
    }
    assert absent == set()


@pytest.mark.parametrize("release", PUBLISHED["tensorrt"])
def test_a_release_of_tensorrt_has_every_name(release: str) -> None:
    document = PUBLISHED["tensorrt"][release]
    excused = ONLY_RTX | (NOT_IN_10_3 if release == "10.3" else set())
    absent = set()
    for of, attr in USES:
        names = document["module"] if of == "module" else document["classes"].get(of, [])
        if attr not in names and attr not in excused and of not in excused:
            absent.add((of, attr))
    assert absent == set()


def test_nothing_is_excused_that_every_release_has() -> None:
    releases = PUBLISHED["tensorrt"]
    for excused, asked in ((ONLY_RTX, list(releases)), (NOT_IN_10_3, ["10.3"])):
        for name in excused:
            assert any(
                name not in releases[r]["module"]
                and not any(name in names for names in releases[r]["classes"].values())
                for r in asked
            ), name


@pytest.mark.parametrize("wheel", PUBLISHED["cuda"])
def test_cuda_python_has_every_name(wheel: str) -> None:
    assert cuda_names() - set(PUBLISHED["cuda"][wheel]["module"]) == set()


def test_an_installed_cuda_python_has_every_name() -> None:
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("pip install cuda-python")
    runtime = importlib.import_module("cuda.bindings.runtime")
    assert {n for n in cuda_names() if not hasattr(runtime, n)} == set()


def cuda_names() -> set[str]:
    """Return the functions called by name, and the enums."""
    tree = ast.parse((FOLDER / "cuda.py").read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "_call":
            assert isinstance(node.args[0], ast.Constant)
            found.add(str(node.args[0].value))
        elif isinstance(node, ast.Attribute) and getattr(node.value, "attr", "") == "_runtime":
            found.add(node.attr)
    return found


def test_the_stand_in_offers_nothing_that_cuda_does_not() -> None:
    offered = {n for n in dir(standin_gpu.Runtime) if n.startswith("cuda")}
    for wheel in PUBLISHED["cuda"].values():
        assert offered - set(wheel["module"]) == set()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (standin_gpu.Engine, "ICudaEngine"),
        (standin_gpu.Context, "IExecutionContext"),
        (standin_gpu.Config, "IRuntimeConfig"),
        (standin_gpu.Cache, "IRuntimeCache"),
    ],
)
def test_the_stand_in_offers_nothing_that_tensorrt_does_not(ours: type, theirs: str) -> None:
    trt: Any = pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")
    own = {"model", "gpu", "contexts", "held", "how"}  # of the stand-in itself
    offered = {n for n in dir(ours) if not n.startswith("_")} - own
    assert offered - set(dir(getattr(trt, theirs))) == set()
