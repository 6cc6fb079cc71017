"""Engines of TensorRT: every combination of what they fit and of machines, against a second list
of the rules, and laws that any such table must keep."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest

from optimizer.harness.bundle.fit import FITS, EngineVerdict, Rebuild, decide, judge_engines
from optimizer.harness.runtimes.machine import Gpu, Machine

ENGINE, MODEL = "engines/trt/model.engine", "model/trt/model.onnx"
GPUS = {
    "H200": "9.0",
    "H100": "9.0",
    "A100": "8.0",
    "V100": "7.0",
    "T4": "7.5",
}
SHAPES = {"batch": [1, 8, 32], "sequence": [16, 128, 256]}
LONGER = {"batch": [1, 1, 2], "sequence": [16, 512, 1024]}
RUN = frozenset({"tensorrt"})


@dataclass(frozen=True)
class Row:
    """One engine and one machine. The engine was built on an H200 by `built_by`; None: deferred."""

    built_by: str | None
    compatible: bool
    level: str
    runners: frozenset[str]
    installed: str | None
    cuda: bool
    gpu: str | None
    driver: str
    system: str
    damaged: str | None

    def engine(self) -> dict[str, Any]:
        fit: dict[str, Any] = {
            "runtime_minimum": "10.13",
            "driver_minimum": "525",
            "os": "linux",
            "architecture": "x86_64",
            "shapes": [SHAPES, LONGER],
            "version_compatible": self.compatible,
            "hardware_compatible": self.level,
        }
        if self.built_by:
            built = {"compute_capabilities": ["90"], "gpu": "H200"}
            fit |= {"runtime_version": self.built_by, **built}
        return {
            "target": "tensorrt-cuda",
            "runtime": "tensorrt",
            "device": "cuda",
            "model": MODEL,
            "model_files": [MODEL],
            "engine": ENGINE if self.built_by else None,
            "deferred": self.built_by is None,
            "fit": fit,
        }

    def verdict(self) -> EngineVerdict:
        packages = {"cuda-bindings": "13.0"} if self.cuda else {}
        packages |= {"tensorrt-cu13": self.installed} if self.installed else {}
        gpu = Gpu(self.gpu, GPUS[self.gpu], self.driver) if self.gpu else None
        machine = Machine(self.system, "x86_64", packages, gpu, self.runners)
        (row,) = judge_engines(
            {"engines": [self.engine()]},
            machine,
            damaged=frozenset([self.damaged] if self.damaged else []),
        )
        return row


VALUES: dict[str, tuple[Any, ...]] = {
    "built_by": (None, "10.13.3.9", "11.4.1.6"),
    "compatible": (False, True),
    "level": ("none", "same_compute_capability", "ampere_plus"),
    "runners": (frozenset(), RUN),
    "installed": (None, "10.12.0.36", "10.13.3.9", "10.14.1.48", "11.4.1.6", "12.0.0.1"),
    "cuda": (False, True),
    "gpu": (None, *GPUS),
    "driver": ("520.61", "580.65.06"),
    "system": ("linux", "windows"),
    "damaged": (None, ENGINE, MODEL),
}
# Inputs of each column, of the row.
FIELDS = {
    "runner": ("runners",),
    "package": ("installed", "cuda"),
    "version": ("installed", "built_by", "compatible"),
    "gpu": ("gpu",),
    "driver": ("driver",),
    "built": ("built_by",),
    "digest": ("damaged",),
    "system": ("system",),
    "architecture": ("gpu", "level"),
    "builder": ("gpu",),
}


def rows() -> Iterator[Row]:
    return (Row(*values) for values in product(*VALUES.values()))


@pytest.fixture(scope="module")
def table() -> dict[Row, EngineVerdict]:
    return {row: row.verdict() for row in rows()}


def objections(r: Row) -> tuple[list[str], list[str], list[str]]:
    """The columns that object to having it at all, to loading it and to building it, in order."""
    opens = {
        ("10.13.3.9", "10.13.3.9"): True,
        ("10.13.3.9", "10.14.1.48"): r.compatible,
        ("10.13.3.9", "11.4.1.6"): r.compatible,
        ("11.4.1.6", "11.4.1.6"): True,
    }
    reaches = {
        "none": ("H200",),
        "same_compute_capability": ("H200", "H100"),
        "ampere_plus": ("H200", "H100", "A100"),
    }
    possible = {
        "runner": r.runners == RUN,
        "package": r.installed is not None and r.cuda,
        "version": r.installed in ("10.13.3.9", "10.14.1.48", "11.4.1.6"),
        "gpu": r.gpu is not None,
        "driver": r.driver == "580.65.06",
    }
    loadable = {
        "built": r.built_by is not None,
        "digest": r.damaged != ENGINE,
        "version": opens.get((str(r.built_by), str(r.installed)), False),
        "system": r.system == "linux",
        "architecture": r.gpu in reaches[r.level],
    }
    buildable = {
        "digest": r.damaged != MODEL,
        "builder": r.gpu not in (None, "V100"),
    }
    first, second, third = (
        [c for c, good in group.items() if not good] for group in (possible, loadable, buildable)
    )
    return first, second, third


def test_every_row_of_the_table(table: dict[Row, EngineVerdict]) -> None:
    for row, made in table.items():
        impossible, unloadable, unbuildable = objections(row)
        if impossible:
            wanted: tuple[Any, ...] = (None, (impossible[0],))
        elif not unloadable:
            wanted = ("load", (FITS,))
        elif not unbuildable:
            wanted = ("build", (unloadable[0],))
        else:
            wanted = (None, (unloadable[0], unbuildable[0]))
        assert (made.how, made.decided) == wanted, row
    assert {v.how for v in table.values()} == {"load", "build", None}
    decided = {column for v in table.values() for column in v.decided}
    assert decided == {*FIELDS, FITS}  # every column decides somewhere


def test_the_reason_begins_with_the_column_and_a_column_that_decided_never_goes_with_loading(
    table: dict[Row, EngineVerdict],
) -> None:
    def seen(row: Row, column: str) -> tuple[Any, ...]:
        return tuple(getattr(row, f) for f in FIELDS[column])

    loaded = {c: {seen(r, c) for r, v in table.items() if v.how == "load"} for c in FIELDS}
    for row, made in table.items():
        assert made.why.startswith(f"{made.decided[0]}: "), row
        assert all(f"{c}: " in made.why for c in made.decided), row
        if made.how != "load" and made.decided[0] in FIELDS:
            assert seen(row, made.decided[0]) not in loaded[made.decided[0]], row


BETTER = {
    "runners": RUN,
    "cuda": True,
    "driver": "580.65.06",
    "damaged": None,
}


@pytest.mark.parametrize("field", BETTER)
def test_a_better_machine_never_has_less(field: str, table: dict[Row, EngineVerdict]) -> None:
    """Nor does a better file: refuse < build < load."""
    rank = {None: 0, "build": 1, "load": 2}
    gains = 0
    for row, made in table.items():
        better = table[replace(row, **{field: BETTER[field]})]
        assert rank[better.how] >= rank[made.how], row
        gains += rank[better.how] > rank[made.how]
    assert gains


def test_wider_compatibility_never_has_less(table: dict[Row, EngineVerdict]) -> None:
    order = ("none", "same_compute_capability", "ampere_plus")
    for row, made in table.items():
        if made.how == "load":
            assert table[replace(row, compatible=True)].how == "load"
            for level in order[order.index(row.level) :]:
                assert table[replace(row, level=level)].how == "load"


def test_installing_what_is_named_and_fits_is_enough_for_a_missing_package(
    table: dict[Row, EngineVerdict],
) -> None:
    for row, made in table.items():
        if made.decided == ("package",) and row.gpu and row.installed in (None, "10.13.3.9"):
            named = ('"tensorrt>=10.13"' in made.install, "cuda-bindings" in made.install)
            assert named == (row.installed is None, not row.cuda), row


def test_an_engine_that_did_not_open_is_passed_over_and_the_reason_is_told() -> None:
    good = Row(
        "11.4.1.6",
        False,
        "none",
        RUN,
        "11.4.1.6",
        True,
        "H200",
        "580.65.06",
        "linux",
        None,
    )
    assert good.verdict().how == "load"
    machine = Machine(
        "linux",
        "x86_64",
        {"tensorrt": "11.4.1.6", "cuda-bindings": "13.0"},
        Gpu("H200", "9.0", "580.65.06"),
        RUN,
    )
    manifest = {"engines": [good.engine()]}
    made = decide(manifest, judge_engines(manifest, machine, failed={0: "CUDA is out of memory"}))
    assert made.reason == "tensorrt-cuda: tried: CUDA is out of memory"


def test_an_engine_whose_file_did_not_open_is_built_here_and_a_failed_one_is_not() -> None:
    row = Row("10.13", False, "none", RUN, "10.13", True, "H200", "580", "linux", None)
    engine = row.engine()
    packages = {"cuda-bindings": "13.0", "tensorrt": "10.13"}
    machine = Machine("linux", "x86_64", packages, Gpu("H200", "9.0", "580"), RUN)
    assert row.verdict().how == "load"
    manifest = {"engines": [engine]}
    unopened = {0: "it does not open here"}
    again = decide(manifest, judge_engines(manifest, machine, unopened=unopened))
    assert isinstance(again, Rebuild)
    assert "tried: it does not open here; it is built here" in again.reason
    (gone,) = judge_engines(manifest, machine, failed={0: "no"}, unopened={0: "no"})
    assert gone.how is None
