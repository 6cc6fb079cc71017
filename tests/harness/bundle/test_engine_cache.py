"""Engines built here: once, by one process, and nothing half-made is ever taken for done."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.bundle import engine_cache
from optimizer.harness.bundle.engine_cache import (
    describe_origin,
    find_cached,
    name_engine_folder,
    obtain,
)
from optimizer.harness.bundle.engines import Workshop, builder, progress, spans
from optimizer.harness.errors import BuildError, MachineError
from optimizer.harness.runtimes.machine import Gpu, Machine
from optimizer.harness.runtimes.trt.header import read_header
from tests.harness import small_model

DOCUMENT = {"model": "a"}
PROCESSES = multiprocessing.get_context("fork")


def slow(engine: Path, timing: Path) -> None:
    """Notes each start beside the cache."""
    with (engine.parent.parent / "builds").open("a") as f:
        f.write("x")
    time.sleep(0.3)
    engine.write_bytes(b"an engine")


def stuck(engine: Path, timing: Path) -> None:
    """Writes everything and dies before the rename, or hangs long enough to be killed."""
    engine.write_bytes(b"half an engine")
    (engine.parent / engine_cache.BUILT).write_text("{}")
    time.sleep(60)


def never(engine: Path, timing: Path) -> None:
    pytest.fail("built again")


def test_processes_that_start_at_once_build_once(tmp_path: Path) -> None:
    started = [PROCESSES.Process(target=obtain, args=(tmp_path, DOCUMENT, slow)) for _ in range(4)]
    for p in started:
        p.start()
    for p in started:
        p.join(20)
        assert p.exitcode == 0
    assert (tmp_path / "builds").read_text() == "x"
    assert obtain(tmp_path, DOCUMENT, never).read_bytes() == b"an engine"


def test_one_that_waits_says_so(tmp_path: Path) -> None:
    first = PROCESSES.Process(target=obtain, args=(tmp_path, DOCUMENT, slow))
    first.start()
    while not (tmp_path / "builds").exists():
        time.sleep(0.01)
    said: list[str] = []
    obtain(tmp_path, DOCUMENT, never, say=said.append)
    first.join(20)
    assert said == ["another process is building this engine; waiting for it"]


def test_a_build_that_is_killed_leaves_nothing_that_is_taken_for_done(tmp_path: Path) -> None:
    victim = PROCESSES.Process(target=obtain, args=(tmp_path, DOCUMENT, stuck))
    victim.start()
    while not list(tmp_path.glob("*.partial/built.json")):
        time.sleep(0.01)
    os.kill(victim.pid or 0, signal.SIGKILL)
    victim.join(20)
    assert find_cached(tmp_path, DOCUMENT) is None
    assert obtain(tmp_path, DOCUMENT, slow).read_bytes() == b"an engine"
    assert not list(tmp_path.glob("*.partial"))


def test_a_build_that_fails_leaves_nothing_and_its_error_is_told(tmp_path: Path) -> None:
    def fails(engine: Path, timing: Path) -> None:
        engine.write_bytes(b"half an engine")
        raise BuildError("no such operator")

    with pytest.raises(BuildError, match="no such operator"):
        obtain(tmp_path, DOCUMENT, fails)
    assert [p.suffix for p in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("name", [engine_cache.ENGINE, engine_cache.BUILT])
def test_a_damaged_engine_is_built_again(name: str, tmp_path: Path) -> None:
    made = obtain(tmp_path, DOCUMENT, slow)
    (made.parent / name).write_bytes(b"changed")
    assert find_cached(tmp_path, DOCUMENT) is None
    assert obtain(tmp_path, DOCUMENT, slow).read_bytes() == b"an engine"
    assert (tmp_path / "builds").read_text() == "xx"


def test_a_build_starts_from_the_shipped_timings_and_keeps_its_own(tmp_path: Path) -> None:
    shipped = tmp_path / "shipped"
    shipped.write_bytes(b"timed where it was built")

    def times(engine: Path, timing: Path) -> None:
        assert timing.read_bytes() == b"timed where it was built"
        timing.write_bytes(b"and here")
        engine.write_bytes(b"an engine")

    made = obtain(tmp_path / "cache", DOCUMENT, times, timing_cache=shipped)
    assert made.with_name(engine_cache.TIMING).read_bytes() == b"and here"
    assert shipped.read_bytes() == b"timed where it was built"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="--cache FOLDER"):
        obtain(tmp_path / "file", DOCUMENT, slow)


FILES = {"m.onnx": {"sha256": "1"}}
ENTRY: dict[str, Any] = {
    "target": "tensorrt-rtx-cuda",
    "runtime": "tensorrt-rtx",
    "device": "cuda",
    "model": "m.onnx",
    "model_files": ["m.onnx"],
    "engine": None,
    "deferred": True,
    "fit": {"driver_minimum": "580", "shapes": {"batch": [1, 2, 4], "sequence": [4, 16, 32]}},
}
HERE = Machine("linux", "x86_64", {"tensorrt-rtx": "1.7.1.116"}, Gpu("a card", "8.9", "580.65"))
OTHERS: dict[str, tuple[Any, Any, Any, str]] = {
    "model": (ENTRY, {"m.onnx": {"sha256": "2"}}, HERE, "1"),
    "version": (ENTRY, FILES, HERE, "2"),
    "runtime": ({**ENTRY, "runtime": "tensorrt"}, FILES, HERE, "1"),
    "shapes": ({**ENTRY, "fit": {"shapes": {"batch": [1, 2, 8]}}}, FILES, HERE, "1"),
    "system": (ENTRY, FILES, Machine("windows", "amd64", gpu=HERE.gpu), "1"),
    "gpu": (ENTRY, FILES, Machine("linux", "x86_64", gpu=Gpu("b", "8.9", "580.65")), "1"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_model_builder_machine_or_shape_is_another_engine(what: str) -> None:
    keys = {
        name_engine_folder(describe_origin(ENTRY, FILES, HERE, "1")),
        name_engine_folder(describe_origin(*OTHERS[what])),
    }
    assert len(keys) == 2


def test_a_newer_driver_keeps_the_engine_and_where_the_shipped_one_was_built_is_nothing() -> None:
    newer = Machine("linux", "x86_64", gpu=Gpu("a card", "8.9", "590.10"))
    shipped = {**ENTRY, "fit": {**ENTRY["fit"], "runtime_version": "1.6", "driver_minimum": "570"}}
    assert describe_origin(ENTRY, FILES, HERE, "1") == describe_origin(shipped, FILES, newer, "1")


def test_a_decoders_mask_covers_the_cache_and_what_is_new() -> None:
    (one,) = spans({"batch": [1, 1, 1], "sequence": [1, 2, 8], "past": [0, 4, 16]})
    assert one["total"] == (1, 6, 24)
    assert len(spans([{"batch": [1, 1, 1]}, {"batch": [1, 2, 2]}])) == 2


def test_damaged_timings_are_ignored_aloud(tmp_path: Path) -> None:
    (tmp_path / "timing").write_bytes(b"damaged")
    said: list[str] = []

    def fresh(engine: Path, timing: Path) -> None:
        assert not timing.exists()
        engine.write_bytes(b"an engine")

    shop = Workshop(
        tmp_path,
        {"files": FILES},
        HERE,
        tmp_path / "cache",
        said.append,
        builder=lambda *_: fresh,
        damaged=frozenset({"timing"}),
    )
    shop.build_cached({**ENTRY, "timing_cache": "timing"})
    assert said == ["timing is damaged: kernels are timed again"]


def test_without_a_folder_nothing_is_built_and_the_option_is_named(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, {"files": FILES}, HERE, None, builder=lambda *_: never)
    assert not shop.is_cached(ENTRY)
    with pytest.raises(MachineError, match="--cache FOLDER"):
        shop.build_cached(ENTRY)


def test_progress_is_a_line_a_second_with_the_time_that_is_left() -> None:
    said: list[str] = []
    now = [0.0]
    tell = progress("x", said.append, lambda: now[0])
    assert tell is not None
    for at, done in ((0.0, 0), (0.4, 100), (2.0, 200), (2.5, 300), (10.0, 1000)):
        now[0] = at
        tell("phase", done, 1000)
    assert [line.partition(": ")[2] for line in said] == [
        "0 %",
        "20 %, about 8 s left",
        "100 %",
    ]


def test_the_real_builder_makes_an_engine_for_this_gpu_alone_and_says_how_far_it_is(
    tmp_path: Path,
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    small_model.model(tmp_path / "m.onnx", dialect="trt_qdq")
    said: list[str] = []
    shop = Workshop(
        tmp_path, {"files": FILES}, HERE, tmp_path / "cache", said.append, None, builder
    )
    made = shop.build_cached(ENTRY)
    assert read_header(made).compute_capabilities == ("89",)
    assert any("building tensorrt-rtx-cuda for this GPU: " in line for line in said)
    again = Workshop(
        tmp_path, {"files": FILES}, HERE, tmp_path / "cache", None, None, lambda *_: never
    )
    assert shop.is_cached(ENTRY)
    assert again.build_cached(ENTRY) == made
    assert json.loads((made.parent / "built.json").read_text())["made_from"]["gpu"] == [
        "a card",
        "8.9",
    ]
