"""Prompts to token ids, and token ids to a decoder's arrays.

Rows of different lengths are padded on the LEFT, so that the newest token of every row is the last
column: attention_mask is 0 where padded, and a token's position counts the real tokens before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..bounds import TEXT as LONGEST
from ..errors import InputError
from ..inputs import kv_cache
from ..inputs.batch import Array, Batch
from ..inputs.text import TEXT, check_text, tokenize
from .task import Task

if TYPE_CHECKING:
    from ..contract import Contract

NO_PAIRS = "text pairs are not supported for text-generation"

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]


def prompt_ids(contract: Contract, tokenizer: Any, prompt: Prompt, where: str) -> list[int]:
    """Token ids of one prompt: a text, a conversation, or ids that are taken as they are.

    A text gets the special tokens its tokenizer adds; a conversation is laid out by the chat
    template, which writes them itself, up to where the answer begins. Nothing is cut.
    Raises InputError naming `where` for a prompt without any token, of another type, with an id
    the model has not, or that leaves no room in the context for one more token.
    """
    spec = contract.decoder
    value: Any = prompt
    if isinstance(prompt, str):
        check_text(prompt, where)
        _check_length(prompt, where)
        ids = list(tokenize(tokenizer, [prompt])[0].ids)
    elif not isinstance(value, Sequence | np.ndarray):
        raise _no_prompt(value, where)
    elif len(prompt) and all(isinstance(t, Mapping) for t in prompt):
        from ..inputs.chat import render

        text = render(contract, tokenizer, [t for t in prompt if isinstance(t, Mapping)], where)
        check_text(text, where)
        _check_length(text, where)
        ids = list(tokenizer.encode(text, add_special_tokens=False).ids)
    elif all(isinstance(t, int | np.integer) for t in prompt):
        ids = [int(t) for t in prompt if not isinstance(t, Mapping)]
    else:
        raise _no_prompt(value, where)
    if not ids:
        raise InputError("the prompt has no token", where=where, fix="Give at least one word.")
    unknown = [i for i in ids if not 0 <= i < spec.vocabulary]
    if unknown:
        raise InputError(
            f"token id {unknown[0]} was found", where=where, accepted=f"0 to {spec.vocabulary - 1}"
        )
    if len(ids) >= spec.context:
        raise InputError(
            f"the prompt has {len(ids)} tokens",
            where=where,
            accepted=f"up to {spec.context - 1}: the context is {spec.context}, answer included",
            fix="Shorten it; nothing is cut silently.",
        )
    return ids


def _check_length(text: str, where: str) -> None:
    if len(text) > LONGEST:
        raise InputError(
            f"the prompt has {len(text):,} characters", where=where, accepted=f"up to {LONGEST:,}"
        )


def _no_prompt(value: Any, where: str) -> InputError:
    return InputError(
        f"{type(value).__name__} was found",
        where=where,
        accepted="a text, a list of messages, or a list of token ids",
    )


def arrays(contract: Contract, rows: Sequence[Sequence[int] | Array], width: int = 0) -> Batch:
    """Rows of token ids as a first step's arrays, padded on the left to the longest row.

    width: tokens to pad to where no row is as long. inputs and encodings of the batch are empty:
    the ids are what was given.
    """
    width = max(width, *map(len, rows))
    ids = np.full((len(rows), width), contract.text.pad_id, np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = row
        mask[i, width - len(row) :] = 1
    return Batch(_inputs(contract, ids, mask), (), (), mask.astype(bool))


def next_arrays(contract: Contract, ids: Array, mask: Array) -> dict[str, Array]:
    """A later step's arrays: ids (batch, new) and the mask (batch, total) of everything so far."""
    return _inputs(contract, ids, mask)


def decode(contract: Contract, logits: Array, mask: Array) -> Array:
    """logits (batch, sequence, vocabulary), zero where padded. mask (batch, past + sequence)."""
    del contract
    new = mask[:, mask.shape[1] - logits.shape[1] :]
    return np.where(new[..., None], logits, np.float32(0))


def answers(contract: Contract, values: Array, batch: Batch) -> list[Any]:
    """Raises InputError: a text is more than one run of the model."""
    del values, batch
    raise InputError("logits are no text", where=contract.task, fix="Use generate().")


def _inputs(contract: Contract, ids: Array, mask: Array) -> dict[str, Array]:
    arrays = {"input_ids": ids, "attention_mask": mask}
    arrays["position_ids"] = kv_cache.position_ids(mask, ids.shape[1])
    return {i.name: arrays[i.name].astype(i.dtype, copy=False) for i in contract.inputs}


def tensors(contract: Contract) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The text that follows."""
    del contract
    return {"text": ("object", ())}


def line(answer: Mapping[str, Any]) -> str:
    """The text, as it is."""
    return str(answer["text"])


TASK = Task(
    name="text-generation",
    inputs=TEXT,
    output="logits",
    axes=("batch", "sequence", "vocabulary"),
    metrics={"perplexity": ()},
    decode=decode,
    answers=answers,
    line=line,
    tensors=tensors,
    arrays=("position_ids",),
    sections=("generation",),
    calibration_items="windows",
    requires=("jinja2",),  # chat templates
    model="transformers:AutoModelForCausalLM",
    heads=("ForCausalLM", "LMHeadModel"),
    not_in_browser="the page keeps no cache, without which each token costs a whole text",
)
