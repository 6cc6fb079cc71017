"""Quantized vectors have the bits of sentence-transformers' quantize_embeddings."""

from __future__ import annotations

import numpy as np
import pytest

from optimizer.harness.embedding_settings import TYPES, QuantizedVectors
from optimizer.harness.errors import BundleError
from optimizer.harness.tasks.embeddings.quantized_embedding import quantize


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("width", [13, 64])
def test_vectors_are_quantized_as_the_library_does(kind: str, width: int) -> None:
    library = pytest.importorskip("sentence_transformers.util.quantization")
    random = np.random.default_rng(1)
    learned = random.standard_t(3, (200, width)).astype(np.float32)
    learned[:, 2] = 0.25  # a number without a range
    vectors = random.standard_t(3, (50, width)).astype(np.float32)
    vectors[0, :3] = 0.0, -0.0, 1e-30
    ranges = np.stack([learned.min(0), learned.max(0)])
    vectors[1:3] = ranges
    expected = library.quantize_embeddings(vectors, kind, ranges=ranges)
    ours = quantize(vectors, kind, ranges)
    assert (ours.dtype, ours.tobytes()) == (expected.dtype, expected.tobytes())
    assert ours[0].nbytes == TYPES[kind].bytes(width)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"types": ("int4",)}, "types.*int8"),
        ({"dimensions": (0,)}, "dimensions"),
        ({"ranges": {"2": ((0.0,), (1.0,))}}, "ranges.2.*the lowest and the highest"),
        ({"ranges": {"2": ((0.0, 2.0), (1.0, 1.0))}}, "ranges.2"),
    ],
)
def test_forms_that_cannot_be_given_are_refused(fields: dict[str, object], words: str) -> None:
    whole = {"types": ("int8",), "dimensions": (2,), "ranges": {"2": ((0.0, 0.0), (1.0, 1.0))}}
    QuantizedVectors(**whole)  # type: ignore[arg-type]
    with pytest.raises(BundleError, match=words):
        QuantizedVectors(**{**whole, **fields})  # type: ignore[arg-type]
