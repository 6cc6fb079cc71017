"""The forms of embeddings stand in the report with their bytes and what a search loses."""

from __future__ import annotations

from typing import Any

from optimizer.package.report.page import render
from optimizer.package.report.summary import summarize
from tests.package.report.documents import document

JUDGED = {
    "baseline": {"value": 0.81},
    "candidate": {"value": 0.7931},
    "difference": {"value": -0.02, "interval": [-0.0312, -0.0044]},
    "needed": None,
}
FORM = {
    "type": "binary",
    "dimensions": 128,
    "bytes": 16,
    "margin": 0.05,
    "recall": JUDGED,
    "ndcg": JUDGED,
    "without_rescoring": {"recall": 0.6125, "ndcg": 0.5},
}
FORMS: dict[str, Any] = {
    "queries": 429,
    "documents": 1029,
    "left_out": 0,
    "labelled": True,
    "k": 10,
    "oversampling": 4,
    "confidence": 0.95,
    "float": {"dimensions": 384, "bytes": 1536, "recall": 0.81, "ndcg": 0.7},
    "forms": [FORM],
}


def test_the_page_and_the_summary_have_bytes_and_losses() -> None:
    plain = document()
    assert "Search with these vectors" not in render(plain)
    plain["reports"][0]["embeddings"] = FORMS
    page = render(plain)
    sentence = "Bytes per vector: 1,536 for the float model, 16 for binary with 128 numbers."
    for words in ("429 queries search 1,029 documents", "0.7931", "−0.0312", "0.6125", sentence):
        assert words in page, words
    assert sentence in " ".join(summarize(plain).split())
