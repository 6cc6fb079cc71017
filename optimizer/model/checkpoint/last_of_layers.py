"""Keep of what a module returns for each layer the last item, where the others serve training only.

A head that reads every layer would run once per layer, and a graph holds its last call alone.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def keep_last(model: nn.Module, place: str) -> None:
    """Make a module of a checkpoint's torch model return only the last item of one of its outputs.
    Changes the model in place.

    place: "module:output", where the output is a tuple with an item per layer
    """
    name, _, output = place.partition(":")

    def shorten(_module: nn.Module, _inputs: Any, result: Any) -> Any:
        result[output] = result[output][-1:]
        return result

    model.get_submodule(name).register_forward_hook(shorten)
