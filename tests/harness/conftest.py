"""The decoders of tiny_decoder.py and the bundle of small_bundle.py, made once."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.inputs.text import load_tokenizer
from optimizer.harness.runtimes.ort.run import OrtRunner
from tests.decoders import write_decoder_tokenizer
from tests.harness import tiny_decoder
from tests.harness.small_model import VOCABULARY
from tests.package.bundles import generation_bundle, small_bundle


@pytest.fixture(scope="session")
def decoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer.json, new.onnx and shared.onnx. Read-only."""
    folder = tmp_path_factory.mktemp("decoder")
    vocabulary = write_decoder_tokenizer(folder)
    for cache in ("new", "shared"):
        tiny_decoder.write_onnx(folder / f"{cache}.onnx", vocabulary, cache)
    return folder


@pytest.fixture(scope="session")
def tokenizer(decoder_folder: Path) -> Any:
    """Byte-level: every byte is a token."""
    return load_tokenizer(decoder_folder, tiny_decoder.contract(320))


@pytest.fixture(scope="session")
def contract(tokenizer: Any) -> Any:
    return tiny_decoder.contract(tokenizer.get_vocab_size())


@pytest.fixture(scope="session")
def runner(decoder_folder: Path) -> OrtRunner:
    """The model whose cache is a new array at each step."""
    return OrtRunner(decoder_folder / "new.onnx", threads=1)


@pytest.fixture(scope="session")
def shared(decoder_folder: Path) -> OrtRunner:
    """The same weights, the cache written in place."""
    return OrtRunner(decoder_folder / "shared.onnx", threads=1)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a bundle. Read-only."""
    return small_bundle.make(tmp_path_factory.mktemp("made")) / "bundle"


@pytest.fixture(scope="session")
def decoder_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a text-generation bundle whose texts may share a step. Read-only."""
    return generation_bundle.make(tmp_path_factory.mktemp("decoders"), "shared")


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(made, tmp_path / "bundle"))


@pytest.fixture(scope="session")
def semantic(made: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options of serve for a cache of similar questions, with pairs of random words."""
    words = [w for w in VOCABULARY if w.isalpha() and len(w) > 2]
    chance, file = random.Random(0), tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    with file.open("w") as out:
        for i in range(30):
            text = " ".join(chance.choices(words, k=2 + i % 5))
            out.write(json.dumps({"text": text, "text_pair": words[i % 3], "same": False}) + "\n")
    options = ("--semantic-encoder", str(made), "--semantic-pairs", str(file))
    return ("--semantic-cache-mib", "1", *options, "--semantic-false-hits", "0.2")
