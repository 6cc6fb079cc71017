"""Read the queries and documents of section `embeddings`, and check that a search can judge."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optimizer.data.datasets import read_samples
from optimizer.data.same_rows import TokenIds, check_disjoint, drop_repeated, make_text_keys
from optimizer.data.sample import Sample
from optimizer.foundation.errors import DataError, RecipeError
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.embedding_settings import TYPES
from optimizer.recipe.embeddings import Embeddings

QUERIES, DOCUMENTS = "embeddings.queries", "embeddings.documents"
BY_ANGLE = (None, "cosine")


@dataclass(frozen=True)
class Corpus:
    """Queries and documents.

    queries, documents: texts. Documents are in the order of their digests, so that the order among
        equal scores says nothing about relevance
    relevant: {index of a document: relevance above 0} of each query; None: not labelled
    left_out: number of queries without a relevant document
    """

    queries: Sequence[str]
    documents: Sequence[str]
    relevant: Sequence[Mapping[int, float]] | None
    left_out: int = 0


def read(
    section: Embeddings,
    contract: Contract,
    ids: TokenIds | None,
    learned: Sequence[Sample],
) -> Corpus:
    """Read both data sets. Raises DataError for data on which no search can fail, and RecipeError
    for vectors that the model does not have.

    ids: token ids of texts, by which they are compared; None: by characters
    learned: rows to calibrate on or to learn from, of which no query may be one
    """
    check_forms(section, contract)
    rows = read_samples(section.queries)
    documents = [r.text for r in drop_repeated(read_samples(section.documents), DOCUMENTS, ids)]
    documents.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    kept = section.k * section.oversampling
    if len(documents) <= kept:
        times = "k x oversampling" if section.oversampling > 1 else "k"
        raise DataError(
            f"{len(documents)} documents are no more than {times}, {kept}, so that every search "
            "finds all of them",
            where=DOCUMENTS,
            accepted=f"more than {kept} documents, better {10 * kept}",
            fix="Add documents, or lower embeddings.k or embeddings.oversampling.",
        )
    check_disjoint({"calibration or training": learned, QUERIES: rows}, ids, ranks=True)
    queries = list(dict.fromkeys(row.text for row in rows))
    if all(row.text_pair is None for row in rows):
        return Corpus(queries, documents, None)
    relevant = _relevant(rows, queries, documents, ids)
    judged = [i for i, some in enumerate(relevant) if some]
    if not judged:
        raise DataError(
            f"none of {len(queries)} queries has a relevant document",
            where=QUERIES,
            accepted="rows with a score above 0, or without a score",
        )
    left_out = len(queries) - len(judged)
    return Corpus([queries[i] for i in judged], documents, [relevant[i] for i in judged], left_out)


def _relevant(
    rows: Sequence[Sample], queries: Sequence[str], documents: Sequence[str], ids: TokenIds | None
) -> list[dict[int, float]]:
    """Return {index of a document: relevance} of each query, from labelled rows. Raises DataError
    for a relevant document that is not among the documents."""
    pairs = [str(row.text_pair) for row in rows]
    keys = make_text_keys([*documents, *pairs], ids)
    place = {keys[text]: i for i, text in enumerate(documents)}
    number = {text: i for i, text in enumerate(queries)}
    relevant: list[dict[int, float]] = [{} for _ in queries]
    for row, pair in zip(rows, pairs, strict=True):
        value = 1.0 if row.score is None else row.score
        if value < 0:
            raise DataError(
                f"a score is {value:g}, and it is read as relevance",
                where=QUERIES,
                accepted="0 for a document that is not relevant, more for one that is",
            )
        at = place.get(keys[pair])
        if at is None and value > 0:
            absent = sum(keys[other] not in place for other in pairs)
            raise DataError(
                f"the document {pair[:60]!r} of query {row.text[:60]!r} is not among the documents "
                f"({absent} of {len(pairs)} rows name such a one)",
                where=QUERIES,
                accepted=f"texts of {DOCUMENTS} as text_pair",
                fix="Add them to the documents, or leave the column text_pair out: the documents "
                "that the float model finds are then the relevant ones.",
            )
        if at is not None and value > 0:
            relevant[number[row.text]][at] = value
    return relevant


def check_forms(section: Embeddings, contract: Contract) -> None:
    """Raise RecipeError for more dimensions than the model has, and for types whose search does not
    rank as the model's similarity does."""
    width = tasks.look_up(contract).tensors(contract)["embedding"][1][0]
    for size in section.dimensions:
        if size > width:
            raise RecipeError(
                f"{size}, and the model's vectors have {width} numbers",
                where="embeddings.dimensions",
                accepted=f"1 to {width}",
            )
    similarity, unit = contract.vectors.similarity, bool(contract.normalize)
    if similarity == "manhattan" or (similarity == "euclidean" and not unit):
        raise RecipeError(
            f"the model compares vectors by {similarity} distance, and quantized ones are searched "
            "by products",
            where="embeddings",
            accepted="a model whose similarity is cosine or dot",
        )
    for name in section.types:
        bits = TYPES[name].bits
        if similarity == "dot" and not unit and bits == 1:
            raise RecipeError(
                f"{name}, and the model compares vectors by dot, which depends on their lengths: "
                "bits have none",
                where="embeddings.type",
                accepted="float32, int8, uint8",
            )
        if similarity in BY_ANGLE and not unit and bits == 8:
            raise RecipeError(
                f"{name}, and the model's vectors are not of unit length: cosine divides by "
                "lengths, and the product of integers does not",
                where="embeddings.type",
                accepted="float32, binary, ubinary",
                fix="Set model.normalize: true, which changes no cosine.",
            )
