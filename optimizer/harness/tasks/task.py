"""What a task is: how a model's outputs become answers, and what else depends on the task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..inputs.batch import Array, Batch
from ..inputs.kind import InputKind

if TYPE_CHECKING:
    from ..contract import Contract


def _no_tensors(contract: Contract) -> dict[str, tuple[str, tuple[int, ...]]]:
    del contract
    return {}


Columns = tuple[tuple[str, ...], ...]
"""The columns that something needs, each way that will do; () for none."""


@dataclass(frozen=True)
class Task:
    """One task.

    inputs: the kind of its inputs. output: the name of the output that is read. axes: of that
    output; after "batch" and perhaps "sequence" its width, which a contract has as a number:
    "width" (of the hidden states), "labels", "vocabulary" or "positions" (of an image's patches).
    metrics: {metric: columns of the evaluation data it needs}, the one to start with first.
    decode(contract, output, real): the array that the task is about, from the output in float32
    and the kind's mask of real positions. answers(contract, values, batch): one JSON object per
    input, from decode's array. line(answer): an answer for a person.

    tensors(contract): of an answer's fields those that are one array over all inputs, as
    (dtype, shape of one input's): what a server can give without JSON.

    arrays: inputs that a model may have besides its kind's; None: any. sections: of a contract,
    those that belong to this task. pairs_together: a row's second input goes into the model with
    the first; otherwise the model reads both by themselves, to be compared. calibration_items:
    "rows", each an input; or "windows" of one length, cut from all rows joined end to end.
    requires: packages that answering needs besides numpy, the tokenizer and a runtime.
    pipeline_tag: what model hubs call it; "" where that is its name. not_in_browser: why the page
    of a bundle (package/web/tasks.mjs) does not answer; "" where it does.

    Of a checkpoint: model: the transformers class that builds it, "module:name". headless:
    its pooler is dropped, as the output is its last hidden state. heads: endings of the names of
    transformers classes that are trained for this task.
    """

    name: str
    inputs: InputKind
    output: str
    axes: tuple[str, ...]
    metrics: Mapping[str, Columns]
    decode: Callable[[Contract, Array, Array], Array]
    answers: Callable[[Contract, Array, Batch], list[dict[str, Any]]]
    line: Callable[[Mapping[str, Any]], str]
    tensors: Callable[[Contract], Mapping[str, tuple[str, tuple[int, ...]]]] = _no_tensors
    arrays: tuple[str, ...] | None = ()
    sections: tuple[str, ...] = ()
    pairs_together: bool = False
    calibration_items: Literal["rows", "windows"] = "rows"
    requires: tuple[str, ...] = ()
    pipeline_tag: str = ""
    not_in_browser: str = "the page has no code that makes its answers"
    model: str = "transformers:AutoModel"
    headless: bool = False
    heads: tuple[str, ...] = ()

    @property
    def generates(self) -> bool:
        """Whether an answer is many runs of the model, each continuing the one before."""
        return "generation" in self.sections

    @property
    def classifies(self) -> bool:
        """Whether an answer is one of the model's labels: of the input, or of each position."""
        return "labels" in self.sections

    @property
    def per_position(self) -> bool:
        """Whether there is an output for each position of the sequence."""
        return "sequence" in self.axes
