"""Sentences name their subject and use the field's terms.

Each rule is a construction that readers of this code had to read twice, with what to write in its
place. A line that is right as it stands, such as a name in a file format, ends in "# prose: ok", or
is listed in prose_exceptions.txt where it cannot; that file may only shrink.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PRODUCT = sorted((ROOT / "optimizer").rglob("*.py"))
OTHERS = [
    f for d in ("tests", "benchmarks", "calibration") for f in sorted((ROOT / d).rglob("*.py"))
]
EXCEPTIONS = Path(__file__).with_name("prose_exceptions.txt")

RULES = {  # name: (expression, what to write in its place, a sentence that it finds)
    "is no": (
        r"\b(?:is|are|was|were) no (?!longer\b|more\b|doubt\b|such\b|need\b|way\b|reason\b)[a-z]+",
        '"is not a …"',
        "logits are no text",
    ),
    "clause for a subject": (
        r"^(?:What|Whatever|Whoever|Who|Which|Where|Whether|How)\b(?!.*\?$)",
        "a verb, or a noun that names the thing",
        "What answers for a target",
    ),
    "go on": (r"\bgo(?:es|ing)? on\b|\bwent on\b", "resume, continue", "the run goes on"),
    "so many": (
        r"\b(?:so|as) many\b(?! as\b)",
        "the number: n, at most n, the same number of",
        "after so many rows",
    ),
    "continued text": (
        r"\bcontinu(?:e[sd]?|ing) (?:texts?|prompts?|sequences?)"
        r"|\btexts? (?:that are|to be|to) continued?",
        "generation, a generated text",
        "a text to continue",
    ),
    "told": (
        r"\b(?:is|are|was|were) (?:said|told|asked|heard|looked at|given back|passed over)\b",
        "reported, logged, returned, skipped",
        "the reason is told",
    ),
    "metaphor": (
        r"\bsays? (?:of )?itself\b|\bhas no say\b|\bthe last word\b|\bby heart\b"
        r"|\bwould rather\b|\bhardly be heard\b",
        "what happens",
        "weights that have no say, or whose sum has no say",
    ),
    "codes": (r"\b(?:codes|coded|uncoded)\b", "integers, quantized", "the codes of a weight"),
    "remember": (
        r"\bremember(?:s|ed)?\b|what the model has seen",
        "the KV cache, cached",
        "remembers the prompt",
    ),
    "gloss without a noun": (
        r"^\s*[a-z_]+: (?:of|that|to|where|when|which|what|by|for|from|in) ",
        "the noun first: rows: maximum rows per batch",
        "rows: of a batch",
    ),
    "clause of a clause": (
        r"\bwhat (?:comes?|came|is|are|was|were|it|they|of it)\b(?! the\b).{0,40}"
        r"\b(?:is|are|does|do)\b",
        "the noun",
        "what came of it is written",
    ),
    "riddle": (
        r"\bof (?:such|those|these) (?:as|that|which)\b"
        r"|\b(?:nothing of|in vain|beside it|not told apart|held to|made up for|bears? it)\b",
        "the plain term",
        "which would have been in vain",
    ),
}


def python_texts(source: str, docstrings_only: bool) -> Iterator[tuple[int, str]]:
    """(line number, text) of each comment, docstring and other string of several words.

    docstrings_only: leaves out strings that are values, such as the cases of a test.
    """
    if is_any_broken(comment_candidates(source)):  # few files: to tokenize all takes seconds
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# ")
    tree = ast.parse(source)
    statements = {n.value for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if " " in node.value and (node in statements or not docstrings_only):
            for number, line in enumerate(node.value.splitlines(), node.lineno):
                yield number, line.strip()


def comment_candidates(source: str) -> Iterator[str]:
    """The rest of a line from each # on, whether it begins a comment or stands in a string."""
    for line in source.splitlines():
        start = line.find("#")
        while start >= 0:
            yield line[start:].lstrip("# ")
            start = line.find("#", start + 1)


def page_texts(source: str) -> Iterator[tuple[int, str]]:
    """(line number, text) of each line of a Markdown page that is not code."""
    in_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, line.strip().lstrip("|-*# ").strip()


def rules_broken(text: str) -> list[str]:
    """Names of the rules that find something in one line."""
    return [name for name, (expression, _, _) in RULES.items() if re.search(expression, text)]


def is_any_broken(texts: Iterable[str]) -> bool:
    """Return True if a rule finds something in one of the lines, searched as one text."""
    whole = "\n".join(texts)
    return any(re.search(expression, whole, re.M) for expression, _, _ in RULES.values())


@functools.cache
def lapses(file: Path) -> list[tuple[int, str, str]]:
    """(line number, rule, text) of each line of a file that breaks a rule."""
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        texts = [*page_texts(source)]
    else:
        texts = [*python_texts(source, docstrings_only=file not in PRODUCT)]
    if not is_any_broken(text for _, text in texts):
        return []
    right = {n for n, line in enumerate(source.splitlines(), 1) if "# prose: ok" in line}
    return [
        (number, rule, text)
        for number, text in texts
        if number not in right
        for rule in rules_broken(text)
    ]


def allowed() -> set[str]:
    """Lines of prose_exceptions.txt: `path: the text of the line`."""
    return set(EXCEPTIONS.read_text(encoding="utf-8").splitlines())


def entry(file: Path, text: str) -> str:
    """The line of prose_exceptions.txt that would allow a text."""
    return f"{file.relative_to(ROOT)}: {text}"


@pytest.mark.parametrize("files", [PRODUCT, PAGES, OTHERS], ids=["product", "pages", "others"])
def test_every_sentence_names_its_subject(files: list[Path]) -> None:
    exceptions = allowed()
    wrong = [
        f"{file.relative_to(ROOT)}:{number}: {rule}: {text}  -> write {RULES[rule][1]}"
        for file in files
        if file != Path(__file__)
        for number, rule, text in lapses(file)
        if entry(file, text) not in exceptions
    ]
    assert wrong == []


def test_every_exception_is_a_line_that_still_stands() -> None:
    files = [f for f in (*PRODUCT, *PAGES, *OTHERS) if f != Path(__file__)]
    standing = {entry(file, text) for file in files for _, _, text in lapses(file)}
    assert allowed() - standing == set()


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_finds_its_example(rule: str) -> None:
    assert rule in rules_broken(RULES[rule][2])
