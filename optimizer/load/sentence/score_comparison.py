"""Compare our reading of a cross-encoder with `CrossEncoder(folder).predict`.

compared   logits of pairs of texts made of the tokenizer's own words, one pair beyond max_length:
           the written checkpoint in torch, through the harness, beside the library in float32; and
           the contract's activation of the library's logits beside the library's scores
limit      of logits a tolerance bound of the distance between two runs in float32, from the errors
           of ours against float64; of scores the rounding of float32
caught     another activation, length or weight: tests/load/sentence/test_cross_encoder.py
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.progress import say
from optimizer.foundation.reading import quote_error
from optimizer.foundation.rounding.tolerance import UNIT, normal_bound
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.pair_template import count_full_lengths
from optimizer.harness.tasks.text_classification import activated
from optimizer.load.config.model_folder import model_folder
from optimizer.load.preparation import Described
from optimizer.load.sentence import cross_encoder, library, logit_score
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.recipe.answers import split_template

PAIRS = 32
ACTIVATION = 4 * UNIT["fp32"]  # of a score, from its logit: two roundings of a sigmoid

Scores = NDArray[np.float32]
Pairs = Sequence[tuple[str, str]]


def compare(d: Described, out: Path) -> None:
    """Check at load our reading of a cross-encoder: raise CheckpointError where it scores a pair
    otherwise than the library; where the library cannot be run, say so.

    out: folder that load wrote
    """
    contract = contracts.read(out / "contract.json")
    saved = contract.activation is not None and cross_encoder.read_settings(d.root) is not None
    if not d.task.ranks and not saved:
        return
    if why := library.explain_not_run(d):
        say(f"load: scores are not compared with CrossEncoder.predict: {why}")
        return
    encoder = d.task.inputs.open(out / "checkpoint", contract)
    pairs, long = _pairs(contract, encoder, library.limit_texts(PAIRS, d))
    try:
        theirs = _open(d)
        logits, scores = _theirs(theirs, pairs)
    except Exception as e:  # whatever the library or the model's code raises
        say(f"load: scores are not compared: CrossEncoder does not answer ({quote_error(e)[:200]})")
        return
    if d.section.max_length is None and contract.text.max_length <= library.LONGEST:
        try:
            more = _theirs(theirs, [long])
        except Exception:  # of a library that takes more tokens than the model has positions
            pass
        else:
            pairs, logits, scores = (
                [*pairs, long],
                np.concatenate([logits, more[0]]),
                np.concatenate([scores, more[1]]),
            )
    del theirs
    model = load_torch_model(open_checkpoint(out), contract.task)
    mine = _logits(contract, encoder, model, pairs)
    limit = _limit(mine, _logits(contract, encoder, model.double(), pairs))
    apart = np.abs(mine - logits).ravel()
    at = int(np.argmax(apart))
    if not apart[at] <= limit:
        _refuse(d, pairs[at], "logit", mine[at], logits[at])
    ours = activated(contract, logits)
    differ = np.abs(ours - scores) > ACTIVATION * np.maximum(np.abs(scores), 1)
    if differ.any():
        at = int(np.argmax(differ))
        _refuse(d, pairs[at], "score", ours[at], scores[at])
    say(
        f"load: {len(pairs)} pairs have the scores of sentence-transformers' CrossEncoder (logits "
        f"apart by at most {apart[at]:.2g}; rounding alone may do {limit:.2g})"
    )


def _pairs(contract: Contract, encoder: Any, count: int) -> tuple[Pairs, tuple[str, str]]:
    """Draw pairs for load's comparison of a cross-encoder: (up to `count` pairs that the model
    reads whole, a pair that is cut). encoder: the harness's tokenizer."""
    own = library.draw_words(encoder, 100 * PAIRS)

    def text(start: int, size: int) -> str:
        return " ".join(own[(start + j) % len(own)] for j in range(size))

    each = [(text(7 * i, 1 + i % 5).title(), text(11 * i + 3, 1 + i % 12)) for i in range(count)]
    longest = contract.text.max_length
    sizes = count_full_lengths(contract, encoder, *map(list, zip(*each, strict=True)))
    pairs = zip(each, sizes, strict=True)
    whole = [pair for pair, size in pairs if size <= longest] or [(own[0], own[-1])]
    return whole, (text(1, longest // 2), text(5, longest))


def _logits(contract: Contract, encoder: Any, model: nn.Module, pairs: Pairs) -> Scores:
    """Compute for load's comparison of a cross-encoder the harness's logits (pairs, 1), each pair
    by itself, in the float type of the model."""
    each = []
    for query, document in pairs:
        batch = tasks.encode(contract, encoder, [query], [document])
        with torch.no_grad():
            output = model(**{name: torch.from_numpy(array) for name, array in batch.items()})
        each.append(getattr(output, tasks.look_up(contract).output).numpy())
    return np.concatenate(each)


def _limit(logits: Scores, exact: Scores) -> float:
    """Bound, for load's comparison of a cross-encoder, the distance of the logits of two runs in
    float32, which have the errors of both. exact: logits in float64."""
    errors = (logits - exact).ravel()
    both = np.concatenate([errors, -errors]).tolist()
    least = UNIT["fp32"] * float(np.abs(exact).max())
    return max(2 * normal_bound(both, len(errors)), least)


def _open(d: Described) -> Any:
    with quiet():
        from sentence_transformers import CrossEncoder

        options: dict[str, Any] = {}
        if d.section.template is not None:
            options["processor_kwargs"] = {"chat_template": _template(d.section.template)}
        model = CrossEncoder(
            str(d.root),
            device="cpu",
            local_files_only=True,
            trust_remote_code=d.section.trust_remote_code,
            **options,
        )
        # in float32 two logits of the head round by more than our one, whose limit would not hold
        scored = logit_score.takes(d.section, model_folder(d.root))
        return model.double() if scored else model.float()


def _template(parts: str) -> str:
    """A chat template, in Jinja, that prints the text of a pair as model.template does."""
    before, between, after = (
        "{{ " + json.dumps(part, ensure_ascii=False) + " }}" for part in split_template(parts)
    )
    return before + "{{ messages[-2].content }}" + between + "{{ messages[-1].content }}" + after


def _theirs(opened: Any, pairs: Pairs) -> tuple[Scores, Scores]:
    """Compute for load's comparison sentence-transformers' (logits, scores) of pairs, each (pairs,
    1), in float32."""
    rows = library.choose_batch_size(opened.tokenizer)
    with quiet():
        raw, scores = (
            opened.predict(pairs, batch_size=rows, show_progress_bar=False, **options)
            for options in ({"activation_fn": nn.Identity()}, {})
        )
    return np.float32(raw).reshape(-1, 1), np.float32(scores).reshape(-1, 1)


def _refuse(d: Described, pair: tuple[str, str], what: str, mine: Scores, other: Scores) -> None:
    raise CheckpointError(
        f"pair {pair[0][:30]!r}, {pair[1][:30]!r} has the {what} {mine.item():.6g}, and "
        f"{other.item():.6g} in sentence-transformers' CrossEncoder",
        where=str(d.root),
        accepted="a folder that is read as CrossEncoder reads it",
        fix="Save the model with CrossEncoder.save_pretrained, without settings of its own.",
    )
