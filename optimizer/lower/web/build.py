"""Fetch onnxruntime-web and a tokenizer for the browser, from pinned npm packages.

Writes out/web/<package>/. Fused modules are inspected on this processor, with the same graph
optimizer that the browser's build has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optimizer.lower.ort import build as onnxruntime
from optimizer.lower.web import npm
from optimizer.lower.web.npm import NpmPackage
from optimizer.recipe.targets import OnnxRuntimeWebTarget

RUNTIME = NpmPackage(
    name="onnxruntime-web",
    version="1.30.0",
    integrity="sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ==",
    files={
        f"dist/{n}": n
        for n in (
            "ort.wasm.min.mjs",
            "ort-wasm-simd-threaded.mjs",
            "ort-wasm-simd-threaded.wasm",
        )
    }
    | {"package.json": "package.json"},
)
TOKENIZERS = NpmPackage(
    name="@huggingface/tokenizers",
    version="0.2.0",
    integrity="sha512-LidMHe1FpcSYH4vcSjXooda34pC0M8m1gmDOv7SQi6Iv+ib1zX7J3sHBCC9/3FPCkn2k1b55FneVqMRxrr99pg==",
    files={
        "dist/tokenizers.min.mjs": "tokenizers.min.mjs",
        "LICENSE": "LICENSE",
        "package.json": "package.json",
    },
)
FOLDERS = {"onnxruntime-web": RUNTIME, "tokenizers": TOKENIZERS}


def build(section: OnnxRuntimeWebTarget, model: Path, out: Path) -> dict[str, Any]:
    """Fetch the packages of a target for the browser into out/web, inspect the model, and return
    entries of engine.json.

    model: the lower stage's folder
    Raises MachineError for a package that cannot be fetched.
    """
    document = onnxruntime.build(section, model, out)
    for folder, package in FOLDERS.items():
        npm.write(package, section.npm, out / "web" / folder)
    return {**document, "npm": {p.name: p.version for p in FOLDERS.values()}}
