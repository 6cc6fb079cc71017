"""Look up how transformers renames and converts the tensors of a checkpoint while loading it.

Since version 5 a model's parameters may have other names than the tensors in its files, or be made
by splitting or joining them (transformers.conversion_mapping, a table by architecture). The load
stage follows renamings itself, and reads a checkpoint with converted tensors through transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.progress import say
from optimizer.model.checkpoint.model import build_skeleton_from_config, choose_auto_class
from optimizer.recipe.schema import Model


def converts(model_type: str) -> bool:
    """Return True for an architecture some of whose stored tensors transformers converts."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    rules = get_checkpoint_conversion_mapping(model_type) or []
    return any(isinstance(rule, WeightConverter) for rule in rules)


def find_renamed(names: Iterable[str], model: nn.Module) -> dict[str, str]:
    """Return {name in a source's file: name in the model} of tensors that are renamed only when
    load reads them."""
    return {n: new for n, (new, anew) in _find_changed(names, model).items() if not anew}


def find_converted(names: Iterable[str], model: nn.Module) -> dict[str, str]:
    """Return {name in a source's file: first parameter made from it} of tensors split, joined or
    rearranged when load reads them."""
    return {n: new for n, (new, anew) in _find_changed(names, model).items() if anew}


def read_converted(
    stored: Mapping[str, Any], section: Model, folder: Path, config: Any
) -> dict[str, Any]:
    """Return {parameter: tensor} of a model as transformers loads it, plus the stored tensors that
    transformers does not use; `stored` itself where the architecture converts nothing. The whole
    model is in memory.

    stored: {name in the files: entry}
    """
    if not converts(config.model_type):
        return dict(stored)
    model = build_skeleton_from_config(config, section.task, section.trust_remote_code)
    if not find_converted(stored, model):
        return dict(stored)
    say("load: transformers splits or joins tensors of this checkpoint; it is read as a whole")
    types = {entry.dtype for entry in stored.values()}
    with quiet():
        whole, loading = choose_auto_class(section.task, config.model_type).from_pretrained(
            folder,
            dtype=next(iter(types)) if len(types) == 1 else torch.float32,
            local_files_only=True,
            trust_remote_code=section.trust_remote_code,
            output_loading_info=True,
        )
    values = {n: t for n, t in whole.state_dict().items() if n not in loading["missing_keys"]}
    return values | {n: stored[n] for n in loading["unexpected_keys"] if n in stored}


def _find_changed(names: Iterable[str], model: nn.Module) -> dict[str, tuple[str, bool]]:
    """Return {name in a file: (name in the model, True where the values are converted too)} for
    tensors that transformers changes when it loads them."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

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
