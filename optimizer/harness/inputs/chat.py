"""Render a conversation to the model's prompt text with its chat template.

Templates are Jinja programs from the checkpoint. They see plain data only, and run in a separate
process with limits on time and memory (template_process.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..errors import InputError, MachineError
from .template_process import NotJinja, Rejected, TooMuch, renderer

if TYPE_CHECKING:
    from ..contract import Contract


def render(
    contract: Contract,
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    where: str,
    *,
    add_generation_prompt: bool = True,
    now: str | None = None,
) -> str:
    """Render a chat to the prompt text up to the start of the assistant's answer.

    messages: {"role", "content"} each, and other keys that the template reads.
    add_generation_prompt: False for a conversation that ends with its last message.
    now: ISO date that a template prints as today's; None: today.
    Raises InputError naming `where` for a message without a role, a model without a template, or
    a template that rejects the conversation or exceeds a limit; MachineError without jinja2.
    """
    template = contract.decoder.chat_template
    if template is None:
        raise InputError(
            "the model has no chat template", where=where, fix="Give the prompt as plain text."
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(
                f"message {i} has no role",
                where=where,
                accepted='{"role": "user", "content": "..."}',
            )
    if find_spec("jinja2") is None:
        raise MachineError(
            "jinja2, which renders chat templates, is not installed",
            where=where,
            fix="pip install jinja2",
        )
    try:
        special_tokens = _special_tokens(contract, tokenizer)
        return apply_template(
            template,
            messages,
            special_tokens,
            add_generation_prompt=add_generation_prompt,
            now=now,
        )
    except (NotJinja, Rejected, TooMuch) as e:
        raise InputError(
            f"the chat template rejects the conversation ({e!s:.300})", where=where
        ) from None
    except (TypeError, ValueError, RecursionError) as e:
        raise InputError(f"messages are not plain data ({e})", where=where) from None


def apply_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool = True,
    now: str | None = None,
) -> str:
    """Return the prompt text: a chat's messages rendered with a template.

    special_tokens: {"bos_token", "eos_token", "pad_token": text}, each optional.
    add_generation_prompt, now: see `render`.
    Raises the errors of Renderer.render.
    """
    variables = {
        "messages": list(messages),
        "tools": None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        **special_tokens,
    }
    return renderer().render(template, variables, now)


def _special_tokens(contract: Contract, tokenizer: Any) -> dict[str, str]:
    """Return for a chat template the special tokens that the tokenizer has; templates print nothing
    for the others."""
    ids = {"bos_token": contract.decoder.bos_id, "eos_token": contract.decoder.eos_ids[0]}
    tokens = {n: tokenizer.id_to_token(i) for n, i in ids.items() if i is not None}
    tokens["pad_token"] = contract.text.pad_token
    return {n: t for n, t in tokens.items() if t is not None}
