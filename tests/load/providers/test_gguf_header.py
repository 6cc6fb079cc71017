"""Compare a GGUF file's header with its size before the gguf package creates objects."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from optimizer.foundation.errors import CheckpointError
from optimizer.load.providers import gguf, gguf_header
from optimizer.recipe.schema import Model
from tests.hostile.written.gguf_files import HEADERS, array, field, header, tensor, write

EXTREME = (2**8, 2**16, 2**28, 2**32 - 1, 2**33, 2**60, 2**63, 2**64 - 1)


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_names_too_much_is_refused_in_little_memory(
    name: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(HEADERS[name]())
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as refused:
            gguf_header.read(file)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert str(file) in str(refused.value)


def test_fields_and_sizes_are_those_that_the_gguf_package_reads(tmp_path: Path) -> None:
    from gguf import GGUFReader

    file = tmp_path / "a.gguf"
    write(file, {"a.strings": ["a", ""], "a.floats": [0.5, 2.0], "a.flag": True, "a.text": "ö"})
    header, reader = gguf_header.read(file), GGUFReader(file)
    assert header.tensors == {t.name: int(t.n_elements) for t in reader.tensors}
    fields = {name: f.contents() for name, f in reader.fields.items() if "GGUF." not in name}
    strings = [n for n, v in fields.items() if isinstance(v, list) and isinstance(v[0], str)]
    assert header.fields == fields | dict.fromkeys(strings)


def test_every_type_of_value_and_the_other_order_of_bytes_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    sizes = {k: struct.calcsize(letter) for k, letter in gguf_header.NUMBERS.items()}
    fields = [field(b"k%d" % k, k, b"\0" * n) for k, n in sizes.items()]
    fields += [field(b"a%d" % k, 9, array(k, 3, b"\0" * 3 * n)) for k, n in sizes.items()]
    file.write_bytes(header(*fields, tensors=(tensor(b"t", 250),)))
    gguf_header.read(file)
    file.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 1) + struct.pack(">Q1sIB", 1, b"k", 7, 1))
    gguf_header.read(file)


@pytest.mark.parametrize("seed", range(4))
def test_a_changed_header_is_refused_or_opens_in_little_memory(seed: int, tmp_path: Path) -> None:
    """Numbers of the header replaced by large ones, or bits turned, at any place."""
    from gguf import GGUFReader

    file, random = tmp_path / "a.gguf", np.random.default_rng(seed)
    write(file)
    good = file.read_bytes()
    ends = good.index(b"blk.1.ffn_norm.weight") + 60
    refused = 0
    for _ in range(40):
        changed, at = bytearray(good), int(random.integers(0, ends))
        if random.random() < 0.7:
            form = "<Q" if random.random() < 0.7 else "<I"
            value = int(random.choice(np.array(EXTREME, object))) % 2 ** (8 * struct.calcsize(form))
            struct.pack_into(form, changed, at, value)
        else:
            changed[at] ^= 1 << int(random.integers(8))
        file.write_bytes(changed)
        try:
            gguf_header.read(file)
        except CheckpointError:
            refused += 1
            continue
        tracemalloc.start()
        try:
            GGUFReader(file)
        except Exception:
            pass
        finally:
            used = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert used < 50_000_000
    assert 5 < refused < 40


def test_the_package_opens_no_file_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.gguf").write_bytes(HEADERS["an array of 2**28 strings"]())
    monkeypatch.setattr("gguf.GGUFReader", lambda _: pytest.fail("it was opened"))
    section = Model(source=str(tmp_path), task="text-generation", gguf_file="a.gguf")
    for read in (gguf.config, gguf.find_file):
        with pytest.raises(CheckpointError, match=r"268,435,456 elements of 'a'"):
            read(tmp_path, section)
