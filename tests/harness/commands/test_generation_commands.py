"""python -m harness with a text-generation model."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.__main__ import main
from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.errors import InputError
from optimizer.harness.generate import Options
from tests.package.bundles import generation_bundle, small_bundle

PROMPTS = ["the film was", "never again, it is a very bad place"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only."""
    return generation_bundle.make(tmp_path_factory.mktemp("generation"))


class Run:
    """The command line on one bundle."""

    def __init__(self, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.bundle, self.capsys = bundle, capsys

    def __call__(self, command: str, *arguments: str, wanted: int = 0) -> str:
        code = main([command, "--bundle", str(self.bundle), *arguments])
        out, err = self.capsys.readouterr()
        assert code == wanted, err
        return out if code == 0 else out + err

    def lines(self, *arguments: str, wanted: int = 0) -> list[Any]:
        out = self(*arguments, "--json", wanted=wanted)
        return [json.loads(line) for line in out.splitlines() if line.startswith("{")]

    def json(self, *arguments: str) -> Any:
        (document,) = self.lines(*arguments)
        return document


def typed(data: bytes) -> io.TextIOWrapper:
    """Standard input that holds `data`."""
    return io.TextIOWrapper(io.BytesIO(data))


@pytest.fixture
def run(bundle: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(bundle, capsys)


def test_predict_continues_each_text(run: Run, bundle: Path) -> None:
    answers = run.lines("predict", *PROMPTS, "--max-new-tokens", "9")
    with Bundle(bundle) as opened:
        wanted = [c.to_json() for c in opened.generate(PROMPTS, Options(max_new_tokens=9))]
    assert answers == [{**w, "engine": "onnxruntime-cpu"} for w in wanted]
    printed = run("predict", *PROMPTS, "--max-new-tokens", "9")
    assert printed == "".join(f"{w['text']}\n" for w in wanted)


def test_a_text_is_printed_as_it_is_streamed(run: Run) -> None:
    asked = ("predict", PROMPTS[0], "--temperature", "1.1", "--seed", "5")
    assert run(*asked, "--stream") == run(*asked)


def test_tokens_are_guessed_where_the_cache_takes_them_back(
    run: Run, decoder_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("predict", *PROMPTS, "--greedy", "--max-new-tokens", "12")
    shared = Run(decoder_bundle, capsys)
    assert shared(*asked, "--prompt-lookup", "7") == shared(*asked, "--prompt-lookup", "1")
    assert "Leave prompt lookup out" in run(*asked, "--prompt-lookup", "3", wanted=5)
    assert "choose from 0, 1, 3, 7, 15" in run(*asked, "--prompt-lookup", "2", wanted=2)


def test_streamed_json_is_a_line_per_token_and_the_whole_at_the_end(run: Run) -> None:
    out = run("predict", PROMPTS[0], "--max-new-tokens", "7", "--stream", "--json")
    *pieces, last = [json.loads(line) for line in out.splitlines()]
    assert "".join(p["text"] for p in pieces) == last["text"]
    assert len(pieces) == last["tokens"]


def test_options_reach_the_loop(run: Run) -> None:
    def text(*options: str) -> str:
        return str(run.json("predict", PROMPTS[0], *options)["text"])

    greedy = text()
    assert text("--greedy") == greedy
    assert text("--top-k", "1") == greedy
    assert text("--temperature", "1.5", "--seed", "1") != text("--temperature=1.5", "--seed=2")
    assert text("--repetition-penalty", "3") != greedy
    stop = greedy[5:7]
    assert text("--stop", stop) == greedy[: greedy.index(stop)]


def test_a_conversation_and_a_text_are_different_prompts(run: Run) -> None:
    def tokens(*options: str) -> int:
        return int(run.json("predict", "hi", *options)["prompt_tokens"])

    assert tokens() < tokens("--chat") < tokens("--chat", "--system", "Be brief.")


def test_lines_of_json_have_options_of_their_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"prompt": "the film", "max_new_tokens": 3},
        {"messages": [{"role": "user", "content": "hi"}], "stop": ["zzz"]},
    ]
    monkeypatch.setattr("sys.stdin", typed("\n".join(map(json.dumps, lines)).encode()))
    out = run("predict", "--jsonl", "--max-new-tokens", "5")
    made = [json.loads(line) for line in out.splitlines()]
    assert [m["tokens"] for m in made] == [3, 5]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "line 1: not a JSON object"),
        ('{"text": "a"}', "text was given. Accepted: one of prompt, messages"),
        ('{"prompt": "a", "top_q": 1}', "top_q: unknown option.*Maybe you meant top_p"),
        ('{"prompt": ["a"]}', "prompt is list"),
        ('{"prompt": "\\ud800"}', r"character 1 is the lone surrogate U\+D800"),
        ("", "line 1: not a JSON object"),
        ("[" * 50_000, "line 1: not a JSON object .more than 64 objects and lists"),
        ('{"messages": ' + "[" * 50_000, "more than 64 objects and lists"),
        ('[["prompt", "a"]]', "line 1: not a JSON object .list"),
        ('{"messages": [[1]]}', "list was given"),
        ('{"prompt": "a", "stop": null}', "stop: None was given"),
        ('{"prompt": "a", "temperature": NaN}', "NaN is not JSON"),
    ],
)
def test_a_line_that_cannot_be_read_exits_2(run: Run, line: str, message: str) -> None:
    import re

    assert re.search(message, run("predict", "--jsonl", line, wanted=2))


def test_a_prompt_that_cannot_be_continued_has_its_error_in_place_and_changes_no_other(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the random numbers of those after it, in whichever batch they are."""
    drawn = ("--temperature", "1.5", "--max-new-tokens", "6")
    texts = [PROMPTS[0], "good " * 100, PROMPTS[1], PROMPTS[0]]
    found = []
    for options in (("--batch-size", "1"), ("--batch-size", "3"), ("--stream",)):
        monkeypatch.setattr("sys.stdin", typed("\n".join(texts).encode()))
        got = run.lines("predict", *drawn, *options, wanted=2)
        ends = [g for g in got if "finish" not in g or "prompt_tokens" in g]
        assert ends[1]["error"] == "InputError"
        assert "line 2" in ends[1]["where"]
        found.append([e["text"] for e in (ends[0], *ends[2:])])
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[0][2]  # the same prompt on another line is drawn anew


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", "--pair", "b"), "--pair"),
        (("a", "--system", "b"), "Add --chat"),
        (("a", "--temperature", "-1"), "temperature: -1"),
        (("a", "--greedy", "--top-k", "5"), "do_sample"),
        (("good " * 100,), "the prompt has"),
    ],
)
def test_a_request_that_makes_no_sense_exits_2(
    run: Run, arguments: tuple[str, ...], message: str
) -> None:
    assert message in run("predict", *arguments, wanted=2)


def test_options_of_generation_are_refused_by_other_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = Run(small_bundle.make(tmp_path) / "bundle", capsys)
    assert "--seed" in encoder("predict", "good", "--seed", "0", wanted=2)
    assert "text-generation" in encoder("predict", "good", "--genai", wanted=2)
    assert "text-generation" in encoder("predict", "good", "--prompt-lookup", "3", wanted=2)
    assert "--new-tokens" in encoder("bench", "--new-tokens", "3", wanted=2)


def test_bench_times_the_recipes_grid(run: Run) -> None:
    document = run.json("bench")
    (cell,) = document["cells"]
    assert (cell["batch"], cell["prompt"], cell["new_tokens"], cell["runs"]) == (1, 8, 4, 5)
    assert document["peak_memory"]["candidate"] > 1 << 20
    assert "missing" in document["recorded"]
    text = run("bench", "--sequence", "4", "--batch", "2", "--iterations=2", "--new-tokens=3")
    assert "batch 2, prompt 4, 3 new tokens, 2 rounds" in text
    assert "first token" in text
    assert "tokens/s" in text


def test_values_of_a_bundle_that_generates_are_logits(bundle: Path) -> None:
    with Bundle(bundle) as opened:
        (made,) = opened.predict([PROMPTS[0]])
        assert made["finish"] in ("length", "eos")
        with pytest.raises(InputError, match="text pairs are not supported for text-generation"):
            opened.predict(["a"], ["b"])


def test_the_advice_of_the_makers_is_followed_when_nothing_is_asked(tmp_path: Path) -> None:
    advised = {"do_sample": True, "temperature": 1.5}
    folder = generation_bundle.make(tmp_path, defaults=advised)
    with Bundle(folder) as opened:
        (plain,) = opened.generate([PROMPTS[0]])
        (asked,) = opened.generate([PROMPTS[0]], Options(do_sample=True, temperature=1.5))
        (greedy,) = opened.generate([PROMPTS[0]], Options(do_sample=False))
    assert plain == asked != greedy
