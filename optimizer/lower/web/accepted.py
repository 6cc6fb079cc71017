"""Refuse models that a browser would answer differently from the harness:

1. a task whose answers need more of a text than its tokens (offsets, a KV cache), by the recipe
2. a tokenizer with a part that @huggingface/tokenizers lacks, by the checkpoint
3. an embedding with layers that have parameters, or with a prompt that is not pooled
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import CheckpointError, RecipeError
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.recipe.schema import OnnxRuntimeWebTarget, Recipe

PARTS = {
    "normalizer": "BertNormalizer Lowercase NFC NFD NFKC NFKD Prepend Replace Sequence "
    "Strip StripAccents",
    "pre_tokenizer": "BertPreTokenizer ByteLevel Digits Metaspace Punctuation Replace Sequence "
    "Split Whitespace WhitespaceSplit",
    "model": "BPE Unigram WordPiece",
    "post_processor": "BertProcessing ByteLevel RobertaProcessing Sequence TemplateProcessing",
}
"""Types in tokenizer.json that @huggingface/tokenizers 0.2.0 implements like the harness
(Precompiled is an approximation there)."""


def check(recipe: Recipe, _section: OnnxRuntimeWebTarget, at: str) -> None:
    """Raise RecipeError for a task that the web page, which runs the model in a browser, does not
    cover (case 1)."""
    task = tasks.find_task(recipe.model.task)
    if task.not_in_browser:
        accepted = ", ".join(n for n, t in tasks.TASKS.items() if not t.not_in_browser)
        raise RecipeError(
            f"{task.name} is not answered in a browser: {task.not_in_browser}",
            where=f"{at}.runtime",
            accepted=f"with it, model.task {accepted}",
            fix="Remove the target.",
        )


def check_tokenizer(path: Path) -> None:
    """Raise CheckpointError naming the first step of tokenizer.json that the browser's PARTS lack
    (case 2)."""
    document = json.loads(path.read_text(encoding="utf-8"))
    for part, types in PARTS.items():
        for kind in _types(document.get(part)):
            if kind not in types.split():
                raise CheckpointError(
                    f"{kind} is not in the tokenizer for browsers, @huggingface/tokenizers",
                    where=f"{path}: {part}",
                    accepted=", ".join(types.split()),
                    fix="Remove target onnxruntime-web.",
                )


def check_embedding(contract: Contract) -> None:
    """Raise CheckpointError for settings of a sentence embedding that the web page ignores (case
    3)."""
    settings = contract.vectors
    uncovered = "its Dense and LayerNorm modules" if settings.file else ""
    if settings.text and not settings.include_prompt:
        uncovered = "a prompt whose tokens are left out of the pooling (include_prompt: false)"
    if uncovered:
        raise CheckpointError(
            f"the page in a browser does not compute {uncovered}",
            where="sentence-transformers folder",
            accepted="Pooling, Normalize, prompts that are pooled, truncate_dim",
            fix="Remove target onnxruntime-web.",
        )


def _types(part: dict[str, Any] | None) -> Iterator[str]:
    """Yield the type of a part of tokenizer.json, to see if the browser has it, and types inside a
    Sequence; nothing for None."""
    if part is None:
        return
    yield str(part.get("type"))
    for key in ("normalizers", "pretokenizers", "processors"):
        for inner in part.get(key) or ():
            yield from _types(inner)
