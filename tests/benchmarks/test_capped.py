"""Recipes under a cap of memory: the gates, and the kill."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from benchmarks.capped.run import GATES, Cap, kill_after
from benchmarks.measure import memory
from benchmarks.measure.results import ROOT
from optimizer.recipe import file as recipe_file


@pytest.mark.parametrize("name", ["llama-3.2-1b-int4", "qwen3-4b-int4"])
def test_the_recipes_take_the_gates_of_a_random_model(name: str) -> None:
    recipe = recipe_file.read(ROOT / "recipes" / f"{name}.yaml", GATES)
    assert recipe.validate_.max_kl == 1
    assert not recipe.validate_.latency.must_beat_float


def test_a_program_in_the_group_is_killed_after_its_stage_began(tmp_path: Path) -> None:
    cap, stage = Cap(tmp_path, "memory.max"), tmp_path / "compress"
    begin = f"mkdir -p {stage}/key.partial; exec sleep 60"
    killer = threading.Thread(target=kill_after, args=(cap, stage, 0.1, threading.Event()))
    killer.start()
    used = memory.run(cap.enclose(["sh", "-c", begin]), tmp_path / "log")
    killer.join()
    assert used.exit_code == -signal.SIGKILL
    assert used.seconds < 30
