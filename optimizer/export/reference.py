"""Run the source model in torch float32 with the weights of one linear layer in memory.

A linear layer and the token embedding read their weight when called and release it afterwards;
smaller parameters (norms, positions) stay. Each forward pass reads the checkpoint once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from optimizer.export.weights import owners
from optimizer.harness.inputs.kv_cache import PARTS, is_past, present_name

Arrays = dict[str, Any]


def lend(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Make a skeleton runnable.

    values: {parameter: float32 tensor}, read at each call; KeyError names a missing one
    """
    looks_up = any(isinstance(m, nn.Embedding) for m in model.modules())
    embedding = getattr(model, "get_input_embeddings", lambda: None)() if looks_up else None
    lent: dict[nn.Module, dict[str, str]] = {}
    for first, (_, places) in owners(model).items():
        borrowing = [isinstance(o, nn.Linear) or o is embedding for o, _ in places]
        if all(borrowing):
            for owner, attribute in places:
                lent.setdefault(owner, {})[attribute] = first
            continue
        here = nn.Parameter(values[first], requires_grad=False)
        for owner, attribute in places:
            setattr(owner, attribute, here)
    for owner, names in lent.items():
        _lend(owner, names, values)


def _lend(owner: nn.Module, names: Mapping[str, str], values: Mapping[str, Tensor]) -> None:
    """Hook `owner` so that `names`, {attribute: parameter}, are filled during a call only."""

    def borrow(module: nn.Module, _inputs: Any) -> None:
        for attribute, name in names.items():
            setattr(module, attribute, nn.Parameter(values[name], requires_grad=False))

    def give_back(module: nn.Module, _inputs: Any, _result: Any) -> None:
        for attribute in names:
            empty = nn.Parameter(getattr(module, attribute).to("meta"), requires_grad=False)
            setattr(module, attribute, empty)

    owner.register_forward_pre_hook(borrow)
    owner.register_forward_hook(give_back)


@torch.no_grad()
def torch_outputs(model: nn.Module, contract: Mapping[str, Any], inputs: Arrays) -> Arrays:
    """Run the float torch model. Returns {output: array}, a decoder's KV cache included.

    inputs: arrays by name; past_key_values.* in order, where a generation is resumed
    """
    arguments: dict[str, Any] = {k: torch.from_numpy(np.array(v)) for k, v in inputs.items()}
    if contract.get("generation") is None:
        result = model(**arguments, return_dict=True)
        return {o["name"]: result[o["name"]].numpy() for o in contract["outputs"]}
    from transformers import DynamicCache

    past = [arguments.pop(n) for n in list(arguments) if is_past(n)]
    cache = DynamicCache([*zip(past[::2], past[1::2], strict=True)] if past else None)
    result = model(**arguments, past_key_values=cache, use_cache=True, return_dict=True)
    answers = {o["name"]: result[o["name"]].numpy() for o in contract["outputs"]}
    for i, layer in enumerate(cache.layers):
        for part, tensor in zip(PARTS, (layer.keys, layer.values), strict=True):
            answers[present_name(i, part)] = tensor.numpy()
    return answers
