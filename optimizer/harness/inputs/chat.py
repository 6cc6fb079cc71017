"""Lay a conversation out as the text the model was trained on, by its chat template.

Templates are Jinja and come with the checkpoint: they see plain data only, and run in a process of
their own with limits of time and memory (template_process.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..errors import InputError, MachineError
from .template_process import NotJinja, Refused, TooMuch, renderer

if TYPE_CHECKING:
    from ..contract import Contract


def render(
    contract: Contract, tokenizer: Any, messages: Sequence[Mapping[str, Any]], where: str
) -> str:
    """The prompt's text, up to where the assistant's answer begins.

    messages: {"role", "content"} each, and what else the template reads. Raises InputError naming
    `where`: a message without a role, no template, or one that refuses this conversation or takes
    too much for it; MachineError without jinja2.
    """
    template = contract.decoder.chat_template
    if template is None:
        raise InputError(
            "the model has no chat template", where=where, fix="Give the prompt as a text."
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
            "jinja2, which chat templates are written for, is not installed",
            where=where,
            fix="pip install jinja2",
        )
    try:
        return laid_out(template, messages, _special_tokens(contract, tokenizer))
    except (NotJinja, Refused, TooMuch) as e:
        raise InputError(f"the chat template refuses it ({e!s:.300})", where=where) from None
    except (TypeError, ValueError, RecursionError) as e:
        raise InputError(f"messages are not plain data ({e})", where=where) from None


def laid_out(
    template: str, messages: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, str]
) -> str:
    """The text of a conversation.

    special_tokens: {"bos_token", "eos_token", "pad_token": text}, of which each may be absent.
    Raises what Renderer.render does.
    """
    variables = {
        "messages": list(messages),
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
        **special_tokens,
    }
    return renderer().render(template, variables)


def _special_tokens(contract: Contract, tokenizer: Any) -> dict[str, str]:
    """Those that the tokenizer has; a template prints nothing for the others."""
    ids = {"bos_token": contract.decoder.bos_id, "eos_token": contract.decoder.eos_ids[0]}
    tokens = {n: tokenizer.id_to_token(i) for n, i in ids.items() if i is not None}
    tokens["pad_token"] = contract.text.pad_token
    return {n: t for n, t in tokens.items() if t is not None}
