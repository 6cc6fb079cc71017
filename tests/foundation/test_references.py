"""A string finds its object, or the error names the missing part."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.foundation.references import load_entry_point, resolve


def test_a_reference_is_the_attribute_of_a_module() -> None:
    assert resolve("pathlib:Path") is Path


@pytest.mark.parametrize(
    ("reference", "error"),
    [("no_such_module:f", ModuleNotFoundError), ("pathlib:no_such_name", AttributeError)],
)
def test_a_reference_to_nothing_is_an_error(reference: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="no_such"):
        resolve(reference)


def test_a_name_that_no_distribution_offers_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="no_such_method"):
        load_entry_point("optimizer.methods", "no_such_method")
