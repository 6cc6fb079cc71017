"""List of all checks of a recipe, in order. A check is a function (recipe, context) -> None that
raises an error.

Checks of the recipe alone come first, then this machine's packages, then the model's files, then
data, whose reading takes longest. All errors are reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from optimizer.checks import (
    accepted,
    covered,
    hot_adapters,
    lengths,
    loadable,
    model_files,
    one_number,
    target_models,
    timed_targets,
)
from optimizer.checks.context import Context
from optimizer.compress import processes as calibration_processes
from optimizer.data.datasets import check_header, check_rows
from optimizer.foundation.errors import DataError, OptimizeError, collect
from optimizer.foundation.process import torch_device
from optimizer.load.tokenizer import student_vocabulary
from optimizer.package import lock
from optimizer.publish import stage as publish
from optimizer.recipe.schema import DataSpec, Model, Recipe
from optimizer.reduce.learn import processes
from optimizer.targets import missing_packages

Check = Callable[[Recipe, Context], None]
TEXTS = ("calibrate", "quantize", "targets.0", "validate")
"""Sections of the recipe of a side of texts that stand in section `texts`."""


def check(recipe: Recipe, context: Context) -> None:
    """Check a recipe before a run by CHECKS, in order; raise all errors found as one
    (errors.collect)."""

    def run(chain: Sequence[Check]) -> None:
        for one in chain:
            one(recipe, context)

    collect(partial(run, chain) for chain in CHECKS)


def check_texts(recipe: Recipe, context: Context) -> None:
    """Check before a run the text encoder of an image-text model, as a recipe of its own. Messages
    name section `texts`."""
    side = recipe.side_of_texts
    if side is None:
        return
    try:
        check(side, replace(context, lock=None))
    except OptimizeError as e:
        for one in (e, *e.further):
            if one.where.startswith(TEXTS):
                one.where = f"texts.{one.where.replace('targets.0', 'target', 1)}"
        raise


def check_parts(model: Model | None, specs: Sequence[DataSpec]) -> None:
    """Check before a run the files of a model, and the columns and first rows of data sets, without
    the other sections of a recipe. Raises the errors of all as one.

    model: section of the model; None: it is invalid and not checked
    """
    calls: list[Callable[[], None]] = [partial(check_header, spec) for spec in specs]
    if model is not None:
        weights, tokenizer = model_files.check_weights, model_files.check_tokenizer
        calls = [partial(weights, model), partial(tokenizer, model), *calls]
    collect(calls)


def check_weights(recipe: Recipe, _: Context) -> None:
    """Check before a run, by their headers, that the model's weights are complete and of types that
    load reads."""
    model_files.check_weights(recipe.model)


def check_tokenizer(recipe: Recipe, _: Context) -> None:
    """Check before a run that the model of a text task has a vocabulary."""
    model_files.check_tokenizer(recipe.model)


def check_addresses(recipe: Recipe, context: Context) -> None:
    """Check before a run the recipe's addresses to publish to, without a network."""
    if context.reaches("publish"):
        publish.check(recipe.publish)


def check_packages(recipe: Recipe, context: Context) -> None:
    """Check before a run that the packages that judge the targets are installed, or deferred."""
    if context.reaches("validate"):
        for i, section in enumerate(recipe.targets):
            missing_packages.check_target(section, f"targets.{i}")


def check_processes(recipe: Recipe, context: Context) -> None:
    """Check before a run that this machine can run the processes that the recipe asks for."""
    if context.reaches("compress"):
        calibration_processes.check(recipe.compression)
    learning = [recipe.recovery.recover if recipe.recovery else None, recipe.qat]
    for section in learning if context.reaches("validate") else ():
        if section is not None:
            processes.check(section)


def check_device(recipe: Recipe, context: Context) -> None:
    """Check before a run that torch can use the GPU that the recipe asks for."""
    for stage, place, device in (
        ("compress", "compress.device", recipe.compress.device),
        ("validate", "validate.reference_device", recipe.validate_.reference_device),
    ):
        if context.reaches(stage) and device == "cuda":
            torch_device.resolve(device, place)


def check_student_vocabulary(recipe: Recipe, context: Context) -> None:
    """Check before a run that a student's vocabulary is as large as the model's."""
    student_vocabulary.check(recipe, fetch=context.fetch)


def check_columns(recipe: Recipe, context: Context) -> None:
    """Check before a run the columns and first rows of every data set on this machine; all rows
    where a later check reads them, so that each table is opened once."""
    check = check_rows if context.early else check_header
    collect(partial(_check_data, check, *one) for one in recipe.data_specs.items())


def _check_data(check: Callable[[DataSpec], None], place: str, spec: DataSpec) -> None:
    """Make one check before a run of the data set at `place` of the recipe, which messages name."""
    try:
        check(spec)
    except DataError as e:
        where = f"{place}: {e.where}"
        raise DataError(e.problem, where=where, accepted=e.accepted, fix=e.fix) from e


def check_lock(recipe: Recipe, context: Context) -> None:
    """Compare before a run the recipe, its checkpoint, data and packages with a lock."""
    if context.lock is not None:
        lock.check(context.file, recipe, context.lock)


CHECKS: tuple[tuple[Check, ...], ...] = (
    (accepted.check,),
    (hot_adapters.check,),
    (timed_targets.check,),
    (check_addresses,),
    (check_packages,),
    (check_processes,),
    (check_device,),
    (covered.check, lengths.check, target_models.check),
    (one_number.check,),
    (check_weights,),
    (check_tokenizer,),
    (check_student_vocabulary,),
    (check_columns,),
    (loadable.check,),
    (check_texts,),
    (check_lock,),
)
"""Chains of checks: each runs where those before it in its chain found nothing. Checks of several
chains may find the same error; it is reported once."""
