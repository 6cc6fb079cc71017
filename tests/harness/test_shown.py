"""Messages and answers hold no secret, and nothing that a terminal or a CI runner acts on."""

from __future__ import annotations

import json
import random
import re

import pytest

from optimizer.harness.shown import (
    JOINERS,
    Pieces,
    escape_line,
    escape_lines,
    has_credentials,
    scrub,
    scrub_document,
)

ACTING = [
    "\x1b[31m",
    "\x1b]0;title\x07",
    "\x9b1A",
    "\r",
    "\x7f",
    "\x00",
    "\u202e",
    "\u2066",
    "\u2028",
]
ACTING += [
    "\u2029",
    "\ud800",
    "\u200f",
    "\U000e0041",
    "::error::",
    "::set-output name=a::",
    "##[add]",
]
ACTING += ["##vso[task]", "##teamcity[x]", "\n", "\n::add-mask::", "\nerror: forged", "\t", " "]
PLAIN = ["a", "é", "日本", "👩\u200d💻", "می\u200cخواهم", "std::vector", "#", ":", "[", "\\"]
COMMAND = re.compile(r"^\s*::[A-Za-z]|##\w*\[", re.M)
SECRET = "kX7-" + "q" * 20


def texts(count: int) -> list[str]:
    draw = random.Random(7)
    return ["".join(draw.choices(ACTING + PLAIN, k=draw.randrange(1, 9))) for _ in range(count)]


def test_nothing_acts_on_a_terminal_or_a_runner() -> None:
    for text in [*ACTING, *texts(500)]:
        shown = escape_line(text)
        assert all(c.isprintable() or c in JOINERS for c in shown), ascii(text)
        assert not COMMAND.search(shown), ascii(text)
        lines = escape_lines(text)
        assert lines.count("\n") == text.count("\n")
        assert all(c.isprintable() or c in JOINERS or c in "\n\t" for c in lines), ascii(text)
        assert not COMMAND.search(lines), ascii(text)


def test_other_texts_stay_as_they_are() -> None:
    for text in PLAIN:
        assert escape_line(text) == escape_lines(text) == text


def test_a_text_in_pieces_is_shown_as_the_whole() -> None:
    draw = random.Random(11)
    parts = ["\n", "::", ":", "error", "#", "##", "vso", "[", "]", " ", "\t", "\r", "é", "a\n"]
    for _ in range(3000):
        pieces = ["".join(draw.choices(parts, k=draw.randrange(4))) for _ in range(6)]
        printed = Pieces()
        shown = [*map(printed.add, pieces), printed.end()]
        assert "".join(shown) == escape_lines("".join(pieces)), pieces
    printed = Pieces()
    assert [printed.add(piece) for piece in ("a", ":", ":b", " #", "1")] == [
        "a",
        ":",
        ":b",
        " ",
        "#1",
    ]


def test_json_stays_the_same_document() -> None:
    for text in texts(500):
        document = {text: [text, {"a": text}]}
        assert json.loads(escape_lines(json.dumps(document, indent=1))) == document


PLACES = [
    f"oci://user:{SECRET}@host/name:1",
    f"http://{SECRET}@127.0.0.1:8000/x",
    f"https://user:a/{SECRET}@host",
    f"https://user:{SECRET}@a@host",
    f"https://one/x,https://user:{SECRET}@host",
    f"mlflow:http://user:{SECRET}@host#name",
    f"oci://:{SECRET}@host:5000/name@sha256:{'0' * 64}",
    f"AGE-SECRET-KEY-1{'Q' * 20}",
    f"age-secret-key-1{'q' * 20}",
    f"Authorization: Bearer {SECRET}",
    f'{{"authorization": "Basic {SECRET}"}}',
    f"https://store/blob?X-Amz-Signature={SECRET}&b=1",
    f"https://store/blob?se=1&sig={SECRET}",
    f"AccountName=a;AccountKey={SECRET};B",
    f"-----BEGIN EC PRIVATE KEY-----\n{SECRET}\n-----END EC PRIVATE KEY-----",
    f"hf_{'q' * 24}",
    f"glpat-{'q' * 20}",
]


@pytest.mark.parametrize("place", PLACES)
def test_a_secret_is_not_shown_and_what_stands_around_it_is(place: str) -> None:
    for text in (place, f"see '{place}': before and after", json.dumps({"where": f"é {place}"})):
        clean = scrub(text)
        assert "q" * 10 not in clean.lower(), clean
        assert "***" in clean
        assert (text[:3], text[-1]) == (clean[:3], clean[-1]) or text == place
    assert json.loads(scrub(json.dumps({"a": place, "b": 1})))["b"] == 1
    assert scrub_document({"a": [place, 1, None]}) == {"a": [scrub(place), 1, None]}


@pytest.mark.parametrize("after", ["", "\\", '\\"', '"', "\n-----END PRIVATE KEY-----"])
def test_a_key_without_its_end_ends_with_its_string(after: str) -> None:
    key = f"-----BEGIN PRIVATE KEY-----\n{SECRET}{after}"
    for document in ({"a": key, "b": 1}, {"a": json.dumps([key]), "b": 1}):
        for indent in (None, 1):
            clean = scrub(json.dumps(document, indent=indent))
            assert json.loads(clean)["b"] == 1
            assert SECRET not in clean
    assert SECRET not in scrub(key)


@pytest.mark.parametrize(
    "text",
    [
        f"oci://host:5000/name:1@sha256:{'0' * 64}",
        "https://registry.npmjs.org/@scope/package",
        "http://127.0.0.1:8000/@me",
        "mail me@host, or see https://host/x?page=2",
        "a file with secret keys, AGE-SECRET-KEY-1... on a line",
        "basic information-retrieval-of-documents",
    ],
)
def test_what_is_not_a_secret_stays(text: str) -> None:
    assert scrub(text) == text
    assert not has_credentials(text)


@pytest.mark.parametrize("part", ["://", "://a@", "a", "@", "&", "://@/", "authorization:"])
def test_a_long_text_takes_no_time_that_grows_with_its_square(part: str) -> None:
    """A million characters; each of these took minutes where one pattern was tried everywhere."""
    assert len(scrub(part * (1_000_000 // len(part)))) > 0
