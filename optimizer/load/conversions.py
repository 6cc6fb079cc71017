"""What transformers does to the names and tensors of a checkpoint as it loads one.

Since version 5 a model's parameters may have other names than its checkpoints, and be pieces or
joins of the tensors in them; a table by architecture says how (transformers.conversion_mapping).
Its renamings are followed here, its conversions are not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


def renamed(names: Iterable[str], model: nn.Module) -> dict[str, str]:
    """{name in a file: name in the model} of tensors that are loaded as they are."""
    return {n: new for n, (new, anew) in _loaded_as(names, model).items() if not anew}


def converted(names: Iterable[str], model: nn.Module) -> dict[str, str]:
    """{name in a file: the first parameter made of it} of tensors that are split, joined or laid
    out anew."""
    return {n: new for n, (new, anew) in _loaded_as(names, model).items() if anew}


def _loaded_as(names: Iterable[str], model: nn.Module) -> dict[str, tuple[str, bool]]:
    """{name in a file: (the model's, whether the tensor is another then)} of those that change."""
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
