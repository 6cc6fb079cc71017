"""Chat templates, judged by transformers."""

import json
from dataclasses import replace
from typing import Any

import pytest

from optimizer.harness.errors import InputError
from optimizer.harness.generate.chat import compiled, render
from optimizer.harness.generate.sandbox import PER_CHARACTER, UNITS, WORK, Work
from tests.decoders import TEMPLATE

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " <b>Grüße</b> "},
    {"role": "assistant", "content": "Hi.", "tool_calls": [{"name": "f", "x": [1, "ä<"]}]},
    {"role": "user", "content": "Go on"},
]
TEMPLATES = {
    "plain": TEMPLATE,
    "tojson": "{% for m in messages %}{{ m | tojson }}\n{{ m | tojson(indent=2) }}{% endfor %}",
    "loop controls": (
        "{% for m in messages %}\n{% if m.role == 'system' %}\n{% continue %}\n{% endif %}\n"
        "{{ m.content }}{% if loop.index > 2 %}{% break %}{% endif %}\n{% endfor %}\n"
    ),
    "special tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ unk_token }}|",
    "generation": (
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
        "{% endfor %}{{ ns.n }}{{ dict(a=1).a }}"
    ),
    "whitespace": "  {% if tools %}\n x\n  {% endif %}\n{{ messages[1].content | trim }}\n",
    "date": "{{ strftime_now('%Y') }}{{ messages[0]['role'] }}{{ documents is none }}",
    "prompt": "{% if add_generation_prompt %}A:{% endif %}",
}


def with_template(contract: Any, template: str | None) -> Any:
    return replace(contract, generation=replace(contract.generation, chat_template=template))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(
    name: str, contract: Any, tokenizer: Any, decoder_folder: Any
) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(decoder_folder)
    wanted = theirs.apply_chat_template(
        CHAT, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )
    assert render(with_template(contract, TEMPLATES[name]), tokenizer, CHAT, "here") == wanted


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('no system turn') }}", "refuses it .no system turn"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses it"),
        ("{% set ns = namespace() %}{% set ns.__init__ = 1 %}", "refuses it"),
        ("{% for %}", "refuses it"),
        ("x" * 100_001, "100,001 characters"),
    ],
)
def test_a_template_that_refuses_or_reaches_out_is_an_error(
    template: str | None, message: str, contract: Any, tokenizer: Any
) -> None:
    with pytest.raises(InputError, match=message):
        render(with_template(contract, template), tokenizer, CHAT, "here")


def test_a_template_cannot_change_the_messages(contract: Any, tokenizer: Any) -> None:
    with pytest.raises(InputError, match="refuses it"):
        render(with_template(contract, "{{ messages.append(1) }}"), tokenizer, CHAT, "here")


def test_messages_are_plain_data(contract: Any, tokenizer: Any) -> None:
    with pytest.raises(InputError, match="plain data"):
        render(contract, tokenizer, [{"role": "user", "content": object()}], "here")


@pytest.mark.parametrize(
    "constant", ["10**(10**8)", "'a' * 10**10", "'%9999999999d' % 1", "'a' | center(10**10)"]
)
def test_nothing_is_worked_out_where_a_template_is_compiled(constant: str) -> None:
    compiled(f"{{{{ {constant} }}}}{{% if {constant} %}}{{% endif %}}{{% set a = {constant} %}}")


NESTED = "{% set n = namespace(x=['a'], y=['a']) %}{% for i in range(60) %}" + "".join(
    f"{{% set n.{v} = [n.{v}, n.{v}] %}}" for v in "xy"
)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 10**(10**8) }}",
        "{{ 'a' * 10**10 }}",
        "{{ 'a' | center(10**10) }}{{ 'a'.center(10**10) }}",
        "{{ '%9999999999d' % 1 }}{{ '{:9999999999}'.format(1) }}",
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}",
        NESTED + "{% endfor %}{{ n.x == n.y }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ range(99999) | select('none') | first }}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60)}}",
        "{% set x = 'a' * 10**7 %}{% for i in range(99999) %}{% if x[1:] %}{% endif %}{% endfor %}",
        "{{ ('x\n' * 10**5) | indent(10**5) }}",
        "{{ ','.join(['a' * 10**5] * 10**5) }}",
    ],
)
def test_a_template_that_takes_too_much_is_stopped(
    template: str, contract: Any, tokenizer: Any
) -> None:
    with pytest.raises(InputError, match=r"refuses it \((it computes|\*\* makes|a field)"):
        render(with_template(contract, template), tokenizer, CHAT, "here")


@pytest.mark.parametrize(("messages", "characters"), [(2000, 5), (1, 500_000)])
def test_a_long_conversation_takes_a_tenth_of_what_it_may(messages: int, characters: int) -> None:
    template = (
        "{% set ns = namespace(last=0) %}{% for m in messages[1:] %}"
        "{% if m.role == 'user' and m.content is string %}{% set ns.last = loop.index0 %}"
        "{% endif %}"
        "{% if '</t>' in m.content %}{{ m.content.split('</t>')[-1].lstrip() }}{% endif %}"
        "{{ '<' + m.role + '>' + m.content | trim + '</s>' }}"
        "{% if loop.index0 == messages | length - 1 %}{{ m | tojson }}{% endif %}{% endfor %}"
    )
    chat = [{"role": "user", "content": "x" * characters}] * messages
    work = Work((UNITS + PER_CHARACTER * len(json.dumps(chat))) // 10)
    compiled(template).render(messages=chat, **{WORK: work})
