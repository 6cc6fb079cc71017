"""Judge the forms of section `embeddings`: gates of recall@k and nDCG@10, paired by query.

baseline    the reference model's float vectors, all of their numbers
candidate   the target's vectors, shortened, stored as a type, searched and rescored (nearest.py)

    recall      share of a query's relevant documents among the first k
    ndcg        nDCG@10 with linear gains

Relevant are the documents that the data name; where they name none, the first k of the baseline,
whose own values are then 1. The ranges of int8 and uint8 are those of the float model's vectors of
calibrate.data, so they are the same for all targets, and for an index of the float model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from optimizer.data.datasets import read_calibration_rows
from optimizer.foundation.progress import bar, say
from optimizer.harness import tasks
from optimizer.harness.embedding_settings import FLOAT, TYPES
from optimizer.harness.tasks.embeddings.sentence_embedding import shorten
from optimizer.recipe.embeddings import Embeddings
from optimizer.validate import target_runner
from optimizer.validate.gates import Gate, make_gate
from optimizer.validate.quality import per_example, quality
from optimizer.validate.quality.answers import TorchRunner
from optimizer.validate.quality.metrics import RANKED, mean_of_examples
from optimizer.validate.quality.significance import Floats
from optimizer.validate.run_artifacts import RunArtifacts
from optimizer.validate.search.corpus import Corpus
from optimizer.validate.search.nearest import Array, Ranks, rescore, search, search_float

FEW = 100  # texts below which sentence-transformers warns of unstable ranges
SECTIONS = ("baseline", "candidate", "difference", "needed")


@dataclass(frozen=True)
class Vectors:
    """One model's vectors of a corpus, each (rows, numbers)."""

    queries: Array
    documents: Array


def judge(
    m: RunArtifacts, corpus: Corpus, device: str
) -> tuple[list[Gate], dict[str, Any], dict[str, Any]]:
    """Judge all forms of section `embeddings`: (gates, the report's section `embeddings`, section
    `quantized` of the contract's `embedding`).

    device: device of the candidate
    """
    section = m.section.embeddings
    assert section is not None
    reference = TorchRunner(m)
    baseline = _answer(m, reference, corpus, "baseline")
    with closing(target_runner.open_candidate(m, device)) as runner:
        candidate = _answer(m, runner, corpus, "candidate")
    width = candidate.documents.shape[1]
    sizes = section.dimensions or (width,)
    ranges = _ranges(m, sizes) if section.ranged else {}
    similarity, depth = m.contract.vectors.similarity, max(section.k, RANKED)
    first = search_float(baseline.queries, baseline.documents, depth, similarity)
    relevant = corpus.relevant or [dict.fromkeys(map(int, ranks), 1.0) for ranks in first]
    if corpus.relevant is None:
        relevant = [dict.fromkeys(map(int, ranks[: section.k]), 1.0) for ranks in first]
    of_baseline = _values(first, relevant, section.k)
    gates, forms = [], []
    for kind in section.types:
        for size in sizes:
            short = Vectors(
                shorten(m.contract, candidate.queries, size),
                shorten(m.contract, candidate.documents, size),
            )
            searches = _search(section, short, kind, ranges.get(size), similarity)
            each = [_values(ranks, relevant, section.k) for ranks in searches]
            of_form, form = _decide(m, (kind, size), of_baseline, each)
            gates += of_form
            forms.append(form)
    report = {
        "queries": len(corpus.queries),
        "documents": len(corpus.documents),
        "left_out": corpus.left_out,
        "labelled": corpus.relevant is not None,
        "k": section.k,
        "oversampling": section.oversampling,
        "confidence": m.section.validate_.confidence,
        "float": {
            "dimensions": baseline.documents.shape[1],
            "bytes": TYPES[FLOAT].bytes(baseline.documents.shape[1]),
            **{name: float(values.mean()) for name, values in of_baseline.items()},
        },
        "forms": forms,
    }
    quantized = {
        "types": list(section.types),
        "dimensions": list(sizes),
        "ranges": {str(size): array.tolist() for size, array in ranges.items()},
    }
    return gates, report, quantized


def _answer(m: RunArtifacts, runner: Any, corpus: Corpus, name: str) -> Vectors:
    """Embed the corpus with one system, with the prompts query and document where the model has
    them.

    name: name of the system in progress bars
    """
    queries = _embed(m, runner, corpus.queries, "query", f"validate: {name}, queries")
    documents = _embed(m, runner, corpus.documents, "document", f"validate: {name}, documents")
    return Vectors(queries, documents)


def _embed(m: RunArtifacts, runner: Any, texts: Sequence[str], prompt: str, label: str) -> Array:
    """Embed a corpus's texts and return vectors (texts, numbers). Texts of similar length share a
    batch.

    prompt: name of the prompt
    label: text before the progress bar
    """
    contract, batch_size = m.contract.with_prompt(prompt), m.section.validate_.batch_size
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    vectors: list[Any] = [None] * len(texts)
    for start in bar(range(0, len(order), batch_size), label):
        part = order[start : start + batch_size]
        batch = tasks.encode(contract, m.encoder, [texts[i] for i in part])
        for i, row in zip(part, tasks.decode(contract, runner.infer(batch), batch), strict=True):
            vectors[i] = row
    return np.stack(vectors)


def _ranges(m: RunArtifacts, sizes: Sequence[int]) -> dict[int, Array]:
    """Measure the lowest and highest value of each number on the calibration texts: {dimensions:
    (2, dimensions)}."""
    assert m.section.calibrate is not None
    rows = read_calibration_rows(m.section.calibrate, tasks.look_up(m.contract))
    runner = TorchRunner(m, m.float_model)
    texts = [row.text for row in rows]
    vectors = _embed(m, runner, texts, "document", "validate: ranges of embeddings")
    if len(texts) < FEW:
        say(
            f"warning: the int8 and uint8 ranges come from only {len(texts)} calibration texts; "
            f"use {FEW} or more (calibrate.samples)"
        )
    ranges = {}
    for size in sizes:
        short = shorten(m.contract, vectors, size)
        ranges[size] = np.stack([short.min(0), short.max(0)])
        constant = np.flatnonzero(ranges[size][0] == ranges[size][1])
        if len(constant):
            say(
                f"warning: {len(constant)} of {size} dimensions are constant over the "
                f"{len(texts)} calibration texts (the first: {constant[0]}); their "
                "quantization step is 1, as in sentence-transformers"
            )
    return ranges


def _search(
    section: Embeddings, vectors: Vectors, kind: str, ranges: Array | None, similarity: str | None
) -> list[Ranks]:
    """Search one form: [indices of documents as the recipe searches, indices without rescoring],
    each (queries, documents found).

    kind: type that the vectors are stored as
    ranges: (2, dimensions) lowest and highest values; None for types without ranges
    """
    depth = max(section.k, RANKED)
    if kind == FLOAT:
        first = search_float(vectors.queries, vectors.documents, depth, similarity)
        return [first, first]
    most = section.k * section.oversampling
    first, stored = search(vectors.queries, vectors.documents, kind, ranges, max(most, depth))
    if section.oversampling == 1:
        return [first[:, :depth], first[:, :depth]]
    again = rescore(vectors.queries, stored, first[:, :most], kind, ranges)
    return [again[:, :depth], first[:, :depth]]


def _values(ranks: Ranks, relevant: Sequence[Mapping[int, float]], k: int) -> dict[str, Floats]:
    """Measure a search's {"recall", "ndcg"}: the value of each query (queries,).

    ranks: indices of documents (queries, documents found), the best first
    relevant: {index of a document: relevance} of each query
    k: number of documents that recall counts
    """
    discounts = 1 / np.log2(np.arange(2, RANKED + 2))
    recall, ndcg = [], []
    for row, gains in zip(ranks, relevant, strict=True):
        gained = np.array([gains.get(int(i), 0.0) for i in row])
        best = np.sort(list(gains.values()))[::-1][:RANKED]
        recall.append((gained[:k] > 0).sum() / len(gains))
        some = gained[:RANKED]
        ndcg.append((some @ discounts[: len(some)]) / (best @ discounts[: len(best)]))
    return {"recall": np.array(recall), "ndcg": np.array(ndcg)}


def _decide(
    m: RunArtifacts,
    form: tuple[str, int],
    baseline: Mapping[str, Floats],
    searches: Sequence[Mapping[str, Floats]],
) -> tuple[list[Gate], dict[str, Any]]:
    """Judge one form: (its gates, its part of the report).

    form: (type, dimensions)
    baseline: values of each query by the baseline
    searches: values of each query by the candidate, [as the recipe searches, without rescoring]
    """
    section, (kind, size) = m.section.embeddings, form
    assert section is not None
    margin = section.margin(kind, size)
    stored, confidence = TYPES[kind].bytes(size), m.section.validate_.confidence
    part: dict[str, Any] = {"type": kind, "dimensions": size, "bytes": stored, "margin": margin}
    gates = []
    for name, title in (("recall", f"recall@{section.k}"), ("ndcg", f"nDCG@{RANKED}")):
        each = per_example.values(name, searches[0][name])
        metric = mean_of_examples(baseline[name], searches[0][name], 1.0, confidence, each)
        count = len(baseline[name])
        decision, judged = quality.judge(name, metric, count, margin, confidence, None)
        what = f"{title} of {kind} vectors of {size} numbers ({stored} bytes)"
        gates.append(make_gate(f"embeddings.{name}.{kind}.{size}", decision, what))
        part[name] = {key: judged[key] for key in SECTIONS}
    part["without_rescoring"] = {name: float(v.mean()) for name, v in searches[1].items()}
    return gates, part
