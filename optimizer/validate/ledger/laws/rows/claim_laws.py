"""Check the labels and scores of zero-shot classification against transformers' own pipeline.

compared   answers of the harness (a row for each label, batched, run, merged as in a bundle) with
           those of ZeroShotClassificationPipeline.postprocess to the same rows of the model's
           outputs, for the contract's labels
limit      labels equal and in one order; scores within the float32 rounding of two softmaxes. Where
           two scores are that near, any order is right
caught     a fault in one field at a time: test_a_fault_in_a_choice_is_caught
caller     hop harness
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from optimizer.harness.contract import Contract
from optimizer.harness.inputs.batch import Array
from optimizer.harness.runtimes.runner import Runner
from optimizer.harness.tasks.answering import Query
from optimizer.validate.ledger import inputs as ledger_inputs
from optimizer.validate.ledger.laws.answer_fields import FREE, Near
from optimizer.validate.ledger.laws.answer_laws import ANSWERED, ReferencePipeline, bound_rounding
from optimizer.validate.ledger.laws.rows import comparison
from optimizer.validate.materials import Materials


def compare_answers(m: Materials, served: Contract, encoder: Any, runner: Runner) -> list[str]:
    """Problems of the harness's answers to the ledger's texts, and to one that is too long.

    served: the harness's contract
    encoder: the harness's tokenizer
    runner: the model that the harness runs
    """
    texts = list(dict.fromkeys(m.texts))
    chosen = [*texts[:: -(-len(texts) // ANSWERED)], ledger_inputs.make_overlong(m.contract, texts)]
    queries = [Query(f"text {i + 1}", text) for i, text in enumerate(chosen)]
    reference = ReferencePipeline(m.contract, m.source / "checkpoint")
    return comparison.compare(
        served,
        encoder,
        runner,
        queries,
        lambda query: encode(reference, query.input),
        lambda _query, rows: expected(reference, np.stack(rows)),
    )


def encode(reference: ReferencePipeline, text: str) -> list[list[int]]:
    """Encode the text with each label's hypothesis by transformers' tokenizer: token ids per
    label."""
    settings = reference.contract.choice
    return [
        reference.tokenizer(
            text,
            settings.hypothesis_template.format(label),
            truncation="only_first",
            max_length=reference.contract.text.max_length,
        )["input_ids"]
        for label in settings.candidate_labels
    ]


def expected(reference: ReferencePipeline, logits: Array) -> Mapping[str, Any]:
    """Return the answer of transformers' pipeline.

    logits: (candidate labels, labels of the model)
    """
    settings = reference.contract.choice
    outputs = [
        {"candidate_label": label, "sequence": "", "logits": torch.from_numpy(row)[None]}
        for label, row in zip(settings.candidate_labels, logits, strict=True)
    ]
    listed = reference.pipeline.postprocess(outputs, multi_label=settings.multi_label)
    entailment = settings.entailment
    pairs = logits[:, [-1 if entailment == 0 else 0, entailment]]
    alone = settings.multi_label or len(logits) == 1
    softmaxes = list(pairs) if alone else [logits[:, entailment]]
    bound = max(float(bound_rounding(np.ascontiguousarray(row)).max()) for row in softmaxes)
    near = bool((-np.diff(listed["scores"]) <= 2 * bound).any())
    return {
        "labels": FREE if near else listed["labels"],
        "scores": [Near(score, bound) for score in listed["scores"]],
    }
