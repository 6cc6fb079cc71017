"""text-ranking: the relevance of a document to a query, read together by a cross-encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..inputs.batch import Array, Batch
from ..inputs.pair_template import QUERY
from .task import Task, unchanged
from .text_classification import activated

if TYPE_CHECKING:
    from ..contract import Contract

COLUMNS = (("text_pair", "score"), ("text_pair", "label"))  # of which metrics read relevance


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Return the answers of text ranking, {"score", "logit"}: the contract's activation of the
    model's logit, and the logit."""
    del batch
    both = zip(activated(contract, values), values, strict=True)
    return [{"score": float(score), "logit": float(logit)} for (score,), (logit,) in both]


def tensors(contract: Contract) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {field of a ranking's answer: (dtype, shape per input)} for servers that send
    arrays."""
    del contract
    return {"score": ("float32", ()), "logit": ("float32", ())}


def line(answer: Mapping[str, Any]) -> str:
    """Write an answer of text ranking in one line for a person: the score of the pair."""
    return f"{answer['score']:.4f}"


TASK = Task(
    name="text-ranking",
    inputs=QUERY,
    output="logits",
    axes=("batch", "labels"),
    metrics={
        "ndcg": COLUMNS,
        "mrr": COLUMNS,
        "spearman": (("text_pair", "score"),),
    },
    decode=unchanged,
    answers=answers,
    line=line,
    tensors=tensors,
    arrays=("token_type_ids",),
    sections=("labels",),
    optional=("template",),
    pairs_together=True,
    ranks=True,
    model="transformers:AutoModelForSequenceClassification",
    not_in_browser="the page asks for one text, and a ranker reads a query and a document",
)
