"""text-generation: encode prompts as token ids, and token ids as input arrays of the model.

Rows of different lengths are padded on the LEFT, so that the last column holds the newest token of
every row. attention_mask is 0 where padded, and a token's position id counts the real tokens before
it. The generation loop is in generate/.
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


def tokenize_prompt(contract: Contract, tokenizer: Any, prompt: Prompt, where: str) -> list[int]:
    """Return the token ids of one prompt of the task text-generation: a text, a conversation, or
    token ids.

    The tokenizer adds its special tokens to a text. A conversation is rendered by the chat
    template, which writes special tokens itself. Nothing is truncated.
    Raises InputError naming `where` for a prompt without tokens, of another type, with an id
    outside the vocabulary, or that fills the context.
    """
    spec = contract.decoder
    value: Any = prompt
    if isinstance(prompt, str):
        check_text(prompt, where)
        _check_length(prompt, where)
        ids = list(tokenize(tokenizer, [prompt])[0].ids)
    elif not isinstance(value, Sequence | np.ndarray):
        raise _wrong_type(value, where)
    elif len(prompt) and all(isinstance(t, Mapping) for t in prompt):
        from ..inputs.chat import render

        text = render(contract, tokenizer, [t for t in prompt if isinstance(t, Mapping)], where)
        check_text(text, where)
        _check_length(text, where)
        ids = list(tokenizer.encode(text, add_special_tokens=False).ids)
    elif all(isinstance(t, int | np.integer) for t in prompt):
        ids = [int(t) for t in prompt if not isinstance(t, Mapping)]
    else:
        raise _wrong_type(value, where)
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
            accepted=f"up to {spec.context - 1}; the context holds {spec.context}, answer included",
            fix="Shorten it; prompts are not truncated.",
        )
    return ids


def _check_length(text: str, where: str) -> None:
    if len(text) > LONGEST:
        raise InputError(
            f"the prompt has {len(text):,} characters", where=where, accepted=f"up to {LONGEST:,}"
        )


def _wrong_type(value: Any, where: str) -> InputError:
    return InputError(
        f"{type(value).__name__} was given",
        where=where,
        accepted="a text, a list of messages, or a list of token ids",
    )


def arrays(contract: Contract, rows: Sequence[Sequence[int] | Array], width: int = 0) -> Batch:
    """Return the decoder's input arrays for prefill, padded on the left to the longest prompt.

    rows: token ids of each prompt.
    width: minimum width in tokens.
    """
    width = max(width, *map(len, rows))
    ids = np.full((len(rows), width), contract.text.pad_id, np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = row
        mask[i, width - len(row) :] = 1
    return Batch(_inputs(contract, ids, mask), (), (), mask.astype(bool))


def build_step_arrays(contract: Contract, ids: Array, mask: Array) -> dict[str, Array]:
    """Return the decoder's input arrays for a step of text generation.

    ids: new tokens (batch, new).
    mask: attention mask of all tokens so far (batch, total).
    """
    return _inputs(contract, ids, mask)


def decode(contract: Contract, logits: Array, mask: Array) -> Array:
    """Return, as the task's output, next-token logits (batch, sequence, vocabulary), zero where
    padded.

    mask: (batch, past + sequence), False where padded
    """
    del contract
    new = mask[:, mask.shape[1] - logits.shape[1] :]
    return np.where(new[..., None], logits, np.float32(0))


def answers(contract: Contract, values: Array, batch: Batch) -> list[Any]:
    """Raise InputError, because the task text-generation takes more than one run of the model."""
    del values, batch
    raise InputError("the result of one run is logits", where=contract.task, fix="Call generate().")


def _inputs(contract: Contract, ids: Array, mask: Array) -> dict[str, Array]:
    arrays = {"input_ids": ids, "attention_mask": mask}
    arrays["position_ids"] = kv_cache.position_ids(mask, ids.shape[1])
    return {i.name: arrays[i.name].astype(i.dtype, copy=False) for i in contract.inputs}


def tensors(contract: Contract) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {field of a generated text's answer: (dtype, shape per input)} for servers that send
    arrays."""
    del contract
    return {"text": ("object", ())}


def line(answer: Mapping[str, Any]) -> str:
    """Return the generated text of the task's answer, for a person."""
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
    multiline=True,
    not_in_browser="the page has no KV cache, so that each token would cost a full prefill",
)
