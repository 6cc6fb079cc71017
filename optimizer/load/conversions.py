"""Look up how transformers renames and converts the tensors of a checkpoint while loading it.

Since version 5 a model's parameters may have other names than the tensors in its files, or be made
by splitting or joining them (transformers.conversion_mapping, a table by architecture). The load
stage follows renamings and refuses conversions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def find_renamed(names: Iterable[str], model: nn.Module) -> dict[str, str]:
    """{name in a file: name in the model} of tensors that are renamed only."""
    return {n: new for n, (new, anew) in _find_changed(names, model).items() if not anew}


def find_converted(names: Iterable[str], model: nn.Module) -> dict[str, str]:
    """{name in a file: first parameter made from it} of tensors split, joined or rearranged."""
    return {n: new for n, (new, anew) in _find_changed(names, model).items() if anew}


def _find_changed(names: Iterable[str], model: nn.Module) -> dict[str, tuple[str, bool]]:
    """{name in a file: (name in the model, True where the values are converted too)}."""
    from transformers import PreTrainedModel

    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter
    except ImportError:  # a version that renames nothing
        return {}
    if not isinstance(model, PreTrainedModel):
        return {}
    table: list[Any] = get_model_conversion_mapping(model)
    converters = [rule for rule in table if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in table if not isinstance(rule, WeightConverter)]
    changed = {}
    for name in names:
        new = name
        for rule in renamings:  # every one that matches, in their order
            new, _pattern = rule.rename_source_key(new)
        for rule in converters:  # the first that matches
            part, pattern = rule.rename_source_key(new)
            if pattern is not None:
                changed[name] = (part, True)
                break
        else:
            if new != name:
                changed[name] = (new, False)
    return changed
