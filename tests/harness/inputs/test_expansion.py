"""Tokenizers that may expand a text without bound are refused before use."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer

from optimizer.harness.inputs.expansion import LONGEST, find_excess


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


CHARSMAP = base64.b64encode(bytes(4) + b"x" * 5000 + b"\0").decode()
REPEATED = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 5000,
    "pair": [],
    "special_tokens": {},
}


@pytest.mark.parametrize(
    ("field", "document"),
    [
        ("normalizer", {"normalizer": replace("b" * 10**6, String="a")}),
        ("normalizer", {"normalizer": sequence(*[replace("aa", String="a")] * 13)}),
        ("normalizer", {"normalizer": sequence(sequence(*[replace("aa", Regex="[a-z]")] * 13))}),
        ("normalizer", {"normalizer": replace("b" * 5000, Regex="(?=a)")}),
        ("normalizer", {"normalizer": {"type": "Prepend", "prepend": "b" * 10**6}}),
        ("normalizer", {"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}}),
        ("normalizer", {"normalizer": sequence(*[{"type": "Lowercase"}] * 1000)}),
        (
            "pre_tokenizer",
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 30}},
        ),
        ("post_processor", {"post_processor": REPEATED}),
        ("decoder", {"decoder": replace("b" * 10**6, String="a")}),
        ("model.continuing_subword_prefix", {"model": {"continuing_subword_prefix": "#" * 10**6}}),
        ("model.max_input_chars_per_word", {"model": {"max_input_chars_per_word": 10**6}}),
    ],
)
def test_what_makes_a_text_too_long_is_named(field: str, document: dict[str, Any]) -> None:
    over = find_excess(document)
    assert over is not None
    assert over.field == field


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()]),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        normalizers.Sequence([normalizers.Replace("``", '"')] * 20),
        normalizers.BertNormalizer(),
    ],
)
def test_usual_tokenizers_are_taken(normalizer: Normalizer) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    assert find_excess(json.loads(tokenizer.to_str())) is None


@pytest.mark.parametrize("text", ["aaaa", "éÅ\ufdfa", "a b\n"])
@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "NFKC"},
        {"type": "NFKD"},
        {"type": "ByteLevel"},
        replace("xyz", String="a"),
        replace("xyz", Regex="[a-z]"),
        replace("xyz", Regex="a*"),
        replace("xyz", Regex=r"\b"),
        replace("xyz", Regex="a|"),
    ],
)
def test_the_bound_holds_for_what_tokenizers_does(normalizer: dict[str, Any], text: str) -> None:
    """Steps accepted by the bound expand a text by at most the bound."""
    steps = [normalizer]
    while find_excess({"normalizer": sequence(*steps, normalizer)}) is None and len(steps) < 5:
        steps.append(normalizer)
    document = {**json.loads(Tokenizer(models.BPE()).to_str()), "normalizer": sequence(*steps)}
    normal = Tokenizer.from_str(json.dumps(document)).normalizer
    assert normal is not None
    assert len(normal.normalize_str(text)) <= LONGEST * (len(text) + 1)
