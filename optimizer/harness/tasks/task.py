"""`Task`: the record of a task, with everything that depends on the task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..inputs.batch import Array, Batch
from ..inputs.kind import Encoded, InputKind

if TYPE_CHECKING:
    from ..contract import Contract


def _list_no_tensors(contract: Contract) -> dict[str, tuple[str, tuple[int, ...]]]:
    del contract
    return {}


def _accept_any(contract: Contract, encoded: Encoded) -> tuple[str, str]:
    del contract, encoded
    return "", ""


def _only(contract: Contract, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    del contract
    (answer,) = answers
    return dict(answer)


def _keep_value(contract: Contract, value: Any) -> Any:
    del contract
    return value


def _of_recipe(
    contract: Contract, values: Array, outputs: Mapping[str, Array], batch: Batch
) -> Array:
    del contract, outputs, batch
    return values


def unchanged(contract: Contract, values: Array, real: Array) -> Array:
    """Decode the output of a task whose answers need it as it is."""
    del contract, real
    return values


def clear_padding(contract: Contract, values: Array, real: Array) -> Array:
    """Decode the output of a task whose answers read a vector per token: 0 where padded."""
    del contract
    return np.where(real[..., None], values, np.float32(0))


Columns = tuple[tuple[str, ...], ...]
"""Alternative sets of data columns, of which a metric needs one set; () if it needs no column."""


@dataclass(frozen=True)
class Task:
    """One task, such as text-classification: what a model reads and how its outputs become answers.

    name: name in a recipe and in a contract.
    inputs: kind of input that the task takes.
    output: name of the model output that `decode` reads; "" for all outputs of the contract,
        flattened per row and joined.
    axes: axes of `output`: "batch", perhaps "sequence" or "positions" (of an image's patches),
        and its width: "width" (hidden size), "labels", "vocabulary" or "ends" (start and end); or
        "queries" and "classes" of objects; or "rows" and "columns" of pixels, perhaps after
        "classes" or "keypoints".
    beside: further outputs of the model, {name: axes}, with the axes of `output` but the last,
        and one or more of their own. `decode` gets all of them joined along that axis, their own
        axes flattened to one. In a graph they stay separate, so that each has a limit of its own
        in the ledger, whatever the sizes of their values.
    metrics: {metric: alternative data columns, see Columns}, the default metric first.
    answer_output: name of an output that holds the array of `decode` itself, where a lowering
        computes it in the graph; "" if none does.
    decode: (contract, float32 output, mask of real positions) -> array of the task.
    answers: (contract, array of `decode`, batch) -> one JSON object per input.
    line: answer -> text for a person.
    tensors: contract -> {field of an answer: (dtype, shape per input)} of the fields that are one
        array over all inputs, which a server can send without JSON.
    arrays: names of optional model inputs, besides `inputs.arrays`; None: any names.
    sections: names of contract sections that must not be null, besides `inputs.sections`.
    optional: names of contract sections of contract.OPTIONAL that the task reads if they are there.
    pairs_together: True if a row's second input enters the model with the first; otherwise the
        model reads both separately, to be compared.
    ranks: True if an input is a query and its pair a document, and the answers order the documents
        of a query; the model has one label, and labels of the data are relevance.
    reads_texts: True if a bundle holds a second model, which reads texts (folder `texts`).
    names_labels: True if the recipe names the labels, whose texts are encoded while the model is
        loaded; a bundle answers with others only where its contract has `label_texts`.
    calibration_items: "rows", one input each; or "windows" of one length, cut from all rows joined.
    check: (contract, encoded input) -> (reason why it cannot be answered, though the model could
        read it, and the remedy), "" where it can.
    merge: (contract, answers to the parts of an input) -> the answer to the input.
    ask: (contract, input of a data set) -> input that can be answered, e.g. with a mask.
    of_request: (contract, array of `decode`, outputs of the model by name, batch) -> array of the
        task with what inputs of the batch bring along, such as labels of their own.
    requires: packages needed besides numpy, the tokenizer and a runtime.
    bytes: (contract, input) -> maximum bytes of the answer as JSON, besides those of `tensors` and
        of labels; None: none.
    multiline: True if `line` gives several lines.
    gives: the answer in words, for a summary; "" where labels or `tensors` say it.
    pipeline_tag: name on model hubs; "" if it equals `name`.
    not_in_browser: reason why a bundle's page (package/web/tasks.mjs) gives no answers; "" if it
        does.
    model: transformers class that builds the model, "module:name".
    joined: outputs of that class, (batch, sequence) each, that `output` joins along a last axis;
        () where `output` is one of them.
    of_file: True if the model is an ONNX file or a torch module, not a checkpoint of `model`.
    headless: True if the checkpoint's pooler is dropped, because the output is a hidden state.
    heads: endings of the names of transformers classes that are trained for this task.
    """

    name: str
    inputs: InputKind
    output: str
    axes: tuple[str, ...]
    metrics: Mapping[str, Columns]
    decode: Callable[[Contract, Array, Array], Array]
    answers: Callable[[Contract, Array, Batch], list[dict[str, Any]]]
    line: Callable[[Mapping[str, Any]], str]
    tensors: Callable[[Contract], Mapping[str, tuple[str, tuple[int, ...]]]] = _list_no_tensors
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    answer_output: str = ""
    arrays: tuple[str, ...] | None = ()
    sections: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    pairs_together: bool = False
    ranks: bool = False
    reads_texts: bool = False
    names_labels: bool = False
    calibration_items: Literal["rows", "windows"] = "rows"
    check: Callable[[Contract, Encoded], tuple[str, str]] = _accept_any
    merge: Callable[[Contract, Sequence[Mapping[str, Any]]], dict[str, Any]] = _only
    ask: Callable[[Contract, Any], Any] = _keep_value
    of_request: Callable[[Contract, Array, Mapping[str, Array], Batch], Array] = _of_recipe
    requires: tuple[str, ...] = ()
    bytes: Callable[[Contract, Any], int] | None = None
    multiline: bool = False
    gives: str = ""
    pipeline_tag: str = ""
    not_in_browser: str = "the page has no code that makes its answers"
    model: str = "transformers:AutoModel"
    joined: tuple[str, ...] = ()
    of_file: bool = False
    headless: bool = False
    heads: tuple[str, ...] = ()

    @property
    def generates(self) -> bool:
        """Return True for the task text-generation, which runs the model once per token."""
        return "generation" in self.sections

    @property
    def classifies(self) -> bool:
        """Return True if the task's output is logits of labels, per input or per position."""
        return "labels" in self.axes

    @property
    def fills(self) -> bool:
        """Return True if the task's output is logits of the vocabulary in place of masks."""
        return self.reads_vocabulary and not self.weighs

    @property
    def reads_vocabulary(self) -> bool:
        """Return True if the task's model is a masked language model, whose logits are of the whole
        vocabulary at each position."""
        return "vocabulary" in self.axes and not self.generates

    @property
    def weighs(self) -> bool:
        """Return True if the task's answer is a weight per entry of the vocabulary."""
        return "sparse" in self.optional

    @property
    def extracts(self) -> bool:
        """Return True if the task's answers are spans of an input's pair."""
        return "answers" in self.optional

    @property
    def chooses(self) -> bool:
        """Return True if the task's input names the labels of its answer."""
        return "zero_shot" in self.optional

    def fields(self, contract: Contract) -> tuple[str, ...]:
        """Return the names of the task's inputs in a request: of an input, and of its pair if the
        model reads one, or of a text in its place."""
        several = self.pairs_together or contract.label_texts is not None
        fields = self.inputs.fields if several else self.inputs.fields[:1]
        return (*fields, self.inputs.instead) if self.reads_texts else fields

    @property
    def needs_labels(self) -> bool:
        """Return True if the recipe names the labels of the task's evaluation."""
        return self.chooses or self.names_labels

    @property
    def in_parts(self) -> bool:
        """Return True if the task's model reads an input in several rows."""
        return self.merge is not _only

    @property
    def per_position(self) -> bool:
        """Return True if the task's output has one vector per position of the sequence."""
        return "sequence" in self.axes
