"""The engine hop of an OpenVINO target: its own kernels, cut at their integers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from optimizer.validate.ledger import hops, ledger
from optimizer.validate.ledger.hops import COARSER
from optimizer.validate.materials import Materials
from tests.harness.runtimes.openvino import integer_sums
from tests.validate.ledger.faults import mutations as m
from tests.validate.ledger.faults.mutations import OUTPUT, QUERY
from tests.validate.runs import Run, damaged, for_openvino

SCHEMES = ("static", "smooth", "w4")


@pytest.fixture(scope="module")
def lowered(runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Materials]:
    """Materials per scheme whose every hop passes."""
    made = {s: for_openvino(runs[s], tmp_path_factory.mktemp(s)) for s in SCHEMES}
    return {scheme: run.materials() for scheme, run in made.items()}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_clean_run_holds_at_every_hop(scheme: str, lowered: dict[str, Materials]) -> None:
    materials = lowered[scheme]
    entries = [ledger.run_hop(hop, materials) for hop in ledger.list_hops(materials)]
    assert integer_sums.misjudged(entries, integers=scheme != "w4") == []
    (engine,) = (e for e in entries if e.hop == "engine")
    kinds = {p.piece for p in engine.pieces}
    assert kinds == ({"product"} if scheme == "w4" else {"quantizer", "arithmetic"})
    assert engine.unproven == lowered[scheme].untested_sizes


def first_input_scale(change: Callable[[float], float]) -> m.Edit:
    return m.coding(1, lambda s: change(s))


def louder(scale: np.ndarray) -> np.ndarray:
    return scale * (1 + 0.01 * (np.arange(scale.size) == 5).reshape(scale.shape))


FAULTS: dict[str, tuple[str, str, m.Edit]] = {
    "a weight scale one hundredth larger in one channel": (
        "static", OUTPUT, m.values("model", f"{OUTPUT}.weight_scale", louder)),
    "one integer off by one": (
        "static", OUTPUT, m.values("model", f"{OUTPUT}.weight_codes", m.first_integer_moved)),
    "an activation scale doubled": ("static", "encoder", first_input_scale(lambda s: 2 * s)),
    "a zero point one lower": ("static", "encoder", m.coding(2, lambda z: z - 1)),
    "groups shifted": (
        "w4", OUTPUT, m.values("model", f"{OUTPUT}.weight_scale", lambda s: np.roll(s, 1, 0))),
    "a module left in float silently": ("static", QUERY, m.left_in_float(QUERY)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_lowered_model_is_caught_in_openvinos_own_kernels(
    fault: str, lowered: dict[str, Materials], tmp_path: Path
) -> None:
    scheme, module, edit = FAULTS[fault]
    entry = ledger.run_hop(hops.engine, damaged(lowered[scheme], tmp_path, edit))
    assert entry.ok is False
    assert any(problem.startswith(module) for problem in entry.problems)


def test_kernels_that_round_their_inputs_unasked_are_caught(
    lowered: dict[str, Materials], tmp_path: Path
) -> None:
    """DYNAMIC_QUANTIZATION_GROUP_SIZE at OpenVINO's own default."""
    unasked = m.edit_json(
        "engine", "engine.json", lambda d: d["fit"].update(dynamic_quantization=32)
    )
    entry = ledger.run_hop(hops.engine, damaged(lowered["w4"], tmp_path, unasked))
    assert entry.ok is False
    assert "last_hidden_state" in entry.problems[0]


def test_inputs_that_kernels_may_round_are_judged_as_rounded(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    run = for_openvino(runs["w4"], tmp_path, dynamic_quantization=32)
    entry = ledger.run_hop(hops.engine, run.materials())
    assert entry.ok is True
    assert {p.limit.rpartition(", result")[0].rpartition(", ")[2] for p in entry.pieces} == {
        "inputs in int8 blocks of 32"
    }


def test_in_bf16_integers_are_judged_in_fp32_and_the_whole_in_bf16(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    pytest.importorskip("openvino")
    from optimizer.harness.runtimes.openvino.devices import list_capabilities

    if "BF16" not in list_capabilities():
        pytest.skip("this processor has no bf16")
    run = for_openvino(runs["static"], tmp_path, float="bf16")
    materials = run.materials()
    entry = ledger.run_hop(hops.engine, materials)
    assert integer_sums.misjudged([entry]) == []
    assert entry.unproven == f"{COARSER}; {materials.untested_sizes}"
    assert all(p.fine for p in entry.pieces) != integer_sums.saturate()


@pytest.mark.slow
@pytest.mark.parametrize(("kernels", "exact"), [("AVX2", False), ("AVX512_CORE_VNNI", True)])
def test_sums_that_saturate_without_vnni_are_caught(kernels: str, exact: bool) -> None:
    """The reason for fit_columns.processor: kernels that saturate are refused."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": kernels}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:]
        return done.stdout.strip()

    measured = run("-c", f"from {integer_sums.__name__} import saturate; print(saturate())")
    assert measured == str(not exact)
    run("-m", "pytest", "-q", f"{__file__}::{test_a_clean_run_holds_at_every_hop.__name__}[static]")
