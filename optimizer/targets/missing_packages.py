"""Check that the packages that build and judge a target are installed.

Called by checks/ordered.py before any work, and by validate.
"""

from __future__ import annotations

from typing import Any

from optimizer import targets
from optimizer.foundation.errors import MachineError
from optimizer.foundation.progress import say
from optimizer.harness.bundle.fit import find_objection
from optimizer.harness.bundle.fit_columns import FitContext
from optimizer.harness.runtimes import table
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.recipe.targets import TargetSection
from optimizer.store import package_version


def check_target(section: TargetSection, at: str) -> None:
    """Raise MachineError where a package that builds or judges a target is missing, or this machine
    cannot run the target's device. With `on_missing: defer` only a package that builds is required,
    and a line is printed for one that judges.

    at: path of the section, for messages
    """
    absent = [name for name in section.made_with if package_version(name) is None]
    if absent:
        raise MachineError(
            f"{' and '.join(absent)} not installed, needed to make its files",
            where=at,
            fix=f"pip install {' '.join(absent)}",
        )
    missing = explain_unjudged(section)
    if missing and section.on_missing != "defer":
        fix = f"{_install(section)}, or set on_missing: defer to skip the judgement."
        raise MachineError(missing, where=at, fix=fix)
    if missing:
        say(f"{at}: {missing}; skipped (on_missing: defer)")
    if section.on_missing != "defer" and (why := explain_unopened(section)):
        fix = "Set on_missing: defer, to prove the model on the CPU and ship it unmeasured."
        raise MachineError(why, where=at, fix=fix)


def explain_unopened(section: TargetSection) -> str:
    """Return the reason why this machine cannot run the lowered model on the target's device; ""
    where it can.

    Also "" for the CPU, and for targets with engine files, whose build is deferred by other means.
    """
    runtime = table.look_up(section.runtime)
    if section.device == "cpu" or not runtime.runs or runtime.engine_files:
        return ""
    entry: dict[str, Any] = {
        "target": section.name,
        "runtime": section.runtime,
        "device": section.device,
        "provider": section.execution_provider,
        "deferred": False,
        "fit": {},
    }
    return find_objection(FitContext(entry, describe_machine(), frozenset()))


def explain_unjudged(section: TargetSection) -> str:
    """Return the reason why this machine cannot judge the lowered model of a target; "" where it
    can."""
    missing = [p for p in targets.look_up(section.runtime).judged_by if package_version(p) is None]
    if not missing:
        return ""
    are = "is" if len(missing) == 1 else "are"
    return (
        f"{' and '.join(missing)} {are} not installed, so the model lowered for {section.runtime} "
        "cannot be judged"
    )


def _install(section: TargetSection) -> str:
    target = targets.look_up(section.runtime)
    extra = target.extras.get(section.runs_on)
    packages = f"'optimize-toolchain[{extra}]'" if extra else " ".join(target.judged_by)
    return f"pip install {packages}"
