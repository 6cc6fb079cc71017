"""Translate tokenizer.json into the keys of a GGUF file.

llama.cpp's converter encodes a probe text and looks its hash up in a table. Here the structure of
tokenizer.json decides: its pre_tokenizer is one of PRE_TOKENIZERS, or the tokenizer is refused,
because llama.cpp would split texts differently without an error.

Source: src/llama-vocab.cpp of llama.cpp (the expressions by which each name splits).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import RecipeError

Step = tuple[str, str | bool]
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WITH_REGEX: Step = ("ByteLevel", True)
BYTES: Step = ("ByteLevel", False)


@dataclass(frozen=True)
class PreTokenizer:
    """Rule of llama.cpp by which texts are split before the merges.

    name: tokenizer.ggml.pre
    steps: types in tokenizer.json's pre_tokenizer, each with its distinguishing option
    whole_words: True where a word that is a token is not built by merges
    """

    name: str
    steps: tuple[Step, ...]
    whole_words: bool = False


LLAMA3 = (("Split", CONTRACTIONS + WORDS % "{1,3}"), BYTES)
PRE_TOKENIZERS = (
    PreTokenizer("gpt-2", (WITH_REGEX,)),
    PreTokenizer("smollm", (("Digits", True), WITH_REGEX)),
    PreTokenizer("qwen2", (("Split", CONTRACTIONS + WORDS % ""), BYTES)),
    PreTokenizer("llama-bpe", LLAMA3, whole_words=True),
    PreTokenizer("smaug-bpe", LLAMA3),
)


@dataclass(frozen=True)
class Vocabulary:
    """Tokenizer of a GGUF file.

    pre: tokenizer.ggml.pre
    tokens, types: text and type of each id, one per row of the token table
    special: gguf.SpecialVocab with merges, ids of special tokens, bos and eos flags, chat template
    notes: sentences about differences in llama.cpp's splitting
    """

    pre: str
    tokens: list[str]
    types: list[int]
    special: Any
    notes: tuple[str, ...]


def read(folder: Path, rows: int) -> Vocabulary:
    """Read the tokenizer of a checkpoint folder for a GGUF file.

    rows: number of rows in the model's token table
    Raises RecipeError for a tokenizer that is not in the table, or has more tokens than rows.
    """
    from gguf import SpecialVocab

    document = _document(folder)
    pre = find_pre_tokenizer(document).name
    tokens, types = _tokens(document, rows)
    special = SpecialVocab(folder, load_merges=True, n_vocab=rows)
    special.add_special_token = _added(folder, special.special_token_ids)
    return Vocabulary(pre, tokens, types, special, tuple(_notes(document)))


def find_pre_tokenizer(document: Mapping[str, Any]) -> PreTokenizer:
    """Look up llama.cpp's splitting rule for a tokenizer.json; RecipeError where the table lacks
    it."""
    model = document.get("model") or {}
    steps = tuple(_steps(document.get("pre_tokenizer")))
    whole_words = bool(model.get("ignore_merges"))
    byte_level = model.get("type") == "BPE" and not model.get("byte_fallback")
    rows = [p for p in PRE_TOKENIZERS if (p.steps, p.whole_words) == (steps, whole_words)]
    normalizer = (document.get("normalizer") or {}).get("type")
    if not byte_level or not rows or normalizer not in (None, "NFC"):
        spelled = json.dumps(document.get("pre_tokenizer"), ensure_ascii=False)
        raise RecipeError(
            f"the tokenizer splits texts in a way that is not in the table of llama.cpp's: model "
            f"{model.get('type')}{' with bytes as tokens' if not byte_level else ''}, normalizer "
            f"{normalizer}, pre_tokenizer {spelled[:300]}",
            where="tokenizer.json",
            accepted=f"byte-level BPE split as by {', '.join(p.name for p in PRE_TOKENIZERS)}",
            fix="Remove the target gguf for this model.",
        )
    return rows[0]


def write(vocabulary: Vocabulary, writer: Any) -> None:
    """Add the tokenizer's keys to the GGUF file of `writer`, a gguf.GGUFWriter."""
    writer.add_tokenizer_model(BYTE_LEVEL)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    vocabulary.special.add_to_gguf(writer, quiet=True)


def build_keys(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return {key: value} of every key that `write` adds to the GGUF file, except the chat
    template."""
    special = vocabulary.special
    return {
        "tokenizer.ggml.model": BYTE_LEVEL,
        "tokenizer.ggml.pre": vocabulary.pre,
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": vocabulary.types,
        "tokenizer.ggml.merges": special.merges,
        **{
            f"tokenizer.ggml.{KEYS.get(name, name)}_token_id": i
            for name, i in special.special_token_ids.items()
        },
        **{f"tokenizer.ggml.add_{n}_token": adds for n, adds in special.add_special_token.items()},
    }


BYTE_LEVEL = "gpt2"  # tokenizer.ggml.model of every byte-level BPE
KEYS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}  # "seperator": as ggml spells it


def _document(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise RecipeError(
            "the checkpoint has no tokenizer.json, and a GGUF file holds its tokenizer",
            where=str(folder),
            fix="Save it beside the model with PreTrainedTokenizerFast.save_pretrained.",
        )
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return document


def _steps(node: Mapping[str, Any] | None) -> Iterator[Step]:
    """Yield the steps of a tokenizer.json's pre_tokenizer, to find llama.cpp's rule; an unsupported
    option makes a step that matches none."""
    kind = str((node or {}).get("type"))
    if node is None:
        return
    if kind == "Sequence":
        for part in node["pretokenizers"]:
            yield from _steps(part)
    elif kind == "ByteLevel" and not node.get("add_prefix_space", True):
        yield kind, bool(node.get("use_regex", True))
    elif kind == "Digits":
        yield kind, bool(node.get("individual_digits"))
    elif kind == "Split" and node.get("behavior") == "Isolated" and not node.get("invert"):
        yield kind, str(node["pattern"].get("Regex"))
    else:
        yield kind, json.dumps(node, sort_keys=True)


def _tokens(document: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Return for the GGUF file the text and type of every id; unused ids get a token that no text
    contains.

    document: content of tokenizer.json
    rows: number of rows in the model's token table
    """
    from gguf import TokenType

    by_id = {i: (text, TokenType.NORMAL) for text, i in document["model"]["vocab"].items()}
    for added in document.get("added_tokens") or ():
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        by_id[added["id"]] = (added["content"], kind)
    if by_id and max(by_id) >= rows:
        text = by_id[max(by_id)][0]
        raise RecipeError(
            f"token {max(by_id)} ({text!r}) has no row in the model's table of {rows}",
            where="tokenizer.json",
            fix="Use the tokenizer that the model was made with.",
        )
    entries = [by_id.get(i, (f"[PAD{i}]", TokenType.UNUSED)) for i in range(rows)]
    return [text for text, _ in entries], [int(kind) for _, kind in entries]


def _added(folder: Path, special: Mapping[str, int]) -> dict[str, bool]:
    """Return for the GGUF file {"bos": True where the tokenizer puts bos before a text, "eos": True
    where it puts eos after it}. Raises RecipeError for a tokenizer that adds anything else.

    special: {name: token id}
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain, full = (tokenizer.encode("a", add_special_tokens=a).ids for a in (False, True))
    for bos in (False, True):
        for eos in (False, True):
            before = [special["bos"]] if bos and "bos" in special else []
            after = [special["eos"]] if eos and "eos" in special else []
            if full == [*before, *plain, *after]:
                return {"bos": bool(before), "eos": bool(after)}
    raise RecipeError(
        f"the tokenizer adds {[i for i in full if i not in plain]} to a text; llama.cpp adds only "
        "bos before and eos after it",
        where="tokenizer.json: post_processor",
        fix="Remove the target gguf for this model.",
    )


def _notes(document: Mapping[str, Any]) -> Iterator[str]:
    if document.get("normalizer"):
        yield (
            "the tokenizer composes characters (NFC) first and llama.cpp does not: it splits texts "
            "with decomposed characters differently"
        )
