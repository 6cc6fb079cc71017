"""Documents are found as sentence-transformers' searches of quantized vectors find them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from optimizer.validate.search import nearest

QUERIES, DOCUMENTS, WIDTH, FOUND = 9, 60, 20, 12


def hamming(one: Any, other: Any) -> int:
    pairs = zip(one.astype(np.uint8), other.astype(np.uint8), strict=True)
    return sum((int(a) ^ int(b)).bit_count() for a, b in pairs)


@pytest.mark.parametrize("kind", ["int8", "uint8", "binary", "ubinary"])
def test_searching_and_rescoring_are_the_librarys(kind: str) -> None:
    library = pytest.importorskip("sentence_transformers.util.quantization")
    random = np.random.default_rng(3)
    queries, documents = (
        random.standard_t(4, (count, WIDTH)).astype(np.float32) for count in (QUERIES, DOCUMENTS)
    )
    ranges = np.stack([documents.min(0), documents.max(0)])
    first, stored = nearest.search(queries, documents, kind, ranges, FOUND)
    again = nearest.rescore(queries, stored, first, kind, ranges)
    of_queries = library.quantize_embeddings(queries, kind, ranges=ranges)
    of_documents = library.quantize_embeddings(documents, kind, ranges=ranges)
    for query, code, found, ordered in zip(queries, of_queries, first, again, strict=True):
        if "binary" in kind:
            scores = [-hamming(code, other) for other in of_documents]
            values = np.unpackbits(
                of_documents.view(np.uint8) ^ (128 if kind == "binary" else 0), axis=1
            )[:, :WIDTH]
        else:
            scores = [int(code.astype(int) @ other.astype(int)) for other in of_documents]
            values = library._dequantize_embeddings(of_documents, kind, ranges)
        best = sorted(range(DOCUMENTS), key=lambda i: -scores[i])[:FOUND]
        assert found.tolist() == best
        products = values.astype(np.float64) @ query.astype(np.float64)
        assert ordered.tolist() == sorted(best, key=lambda i: -products[i])
