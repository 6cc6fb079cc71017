"""Parts of the GPU suite report wrong answers as failures and never as results."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import check, memory, models, parts, speed
from benchmarks.gpu.systems import Held, System, Writer
from optimizer.recipe import file as recipe_file

ROOT = Path(__file__).resolve().parents[2]


def report(verdict: str = "pass", ok: bool | None = True) -> dict[str, Any]:
    gates = [{"name": "ledger", "verdict": verdict, "message": "hop lower: out of tolerance"}]
    ledger = [{"hop": "lower", "ok": True}, {"hop": "engine", "ok": ok, "why": "9.0 is not its"}]
    empty = dict.fromkeys(("target", "not_measured", "fallbacks"))
    return {**empty, "verdict": verdict, "gates": gates, "ledger": ledger}


def test_a_ledger_ran_when_every_gate_passed_and_the_engine_was_asked() -> None:
    assert parts.judged(report(), [])["verdict"] == "pass"


@pytest.mark.parametrize("verdict", ["fail", "inconclusive", "not measured"])
def test_a_verdict_that_is_no_pass_is_a_failure_that_keeps_the_report(verdict: str) -> None:
    with pytest.raises(parts.Failed, match="hop lower") as caught:
        parts.judged(report(verdict), [])
    assert caught.value.result["verdict"] == verdict


def test_a_ledger_whose_engine_was_not_asked_did_not_run() -> None:
    with pytest.raises(parts.NotRun, match=r"9\.0 is not its"):
        parts.judged(report(ok=None), [])


@pytest.mark.parametrize("recipe", ["minilm-int8", "smollm2-int4", "llama-3.2-1b-int4"])
def test_the_source_that_is_given_is_the_one_that_is_used(recipe: str, tmp_path: Path) -> None:
    path = ROOT / "recipes" / f"{recipe}.yaml"
    writes = recipe_file.read(path).model.task == "text-generation"
    made = recipe_file.read(path, parts.changes("tensorrt-rtx", writes, str(tmp_path)))
    assert made.model.source == str(tmp_path)
    assert made.model.gguf_file is None  # the folder has none
    assert not made.validate_.latency.must_beat_float


def test_a_given_checkpoint_is_prepared_and_otherwise_the_package_that_has_the_weights(
    tmp_path: Path,
) -> None:
    given = models.chosen("decoder", tmp_path, False, str(tmp_path))
    assert given == (str(tmp_path), f"real: {tmp_path}")
    package, _, extra, readers = models.REAL["decoder"]
    if any(find_spec(m) is None for m in (package, *readers)):
        pytest.skip("the package is not installed")
    assert models.chosen("decoder", tmp_path, False, None)[0].endswith(extra)


ASKED = {"a": {"weight": "int8 channel", "activation": "int8"}}
SIDECAR = {
    **dict.fromkeys(("version", "compute_capabilities", "bytes", "kept_packed", "warnings")),
    "layers": [],
}


def test_kernels_that_were_read_are_told_with_what_runs_wider() -> None:
    kernel = {"layer": "k", "multiplies": "HALF", "weight": "INT8"}
    made = parts.told({**SIDECAR, "kernels": {"a": kernel}}, ASKED)
    assert made["kernels"] == {"a": kernel}
    assert list(made["wider"]) == ["a"]
    assert parts.told({**SIDECAR, "kernels": {}}, ASKED)["untold"] == ["a"]
    assert parts.told({**SIDECAR, "kernels": None}, ASKED)["wider"] is None


GRID = {"batch": (1, 8), "sequence": (4,)}
LIMIT = 0.01


def answers(batch: int, sequence: int) -> np.ndarray:
    return np.cos(check.ids(batch, sequence)["input_ids"])[:, :, None]


def encoder(error: float = 0.0, *, after: int = 0, resident: float = 0.0) -> System:
    """Make an encoder that is wrong in its last row by `error` after `after` calls."""
    asked = [0]

    def answer(arrays: Any, wrong: float) -> dict[str, Any]:
        found = np.cos(arrays["input_ids"])[:, :, None]
        found[-1] *= 1 + wrong
        return {"y": found}

    def infer(arrays: Any) -> dict[str, Any]:
        asked[0] += 1
        return answer(arrays, error if asked[0] > after else 0.0)

    return System(infer, lambda a: Held(lambda: None, lambda: answer(a, resident)))


JUDGE = check.Judge({"4.y": answers(8, 4)[[0, 1, 7]]}, LIMIT, "engine fp16 float")


@pytest.mark.parametrize(
    ("system", "right"),
    [
        (encoder(), True),
        (encoder(LIMIT / 2), True),
        (encoder(LIMIT * 2), False),
        (encoder(LIMIT * 2, after=2), False),  # a graph that replays something else
        (encoder(resident=LIMIT * 2), False),
        (encoder(float("nan")), False),
    ],
)
def test_an_encoder_is_timed_only_where_its_answers_are_the_cpus(
    system: System, right: bool
) -> None:
    assert (not check.encoder_problem(system, JUDGE, 8, 4)) == right


def test_outputs_of_other_names_are_not_taken_for_right_ones() -> None:
    other = check.Judge({"4.z": answers(8, 4)[[0, 1, 7]]}, LIMIT, "")
    assert check.encoder_problem(encoder(), other, 8, 4)


def test_a_wrong_cell_has_no_times() -> None:
    system, told = encoder(LIMIT * 2, after=1), []
    cells = speed.encode(system, GRID, JUDGE, lambda: 60.0, told.append)
    assert all("wrong" in c and "end_to_end" not in c for c in cells)


def decoder(wrong_step: int = -1) -> System:
    """Make a decoder that is wrong in one step."""

    def start(batch: int, _: int) -> Writer:
        count = [-1]

        def step(arrays: Any) -> np.ndarray:
            count[0] += 1
            last = np.cos(arrays["input_ids"][:, -1:, None] * np.arange(1.0, 5))
            return last * (2 if count[0] == wrong_step else 1)

        return Writer(step)

    return System(start=start)


@pytest.mark.parametrize("step", [-1, 0, 1, check.STEPS])
def test_a_decoder_is_timed_only_where_every_step_is_the_cpus(step: int) -> None:
    right = decoder().start
    assert right is not None
    writer = right(2, 0)
    steps = range(1 + check.STEPS)
    logits = np.stack([writer.step(check.stepped(2, s))[:, -1] for s in steps])
    judge = check.Judge({"logits": logits}, LIMIT, "")
    assert (not check.decoder_problem(decoder(step), judge, 2)) == (step == -1)


def test_steps_continue_one_text() -> None:
    whole = check.ids(2, check.PROMPT + check.STEPS)["input_ids"]
    pieces = [check.stepped(2, s) for s in range(1 + check.STEPS)]
    assert np.array_equal(np.concatenate([p["input_ids"] for p in pieces], 1), whole)
    assert [p["attention_mask"].shape[1] for p in pieces][-1] == whole.shape[1]


def test_cells_without_time_stay_unmeasured_and_finished_ones_are_told_at_once() -> None:
    left, told = iter([9.0, 0.0, 0.0]), []
    cells = [{"n": i, "why": "not run: time"} for i in range(3)]
    for cell in speed.timely(cells, 5, lambda: next(left), lambda c: told.append(str(c))):
        cell["ran"] = True
    assert [c.get("ran", False) for c in cells] == [True, False, False]
    assert "'ran': True" in told[1]


def cell(speed: float) -> list[dict[str, Any]]:
    return [{"batch": 2, "prompt": 128, "new": 64, "tokens_per_second": speed}]


def test_the_bound_reads_weights_once_and_each_rows_cache() -> None:
    memory = {"bytes_per_second": 1e6, "l2_bytes": 0}
    made = cell(100.0)
    assert not speed.bound(made, 1000, 10, memory)
    assert made[0]["bytes_per_step"] == 1000 + 2 * 10 * 160
    assert made[0]["share_of_bound"] == pytest.approx(100 / (1e6 / 4200 * 2))
    assert "cannot be" in speed.bound(cell(500.0), 1000, 10, memory)
    assert not speed.bound(cell(500.0), 1000, 10, {**memory, "l2_bytes": 5000})


def test_memory_is_the_process_own_where_the_driver_tells() -> None:
    rows = [["12", "100"], ["13", "7"], ["12", "20"]]
    assert memory.of_process(rows, 12) == 120
    assert memory.of_process(rows, 99) is None
    assert memory.of_process([["12", "[N/A]"]], 12) is None
    assert memory.of_device([]) is None
