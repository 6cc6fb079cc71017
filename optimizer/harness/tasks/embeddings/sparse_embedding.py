"""sparse-embedding: weights of the vocabulary's entries, few above 0, of each text (SPLADE).

This is SparseEncoder.encode of the same folder: sparse_settings.py has the function. Positions that
are padding count as a logit of 0, whose weight is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...inputs.batch import Array, Batch
from ...inputs.text import TEXT
from ..task import Task
from ..text_ranking import COLUMNS

if TYPE_CHECKING:
    from ...contract import Contract

SHOWN = 10  # entries of the vocabulary that an answer names, the heaviest


def decode(contract: Contract, logits: Array, mask: Array) -> Array:
    """Decode sparse embeddings: all weights (batch, vocabulary) of logits (batch, sequence,
    vocabulary), before `prune`.

    The sum runs in sequence order, and padding adds zeros at its end.
    """
    settings = contract.splade
    if settings.pooling == "max":  # the function grows with its argument
        logits = np.where(mask[..., None], logits, np.float32(0)).max(axis=1)
        return _weigh(logits, settings.activation)
    rows = zip(logits, mask, strict=True)  # one text at a time: logits are large
    return np.stack([_weigh(r[real], settings.activation).sum(axis=0) for r, real in rows])


def _weigh(logits: Array, activation: str) -> Array:
    weights = np.log1p(np.maximum(logits, np.float32(0)))
    return np.asarray(np.log1p(weights) if activation == "log1p_relu" else weights)


def prune(contract: Contract, weights: Array) -> Array:
    """Keep in sparse embeddings the max_active_dims largest weights of each text, and set the
    others to 0.

    Of equal weights those with lower ids are kept. weights: (batch, vocabulary)
    """
    max_active_dims = contract.splade.max_active_dims
    if max_active_dims is None or max_active_dims >= weights.shape[1]:
        return weights
    kept = np.argsort(-weights, axis=1, kind="stable")[:, :max_active_dims]
    pruned = np.zeros_like(weights)
    np.put_along_axis(pruned, kept, np.take_along_axis(weights, kept, 1), 1)
    return pruned


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Return the answers of sparse embedding, {"indices", "values", "strongest"} per text: ids of
    the vocabulary with their weights, the heaviest first, and the SHOWN heaviest as {token:
    weight}."""
    return [_list_heaviest(row, batch.encoder) for row in prune(contract, values)]


def _list_heaviest(weights: Array, tokenizer: Any) -> dict[str, Any]:
    order = np.argsort(-weights, kind="stable")[: np.count_nonzero(weights)]
    ids, values = order.tolist(), weights[order].tolist()
    first = zip(ids[:SHOWN], values, strict=False)
    strongest = {tokenizer.id_to_token(i) or f"[{i}]": value for i, value in first}
    return {"indices": ids, "values": values, "strongest": strongest}


def line(answer: Mapping[str, Any]) -> str:
    """Write a sparse embedding in one line for a person: the tokens with the largest weights."""
    shown = "  ".join(f"{token} {value:.4f}" for token, value in answer["strongest"].items())
    count = len(answer["indices"])
    return f"{shown} ... {count} weights (--json prints all)" if count > SHOWN else shown


TASK = Task(
    name="sparse-embedding",
    inputs=TEXT,
    output="logits",
    axes=("batch", "sequence", "vocabulary"),
    metrics={
        "cosine": (),
        "retrieval": (("text_pair",), ("label",)),
        "ndcg": COLUMNS,
        "mrr": COLUMNS,
        "spearman": (("text_pair", "score"),),
    },
    decode=decode,
    answers=answers,
    line=line,
    arrays=("token_type_ids",),
    optional=("embedding", "sparse"),
    model="transformers:AutoModelForMaskedLM",
    pipeline_tag="feature-extraction",
    not_in_browser="the page has no code that weighs the vocabulary",
)
