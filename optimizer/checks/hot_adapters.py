"""Check a recipe with `keep: hot`: LoRA adapters stay apart from the compressed model, and each
request chooses one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from optimizer import targets
from optimizer.checks.context import Context
from optimizer.foundation.errors import RecipeError, collect
from optimizer.harness import tasks
from optimizer.load import source
from optimizer.load.adapters import hot, merge
from optimizer.recipe.compression import methods
from optimizer.recipe.schema import Recipe

WHERE = "model.adapters"
MERGE = "merge one adapter into a bundle of its own: model.adapters: [FOLDER]"


def check(recipe: Recipe, context: Context) -> None:
    """Check before a run the recipe's sections, and the adapters, where adapters stay apart from
    the model. Adapters on a hub are read only with context.fetch.

    Raises RecipeError for a section that excludes such adapters, CheckpointError for an adapter
    that is not LoRA of linear modules, MachineError without peft.
    """
    if not recipe.model.hot:
        return
    calls: list[Callable[[], object]] = [partial(one, recipe) for one in CHECKS]
    collect([*calls, merge.import_peft])
    local = all(source.is_local(n, recipe.model.base) for n in recipe.model.hot.values())
    if context.early and (local or context.fetch):
        hot.find(recipe.model)


def _task(recipe: Recipe) -> None:
    if not tasks.find_task(recipe.model.task).generates:
        raise RecipeError(
            f"keep: hot is for tasks that generate text, and the task is {recipe.model.task}",
            where=f"{WHERE}.keep",
            accepted=f"task {', '.join(tasks.list_generating())}",
            fix=f"Or {MERGE}.",
        )


def _names(recipe: Recipe) -> None:
    if recipe.name in recipe.model.hot:
        raise RecipeError(
            f"{recipe.name!r} is the name of the model itself, by which requests choose no adapter",
            where=f"{WHERE}.sources.{recipe.name}",
            fix="Name the adapter, or the recipe, otherwise.",
        )


def _targets(recipe: Recipe) -> None:
    for i, section in enumerate(recipe.targets):
        devices = targets.look_up(section.runtime).accepts.adapters_on
        if section.device not in devices or section.float_type != "fp32":
            here = f"{section.runtime} on {section.device} in {section.float_type}"
            raise RecipeError(
                f"adapters cannot be chosen at run time on {here}",
                where=f"targets.{i}",
                accepted="; ".join(
                    f"{t.name} on {', '.join(t.accepts.adapters_on)}, in fp32"
                    for t in targets.load_all()
                    if t.accepts.adapters_on
                ),
                fix=f"Remove the target, or {MERGE}.",
            )


def _methods(recipe: Recipe) -> None:
    """Refuse before a run compression methods that change the inputs of linear modules, because the
    adapters were trained on the original inputs."""
    quantize = recipe.quantize
    moving = [m.name for m in quantize.in_use if m.folds or m.folds_norms or m.learns_norms]
    if moving or quantize.passes_through:
        name = (moving or [m.name for m in quantize.chosen])[0]
        accepted = [m.name for m in methods.METHODS.values() if _keeps_inputs(m)]
        raise RecipeError(
            f"method {name} changes the inputs of linear modules, which the adapters read"
            if moving
            else f"method {name} keeps a checkpoint's integers, to which no adapter is added here",
            where="quantize.methods",
            accepted=", ".join(accepted),
            fix=f"Choose one of these, or {MERGE}.",
        )
    if quantize.static_activations:
        raise RecipeError(
            "static ranges of activations are measured without the adapters, whose activations may "
            "exceed them",
            where="quantize.activations.granularity",
            accepted="token, or no quantize.activations",
        )


def _keeps_inputs(method: methods.Method) -> bool:
    return method.kind == "rounding" and not (method.folds or method.learns_norms)


def _sections(recipe: Recipe) -> None:
    others = {"reduce": recipe.reduce, "qat": recipe.qat, "search": recipe.search}
    present = [name for name, section in others.items() if section is not None]
    if present:
        raise RecipeError(
            f"adapters were trained on the model as it is, and {present[0]} makes another",
            where=present[0],
            fix=f"Remove {present[0]}, or {MERGE}.",
        )


CHECKS = (_task, _names, _targets, _methods, _sections)
