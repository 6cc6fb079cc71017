"""The pack for a GPU machine without a network: its pieces, its libraries, its wheels."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu.pack import LACKING, ROOT, lacking, write_pieces
from benchmarks.gpu.slim import MAGIC, slim

CODE = {80: b"a" * 24, 90: b"b" * 16}


def fat_binary(entries: list[tuple[int, int, bytes]]) -> bytes:
    """A fat binary of (kind, compute capability, payload)."""
    parts = b""
    for kind, capability, payload in entries:
        header = struct.pack("<HHIQ", kind, 0, 64, len(payload)).ljust(28, b"\0")
        parts += (header + struct.pack("<I", capability)).ljust(64, b"\0") + payload
    return MAGIC + struct.pack("<HHQ", 1, 16, len(parts)) + parts


def test_only_the_machine_code_of_the_capability_is_kept_and_nothing_moves() -> None:
    binary = fat_binary([(2, 80, CODE[80]), (2, 90, CODE[90]), (1, 90, b"ptx" * 5)])
    library = bytearray(b"elf" + MAGIC + b"by chance" * 3 + binary + b"tail")
    before = bytes(library)
    assert slim(library, {90}) == {90: 16}
    for payload in (CODE[80], b"ptx" * 5):
        before = before.replace(payload, bytes(len(payload)))
    assert bytes(library) == before
    assert not slim(bytearray(before), {86})


def test_pieces_joined_are_the_archive_and_none_is_larger_than_its_limit(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).bytes(50_000)
    (tmp_path / "in" / "site").mkdir(parents=True)
    (tmp_path / "in" / "site" / "noise").write_bytes(noise)
    (tmp_path / "out").mkdir()
    names = write_pieces(tmp_path / "in", tmp_path / "out", size=20_000)
    pieces = [(tmp_path / "out" / name).read_bytes() for name in names]
    assert [len(p) for p in pieces[:-1]] == [20_000] * (len(pieces) - 1)
    assert len(pieces) == 3
    (tmp_path / "back").mkdir()
    subprocess.run("cat out/part-* | xz -dc | tar -x -C back", shell=True, check=True, cwd=tmp_path)
    assert (tmp_path / "back" / "site" / "noise").read_bytes() == noise
    listed = (tmp_path / "out" / "pieces.sha256").read_text().splitlines()
    assert listed[0] == f"{hashlib.sha256(pieces[0]).hexdigest()}  part-00"


def test_only_distributions_that_the_machine_lacks_are_packed() -> None:
    there = [name for name in LACKING if name not in ("click", "onnx-ir")]
    assert lacking("\n".join(f"{name.replace('-', '_')} 1.0" for name in there)) == [
        "click",
        "onnx-ir",
    ]
    assert lacking("") == list(LACKING)


@pytest.mark.slow
def test_an_unpacked_rehearsal_runs_in_an_empty_folder(tmp_path: Path) -> None:
    pack = [sys.executable, "-m", "benchmarks.gpu.pack", str(tmp_path / "out"), "--rehearse"]
    subprocess.run(pack, cwd=ROOT, check=True)
    target = tmp_path / "target"
    unpack = ["sh", str(tmp_path / "out" / "unpack.sh"), str(target)]
    subprocess.run(unpack, cwd=tmp_path, env={**os.environ, "PYTHON": sys.executable}, check=True)
    parts = json.loads((target / "gpu.json").read_text())["parts"]
    assert parts["encoder:onnxruntime"]["status"] == "ran"
    assert (target / "models" / "minilm-int8" / "model.safetensors").is_file()
