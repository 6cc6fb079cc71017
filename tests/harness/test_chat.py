"""Chat templates, judged by transformers."""

from dataclasses import replace
from typing import Any

import pytest

from optimizer.harness.errors import InputError
from optimizer.harness.generate.chat import compiled, render
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
        ("x" * 1_000_001, "1,000,001 characters"),
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
