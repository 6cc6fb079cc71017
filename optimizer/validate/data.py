"""Rows of the data sets that validate reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optimizer.data import conversations
from optimizer.data.datasets import Sample, cut_windows, read_calibration_rows, read_samples
from optimizer.data.same_rows import check_disjoint, drop_repeated
from optimizer.foundation.errors import DataError
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.recipe.schema import DataSpec, Validation, list_data_specs
from optimizer.recipe.stage_sections import ADAPTERS, LEARNING
from optimizer.validate.quality.shared_rows import JUDGED


def list_specs(section: Validation) -> dict[str, DataSpec]:
    """List the data sets that validate reads: {place in the recipe, such as validate.data: its
    spec}."""
    by_place = list_data_specs(
        section.calibrate, section.validate_, section.reduce, adapters=section.adapters
    )
    if section.recovery:
        by_place["reduce.recover.data"] = section.recovery.data
    if section.training:
        by_place["qat.data"] = section.training.data
    return by_place


def read_data(section: Validation, source: Path, contract: Contract) -> dict[str, list[Sample]]:
    """Read the rows of every data set: {place in the recipe: rows}, conversations as texts.

    source: folder of stage load

    Raises DataError where a row occurs in two sets of different purpose. Two overlaps are allowed:
    a model may be trained on the texts of validate.train, which judge nothing, and several adapters
    may be judged on the same texts.
    """
    task = tasks.look_up(contract)
    tokenizer = load_tokenizer(source / "checkpoint", contract) if contract.tokenizer else None
    ids = tokenizer.ids if tokenizer else None
    read = {n: read_samples(spec) for n, spec in list_specs(section).items()}
    if section.calibrate:
        read["calibrate"] = read_calibration_rows(section.calibrate, task)
    if section.reduce and section.reduce.calibrate:
        read["reduce.calibrate"] = read_calibration_rows(section.reduce.calibrate, task)
    rows = {n: conversations.render(some, contract, tokenizer) for n, some in read.items()}
    for name in [n for n in rows if n not in ("calibrate", "reduce.calibrate")]:
        rows[name] = drop_repeated(rows[name], f"{name} data", ids)
    learning = [name for name in LEARNING if name in rows]  # these may overlap each other
    calibrating = [name for name in learning if "calibrate" in name]
    apart = [name for name in rows if name.startswith(ADAPTERS)]
    for names, beside in ((learning, "validate.train"), (calibrating, "")):
        together = {" or ".join(names): [r for name in names for r in rows[name]]}
        others = {n: rows[n] for n in rows if n not in (*learning, *apart) and n != beside}
        for judging in (others, *({name: rows[name]} for name in apart)):
            check_disjoint({**together, **judging}, ids, ranks=task.ranks, extracts=task.extracts)
    return rows


def check_windows(
    section: Validation, data: Mapping[str, Sequence[Sample]], contract: Contract, encoder: Any
) -> None:
    """Raise DataError where the texts for perplexity are shorter than one window.

    data: rows by their place in the recipe
    """
    if not tasks.look_up(contract).generates:
        return
    for place in (name for name in data if name.startswith(JUDGED)):
        try:
            cut_windows(data[place], encoder, contract, section.validate_.sequence_length)
        except DataError as e:
            raise DataError(e.problem, where=place, accepted=e.accepted, fix=e.fix) from e
