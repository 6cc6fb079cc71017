"""Lines of standard input and options that mean nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from tests.hostile.cases import VALUES, Case, Good, ended

LINES = (
    "[" * 50_000,
    "{" * 50_000,
    '{"prompt": ' + "[" * 50_000,
    '{"messages": [{"role": "user", "content": ' + "[" * 62 + "]" * 62 + "}]}",
    '{"prompt": "\\ud800"}',
    '{"messages": [{"role": "user", "content": "\\udfff"}]}',
    '{"messages": [{"role": "\\udfff", "content": "a"}]}',
    '{"messages": [{"role": 1}]}',
    '{"messages": [1.5]}',
    '{"messages": [99999999999]}',
    '{"messages": {}}',
    '{"messages": null}',
    '{"prompt": null}',
    '{"prompt": ""}',
    '{"prompt": "a", "prompt": "b"}',
    '{"prompt": "a", "temperature": 1e999}',
    '{"prompt": "a", "seed": ' + "9" * 5000 + "}",
    "null",
    "1",
    '"x"',
    "[]",
    "{}",
    "\x00",
)
OPTIONS = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
    "do_sample",
    "ignore_eos",
    "nothing",
)


def of_lines(good: Good) -> Iterator[Case]:
    """Lines of JSON and options that mean nothing."""
    bundle = str(good.decoder)
    for i, line in enumerate(LINES):
        yield Case(f"line {i}", _line(bundle, line, "line 1"))
    for option in OPTIONS:
        for what, value in {**VALUES, "1e-300": 1e-300, "texts": ["a", "\ud800"]}.items():
            line = json.dumps({"prompt": "good", "max_new_tokens": 2} | {option: value})
            yield Case(f"option {option} {what}", _line(bundle, line, option, "surrogate"))
    encoder = str(good.encoder)
    for option in (
        "--threads",
        "--batch-size",
        "--text",
        "--pair",
        "--runtime",
        "--cache",
        "--stop",
    ):
        for value in ("", "0", "-1", "100000", "1e8", "nan", "²", "9" * 5000, "\udcff", "x"):
            if option in ("--text", "--stop", "--cache", "--runtime") and value not in (
                "\udcff",
                "",
            ):
                continue
            words = [option, option.strip("-"), "text", "line"]
            arguments = ["predict", encoder, option, value, "good"]
            yield Case(
                f"{option} {value[:9]!r}", lambda a=arguments, w=words: ended(a, w, (0, 2, 5))
            )  # type: ignore[misc]
    for option in ("--batch", "--sequence", "--iterations", "--texts-file", "--threads"):
        for value in ("", "-1", "100000000", "1e8", "9" * 5000, "/nowhere", "\udcff"):
            words = [
                option,
                *(
                    ["/nowhere", "cannot be read", "no plain file"]
                    if option == "--texts-file"
                    else []
                ),
            ]
            arguments = ["bench", encoder, option, value]
            yield Case(f"bench {option} {value[:9]!r}", lambda a=arguments, w=words: ended(a, w))  # type: ignore[misc]


def _line(bundle: str, line: str, *named: str) -> Callable[[], str]:
    data = line.encode(errors="surrogateescape") + b"\n"
    return lambda: ended(["predict", bundle, "--jsonl"], named, (0, 2), data)
