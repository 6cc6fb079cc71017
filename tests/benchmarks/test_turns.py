"""Timing in turns: worker processes answer, ratios are taken within a round, failures are rows."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.measure.processes import System, Worker
from benchmarks.measure.turns import BATCHES, attempt, summarize, time_in_turns


def test_two_worker_processes_are_timed_in_turns(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "image.png")
    names = ("ours", "peer")
    rows: dict[str, Any] = {name: {"why": ""} for name in names}
    workers = {
        name: Worker(
            System(name, name, "decoding", tmp_path),
            1,
            "benchmarks.vision.preprocessing_worker",
            inputs=str(tmp_path),
        )
        for name in names
    }
    try:
        asked = argparse.Namespace(rounds=2, clock="cpu")
        times = time_in_turns(workers, rows, BATCHES[0], asked)
    finally:
        for worker in workers.values():
            worker.close()
    assert {name: len(rounds) for name, rounds in times.items()} == {"ours": 2, "peer": 2}
    assert min(t for rounds in times.values() for r in rounds for t in r) > 0


def test_a_worker_that_ends_is_reported_with_its_log(tmp_path: Path) -> None:
    worker = Worker(
        System("peer", "peer", "no such kind", tmp_path), 1, "benchmarks.encoders.int8_worker"
    )
    with pytest.raises(RuntimeError, match=r"(?s)peer ended: .*contract"):
        worker.ask(run=1)
    worker.close()


def test_a_ratio_is_taken_within_its_round() -> None:
    found = summarize({"peer": [[2.0], [40.0]], "float": [[1.0], [10.0]]}, "float")
    assert found["peer"]["ratio"]["rounds"] == [2.0, 4.0]
    assert found["float"]["ratio"]["median"] == 1.0


def test_a_peer_that_fails_is_a_row_and_ours_is_an_error() -> None:
    def fail() -> None:
        raise RuntimeError("out of\nmemory")

    rows: dict[str, Any] = {"peer": {"why": ""}, "ours": {"why": ""}}
    assert attempt(rows, "peer", fail) is None
    assert rows["peer"]["why"] == "failed: out of memory"
    with pytest.raises(RuntimeError):
        attempt(rows, "ours", fail)
