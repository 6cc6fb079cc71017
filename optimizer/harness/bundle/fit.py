"""Decide which engine of a bundle runs on this machine, before anything is loaded.

An engine is machine code for one runtime version and some GPUs; deserializing a wrong one is at
best an error. The manifest says what each engine needs, and `decide` compares that with a
description of the machine. It reads no file and imports no runtime. Called by bundle.py and
`check`.

Engines are tried in the manifest's order. For each, columns (fit_columns.py) are evaluated in this
order, and the first that objects decides:

    POSSIBLE   runner, package, version, gpu, driver,
               processor                                       objection -> next engine
    then, when its runtime runs the portable ONNX itself:
    MODEL      digest of the model                             objection -> next engine, else load
    and when it has engine files of its own:
    LOADABLE   built, digest, version, system, architecture    no objection -> load
    BUILDABLE  digest of the model, builder                    no objection -> build, else next

The first engine gives Fit (load) or Rebuild (build); a later one FallBack, which names the skipped
ones; none gives Refuse. Every reason begins with the column that decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from ..runtimes import table
from ..runtimes.machine import Machine
from . import fit_columns as columns
from .fit_columns import Column, FitContext

How = Literal["load", "build"]
FITS = "fits"

POSSIBLE: tuple[tuple[str, Column], ...] = (
    ("runner", columns.runner),
    ("package", columns.package),
    ("version", columns.runnable),
    ("gpu", columns.gpu),
    ("driver", columns.driver),
    ("processor", columns.processor),
)
MODEL: tuple[tuple[str, Column], ...] = (("digest", columns.model_digest),)
LOADABLE: tuple[tuple[str, Column], ...] = (
    ("built", columns.built),
    ("digest", columns.engine_digest),
    ("version", columns.version),
    ("system", columns.system),
    ("architecture", columns.architecture),
)
BUILDABLE: tuple[tuple[str, Column], ...] = (
    ("digest", columns.model_digest),
    ("builder", columns.builder),
)


ADVICE = {
    "gpu": "Run it on a machine with an NVIDIA GPU and its driver; nvidia-smi lists both.",
    "driver": "Install a newer driver of the GPU; nvidia-smi shows the installed one.",
}
"""{column: what to do where it objects and no package helps}."""
OTHER_ADVICE = (
    "Make the bundle again on this machine (optimize RECIPE), with a target that runs here: "
    "optimize doctor lists them."
)


@dataclass(frozen=True)
class Fit:
    """Decision, when a bundle is opened, to load engine `index` of the manifest as it was
    shipped."""

    index: int
    reason: str


@dataclass(frozen=True)
class Rebuild:
    """Decision, when a bundle is opened, to build engine `index` of the manifest from its portable
    ONNX file, and load it."""

    index: int
    reason: str


@dataclass(frozen=True)
class FallBack:
    """Decision to use a later engine of the bundle; `reason` explains why each earlier one was
    skipped."""

    index: int
    how: How
    reason: str


@dataclass(frozen=True)
class Refuse:
    """Decision that no engine of the bundle runs on this machine.

    install: pip command that would help, or ""
    advice: next step if no package helps
    """

    reason: str
    install: str
    advice: str


Decision = Fit | Rebuild | FallBack | Refuse


@dataclass(frozen=True)
class EngineVerdict:
    """Verdict about one engine of a bundle on this machine.

    index: place in the manifest's engines
    how: "load" or "build"; None if it cannot run here
    decided: columns that objected, first against loading, then building; (FITS,) if none did
    why: reason, as a clause
    install: pip command that would help, or ""
    """

    index: int
    target: str
    how: How | None
    decided: tuple[str, ...]
    why: str
    install: str = ""

    @property
    def reason(self) -> str:
        return f"{self.target}: {self.why}"


def decide(
    manifest: Mapping[str, Any], rows: Sequence[EngineVerdict], runtime: str | None = None
) -> Decision:
    """Choose the first engine of a bundle that runs on this machine.

    rows: verdicts of `judge_engines`, for the same `runtime`
    runtime: only runtime to consider; None: any
    """
    if not rows:
        runtimes = ", ".join(e["runtime"] for e in manifest["engines"])
        reason = f"the bundle has no engine for {runtime}; it has: {runtimes}"
        return Refuse(reason, "", "Give one of these to --runtime, or leave the option out.")
    chosen = next((row for row in rows if row.how is not None), None)
    if chosen is None or chosen.how is None:
        install = next((row.install for row in rows if row.install), "")
        decided = [column for row in rows for column in row.decided]
        advice = next((ADVICE[column] for column in decided if column in ADVICE), OTHER_ADVICE)
        return Refuse("; ".join(row.reason for row in rows), install, advice)
    if chosen is not rows[0]:
        passed = rows[: rows.index(chosen) + 1]
        return FallBack(chosen.index, chosen.how, "; ".join(row.reason for row in passed))
    kind = Fit if chosen.how == "load" else Rebuild
    return kind(chosen.index, chosen.reason)


def judge_engines(
    manifest: Mapping[str, Any],
    machine: Machine,
    *,
    damaged: Set[str] = frozenset(),
    runtime: str | None = None,
    failed: Mapping[int, str] | None = None,
    unopened: Mapping[int, str] | None = None,
) -> list[EngineVerdict]:
    """Judge each engine of a manifest on a machine; return the verdicts in the manifest's order.

    damaged: files of the bundle whose digest differs from the manifest
    runtime: only runtime to consider, without a fallback; None: any
    failed: {index: reason} of engines that fit but failed here
    unopened: {index: reason} of engines whose shipped file did not open; they may still be built
    """
    rows = []
    for index, engine in enumerate(manifest["engines"]):
        if runtime not in (None, engine["runtime"]):
            continue
        if failed and index in failed:
            rows.append(_row(index, engine, None, "tried", failed[index]))
            continue
        context = FitContext(engine, machine, damaged)
        rows.append(_judge(index, engine, context, (unopened or {}).get(index, "")))
    return rows


def _judge(
    index: int, engine: Mapping[str, Any], context: FitContext, unopened: str
) -> EngineVerdict:
    """Return the verdict about one engine of a bundle.

    unopened: reason why its shipped file did not open; "" if it was not tried
    """
    column, why = _find_objection(POSSIBLE, context)
    if column:
        return _row(index, engine, None, column, why, columns.install(context))
    if not table.look_up(engine["runtime"]).engine_files:
        column, why = _find_objection(MODEL, context)
        unseen = "; it was not opened where the bundle was made" if engine["deferred"] else ""
        fits = f"portable ONNX, and the runtime is installed{unseen}"
        return _row(index, engine, None if column else "load", column or FITS, why or fits)
    column, why = ("tried", unopened) if unopened else _find_objection(LOADABLE, context)
    if not column:
        fits = "the engine was built for this runtime, system and GPU"
        return _row(index, engine, "load", FITS, fits)
    other, cannot = _find_objection(BUILDABLE, context)
    text = f"{column}: {why}"
    if other:
        text = f"{text}, and it cannot be built here: {other}: {cannot}"
        return EngineVerdict(index, engine["target"], None, (column, other), text)
    text = f"{text}; it is built here from the portable ONNX"
    return EngineVerdict(index, engine["target"], "build", (column,), text)


def find_objection(context: FitContext) -> str:
    """Return the first reason why the machine cannot run a bundle's engine, whatever its files; or
    ""."""
    column, why = _find_objection(POSSIBLE, context)
    return f"{column}: {why}" if column else ""


def _find_objection(rules: Sequence[tuple[str, Column]], context: FitContext) -> tuple[str, str]:
    """Return (column, reason) of the first rule that objects to a bundle's engine; ("", "") if none
    does."""
    for name, column in rules:
        why = column(context)
        if why:
            return name, why
    return "", ""


def _row(
    index: int,
    engine: Mapping[str, Any],
    how: How | None,
    column: str,
    why: str,
    install: str = "",
) -> EngineVerdict:
    return EngineVerdict(index, engine["target"], how, (column,), f"{column}: {why}", install)
