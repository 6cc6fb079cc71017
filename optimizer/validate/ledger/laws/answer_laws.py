"""Check every field of an answer against the reference library's own code.

compared   answers of the harness (inputs encoded, batched, run and decoded as in a bundle), and
           the reference's answers to the same rows of the model's outputs
limit      texts, offsets and counts equal; numbers within the float32 rounding of a softmax or a
           mean. Of labels whose scores are equal within that bound, each is right
caught     a fault in one field at a time: test_a_fault_in_one_field_is_caught_at_the_harness,
           test_a_generated_text_that_lost_a_character_is_caught
caller     harness hops

The references by task:

    text-classification     transformers' TextClassificationPipeline: labels and scores
    image-classification    ImageClassificationPipeline: the same
    zero-shot-image-classification
                            ZeroShotImageClassificationPipeline: the same
    text-ranking            the logit, and its sigmoid in float64 where the contract has that
    token-classification    TokenClassificationPipeline, strategy `first`, with the tokenizer's
                            words: words and entities, with labels, scores, offsets and texts;
                            with `aggregation` the pipeline's answer with that strategy
    fill-mask               FillMaskPipeline: scores, tokens and texts
    sentence-embedding, sparse-embedding, image-feature-extraction, image-text-embedding
                            law 2 of contract_laws.py, in float64
    object-detection, image-segmentation, depth-estimation
                            the pipelines of these names: pipeline_answers.py
    universal-segmentation  the image processor's post_process_semantic_segmentation: there, too
    keypoint-detection      the image processor's post_process_pose_estimation: pose_answers.py
    feature-extraction      the model's own numbers
    text-generation         `generated`: the text, by transformers' tokenizer; the other fields
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from logging import ERROR
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from optimizer.foundation.process.quiet import quiet
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.batch import Array, Batch
from optimizer.harness.runtimes.runner import Runner
from optimizer.harness.tasks import (
    feature_extraction,
    fill_mask,
    image_classification,
    image_feature_extraction,
    image_text_embedding,
    sentence_embedding,
    sparse_embedding,
    text_classification,
    text_ranking,
    token_classification,
    zero_shot_classification,
    zero_shot_image_classification,
)
from optimizer.harness.tasks.answering import Answered, Predictor, Query, answer
from optimizer.harness.tasks.images import keypoint_detection
from optimizer.load.config.image_processor import open_processor
from optimizer.validate.ledger import inputs as ledger_inputs
from optimizer.validate.ledger.laws import contract_laws
from optimizer.validate.ledger.laws.answer_fields import FREE, Judged, Near, OneOf, differ
from optimizer.validate.ledger.laws.images import pipeline_answers, pose_answers
from optimizer.validate.ledger.laws.rows.own_outputs import Run, list_part_rows, run_row
from optimizer.validate.ledger.pieces.roundoff import SMALLEST, UNIT
from optimizer.validate.materials import Materials

if TYPE_CHECKING:
    from optimizer.harness.generate import Completion

ANSWERED = 8  # inputs, spread evenly over all; and one text that is too long
OUTSIDE = "O"
EXPONENTIAL = 6  # roundoffs of a float32 exponential: numpy's is within 3 units in the last place
UNJUDGED = "the fields of answers: task {} has none to compare with"


@dataclass(frozen=True)
class ReferencePipeline:
    """Transformers' tokenizer and pipeline of a checkpoint, which give the expected answers."""

    contract: Contract  # the source's
    checkpoint: Any  # the folder that transformers reads

    @cached_property
    def tokenizer(self) -> Any:
        """transformers' own tokenizer."""
        from transformers import AutoTokenizer

        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(self.checkpoint)
        tokenizer.padding_side = tokenizer.truncation_side = "right"
        return tokenizer

    @cached_property
    def processor(self) -> Any:
        """transformers' own image processor."""
        return open_processor(self.checkpoint)

    def encoded(self, text: str) -> Any:
        """The text as transformers' tokenizer encodes it."""
        return self.tokenizer(
            text,
            truncation=True,
            max_length=self.contract.text.max_length,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )

    @cached_property
    def pipeline(self) -> Any:
        """transformers' pipeline of the task, for the steps after the model: its model is the
        checkpoint's config without weights."""
        import transformers

        remote = any(self.checkpoint.glob("*.py"))  # load copies it where the recipe trusts it
        with quiet(ERROR):  # transformers logs an error for the stand-in model
            config = transformers.AutoConfig.from_pretrained(
                self.checkpoint, trust_remote_code=remote
            )
            names = config.id2label
            count = len(self.contract.labels or ())
            config.id2label = {i: names.get(i, f"LABEL_{i}") for i in range(count)}
            pipeline = getattr(transformers, PIPELINES[self.contract.task])
            model = SimpleNamespace(config=config, device=torch.device("cpu"))
            text = self.contract.input_kind == "text"
            reader = {"tokenizer": self.tokenizer} if text else {"image_processor": self.processor}
            return pipeline(model=model, device=-1, **reader)


Expected = Callable[[ReferencePipeline, Any, Array, Batch], Mapping[str, Any] | Judged]
"""(reference, input, the model's output for it without padding, the input alone as a batch) -> the
reference's answer."""


def classified(
    reference: ReferencePipeline, _value: Any, logits: Array, _alone: Batch
) -> dict[str, Any]:
    """Compute transformers' answer of text- or image-classification from logits (labels,)."""
    labels = reference.contract.labels or ()
    if len(labels) == 1:
        (name,) = reference.pipeline.model.config.id2label.values()
        return {"label": name, "value": _activated(reference.contract, logits)}
    if reference.contract.activation is not None:
        return _several(reference, logits)
    options = {"_legacy": False} if reference.contract.input_kind == "text" else {}
    listed = reference.pipeline.postprocess(
        {"logits": torch.from_numpy(logits)[None]}, top_k=len(labels), **options
    )
    config = reference.pipeline.model.config
    bounds = {config.id2label[i]: float(b) for i, b in enumerate(bound_rounding(logits))}
    scores = {one["label"]: Near(one["score"], bounds[one["label"]]) for one in listed}
    best = max(scores.values(), key=lambda s: float(s.values))
    return {"label": _equal(scores, best), "score": best, "scores": scores}


def _several(reference: ReferencePipeline, logits: Array) -> dict[str, Any]:
    """Compute transformers' answer of a multi-label model or a regression from logits (labels,)."""
    listed = reference.pipeline.postprocess(
        {"logits": torch.from_numpy(logits)[None]}, top_k=None, _legacy=False
    )
    scores = {one["label"]: float(one["score"]) for one in listed}
    if not reference.contract.multi_label:
        return {"values": {name: Near(score) for name, score in scores.items()}}
    # the pipeline's exponential and sum are of float32, the harness rounds once
    bounds = {
        name: (EXPONENTIAL + 3) * UNIT["fp32"] * score + SMALLEST["fp32"]
        for name, score in scores.items()
    }
    labels = reference.contract.labels or ()
    least = dict(zip(labels, reference.contract.thresholds or [0.5] * len(labels), strict=True))
    near = any(abs(scores[n] - least[n]) <= bounds[n] for n in labels)
    return {
        "labels": FREE if near else [n for n in labels if scores[n] >= least[n]],
        "scores": {n: Near(scores[n], bounds[n]) for n in labels},
    }


def fitting(
    reference: ReferencePipeline, _value: Any, logits: Array, _alone: Batch
) -> dict[str, Any]:
    """Compute transformers' answer of zero-shot-image-classification from logits (labels,)."""
    labels = list(reference.contract.labels or ())
    listed = reference.pipeline.postprocess(
        {"candidate_labels": labels, "logits": [torch.from_numpy(logits)]}
    )
    listed_scores = {one["label"]: float(one["score"]) for one in listed}
    bounds = bound_rounding(logits)
    if reference.contract.activation is not None:  # the harness rounds once
        relative = (EXPONENTIAL + 3) * UNIT["fp32"]
        bounds = np.array([relative * listed_scores[n] + SMALLEST["fp32"] for n in labels])
    scores = {n: Near(listed_scores[n], float(b)) for n, b in zip(labels, bounds, strict=True)}
    best = max(scores.values(), key=lambda s: float(s.values))
    return {"label": _equal(scores, best), "score": best, "scores": scores}


def _activated(contract: Contract, logits: Array) -> Near:
    """Apply the activation to one logit in float64; the harness rounds it once to float32."""
    if contract.activation != "sigmoid":
        return Near(float(logits[0]))
    value = float(torch.sigmoid(torch.from_numpy(logits[:1]).double()))
    return Near(value, UNIT["fp32"] * value + SMALLEST["fp32"])


def scored(
    reference: ReferencePipeline, _value: Any, logits: Array, _alone: Batch
) -> dict[str, Any]:
    """Compute the expected answer of text-ranking, for one pair of texts, from logits (1,)."""
    return {"score": _activated(reference.contract, logits), "logit": Near(float(logits[0]))}


def tagged(reference: ReferencePipeline, text: str, logits: Array, _alone: Batch) -> dict[str, Any]:
    """Compute transformers' answer of token-classification from logits (tokens, labels)."""
    from transformers.pipelines.token_classification import AggregationStrategy

    if reference.contract.aggregation is not None:
        strategy = AggregationStrategy(reference.contract.aggregation)
        return _aggregated(reference, text, logits, strategy)
    pipeline, encoded = reference.pipeline, reference.encoded(text)
    first = AggregationStrategy.FIRST
    scores = torch.softmax(torch.from_numpy(logits), -1).numpy()
    numbers = encoded.word_ids()
    with warnings.catch_warnings():  # for tokenizers whose words it has to guess
        warnings.simplefilter("ignore", UserWarning)
        tokens = pipeline.gather_pre_entities(
            text,
            np.array(encoded["input_ids"]),
            scores,
            encoded["offset_mapping"],
            np.array(encoded["special_tokens_mask"]),
            first,
        )
    tokens = [token for token in tokens if numbers[token["index"]] is not None]
    previous = None
    for token in tokens:
        token["is_subword"] = numbers[token["index"]] == previous
        previous = numbers[token["index"]]
    heads = [token for token in tokens if not token["is_subword"]]
    aggregated = pipeline.aggregate_words(tokens, first)
    bounds = [bound_rounding(logits[token["index"]]) for token in heads]
    names = pipeline.model.config.id2label
    words = []
    for word, token, bound in zip(aggregated, heads, bounds, strict=True):
        both = zip(token["scores"], bound, strict=True)
        each = {names[i]: Near(float(s), float(b)) for i, (s, b) in enumerate(both)}
        word["bound"] = float(bound.max())
        words.append(
            {
                "label": _equal(each, each[word["entity"]]),
                "score": Near(float(word["score"]), word["bound"]),
                **_place(text, word),
            }
        )
    if any(len(word["label"].texts) > 1 for word in words):
        return {"words": words, "entities": FREE}
    return {"words": words, "entities": _entities(pipeline, text, aggregated)}


def _aggregated(
    reference: ReferencePipeline, text: str, logits: Array, strategy: Any
) -> dict[str, Any]:
    """Compute transformers' entities (tokens joined by a strategy) from logits (tokens, labels)."""
    encoded = reference.encoded(text)
    names = ("input_ids", "offset_mapping", "special_tokens_mask")
    outputs: dict[str, Any] = {n: torch.tensor(encoded[n])[None] for n in names}
    outputs |= {"logits": torch.from_numpy(logits)[None], "sentence": text}
    with warnings.catch_warnings():  # for tokenizers whose words it has to guess
        warnings.simplefilter("ignore", UserWarning)
        listed = reference.pipeline.postprocess([outputs], strategy)
    # of a mean over all tokens at most
    bound = max(float(bound_rounding(row).max()) for row in logits) + len(logits) * UNIT["fp32"]
    return {"entities": [{**one, "score": Near(float(one["score"]), bound)} for one in listed]}


def _entities(pipeline: Any, text: str, words: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join words as group_entities does, which cuts every label at its first dash to name a group.
    The names here are those of get_tag, which cuts B- and I- only."""
    entities, remaining = [], list(words)
    for group in pipeline.group_entities(list(words)):
        count = next(i for i, word in enumerate(remaining, 1) if word["end"] == group["end"])
        members, remaining = remaining[:count], remaining[count:]
        label = pipeline.get_tag(members[0]["entity"])[1]
        if label == OUTSIDE:
            continue
        bound = max(w["bound"] for w in members) + (len(members) + 2) * UNIT["fp32"]
        score = Near(float(group["score"]), bound)
        entities.append({"label": label, "score": score, **_place(text, group)})
    return entities


def _place(text: str, place: Mapping[str, Any]) -> dict[str, Any]:
    """Return the expected {text, start, end} of a word or entity, without white space at its
    beginning."""
    start, end = int(place["start"]), int(place["end"])
    start += len(text[start:end]) - len(text[start:end].lstrip())
    return {"text": text[start:end], "start": start, "end": end}


def filled(reference: ReferencePipeline, text: str, logits: Array, _alone: Batch) -> dict[str, Any]:
    """Compute transformers' answer of fill-mask from logits (tokens, vocabulary)."""
    ids = torch.tensor(reference.encoded(text)["input_ids"])
    listed = reference.pipeline.postprocess(
        {"input_ids": ids[None], "logits": torch.from_numpy(logits)[None]}, top_k=fill_mask.BEST
    )
    masks = [listed] if isinstance(listed[0], dict) else listed
    places = np.flatnonzero(ids.numpy() == reference.tokenizer.mask_token_id)
    expected = []
    for place, tokens in zip(places, masks, strict=True):
        bounds = bound_rounding(logits[place])
        order = np.sort(torch.softmax(torch.from_numpy(logits[place]), -1).numpy())[::-1]
        near = (order[: len(tokens)] - order[1 : len(tokens) + 1] <= bounds.max()).any()
        expected.append(
            [
                (dict.fromkeys(token, FREE) if near else token)
                | {"score": Near(token["score"], float(bounds.max()))}
                for token in tokens
            ]
        )
    return {"masks": expected}


def pooled(
    reference: ReferencePipeline, _value: Any, hidden: Array, alone: Batch
) -> dict[str, Any]:
    """Compute the vector that the law expects of an input from its hidden states (positions,
    width)."""
    contract = reference.contract
    values, bounds = contract_laws.evaluate(
        contract, {tasks.look_up(contract).output: hidden[None]}, alone
    )
    (name,) = tasks.look_up(contract).tensors(contract)
    return {name: Near(values[0], bounds[0])}


def weighed(
    reference: ReferencePipeline, _value: Any, logits: Array, alone: Batch
) -> dict[str, Any]:
    """Return the expected ids and weights of sparse-embedding; any ids, where weights are so close
    that rounding may order them otherwise. logits: (tokens, vocabulary)."""
    contract = reference.contract
    values, bounds = contract_laws.evaluate(contract, {"logits": logits[None]}, alone)
    order = np.argsort(-values[0], kind="stable")
    weights, bound = values[0][order], bounds[0][order]
    count = min(int((weights > 0).sum()), contract.splade.max_active_dims or len(weights))
    ids, tokens = order[:count].tolist(), reference.tokenizer
    apart = weights[: count + 1][:-1] - weights[: count + 1][1:]
    near = (apart <= bound[: len(apart)] + bound[1 : len(apart) + 1]).any()
    names = tokens.convert_ids_to_tokens(ids[: sparse_embedding.SHOWN])
    each = [Near(w, b) for w, b in zip(weights[:count], bound[:count], strict=True)]
    strongest = dict(zip(names, each, strict=False))
    return {
        "indices": FREE if near else ids,
        "values": Near(weights[:count], bound[:count]),
        "strongest": FREE if near else strongest,
    }


def states(
    _reference: ReferencePipeline, _value: Any, hidden: Array, _alone: Batch
) -> dict[str, Any]:
    """Return the expected answer of feature-extraction: `hidden` (tokens, width) itself."""
    return {"hidden_states": Near(hidden)}


EXPECTED: Mapping[str, Expected] = {
    text_classification.TASK.name: classified,
    image_classification.TASK.name: classified,
    zero_shot_image_classification.TASK.name: fitting,
    text_ranking.TASK.name: scored,
    token_classification.TASK.name: tagged,
    fill_mask.TASK.name: filled,
    sentence_embedding.TASK.name: pooled,
    sparse_embedding.TASK.name: weighed,
    image_feature_extraction.TASK.name: pooled,
    image_text_embedding.TASK.name: pooled,
    feature_extraction.TASK.name: states,
    **pipeline_answers.EXPECTED,
    keypoint_detection.TASK.name: pose_answers.posed,
}
PIPELINES = {
    text_classification.TASK.name: "TextClassificationPipeline",
    image_classification.TASK.name: "ImageClassificationPipeline",
    token_classification.TASK.name: "TokenClassificationPipeline",
    fill_mask.TASK.name: "FillMaskPipeline",
    zero_shot_classification.TASK.name: "ZeroShotClassificationPipeline",
    zero_shot_image_classification.TASK.name: "ZeroShotImageClassificationPipeline",
    **pipeline_answers.PIPELINES,
}
"""{task: transformers' pipeline class}."""


def explain_unjudged(task: str) -> str:
    """Explain that no reference can judge this task's answers; "" where one can."""
    return "" if task in EXPECTED else UNJUDGED.format(task)


def bound_rounding(logits: Array) -> Array:
    """Bound, as a law's limit, the distance (labels,) of two float32 softmaxes of the logits
    (labels,). Each rounds the shifted logits, which an exponential turns into relative errors, the
    exponentials, their sum and a quotient."""
    shifted = logits.max() - logits.astype(np.float64)
    p = np.exp(-shifted) / np.exp(-shifted).sum()
    roundoffs = shifted + float(p @ shifted) + 2 * EXPONENTIAL + len(p) + 1
    bounds: Array = 2 * (UNIT["fp32"] * roundoffs * p + SMALLEST["fp32"] * len(p))
    return bounds


def _equal(scores: Mapping[str, Near], best: Near) -> OneOf:
    """Return the labels whose score may be the best one, within the bounds of rounding."""
    near = (n for n, s in scores.items() if s.values + s.bounds >= best.values - best.bounds)
    return OneOf(frozenset(near))


def compare_answers(m: Materials, served: Contract, encoder: Any, runner: Runner) -> list[str]:
    """Problems of the harness's answers to the ledger's inputs; [] for a task without a reference.

    served: the harness's contract
    encoder: the harness's tokenizer or image reader
    runner: the model that the harness runs
    """
    expected, kind = EXPECTED.get(m.contract.task), tasks.look_up(m.contract).inputs
    if expected is None:
        return []
    texts = list(dict.fromkeys(m.texts))
    inputs = texts[:: -(-len(texts) // ANSWERED)]
    inputs += [ledger_inputs.make_overlong(m.contract, texts)] if kind.size else []
    runs: list[Run] = []

    def infer(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        outputs = runner.infer(arrays)
        runs.append((arrays, contract_laws.join_outputs(m.contract, outputs)))
        return outputs

    inputs = [tasks.look_up(served).ask(served, value) for value in inputs]
    queries = [Query(f"{kind.name} {i + 1}", value) for i, value in enumerate(inputs)]
    predictor = Predictor(served, encoder, infer)
    answered = list(answer(predictor, queries, ANSWERED))
    reference = ReferencePipeline(m.contract, m.source / "checkpoint")
    problems: list[str] = []
    for query, one in zip(queries, answered, strict=True):
        alone = tasks.encode(m.contract, m.encoder, [query.input])
        row = run_row(alone, runs)
        if tasks.look_up(m.contract).in_parts:
            alone, row = list_part_rows(m, query.input, runs)
        if row is None or one.answer is None:
            problems.append(f"{query.where}: it has no answer, or no batch holds it")
            continue
        target = expected(reference, query.input, row, alone)
        problems += [f"{query.where}: {d}" for d in differ(one.answer, target)]
        if kind.size:
            problems += [f"{query.where}: {d}" for d in _counts(reference, query.input, one)]
    return problems


def _counts(reference: ReferencePipeline, text: str, one: Answered) -> Iterator[str]:
    """Yield differences in the numbers of tokens of a text, and of tokens that were read."""
    with quiet():
        parts = reference.contract.template or ("", "", "")  # the text is a document
        prompted = reference.contract.vectors.text + parts[0] + parts[1] + text + parts[2]
        whole = len(reference.tokenizer(prompted, add_special_tokens=not any(parts))["input_ids"])
    yield from differ(
        {"tokens": one.tokens, "read": one.kept},
        {"tokens": whole, "read": min(whole, reference.contract.text.max_length)},
    )


def compare_generated(
    tokenizer: Any, prompt: Sequence[int], completion: Completion, new: int
) -> list[str]:
    """Return a problem for each wrong field of the harness's answer to a prompt, where no token may
    end the text.
    tokenizer: transformers' own
    new: number of requested tokens
    """

    def read(ids: Sequence[int]) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(ids, **options))

    before, whole = read(prompt), read([*prompt, *completion.tokens])
    target = {
        "text": whole[len(before) :] if whole.startswith(before) else FREE,
        "tokens": new,
        "finish": "length",
        "prompt_tokens": len(prompt),
        "stop": None,
    }
    return list(differ(completion.to_json(), target))
