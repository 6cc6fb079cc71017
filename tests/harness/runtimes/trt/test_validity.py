"""The header of an engine is checked before the engine is deserialized."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optimizer.harness.errors import MachineError
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.harness.runtimes.trt.validity import REASONS, refuse_invalid


def product(bits: int, valid: bool = False) -> Any:
    """A module that answers with these bits to the first 64 bytes."""

    class Runtime:
        engine_header_size = 64

        def __init__(self, logger: object) -> None: ...

        def get_engine_validity(self, header: bytes) -> tuple[int, int]:
            assert len(header) == 64
            return (0 if valid else 2, bits)

    return SimpleNamespace(
        Runtime=Runtime, ILogger=object, EngineValidity=SimpleNamespace(INVALID=2)
    )


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    (tmp_path / "model.engine").write_bytes(b"vtrt" + bytes(200))
    return tmp_path / "model.engine"


@pytest.mark.parametrize("bit", REASONS)
def test_what_is_wrong_is_said_in_words(bit: int, engine: Path) -> None:
    with pytest.raises(MachineError, match=REASONS[bit]):
        refuse_invalid(engine, product(bit))


def test_a_valid_engine_and_a_product_without_the_question_pass(engine: Path) -> None:
    refuse_invalid(engine, product(0, valid=True))
    refuse_invalid(engine, SimpleNamespace(Runtime=object))


def test_the_words_are_for_the_bits_of_the_real_runtime(engine: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    members = trt.EngineInvalidityDiagnostics.__members__.values()
    assert {int(m) for m in members} == set(REASONS)
    if describe_machine().gpu is None:
        with pytest.raises(MachineError, match="the runtime rejects the engine"):
            refuse_invalid(engine, trt)
