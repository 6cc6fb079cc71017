"""Run batches of any shape on an engine whose optimization profiles take only some shapes.

Short texts are padded (the mask hides it), small batches get empty rows, and large batches run in
parts; padding is removed from the outputs. Answers differ from unpadded ones by float rounding
only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import tasks
from ..contract import Contract
from ..errors import BundleError
from ..inputs.batch import Array
from ..process.closing import Closing
from .decoder import Decoder
from .runner import Runner
from .slots import Slots

Span = Sequence[int]


class FittedRunner(Closing):
    """Runner of an encoder's engine that pads or divides batches to fit optimization profiles.

    contract: contract with the axes of inputs and outputs, and the ids of padding
    profiles: [{"batch": [min, opt, max], "sequence": [min, opt, max]}]; without "sequence" for
        images

    A sequence longer than all profiles goes to the engine unchanged, which raises InputError.
    Raises BundleError for an output that the contract does not name, because its padded axes are
    unknown.
    """

    def __init__(
        self, runner: Runner, contract: Contract, profiles: Sequence[Mapping[str, Span]]
    ) -> None:
        self._runner, self._profiles = runner, profiles
        self._inputs = {i.name: i.axes for i in contract.inputs}
        self._axes = {o.name: o.axes for o in contract.outputs}
        answer = tasks.look_up(contract).answer_output
        self._axes |= {answer: ("batch", "width")} if answer else {}
        text = contract.tokenizer
        self._padding = (  # a model may tell its last token by the id of padding
            {} if text is None else {"input_ids": text.pad_id, "token_type_ids": text.pad_type_id}
        )
        unknown = sorted(set(runner.outputs) - set(self._axes))
        if unknown:
            raise BundleError(
                f"the engine has outputs that the contract does not name: {', '.join(unknown)}",
                where="contract.json",
                accepted=", ".join(self._axes),
            )

    @property
    def model(self) -> Path:
        return self._runner.model

    @property
    def inputs(self) -> Mapping[str, Any]:
        return self._runner.inputs

    @property
    def outputs(self) -> list[str]:
        return self._runner.outputs

    def infer(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Run an engine on arrays padded to its profiles; return the outputs without padding. A
        batch larger than a profile runs in parts."""
        if set(arrays) != set(self._inputs):
            return self._runner.infer(arrays)  # which names the wrong inputs
        rows, tokens = self._sizes(arrays)
        parts, done = [], 0
        while done < rows:
            profile = self._profile(rows - done, tokens)
            if profile is None:
                return self._runner.infer(arrays)
            until = done + profile["batch"][2]
            parts.append(self._part({n: a[done:until] for n, a in arrays.items()}, profile))
            done = until
        return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}

    def decoder(self, contract: Contract, capacity: int = 0) -> Decoder:
        return self._runner.decoder(contract, capacity)

    def slots(self, contract: Contract, rows: int, capacity: int) -> Slots:
        return self._runner.slots(contract, rows, capacity)

    def cache_bytes(self, contract: Contract, tokens: int) -> int:
        return self._runner.cache_bytes(contract, tokens)

    def close(self) -> None:
        self._runner.close()

    def _profile(self, rows: int, tokens: int) -> Mapping[str, Span] | None:
        """Choose the engine's optimization profile that needs the fewest parts, then the least
        padding.

        Returns None if `tokens` exceeds the longest sequence of every profile.
        """
        wide = [p for p in self._profiles if not tokens or tokens <= p["sequence"][2]]

        def cost(p: Mapping[str, Span]) -> tuple[int, int]:
            parts = -(-rows // p["batch"][2])
            longest = max(tokens, p["sequence"][0]) if tokens else 1
            return parts, max(rows, p["batch"][0]) * longest

        return min(wide, key=cost, default=None)

    def _sizes(self, arrays: Mapping[str, Array]) -> tuple[int, int]:
        """Return (rows, tokens per row) of a batch, by which a profile of the engine is chosen; 0
        tokens for images."""
        name, array = next(iter(arrays.items()))
        axes = self._inputs[name]
        return len(array), array.shape[axes.index("sequence")] if "sequence" in axes else 0

    def _part(self, arrays: Mapping[str, Array], profile: Mapping[str, Span]) -> dict[str, Array]:
        """Pad arrays to the minimum sizes of an engine's profile, run them, and cut the padding
        from the outputs."""
        rows, tokens = self._sizes(arrays)
        more = {"batch": max(profile["batch"][0] - rows, 0)}
        if tokens:
            more["sequence"] = max(profile["sequence"][0] - tokens, 0)
        if not any(more.values()):
            return self._runner.infer(arrays)
        padded = {
            n: np.pad(
                a,
                [(0, more.get(str(axis), 0)) for axis in self._inputs[n]],
                constant_values=self._padding.get(n, 0),
            )
            for n, a in arrays.items()
        }
        if "attention_mask" in padded:  # one token per empty row avoids a division by zero
            padded["attention_mask"][rows:, 0] = 1
        return {n: self._cut(n, a, rows, tokens) for n, a in self._runner.infer(padded).items()}

    def _cut(self, name: str, array: Array, rows: int, tokens: int) -> Array:
        """Cut an engine's output to the rows and tokens that the batch had before padding."""
        sizes = {"batch": rows, "sequence": tokens}
        return array[tuple(slice(sizes.get(str(axis))) for axis in self._axes[name])]
