"""A method's record is complete, and no other module contains its name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import optimizer
from optimizer.foundation.references import resolve
from optimizer.recipe.compression.methods import METHODS, RENAMED, Method
from optimizer.recipe.compression.quantize import Quantize

ROOT = Path(optimizer.__file__).parent
TABLE = "recipe/compression/methods.py"
LEARNING = "recipe/recover.py"  # its own methods; an old name of one of compression is among them
FORMATS = "load/quantized/"  # of checkpoints; some are called like the method that made them


def test_a_method_s_name_is_a_string_in_the_table_alone() -> None:
    names = {*METHODS, *RENAMED}
    name = re.compile(rf"\b(?:{'|'.join(names)})\b")
    found = {
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in ROOT.rglob("*.py")
        if name.search(file.read_text())
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert any(place.startswith(TABLE) for place in found)
    elsewhere = (TABLE, FORMATS, LEARNING)
    assert {p for p in found if not p.startswith(elsewhere)} == set()


@pytest.mark.parametrize("record", METHODS.values(), ids=lambda m: m.name)
def test_its_code_is_in_the_file_of_its_name(record: Method) -> None:
    module, _, function = record.apply.partition(":")
    assert re.fullmatch(rf"optimizer\.compress\.apply\.\w+\.{record.name}", module)
    assert callable(resolve(f"{module}:{function}"))
    assert not record.limits or callable(resolve(record.limits))


@pytest.mark.parametrize("record", METHODS.values(), ids=lambda m: m.name)
def test_its_options_are_a_section_of_its_name(record: Method) -> None:
    field = Quantize.model_fields.get(record.name)
    assert (field.annotation if field else None) == record.options
