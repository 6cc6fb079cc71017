"""The harness runs in a bundle, where neither we nor any framework is."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from optimizer import harness

FOLDER = Path(str(harness.__file__)).parent
ALLOWED = {"numpy", "tokenizers"} | set(sys.stdlib_module_names)
ALSO = {  # the files that may import a package, and only when it is used
    "runtimes/ort/run.py": "onnxruntime",
    "runtimes/openvino/core.py": "openvino",
    "runtimes/openvino/stateful.py": "openvino",
    "runtimes/openvino/paged.py": "openvino",
    "runtimes/ort/genai.py": "onnxruntime_genai",
    "inputs/template_process.py": "jinja2",
    "generate/grammar.py": "llguidance",
    "commands/application.py": "starlette",
    "server/http/app.py": "starlette",
    "server/http/retrieval/embed.py": "starlette",
    "server/http/retrieval/embed_sparse.py": "starlette",
    "server/http/openai.py": "starlette",
    "server/http/openai_texts.py": "starlette",
    "server/http/request.py": "starlette",
    "server/http/retrieval/rerank.py": "starlette",
    "server/http/server.py": "h11 uvicorn",
    "server/tensors.py": "orjson",
    "server/http/v2_http.py": "starlette",
    "commands/serve.py": "uvloop",
    "server/grpc/server.py": "grpc",
    "server/grpc/stream.py": "grpc",
    "server/observe/tracing.py": "opentelemetry",
    "server/grpc/messages.py": "google",
    "inputs/image_file.py": "PIL",
    "trust/signature.py": "cryptography",
}
FILES = sorted(p.relative_to(FOLDER).as_posix() for p in FOLDER.rglob("*.py"))


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_only_what_a_bundle_has(name: str) -> None:
    depth = len(Path(name).parts)
    for node in ast.walk(ast.parse((FOLDER / name).read_text())):
        if isinstance(node, ast.Import):
            found = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= depth, f"{name}:{node.lineno} leaves the harness"
            found = set() if node.level else {str(node.module).split(".")[0]}
        else:
            continue
        assert found <= ALLOWED | set(ALSO.get(name, "").split()), f"{name}:{node.lineno}"


def test_answering_imports_neither_torch_nor_transformers_nor_another_runtime(
    tmp_path: Path,
) -> None:
    """Packages that are imported late, so that the first answer is fast."""
    from tests.package.bundles import small_bundle

    made = small_bundle.make(tmp_path) / "bundle"
    code = (
        "import sys\nfrom optimizer.harness.__main__ import main\n"
        f"assert main(['predict', '--bundle', {str(made)!r}, 'a good film']) == 0\n"
        "heavy = {'onnx', 'tensorrt', 'tensorrt_rtx', 'torch', 'transformers', 'cuda'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_opening_the_commands_imports_nothing_heavy() -> None:
    code = (
        "import sys, optimizer.harness.__main__\n"
        "heavy = {'jinja2', 'numpy', 'onnxruntime', 'onnxruntime_genai', 'tensorrt_rtx'}\n"
        "heavy |= {'tokenizers', 'torch', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
