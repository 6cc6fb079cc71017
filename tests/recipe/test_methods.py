"""What is known of a method stands in its record, and its name nowhere else."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import optimizer
from optimizer.recipe.methods import METHODS, RENAMED, Method
from optimizer.recipe.quantize import Quantize
from optimizer.references import resolve

ROOT = Path(optimizer.__file__).parent
TABLE = "recipe/methods.py"
FORMATS = "load/quantized/"  # of checkpoints; some are called like the method that made them


def test_a_method_s_name_is_a_string_in_the_table_alone() -> None:
    names = {*METHODS, *RENAMED}
    found = {
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert any(place.startswith(TABLE) for place in found)
    assert {p for p in found if not p.startswith((TABLE, FORMATS))} == set()


@pytest.mark.parametrize("record", METHODS.values(), ids=lambda m: m.name)
def test_its_code_is_in_the_file_of_its_name(record: Method) -> None:
    module, _, function = record.apply.partition(":")
    assert module == f"optimizer.compress.apply.{record.name}"
    assert callable(resolve(f"{module}:{function}"))
    assert not record.limits or callable(resolve(record.limits))


@pytest.mark.parametrize("record", METHODS.values(), ids=lambda m: m.name)
def test_its_options_are_a_section_of_its_name(record: Method) -> None:
    field = Quantize.model_fields.get(record.name)
    assert (field.annotation if field else None) == record.options


W8A8 = {"activations": {}}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"methods": ("gptq", "awq")}, "in this order: rotation, smoothquant, awq, rtn, gptq"),
        ({"methods": ("gptq", "gptq")}, "each once"),
        ({"methods": ("rtn", "gptq")}, "rtn chooses the codes by itself; leave it out beside gptq"),
        ({"methods": ("rtn", "autoround")}, "leave it out beside autoround"),
        ({"methods": ("rotation", "awq", "autoround")}, "leave one of rotation and awq out"),
        ({"methods": ("autoround", "scale_tuning")}, "both tune the norms' gains"),
        ({"method": "smoothquant"}, "needs an activations block"),
        ({"method": "autoround", **W8A8}, "learns for float inputs"),
        ({"method": "rtn", "methods": ("gptq",)}, "both given"),
        ({"methods": ("gptq", "pass_through")}, "nothing else"),
        ({"method": "gptq", "allocate": {}}, "with gptq uniform weights are better"),
        ({"allocate": {}, **W8A8}, "errors of weights only"),
        ({"method": "rtn", "gptq": {"damping": 0.1}}, "methods does not name gptq"),
    ],
)
def test_methods_that_do_not_go_together_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quantize.model_validate(section)


@pytest.mark.parametrize(
    ("section", "rounding"),
    [
        ({}, "rtn:round_weight"),
        ({"method": "awq"}, "awq:round_weight"),
        ({"methods": ("awq", "gptq")}, "gptq:round_weight"),
        ({"method": "awq", "awq": {"clip": False}}, "rtn:round_weight"),
        ({"methods": ("awq", "scale_tuning")}, "awq:round_weight"),
    ],
)
def test_awq_searches_ranges_where_nothing_else_chooses_integers(
    section: dict[str, Any], rounding: str
) -> None:
    record = Quantize.model_validate(section).block_rounding
    assert record.apply == f"optimizer.compress.apply.{rounding}"
