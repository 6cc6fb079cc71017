"""Run the source model in torch float32 with the weights of one linear layer in memory.

A linear layer and the token embedding read their weight when called and release it afterwards; of
a large one (a vocabulary's) only some rows are in float32. Smaller parameters (norms, positions)
stay. Each forward pass reads the checkpoint once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from optimizer.export.weights import ROWS_OF, Values, find_owners, read_rows
from optimizer.harness.inputs.kv_cache import PARTS, is_past, present_name
from optimizer.model.checkpoint.model import is_linear

Arrays = dict[str, Any]


def lend(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Make a skeleton (a model without weights) runnable as the reference of the export, in place.

    values: {parameter: float32 tensor}, read at each call; KeyError names a missing one
    """
    embedding = _input_embedding(model)
    lent: dict[nn.Module, dict[str, str]] = {}
    for first, (_, places) in find_owners(model).items():
        borrowing = [is_linear(o) or o is embedding for o, _ in places]
        if all(borrowing):
            for owner, attribute in places:
                lent.setdefault(owner, {})[attribute] = first
            continue
        here = nn.Parameter(values[first], requires_grad=False)
        for owner, attribute in places:
            setattr(owner, attribute, here)
    for owner, names in lent.items():
        _lend(owner, names, values)


def _input_embedding(model: Any) -> nn.Module | None:
    """The table in which a model that is exported looks up its inputs; None for one that reads
    images, of which some classes of transformers raise an error."""
    if not any(isinstance(m, nn.Embedding) for m in model.modules()):
        return None
    try:
        table: nn.Module | None = getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:
        return None
    return table


def _lend(owner: nn.Module, names: Mapping[str, str], values: Mapping[str, Tensor]) -> None:
    """Hook the module `owner` of the export's reference so that its parameters are in memory during
    a call only.

    names: {attribute of the module: parameter}
    """
    large = isinstance(values, Values) and _large_forward(owner, names, values)
    if large:
        owner.forward = large
        return

    def borrow(module: nn.Module, _inputs: Any) -> None:
        for attribute, name in names.items():
            setattr(module, attribute, nn.Parameter(values[name], requires_grad=False))

    def give_back(module: nn.Module, _inputs: Any, _result: Any) -> None:
        for attribute in names:
            empty = nn.Parameter(getattr(module, attribute).to("meta"), requires_grad=False)
            setattr(module, attribute, empty)

    owner.register_forward_pre_hook(borrow)
    owner.register_forward_hook(give_back)


def _large_forward(
    owner: nn.Module, names: Mapping[str, str], values: Values
) -> Callable[[Tensor], Tensor] | None:
    """Return, for the export's reference, the forward function, reading some rows at a time, of an
    embedding or linear layer without bias whose weight is large; None for any other module."""
    weight = getattr(owner, "weight", None)
    if not isinstance(weight, Tensor) or weight.numel() <= ROWS_OF:
        return None
    if isinstance(owner, nn.Embedding):
        return partial(_look_up, values, names["weight"])
    without_bias = isinstance(owner, nn.Linear) and owner.bias is None
    return partial(_multiply, values, names["weight"]) if without_bias else None


def _look_up(values: Values, name: str, ids: Tensor) -> Tensor:
    """Read rows `ids` of an embedding from the checkpoint, for the export's reference."""
    unique, places = torch.unique(ids, return_inverse=True)
    return nn.functional.embedding(places, values.stored(name)[unique].float())


def _multiply(values: Values, name: str, x: Tensor) -> Tensor:
    """Multiply x in the export's reference by a linear layer's weight from the checkpoint, some
    rows of the weight at a time."""
    return torch.cat([nn.functional.linear(x, rows) for rows in read_rows(values, name)], dim=-1)


@torch.no_grad()
def run_torch(model: nn.Module, contract: Mapping[str, Any], inputs: Arrays) -> Arrays:
    """Run the float torch model, with which the exported graph is compared. Returns {output:
    array}, a decoder's KV cache included.

    inputs: {input: array}, with past_key_values.* in block order where tokens follow a KV cache
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
