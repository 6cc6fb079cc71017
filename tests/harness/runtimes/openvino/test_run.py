"""The OpenVINO runner: what it takes, what it refuses, and that it tells nobody."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

from optimizer.harness.contract import Contract
from optimizer.harness.errors import BundleError, HarnessError, InputError, MachineError
from optimizer.harness.runtimes.openvino import run
from optimizer.harness.runtimes.openvino.run import OpenVinoRunner, OpenVinoSettings
from tests.harness import small_model
from tests.harness.runtimes.ort.test_run import arrays, wrong_requests

AXES = dict.fromkeys(("input_ids", "attention_mask"), ("batch", "sequence"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model.model(tmp_path_factory.mktemp("openvino") / "model.onnx")


@pytest.fixture(scope="module")
def runner(model: Path) -> OpenVinoRunner:
    return OpenVinoRunner(model, threads=1, axes=AXES)


def test_it_computes_what_the_reference_evaluator_of_onnx_computes(
    model: Path, runner: OpenVinoRunner
) -> None:
    from onnx.reference import ReferenceEvaluator

    reference = ReferenceEvaluator(onnx.load(model))
    for batch, sequence in ((2, 5), (1, 1), (3, 17)):
        (expected,) = reference.run(None, arrays(batch, sequence))
        answer = runner.infer(arrays(batch, sequence))["last_hidden_state"]
        np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("request_", "message"), wrong_requests())
def test_a_wrong_array_is_named(
    request_: dict[str, Any], message: str, runner: OpenVinoRunner
) -> None:
    with pytest.raises(InputError, match=message):
        runner.infer(request_)


def test_it_answers_several_threads_at_once(runner: OpenVinoRunner) -> None:
    requests = [arrays(batch, 5 + batch) for batch in (1, 2, 3, 4)] * 8
    alone = [runner.infer(r)["last_hidden_state"] for r in requests]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda r: runner.infer(r)["last_hidden_state"], requests))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


class Counting(OpenVinoRunner):
    """With the number of requests that were made."""

    requests = 0

    def request(self) -> Any:
        self.requests += 1
        return super().request()


@pytest.mark.parametrize(("hint", "at_once"), [("latency", 1), ("throughput", 2)])
def test_with_the_hint_throughput_requests_share_the_rows_of_a_batch(
    hint: str, at_once: int, model: Path, runner: OpenVinoRunner
) -> None:
    for rows in range(1, 8):
        with Counting(model, OpenVinoSettings(hint=hint), threads=2, axes=AXES) as counting:
            opened = counting.requests
            for sequence in (3, 9, 5):  # shorter and longer than what a request had before
                answer = counting.infer(arrays(rows, sequence))["last_hidden_state"]
            assert counting.requests - opened == min(rows, at_once)
        expected = runner.infer(arrays(rows))["last_hidden_state"]
        np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-6)


def test_a_share_that_fails_fails_the_batch(model: Path) -> None:
    wrong = arrays(3)
    wrong["input_ids"] = wrong["input_ids"].copy()
    with OpenVinoRunner(
        model, OpenVinoSettings(hint="throughput"), threads=2, axes=AXES
    ) as throughput:
        expected = throughput.infer(arrays(3))["last_hidden_state"]
        wrong["input_ids"][2] = -(10**6)  # no row of the table
        with contextlib.suppress(HarnessError):  # a gather out of bounds is 0 in some versions
            throughput.infer(wrong)
        again = throughput.infer(arrays(3))["last_hidden_state"]
    assert np.array_equal(again, expected)


def test_an_answer_is_not_overwritten_by_the_next(runner: OpenVinoRunner) -> None:
    first = runner.infer(arrays(2))["last_hidden_state"]
    kept = first.copy()
    runner.infer({n: a[::-1].copy() for n, a in arrays(2).items()})
    assert np.array_equal(first, kept)


def test_what_was_compiled_answers_alike_and_damage_is_refused(
    model: Path, runner: OpenVinoRunner, tmp_path: Path
) -> None:
    compiled = tmp_path / "model.engine"
    run.write_compiled(model, OpenVinoSettings(), 1, compiled)
    again = OpenVinoRunner(model, threads=1, compiled=compiled)
    assert np.array_equal(*(r.infer(arrays())["last_hidden_state"] for r in (runner, again)))
    assert (again.inputs, again.outputs) == (runner.inputs, runner.outputs)
    compiled.write_bytes(compiled.read_bytes()[:-400])
    with pytest.raises(BundleError, match=r"cannot open it"):
        OpenVinoRunner(model, threads=1, compiled=compiled)


def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no model")
    with pytest.raises(BundleError, match=r"model\.onnx: OpenVINO 2026.* cannot open it"):
        OpenVinoRunner(tmp_path / "model.onnx")
    with pytest.raises(BundleError, match="missing"):
        OpenVinoRunner(tmp_path / "other.onnx")


def test_a_file_that_is_read_and_does_not_compile_or_run_is_this_machines(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under ONEDNN_MAX_CPU_ISA, which forbids kernels: another processor runs the same file."""
    opened = OpenVinoRunner(model, threads=1)

    def forbidden(*_: Any, **__: Any) -> Any:
        raise RuntimeError("could not create a primitive")

    def misshapen(*_: Any, **__: Any) -> Any:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(opened, "request", lambda: SimpleNamespace(infer=forbidden))
    with pytest.raises(MachineError, match=r"cannot run it on this cpu .could not create"):
        opened.infer(arrays())
    monkeypatch.setattr(opened, "request", lambda: SimpleNamespace(infer=misshapen))
    with pytest.raises(BundleError, match="shapes do not match"):
        opened.infer(arrays())
    with monkeypatch.context() as patched:
        patched.setattr(type(run.open_core()), "compile_model", forbidden)
        with pytest.raises(MachineError, match=r"cannot open it .could not create.*ONEDNN") as e:
            OpenVinoRunner(model, threads=1)
    assert e.value.exit_code == 5


def test_a_model_without_a_cache_continues_no_text(runner: OpenVinoRunner) -> None:
    contract = Contract.from_json(small_model.contract("text-generation"))
    with pytest.raises(BundleError, match="has no KV cache"):
        runner.decoder(contract)


@pytest.fixture
def in_new_process(model: Path, tmp_path: Path) -> Callable[[str], str]:
    """Run code that has opened the model, with a home of its own; what it prints."""

    def start(code: str) -> str:
        opening = (
            "from pathlib import Path\n"
            "from optimizer.harness.runtimes.openvino.run import OpenVinoRunner\n"
            f"model = Path({str(model)!r})\nOpenVinoRunner(model)\n{code}"
        )
        done = subprocess.run(
            [sys.executable, "-c", opening],
            env={**os.environ, "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    return start


def test_nothing_is_reported_to_its_makers(
    in_new_process: Callable[[str], str], tmp_path: Path
) -> None:
    """A plain `import openvino` leaves ~/intel and loads openvino_telemetry."""
    code = "import sys; print([m for m in sys.modules if 'telemetry' in m or '.ovc' in m])"
    assert in_new_process(code) == "[]"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM"])
def test_closed_models_leave_signals_to_python(
    sent: str, in_new_process: Callable[[str], str]
) -> None:
    """The first opened is closed first, and one by another thread."""
    code = f"""
import os, signal, threading
opened = [OpenVinoRunner(model, threads=n) for n in (2, 1, 2)]
opened[0].close()
opened[1].close()
thread = threading.Thread(target=opened[2].close)
thread.start()
thread.join()
signal.signal(signal.{sent}, lambda *_: print("handled"))
os.kill(os.getpid(), signal.{sent})
"""
    assert in_new_process(code) == "handled"
