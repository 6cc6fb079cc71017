"""Read conversations of a data set, and render them by the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from optimizer.data.sample import Sample
from optimizer.foundation.errors import DataError
from optimizer.harness.contract import Contract
from optimizer.harness.errors import InputError
from optimizer.harness.inputs import chat

ROLES = {"human": "user", "gpt": "assistant"}  # of rows with keys from and value: ShareGPT's
TODAY = "2024-07-26"
"""Date that templates print in data, so that rows have the same tokens on every day."""


def parse(value: Any, where: str) -> tuple[Mapping[str, str], ...]:
    """Read the messages of a conversation in a data set's column.

    value: a list of {"role", "content"} or of {"from", "value"}, or this list as JSON text, as csv
        files hold it
    where: the row, for messages

    Keys without a value are left out, because `datasets` gives every message of a file the same
    keys. Raises DataError for any other value, and for a content that is not a text.
    """
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise DataError(
            f"{str(value)[:80]} is not a list of messages",
            where=where,
            accepted='[{"role": "user", "content": "..."}, {"role": "assistant", ...}], in a csv '
            "file as JSON",
        )
    parsed = []
    for i, message in enumerate(value):
        present = {str(key): value for key, value in message.items() if value is not None}
        if "role" not in present and {"from", "value"} <= set(present):
            sender, content = present.pop("from"), present.pop("value")
            present |= {"role": ROLES.get(str(sender), sender), "content": content}
        for key in ("role", "content", *present):
            if not isinstance(present.get(key), str):
                keys = ", ".join(present)
                missing = f"is missing; its keys are {keys[:60]}"
                problem = f"is {str(present[key])[:60]}" if key in present else missing
                raise DataError(
                    f"{key} of message {i} {problem}",
                    where=where,
                    accepted="role and content, and other keys of the template, as texts",
                    fix="Name the keys so, or render the conversations to texts, and give them as "
                    "column text.",
                )
        parsed.append(present)
    return tuple(parsed)


def join_messages(messages: Sequence[Mapping[str, str]]) -> str:
    """Join a data set's conversation without a chat template: one line "role: content" per
    message."""
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def render(rows: Sequence[Sample], contract: Contract, tokenizer: Any) -> list[Sample]:
    """Return rows of a data set with conversations rendered by the model's chat template. Other
    rows, and those that are rendered already, stay as they are.

    tokenizer: result of inputs.text.load_tokenizer

    Raises DataError for a model without a template, and for a conversation that it rejects.
    """
    return [_render(row, contract, tokenizer) if row.messages else row for row in rows]


def _render(row: Sample, contract: Contract, tokenizer: Any) -> Sample:
    assert row.messages is not None
    if contract.decoder.chat_template is None:
        raise DataError(
            "the data are conversations (columns.messages), and the model has no chat template",
            where=f"{contract.task} data",
            accepted="a column of texts: columns: {text: COLUMN}",
            fix="Use the model that was trained on conversations, or save the template in its "
            "tokenizer (chat_template.jinja).",
        )
    where = f"{contract.task} data: the conversation {row.text[:60]!r}"
    try:
        text = chat.render(
            contract, tokenizer, row.messages, where, add_generation_prompt=False, now=TODAY
        )
    except InputError as e:
        raise DataError(e.problem, where=e.where, accepted=e.accepted, fix=e.fix) from None
    return replace(row, text=text, messages=())
