"""Chat templates render as in transformers, and within limits."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optimizer.harness.errors import InputError, MachineError
from optimizer.harness.inputs import chat, template_process
from optimizer.harness.inputs.chat import apply_template, render
from optimizer.harness.inputs.template_process import Rejected, Renderer, TooMuch
from tests import killing
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
        ("{{ raise_exception('no system turn') }}", "rejects the conversation .no system turn"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "rejects the conversation"),
        ("{% set ns = namespace() %}{% set ns.__init__ = 1 %}", "rejects the conversation"),
        ("{% for %}", "rejects the conversation"),
        ("x" * 100_001, "100,001 characters"),
    ],
)
def test_a_template_that_refuses_or_reaches_out_is_an_error(
    template: str | None, message: str, contract: Any, tokenizer: Any
) -> None:
    with pytest.raises(InputError, match=message):
        render(with_template(contract, template), tokenizer, CHAT, "here")


def test_a_template_cannot_change_the_messages(contract: Any, tokenizer: Any) -> None:
    with pytest.raises(InputError, match="rejects the conversation"):
        render(with_template(contract, "{{ messages.append(1) }}"), tokenizer, CHAT, "here")


def test_messages_are_plain_data(contract: Any, tokenizer: Any) -> None:
    with pytest.raises(InputError, match="plain data"):
        render(contract, tokenizer, [{"role": "user", "content": object()}], "here")


MEMORY = 64 << 20


@pytest.fixture(scope="module")
def small() -> Iterator[Renderer]:
    """Renderer with lower limits of time and memory."""
    renderer = Renderer(0.1, MEMORY)
    yield renderer
    renderer.close()


LONG = "('ab' * 10**6)"
ENDLESS = (
    f"{LONG}.rfind('b' * 10**5 + 'a' + 'b' * 10**5)",
    f"{LONG}.rsplit('a' * 10**4 ~ 'c')",
    f"{LONG}.rpartition('a' * 10**4 ~ 'c')",
    f"{LONG}.strip('b' * 10**6 ~ 'a')",
    "('a' * 10**6).translate({97: 'b' * 1000})",
    "('a' * 10**6) | replace('a', 'b' * 1000)",
    "('a ' * 10**6) | wordwrap(1)",
    "10**(10**8)",
    "'a' * 10**10",
    "'a' | center(10**10)",
    "'%9999999999d' % 1",
    "('x\n' * 10**5) | indent(10**5)",
    "','.join(['a' * 10**5] * 10**5)",
)
FOR = "{% for i in range(99999) %}"
END = "{% endfor %}"
PROGRAMS = (
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ " + "(" * 20_000 + ")" * 20_000 + " }}",
    "{% set n = namespace(x='aa') %}" + FOR + "{% set n.x = n.x ~ n.x %}" + END,
    "{% set n = namespace(x=['a'], y=['a']) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}"
    "{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    FOR + "{% for j in range(99999) if false %}" + END + END,
    *(f"{FOR}{FOR}{{{{ ({call}) | string | length }}}}{END}{END}" for call in ENDLESS),
)


@pytest.mark.parametrize("template", PROGRAMS)
def test_no_template_takes_more_than_its_time_and_memory(template: str, small: Renderer) -> None:
    with pytest.raises(TooMuch, match=r"0\.1 seconds of processor time, 64 MiB"):
        small.render(template, {})
    assert small.render("{{ 1 }}", {}) == "1"


def test_memory_is_limited(small: Renderer) -> None:
    assert small.render("{{ ('a' * (16 * 2**20)) | length }}", {}) == str(16 << 20)
    with pytest.raises(TooMuch, match="MemoryError"):
        small.render("{{ ('a' * (65 * 2**20)) | length }}", {})


def test_time_ends_it_where_the_system_counts_no_processor_time() -> None:
    renderer = Renderer(seconds=0, wall=0.5)  # a timer of 0 never ends anything
    with pytest.raises(TooMuch, match="ended with code -9"):
        renderer.render(FOR * 3 + END * 3, {})
    renderer.close()


def test_an_endless_text_is_not_read(small: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "REPLY", 1 << 20)
    with pytest.raises(TooMuch, match="1 MiB of text"):
        small.render("{{ 'a' * 2**20 }}", {})


@pytest.mark.parametrize("seed", range(3))
def test_methods_and_filters_of_long_texts_end(seed: int) -> None:
    """Arbitrary templates, some slow or large, never end this process."""
    from jinja2.filters import FILTERS

    texts = (LONG, "('a' * 10**5)", "(['a'] * 10**5)")
    arguments = ("", "'a' * 10**5 ~ 'b'", "10**9", "'a', 'c' * 10**5", "{97: 'x' * 10**5}")
    calls = [f".{m}" for m in dir(str) if not m.startswith("_")] + [f" | {f}" for f in FILTERS]
    short, random = Renderer(0.05, MEMORY), np.random.default_rng(seed)
    for _ in range(15):
        text, call, given = (random.choice(part) for part in (texts, calls, arguments))
        with suppress(TooMuch, Rejected):
            short.render(f"{FOR}{{{{ ({text}{call}({given})) | string | length }}}}{END}", {})
    assert short.render("{{ 1 }}", {}) == "1"
    short.close()


def test_a_long_conversation_is_rendered() -> None:
    template = (
        "{% set ns = namespace(last=0) %}{% for m in messages[1:] %}"
        "{% if m.role == 'user' and m.content is string %}{% set ns.last = loop.index0 %}"
        "{% endif %}"
        "{% if '</t>' in m.content %}{{ m.content.split('</t>')[-1].lstrip() }}{% endif %}"
        "{{ '<' + m.role + '>' + m.content | trim + '</s>' }}"
        "{% if loop.index0 == messages | length - 1 %}{{ m | tojson }}{% endif %}{% endfor %}"
    )
    many = [{"role": "user", "content": "x" * 50}] * 20_000
    assert apply_template(template, many, {}).count("</s>") == 19_999
    long = [{"role": "user", "content": "x" * 1_000_000}] * 2
    assert len(apply_template(template, long, {})) > 1_000_000


def test_threads_get_their_own_texts() -> None:
    made: dict[int, str] = {}

    def work(i: int) -> None:
        made[i] = apply_template(
            "{{ messages[0].content }}", [{"role": "user", "content": str(i)}], {}
        )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == {i: str(i) for i in range(20)}


def test_a_fork_has_a_process_of_its_own() -> None:
    assert apply_template("{{ 1 }}", [], {}) == "1"

    def work() -> None:
        assert apply_template("{{ 2 }}", [], {}) == "2"

    assert killing.wait(killing.start(work)) == 0
    assert apply_template("{{ 3 }}", [], {}) == "3"


def test_a_process_that_somebody_killed_is_started_again(small: Renderer) -> None:
    assert small.render("{{ 1 }}", {}) == "1"
    child = small._child
    assert child is not None
    child.kill()
    child.wait()
    assert small.render("{{ 2 }}", {}) == "2"


def test_texts_keep_every_character() -> None:
    text = "a\n\r\0\ud800 \U0001f600\u2028"
    assert apply_template("{{ messages[0].content }}", [{"content": text}], {}) == text


def test_without_jinja_it_is_the_machine(
    contract: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "find_spec", lambda _: None)
    with pytest.raises(MachineError, match="pip install jinja2"):
        render(contract, tokenizer, CHAT, "here")
