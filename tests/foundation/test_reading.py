"""Every exception of a parser becomes one error that names the user's file."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from optimizer.foundation import reading as reading_module
from optimizer.foundation.errors import CheckpointError, DataError, MachineError, RecipeError
from optimizer.foundation.reading import check_regular, read_json, read_text, reading


@pytest.mark.parametrize(
    "raised",
    [
        KeyError("x"),
        ZeroDivisionError(),
        AssertionError("no"),
        RecursionError(),
        ValueError("\ud800"),
    ],
)
def test_what_a_library_raises_becomes_an_error_of_the_file(raised: Exception) -> None:
    expected = pytest.raises(DataError, match=r"^a\.json: it cannot be read")
    with expected as caught, reading("a.json", error=DataError):
        raise raised
    assert caught.value.exit_code == 2
    assert caught.value.__cause__ is raised
    str(caught.value).encode()


def test_a_panic_of_rust_code_is_caught_though_it_is_no_exception() -> None:
    from tokenizers import Tokenizer

    charsmap = {"type": "Precompiled", "precompiled_charsmap": ""}
    document = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": charsmap,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    with pytest.raises(CheckpointError, match="PanicException"), reading("tokenizer.json"):
        Tokenizer.from_str(json.dumps(document))


def _mistake() -> None:
    code = compile("{}['x']", str(reading_module.PACKAGE / "load/planted.py"), "exec")
    exec(code)


def test_a_mistake_of_ours_is_not_the_files_fault() -> None:
    with pytest.raises(KeyError), reading("model", own_faults=True):
        _mistake()
    with pytest.raises(CheckpointError, match="KeyError"), reading("model"):
        _mistake()


@pytest.mark.parametrize("raising", ["json.loads('{')", "json.loads(3)", "{}['x']"])
def test_what_a_library_raises_is_the_files_fault_in_our_blocks_too(raising: str) -> None:
    code = compile(f"import json\n{raising}", "/site-packages/library.py", "exec")
    with pytest.raises(CheckpointError), reading("model", own_faults=True):
        exec(code)


def test_our_own_errors_and_interrupts_pass_unchanged() -> None:
    ours = RecipeError("wrong", where="here")
    for passing in (ours, KeyboardInterrupt()):
        with pytest.raises(type(passing)) as caught, reading("a.json"):
            raise passing
        assert caught.value is passing


def test_missing_memory_and_permission_are_the_machines_fault() -> None:
    for missing in (MemoryError(), PermissionError(errno.EACCES, "no", "b.json")):
        with pytest.raises(MachineError), reading("a.json"):
            raise missing


def test_a_full_disk_is_left_to_what_writes() -> None:
    with pytest.raises(OSError) as caught, reading("a.json"):
        raise OSError(errno.ENOSPC, "full")
    assert caught.value.errno == errno.ENOSPC


def test_only_regular_files_are_read_and_only_up_to_a_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "large").write_bytes(b"12345")
    for name, reason in (
        ("", "a folder"),
        ("fifo", "a FIFO"),
        ("loop", "symbolic links"),
        ("nowhere", "no such file"),
        ("large", "5 bytes"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            check_regular(tmp_path / name, 4)
    with pytest.raises(CheckpointError, match="a device"):
        read_text(Path("/dev/zero"), 4)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\ud800"])
def test_json_that_is_none_says_so(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=r"a\.json: (not JSON|it is not UTF-8)"):
        read_json(file)
