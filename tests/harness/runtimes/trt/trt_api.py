"""Write trt_api.json: the public names of TensorRT releases, without their libraries.

    python -m tests.harness.runtimes.trt.trt_api            needs gcc, readelf and the package index

TensorRT's bindings are small wheels that import once stand-ins are there for the three libraries
they are linked with; dir() of their classes is then the published API. Nothing of them is run.
CUDA's binding is taken whole. The wheels' digests are kept, so that the list can be made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("trt_api.json")
CLASSES = (
    "Builder",
    "BuilderFlag",
    "DataType",
    "EngineInspector",
    "ExecutionContextAllocationStrategy",
    "HardwareCompatibilityLevel",
    "IBuilderConfig",
    "ICudaEngine",
    "IExecutionContext",
    "IHostMemory",
    "ILayer",
    "ILogger",
    "INetworkDefinition",
    "IOptimizationProfile",
    "IOutputAllocator",
    "IProgressMonitor",
    "IRuntimeConfig",
    "ITensor",
    "ITimingCache",
    "LayerInformationFormat",
    "LayerType",
    "Logger",
    "MemoryPoolType",
    "NetworkDefinitionCreationFlag",
    "OnnxParser",
    "OnnxParserRefitter",
    "ParserError",
    "ProfilingVerbosity",
    "Refitter",
    "Runtime",
    "TensorIOMode",
    "TensorLocation",
)
TENSORRT = {
    "10.3": "tensorrt-cu12-bindings==10.3.0",
    "10.16": "tensorrt-cu12-bindings==10.16.1.11",
    "11.0": "tensorrt-cu13-bindings==11.0.0.114",
    "11.4": "tensorrt-cu13-bindings==11.4.0.106",
}
FUNCTIONS = (  # that the bindings take from the libraries
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)
CONSTANTS = ("cudaDevAttr", "cudaError", "cudaKey")
CUDA = ("cuda-bindings==12.9.0", "cuda-bindings==13.5.0")
DUMP = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
module = importlib.import_module(sys.argv[1])
classes = sys.argv[2:]
of = lambda o: sorted(n for n in dir(o) if not n.startswith("_"))
names = {c: of(getattr(module, c)) for c in classes if hasattr(module, c)}
print(json.dumps({"module": [n for n in dir(module) if n[:1].isalpha()], "classes": names}))
"""


def main() -> None:
    """Download the releases, read their names and write the file."""
    found: dict[str, Any] = {"tensorrt": {}, "cuda": {}}
    for release, requirement in TENSORRT.items():
        with tempfile.TemporaryDirectory() as folder:
            wheel = download(requirement, Path(folder))
            libraries = stand_ins(next(Path(folder).rglob("tensorrt.so")), Path(folder) / "lib")
            entry = dump(Path(folder), "tensorrt_bindings", CLASSES, libraries)
        found["tensorrt"][release] = {"wheel": wheel} | entry
    for requirement in CUDA:
        with tempfile.TemporaryDirectory() as folder:
            wheel = download(requirement, Path(folder))
            download("cuda-pathfinder", Path(folder))
            names = dump(Path(folder), "cuda.bindings.runtime", ["cudaError_t"], None)
        kept = [n for n in names["module"] if n.startswith("cuda") and "_" not in n]
        kept += [n for n in names["module"] if n in ("cudaError_t",)]
        found["cuda"][requirement] = {"wheel": wheel, "module": functions_and_enums(kept)}
    DATA.write_text(one_line_per_list(found) + "\n", encoding="utf-8")


def one_line_per_list(document: Any, indent: str = "") -> str:
    """Return JSON with indented objects and one-line lists."""
    if not isinstance(document, dict):
        return json.dumps(document)
    inner = indent + " "
    lines = [
        f"{inner}{json.dumps(k)}: {one_line_per_list(v, inner)}"
        for k, v in sorted(document.items())
    ]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def functions_and_enums(names: list[str]) -> list[str]:
    """Return the names without the constants of older enums (cudaDevAttr...)."""
    return sorted(n for n in names if n == "cudaError_t" or not n.startswith(CONSTANTS))


def download(requirement: str, folder: Path) -> dict[str, str]:
    """Unpack a wheel into folder; return its file name and sha256."""
    before = set(folder.glob("*.whl"))
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    subprocess.run([*pip, requirement], check=True, stderr=subprocess.DEVNULL)
    (wheel,) = set(folder.glob("*.whl")) - before
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return {"file": wheel.name, "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}


def stand_ins(binding: Path, folder: Path) -> Path:
    """Build empty shared objects under the names that the binding is linked with."""
    folder.mkdir()
    said = subprocess.run(
        ["readelf", "-d", str(binding)], capture_output=True, text=True, check=True
    ).stdout
    needed = [line.split("[")[1].rstrip("]") for line in said.splitlines() if "NEEDED" in line]
    source = folder / "functions.c"
    source.write_text("".join(f"void *{f}(void) {{ return 0; }}\n" for f in FUNCTIONS))
    for name in (n for n in needed if n.startswith("libnv")):
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run([*command, str(source)], check=True)
    return folder


def dump(
    folder: Path, module: str, classes: Sequence[str], libraries: Path | None
) -> dict[str, Any]:
    """Return dir() of the module and of some of its classes, from a separate process."""
    environment = dict(os.environ, PYTHONPATH=str(folder))
    if libraries is not None:
        environment["LD_LIBRARY_PATH"] = str(libraries)
    done = subprocess.run(
        [sys.executable, "-c", DUMP, module, *classes],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{module}: {done.stderr[-2000:]}")
    names: dict[str, Any] = json.loads(done.stdout)
    return names


if __name__ == "__main__":
    main()
