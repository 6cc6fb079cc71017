"""What is not installed of the packages that judge a recipe's targets: known before any work."""

from __future__ import annotations

from optimizer import targets
from optimizer.foundation.errors import MachineError
from optimizer.foundation.progress import say
from optimizer.recipe.recover import Learning
from optimizer.recipe.schema import Recipe, TargetSection
from optimizer.store import package_version


def check(recipe: Recipe) -> None:
    """Raise MachineError for the first target that cannot be judged here; under on_missing: defer
    say so instead."""
    for i, section in enumerate(recipe.targets):
        check_target(section, f"targets.{i}")
    check_processes(recipe)


def check_processes(recipe: Recipe) -> None:
    """Of what learns: that as many processes can train here as it says."""
    sections: list[Learning] = [recipe.recovery.recover] if recipe.recovery else []
    sections += [recipe.qat] if recipe.qat else []
    for section in sections:
        from optimizer.reduce.learn import processes  # imports torch

        processes.check(section)


def check_target(section: TargetSection, at: str) -> None:
    """Of one target; at: its path in the recipe."""
    absent = [name for name in section.made_with if package_version(name) is None]
    if absent:
        raise MachineError(
            f"{' and '.join(absent)} not installed, with which its files are made",
            where=at,
            fix=f"pip install {' '.join(absent)}",
        )
    missing = not_judged(section)
    if missing and section.on_missing != "defer":
        fix = f"{_install(section)}, or on_missing: defer to go on without it."
        raise MachineError(missing, where=at, fix=fix)
    if missing:
        say(f"{at}: {missing}, as on_missing: defer allows")


def not_judged(section: TargetSection) -> str:
    """Why this machine cannot judge what is lowered for a target, or ""."""
    missing = [p for p in targets.of(section.runtime).judged_by if package_version(p) is None]
    if not missing:
        return ""
    are = "is" if len(missing) == 1 else "are"
    return (
        f"{' and '.join(missing)} {are} not installed, so that what is lowered for "
        f"{section.runtime} cannot be judged"
    )


def _install(section: TargetSection) -> str:
    target = targets.of(section.runtime)
    extra = target.extras.get(section.runs_on)
    packages = f"'optimize-toolchain[{extra}]'" if extra else " ".join(target.judged_by)
    return f"pip install {packages}"
