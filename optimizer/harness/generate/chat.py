"""Lay a conversation out as the text the model was trained on, by its chat template.

Templates are Jinja and come with the checkpoint, so they run in a sandbox (sandbox.py) and see
plain data only. The environment is that of transformers (utils/chat_template_utils.py), without
which published templates do not render alike: blocks trimmed, loop controls, a {% generation %}
block that prints its body, tojson without HTML escapes, raise_exception, strftime_now, and a dict
and a namespace through which a template cannot reach into Python.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..errors import InputError, MachineError

if TYPE_CHECKING:
    from ..contract import Contract

TEMPLATE = 100_000  # characters; a long published one has 20,000. Compiled in 5 s at most


def render(
    contract: Contract, tokenizer: Any, messages: Sequence[Mapping[str, Any]], where: str
) -> str:
    """The prompt's text, up to where the assistant's answer begins.

    messages: {"role", "content"} each, and what else the template reads. Raises InputError naming
    `where`: a message without a role, no template, or one that refuses this conversation;
    MachineError without jinja2.
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
    try:
        plain = json.loads(json.dumps(list(messages)))
    except (TypeError, ValueError) as e:
        raise InputError(f"messages are not plain data ({e})", where=where) from None
    try:
        from jinja2 import TemplateError
    except ImportError:
        raise MachineError(
            "jinja2, which chat templates are written for, is not installed",
            where=where,
            fix="pip install jinja2",
        ) from None
    try:
        return laid_out(template, plain, _special_tokens(contract, tokenizer))
    except Exception as e:  # a template is a program of the checkpoint's, in a sandbox
        why = str(e) if isinstance(e, TemplateError) else f"{type(e).__name__}: {e}"
        raise InputError(f"the chat template refuses it ({why:.300})", where=where) from None


def laid_out(template: str, messages: list[Any], special_tokens: Mapping[str, str]) -> str:
    """The text of a conversation.

    special_tokens: {"bos_token", "eos_token", "pad_token": text}, of which each may be absent.
    Raises sandbox.TooMuch for a template that takes too much memory or time, TemplateError for
    what it refuses by itself, and whatever else its expressions raise.
    """
    from .sandbox import PER_CHARACTER, UNITS, WORK, Work

    size = len(json.dumps(messages))
    return str(
        compiled(template).render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **special_tokens,
            **{WORK: Work(UNITS + PER_CHARACTER * size)},
        )
    )


def _special_tokens(contract: Contract, tokenizer: Any) -> dict[str, str]:
    """Those that the tokenizer has; a template prints nothing for the others."""
    ids = {"bos_token": contract.decoder.bos_id, "eos_token": contract.decoder.eos_ids[0]}
    tokens = {n: tokenizer.id_to_token(i) for n, i in ids.items() if i is not None}
    tokens["pad_token"] = contract.text.pad_token
    return {n: t for n, t in tokens.items() if t is not None}


@lru_cache(maxsize=8)
def compiled(template: str) -> Any:
    """The template, ready to be rendered; nothing of it is worked out here. Raises jinja2's
    TemplateError for what is no Jinja, or has more than TEMPLATE characters."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.utils import Namespace

    from .sandbox import Sandbox

    if len(template) > TEMPLATE:
        raise TemplateError(f"it has {len(template):,} characters; {TEMPLATE:,} at most are read")

    class GenerationBlock(Extension):
        """{% generation %}...{% endgeneration %} marks the assistant's words for training."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class PlainNamespace(Namespace):
        """Without underscored names, which reach into Python."""

        def __init__(*args: Any, **values: Any) -> None:
            self, *pairs = args
            Namespace.__init__(self)
            for name, value in dict(*pairs, **values).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise SecurityError(f"a template cannot set {name!r} of a namespace")
            super().__setitem__(name, value)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.add_filter("tojson", _tojson)
    environment.globals["namespace"] = PlainNamespace
    environment.globals["dict"] = lambda *pairs, **values: dict(*pairs, **values)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.bounded(environment.parse(template))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
