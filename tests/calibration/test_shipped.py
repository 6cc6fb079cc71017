"""Shipped recipes use no text for two purposes."""

from pathlib import Path

import pytest

from optimizer.harness.contract import Contract
from optimizer.recipe import file as recipe_file
from optimizer.validate import data


@pytest.mark.parametrize("file", sorted(Path("recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_what_a_shipped_recipe_learns_from_judges_nothing(file: Path) -> None:
    recipe = recipe_file.read(file)
    section = recipe.validation(recipe.targets[0])
    for spec in (s for s in data.list_specs(section).values() if s.obtain):
        if not all((Path(spec.base) / name).is_file() for name in spec.files):
            pytest.skip(f"{spec.files} is not kept here: {spec.obtain}")
    assert data.read_data(section, Path(), Contract(recipe.model.task, (), ()))
