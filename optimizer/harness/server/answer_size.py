"""Predict the bytes of an answer from its request, and refuse one above --max-answer.

The prediction is an upper bound, so nothing is computed for a request that is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ..bounds import TEXT
from ..tasks import fill_mask
from ..tasks.embeddings import sparse_embedding
from .refusals import TooLargeError
from .tensors import JSON_NUMBER, Array, answer_bytes, datatype

if TYPE_CHECKING:
    from ..contract import Contract
    from ..tasks.task import Task

LONGEST = -2.2250738585072014e-308  # a number with the most characters in JSON
WORD = {"label": "", "score": LONGEST, "text": "", "start": TEXT, "end": TEXT}
ENTRY = len(json.dumps(json.dumps([WORD, WORD]))) - len(json.dumps(json.dumps([WORD])))
"""Bytes of a word or an entity, without label and text, in an answer as JSON within JSON."""
PLACE = {"index": TEXT, "start": TEXT, "end": TEXT}
TOKEN = {"entity_group": "", "score": LONGEST, "word": "##", **PLACE}
AGGREGATED = len(json.dumps(json.dumps([TOKEN, TOKEN]))) - len(json.dumps(json.dumps([TOKEN])))
"""Bytes of an aggregated entity, likewise."""
BYTE_LEVEL = 3  # maximum characters of tokens for a UTF-16 unit of a text, one for each byte
ROW = 256  # bytes of an answer's JSON without its words, labels and numbers
SCORE = JSON_NUMBER + len(json.dumps('"": ')) - 2  # bytes of a label's score, without the label
WEIGHT = JSON_NUMBER + len(json.dumps(1 << 31)) + 4  # bytes of an id with its weight
ESCAPED = 7  # maximum bytes of a UTF-16 unit of a text in JSON within JSON: \\u0000
LOGPROB = 512  # bytes of one token and its log probability while an answer is made


FEWER = "Ask for fewer rows or outputs at once"


def check_answer(size: int, largest: int, fix: str = FEWER) -> None:
    """Raise TooLargeError if a server's answer would exceed the limit.

    size: predicted bytes of the answer
    largest: maximum bytes
    fix: advice in the message
    """
    if size > largest:
        raise TooLargeError(
            f"the answer would have up to {size} bytes; accepted: up to {largest}. {fix}, or "
            "start the server with a larger --max-answer"
        )


def predict_field_bytes(
    task: Task,
    contract: Contract,
    inputs: Sequence[Any],
    chosen: Mapping[str, bool],
    pairs: Sequence[Any] | None = None,
) -> int:
    """Predict the maximum bytes of the answers to a request, over all inputs and requested fields.

    inputs, pairs: inputs of the request, and their second texts; None without any
    chosen: {output: True if binary, False if JSON}; an output that is not a tensor of the task is
        the whole answer as JSON
    """
    tensors, rows, size = task.tensors(contract), len(inputs), 0
    labels = [_escaped_bytes(label) for label in contract.labels or ()]
    longest = max(labels, default=0)
    for name, binary in chosen.items():
        if name in tensors:
            dtype, shape = tensors[name]
            size += answer_bytes(datatype(dtype), rows * prod(shape), binary)
            size += rows * longest if dtype == "object" else 0
            continue
        size += JSON_NUMBER * rows * sum(prod(shape) for _, shape in tensors.values())
        size += rows * (ROW + longest)
        if task.bytes is not None:
            size += sum(task.bytes(contract, one) for one in inputs)
        elif task.fills:  # each token of each mask with the whole text
            for text in inputs:
                masks = min(text.count(str(contract.text.mask_token)), contract.text.max_length)
                size += masks * fill_mask.BEST * (ENTRY + ROW + 2 * _escaped_bytes(text))
        elif task.weighs:  # an id and a number per entry, and the heaviest again by name
            (entries,) = (o.axes[-1] for o in contract.outputs if o.name == task.output)
            most = contract.splade.max_active_dims or int(entries)
            size += rows * (min(most, int(entries)) * WEIGHT + sparse_embedding.SHOWN * ROW)
        elif task.chooses:  # each label once, and a number for it
            names = json.dumps(contract.choice.candidate_labels)
            for own in pairs or [None] * rows:
                named = names if own is None else str(own)
                size += _escaped_bytes(named) + (named.count(",") + 1) * SCORE
        elif task.extracts:  # the best answer stands apart from the list
            spans = sum(_escaped_bytes(pair or "") for pair in pairs or ())
            size += (contract.spans.top_k + 1) * (rows * ENTRY + spans)
        elif task.per_position and task.classifies:
            for text in inputs:
                words = min(len(text), task.inputs.longest(contract))
                if contract.aggregation is not None:
                    size += words * (AGGREGATED + longest) + BYTE_LEVEL * _escaped_bytes(text)
                    continue
                size += 2 * (words * (ENTRY + longest) + _escaped_bytes(text))
        elif task.names_labels and pairs is not None:  # as above, and the best label once more
            names = json.dumps(contract.labels)
            for own in pairs:
                named = names if own is None else str(own)
                size += 2 * _escaped_bytes(named) + (named.count(",") + 1) * SCORE
        else:
            size += rows * (len(labels) * SCORE + (1 + contract.multi_label) * sum(labels))
    return size


def _escaped_bytes(text: str) -> int:
    return ESCAPED * (len(text.encode("utf-16-le", "surrogatepass")) // 2)


def predict_tensor_bytes(
    contract: Contract, arrays: Mapping[str, Array], chosen: Mapping[str, bool]
) -> int:
    """Predict the maximum bytes of a server's answer, the model's outputs, for raw input arrays.

    chosen: {output: True if binary, False if JSON}; other outputs are computed too and count as
        binary

    An output axis that no input has counts as 1.
    """
    axes: dict[str | int, int] = {}
    for spec in contract.inputs:
        if spec.name in arrays:
            axes |= dict(zip(spec.axes, arrays[spec.name].shape, strict=False))
    size = 0
    for spec in contract.outputs:
        count = prod(a if isinstance(a, int) else axes.get(a, 1) for a in spec.axes)
        size += answer_bytes(datatype(spec.dtype), count, chosen.get(spec.name, True))
    return size
