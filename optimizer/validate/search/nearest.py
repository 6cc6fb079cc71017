"""Search documents with vectors of every type, as vector stores and sentence-transformers do.

first pass   int8, uint8: the inner product of the integers of query and document
             binary, ubinary: the number of equal bits (Hamming)
             float32: the inner product, of unit vectors where the similarity is cosine
rescoring    the first k x oversampling documents by the inner product of the float query and the
             de-quantized document (of bits: 0 and 1), as semantic_search_faiss does

Documents of equal scores stay in their order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from optimizer.harness.embedding_settings import TYPES
from optimizer.harness.tasks.embeddings.quantized_embedding import quantize, steps
from optimizer.harness.tasks.embeddings.sentence_embedding import normalize

Array = npt.NDArray[Any]
Ranks = npt.NDArray[np.int64]
TOGETHER = 128  # queries compared with all documents at once


def find_nearest(queries: Array, documents: Array, count: int) -> Ranks:
    """Search a corpus: return the indices (queries, count) of the documents with the largest inner
    products, the largest first.

    queries, documents: (rows, dimensions)
    """
    wide = documents.astype(np.float64).T
    parts = []
    for start in range(0, len(queries), TOGETHER):
        scores = queries[start : start + TOGETHER].astype(np.float64) @ wide
        parts.append(np.argsort(-scores, axis=1, kind="stable")[:, :count])
    return np.concatenate(parts)


def search_float(queries: Array, documents: Array, count: int, similarity: str | None) -> Ranks:
    """Do as find_nearest with a contract's similarity of float vectors; None: cosine."""
    if similarity != "dot":
        queries, documents = normalize(queries), normalize(documents)
    return find_nearest(queries, documents, count)


def search(
    queries: Array, documents: Array, kind: str, ranges: Array | None, count: int
) -> tuple[Ranks, Array]:
    """Store a corpus's documents as a type and search them: (indices (queries, count), the stored
    documents as `quantize` returns them).

    queries, documents: float vectors (rows, dimensions)
    kind, ranges: arguments of `quantize`
    count: documents per query
    """
    codes = [quantize(vectors, kind, ranges) for vectors in (queries, documents)]
    if TYPES[kind].bits == 1:
        signs = [2.0 * unpack_bits(c, queries.shape[1]) - 1 for c in codes]
        return find_nearest(signs[0], signs[1], count), codes[1]
    return find_nearest(codes[0], codes[1], count), codes[1]


def rescore(queries: Array, stored: Array, first: Ranks, kind: str, ranges: Array | None) -> Ranks:
    """Sort the found documents `first` (queries, count) by the inner product of the float query and
    the de-quantized document, the largest first.

    queries: float vectors (queries, dimensions)
    stored: documents as `search` returns them
    kind, ranges: arguments of `quantize`
    """
    values = dequantize(stored, kind, ranges, queries.shape[1])
    ordered = []
    for query, row in zip(queries.astype(np.float64), first, strict=True):
        ordered.append(row[np.argsort(-(values[row] @ query), kind="stable")])
    return np.stack(ordered)


def dequantize(stored: Array, kind: str, ranges: Array | None, dimensions: int) -> Array:
    """Convert stored embeddings to numbers (documents, dimensions), as sentence-transformers reads
    them.

    stored: documents as `search` returns them
    """
    record = TYPES[kind]
    if record.bits == 1:
        return unpack_bits(stored, dimensions).astype(np.float64)
    if not record.ranged:
        return stored.astype(np.float64)
    assert ranges is not None
    low, step = steps(ranges)
    integers = stored.astype(np.float64) + (128 if record.dtype == "int8" else 0)
    return integers * step + low


def unpack_bits(stored: Array, dimensions: int) -> Array:
    """Bits (documents, dimensions), 0 or 1, of stored embeddings of type binary or ubinary.

    stored: (documents, ceil(dimensions / 8)), int8 or uint8
    """
    offset = 128 if stored.dtype == np.int8 else 0
    packed = (stored.astype(np.int16) + offset).astype(np.uint8)
    return np.unpackbits(packed, axis=1, count=dimensions)
