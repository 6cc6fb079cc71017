"""Check the code around the model: encoding of inputs, pooling, labels and the contract.

compared   the harness's arrays, values and fields with transformers' and torch's, computed from
           the source's own files
limit      none for arrays, labels and fields: equal. Pooling, layers and normalization: the float32
           bound of their sums (embedding_laws.py)
caught     another normalizer, swapped labels, padding pooled or on the left:
           test_another_normalizer_is_caught_at_the_harness,
           test_a_fault_in_the_contract_is_caught_at_the_harness

 1. inputs    transformers' tokenizer or image processor gives the harness's arrays (images:
              image_laws.py)
 2. values    pooling, layers and normalization, written again in torch, give the harness's values
              (embedding_laws.py)
 3. labels    label i is the source config's id2label[i]
 4. contract  the harness's contract agrees with the source's contract and config

In each function `source` is the contract that the checkpoint was loaded with, `served` the
harness's. Called by hop `harness` of encoders and decoders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.batch import Batch
from optimizer.harness.inputs.image import IMAGE
from optimizer.harness.inputs.tensors import TENSORS
from optimizer.harness.inputs.text import MASK, TEXT
from optimizer.validate.ledger.distance import Array
from optimizer.validate.ledger.laws import embedding_laws, image_laws, tensor_laws

STRANGE = (
    "Straße Über ÉCOLE naïve façade",
    "MiXeD CaSe, punctuation!? ... and  spaces\ttabs",
    "漢字 かな 한국어 العربية",
    "emoji 😀 zero\u200bwidth — dash",
    "supercalifragilisticexpialidocious " * 3,
    "x",
)
"""Texts that distinguish tokenizer settings: case, accents, scripts, long words, one letter."""


def compare_tokens(
    checkpoint: Path, source: Contract, served: Contract, tokenizer: Any, texts: Sequence[str]
) -> list[str]:
    """Check law 1 for texts: return a problem for each text or text pair that the harness encodes
    to other arrays than transformers' tokenizer.

    checkpoint: folder with the source's tokenizer files
    tokenizer: the harness's tokenizer
    texts: inputs of the ledger
    """
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(checkpoint)
    reference.padding_side = reference.truncation_side = "right"
    long = " ".join([*texts, *STRANGE] * (1 + source.text.max_length // 20))
    if tasks.look_up(source).chooses:
        return _claims(reference, source, served, tokenizer, [*texts, *STRANGE, long])
    if tasks.look_up(source).extracts:
        return _windows(reference, source, served, tokenizer, [*texts, *STRANGE])
    if source.template is not None:
        return _templated(reference, source, served, tokenizer, [*texts, *STRANGE, long])
    broken = []
    for group in (list(texts), [*STRANGE, long], [texts[0]]):
        for pairs in (None, list(reversed(group))):
            encoding = reference(
                [source.vectors.text + text for text in group],
                pairs,
                padding=True if source.text.padded_to is None else "max_length",
                truncation=True,
                max_length=source.text.max_length,
                return_tensors="np",
            )
            if source.text.padded_to is not None:  # transformers' pipelines pass it no mask
                encoding[MASK] = np.ones_like(encoding["input_ids"])
            actual = tasks.encode(served, tokenizer, group, pairs)
            for name, array in actual.items():
                expected = encoding.get(name)
                if expected is None:
                    continue
                if array.shape != expected.shape or not np.array_equal(array, expected):
                    kind = "text pairs" if pairs else "texts"
                    broken.append(f"{name} of {len(group)} {kind}: {_difference(array, expected)}")
    return broken


def _templated(
    reference: Any, source: Contract, served: Contract, tokenizer: Any, texts: Sequence[str]
) -> list[str]:
    """Check law 1 for pairs in a template: return a problem for each pair that the harness encodes
    to other token ids.

    The tokens that two pairs have in common at their end are those behind the document. They must
    stand at the end of a text that is cut, too.
    """
    before, between, after = source.template or ("", "", "")

    def ids(query: str, document: str) -> list[int]:
        whole = before + query + between + document + after
        return list(reference(whole, add_special_tokens=False)["input_ids"])

    one, other = ids("0", "0"), ids("1 2 3 4", "1 2 3 4")
    shared = max(n for n in range(len(one)) if one[len(one) - n :] == other[len(other) - n :])
    longest, broken = source.text.max_length, []
    for i, (query, document) in enumerate(zip(texts, reversed(texts), strict=True)):
        expected = ids(query, document)
        if len(expected) > longest:
            tail = one[len(one) - shared :][-longest:]
            expected = [*expected[: longest - len(tail)], *tail]
        actual = tasks.encode(served, tokenizer, [query], [document])["input_ids"]
        if actual.shape != (1, len(expected)) or not np.array_equal(actual[0], expected):
            difference = _difference(actual, np.array([expected]))
            broken.append(f"input_ids of pair {i + 1} in the template: {difference}")
    return broken


def _claims(
    reference: Any, source: Contract, served: Contract, tokenizer: Any, texts: Sequence[str]
) -> list[str]:
    """Check law 1 for texts with hypotheses (zero-shot classification): return a problem for each
    row that the harness encodes to other arrays than transformers."""
    kind, settings, broken = tasks.look_up(served).inputs, source.choice, []
    for i, one in enumerate(kind.encode(served, tokenizer, texts)):
        rows = {part.input.label: part for part in one.parts if not one.problem}
        for label in settings.candidate_labels if rows else ():
            expected = reference(
                texts[i],
                settings.hypothesis_template.format(label),
                truncation="only_first",
                max_length=source.text.max_length,
            )
            for name, array in kind.collate(served, [rows[label]]).items():
                row = expected.get(name)
                if row is not None and not np.array_equal(array[0], row):
                    where = f"{name} of text {i + 1} with label {label!r}"
                    broken.append(f"{where}: {_difference(array, np.array([row]))}")
    return broken


def _windows(
    reference: Any, source: Contract, served: Contract, tokenizer: Any, texts: Sequence[str]
) -> list[str]:
    """Check law 1 for questions with contexts: return a problem for each window that the harness
    encodes to other arrays than transformers."""
    kind = tasks.look_up(served).inputs
    contexts = [*texts, " ".join([*texts] * (1 + source.text.max_length // 5))]
    questions = [text[:20] for text in reversed(contexts)]
    broken = []
    for i, one in enumerate(kind.encode(served, tokenizer, questions, contexts)):
        expected = reference(
            questions[i],
            contexts[i],
            truncation="only_second",
            max_length=source.text.max_length,
            stride=source.spans.doc_stride,
            return_overflowing_tokens=True,
        )
        for at, part in enumerate(() if one.problem else one.parts):
            for name, array in kind.collate(served, [part]).items():
                rows = expected.get(name)
                row = [] if rows is None or at >= len(rows) else rows[at]
                if rows is not None and not np.array_equal(array[0], row):
                    where = f"{name} of window {at + 1} of text {i + 1}"
                    broken.append(f"{where}: {_difference(array, np.array([row]))}")
        if not one.problem and len(one.parts) != len(expected["input_ids"]):
            counts = f"{len(one.parts)} windows, transformers {len(expected['input_ids'])}"
            broken.append(f"text {i + 1} has {counts}")
    return broken


def _difference(actual: Array, expected: Array) -> str:
    if actual.shape != expected.shape:
        return f"shape {actual.shape}, transformers {expected.shape}"
    at = tuple(int(i) for i in np.argwhere(actual != expected)[0])
    return f"row {at[0]} position {at[1]} is {actual[at]}, transformers {expected[at]}"


def evaluate(source: Contract, outputs: Mapping[str, Array], batch: Batch) -> tuple[Array, Array]:
    """Compute the task's values in torch and float64, as the reference of law 2: (values, float32
    bound of each element; 0 where it must be equal).

    source: contract that the checkpoint was loaded with
    outputs: {name: array} of the model
    batch: inputs of the model
    """
    if not tasks.look_up(source).output:
        rows = [np.asarray(outputs[o.name], np.float64) for o in source.outputs]
        flat = np.concatenate([a.reshape(len(a), -1) for a in rows], axis=1)
        return flat, np.zeros(flat.shape)
    raw = torch.from_numpy(join_outputs(source, outputs)).double()
    real = batch.pooled if batch.real.ndim > 1 else np.ones(raw.shape[:2])  # no padding
    mask = torch.from_numpy(real).double()
    if source.sparse is not None:
        exact, bound = embedding_laws.compute_weights(source, raw, mask)
        return exact.numpy(), bound.numpy()
    if source.pooling is None:
        if raw.ndim == 3:
            raw = raw.masked_fill(mask[..., None] == 0, 0.0)
        return raw.numpy(), np.zeros(raw.shape)
    exact, bound = embedding_laws.compute_vectors(source, raw, mask)
    return exact.numpy(), bound.numpy()


def join_outputs(source: Contract, outputs: Mapping[str, Array]) -> Array:
    """Join the outputs of the source's task, as float32, along the last axis of the first."""
    task = tasks.look_up(source)
    first = np.asarray(outputs[task.output], np.float32)
    others = [np.asarray(outputs[name], np.float32) for name in task.beside]
    each = [first, *(a.reshape(*first.shape[:-1], -1) for a in others)]
    return first if len(each) == 1 else np.concatenate(each, -1)


def compare_labels(source: Contract, served: Contract, checkpoint: Path, batch: Batch) -> list[str]:
    """Check law 3: return a problem for each label whose name differs from the source's, and for
    logits that the harness answers with another label.

    checkpoint: folder with the source's config.json
    batch: inputs of the model
    """
    if source.labels is None:
        return []
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    names = {int(i): n for i, n in config.get("id2label", {}).items()}
    expected = [names.get(i, f"LABEL_{i}") for i in range(len(source.labels or ()))]
    if list(served.labels or ()) != expected:
        return [f"labels are {list(served.labels or ())}; the model's are {expected}"]
    task = tasks.look_up(served)
    if not task.classifies or task.per_position or task.chooses:
        return []
    broken = []
    for i, name in enumerate(expected if len(expected) > 1 else []):
        one = Batch(
            {k: a[:1] for k, a in batch.items()},
            batch.inputs[:1],
            batch.encodings[:1],
            batch.real[:1],
        )
        logits = np.eye(len(expected), dtype=np.float32)[i : i + 1]
        (answer,) = map(_named, tasks.build_answers(served, 20 * logits - 10, one))
        if answer != name:
            broken.append(f"output {i} is answered {answer!r}; the model calls it {name!r}")
    return broken


def _named(answer: Mapping[str, Any]) -> object:
    """Return the label of an answer; of an answer with several labels, or with a number per label,
    the only one that applies."""
    if "label" in answer:
        return answer["label"]
    names = answer.get("labels") or [n for n, v in answer.get("values", {}).items() if v > 0]
    return names[0] if len(names) == 1 else names


def compare_contract(source: Contract, served: Contract, checkpoint: Path) -> list[str]:
    """Check law 4: return a problem for each field of the bundle's contract that contradicts the
    source's contract or config.json."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    expected, actual = source.to_json(), served.to_json()
    broken = [
        f"{key} is {actual.get(key)!r}; the source's is {expected[key]!r}"
        for key in expected
        if actual.get(key) != expected[key]
    ]
    return broken + INPUTS[served.input_kind].contract(served, config)


def _text(served: Contract, config: dict[str, Any]) -> list[str]:
    """Check law 4 for texts: return [a problem] where the bundle's max_length exceeds the positions
    of the model, else []."""
    broken = []
    spec, positions = served.text, config.get("max_position_embeddings")
    if positions is not None and spec.max_length > positions:
        broken.append(f"max_length {spec.max_length}; the model has {positions} positions")
    return broken


@dataclass(frozen=True)
class InputLaws:
    """Laws of one kind of input. Both functions return problems, one sentence each.

    arrays: law 1: (checkpoint, source, served, encoder, inputs) -> problems
    contract: law 4: (served, content of config.json) -> problems
    """

    arrays: Callable[[Path, Contract, Contract, Any, Sequence[Any]], list[str]]  # law 1
    contract: Callable[[Contract, dict[str, Any]], list[str]]  # law 4


INPUTS: Mapping[str, InputLaws] = {
    TEXT.name: InputLaws(compare_tokens, _text),
    TENSORS.name: InputLaws(tensor_laws.compare_arrays, tensor_laws.compare_contract),
    IMAGE.name: InputLaws(image_laws.compare_pixels, image_laws.compare_contract),
}
