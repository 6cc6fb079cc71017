"""What a browser answers as the harness does; the rest is refused:
1. a task whose answers need more of a text than its tokens (offsets, a cache), by the recipe
2. a tokenizer with a part that @huggingface/tokenizers does not have, by the checkpoint
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from optimizer.errors import CheckpointError, RecipeError
from optimizer.recipe.schema import OnnxRuntimeWebTarget, Recipe

TASKS = ("sentence-embedding", "text-classification", "feature-extraction")
"""Those that package/web/tasks.mjs answers."""
WHY = {
    "token-classification": "its answers name places in the text, which the tokenizer for browsers "
    "does not give",
    "text-generation": "the page keeps no cache, without which each token costs a whole text",
}
PARTS = {
    "normalizer": "BertNormalizer Lowercase NFC NFD NFKC NFKD Prepend Replace Sequence "
    "Strip StripAccents",
    "pre_tokenizer": "BertPreTokenizer ByteLevel Digits Metaspace Punctuation Replace Sequence "
    "Split Whitespace WhitespaceSplit",
    "model": "BPE Unigram WordPiece",
    "post_processor": "BertProcessing ByteLevel RobertaProcessing Sequence TemplateProcessing",
}
"""Of tokenizer.json, the types that @huggingface/tokenizers 0.2.0 has as the harness does (of
Precompiled it has an approximation)."""


def check(recipe: Recipe, _section: OnnxRuntimeWebTarget, at: str) -> None:
    """Raise RecipeError for a task of the list above."""
    task = recipe.model.task
    if task not in TASKS:
        why = WHY.get(task, "the page has no code that makes its answers")
        raise RecipeError(
            f"{task} is not answered in a browser: {why}",
            where=f"{at}.runtime",
            accepted=f"with it, model.task {', '.join(TASKS)}",
            fix="Remove the target.",
        )


def check_tokenizer(path: Path) -> None:
    """Raise CheckpointError naming the first part that the browser's tokenizer lacks."""
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


def _types(part: dict[str, Any] | None) -> Iterator[str]:
    """The type of a part, or those of the parts that a Sequence has."""
    if part is None:
        return
    yield str(part.get("type"))
    for key in ("normalizers", "pretokenizers", "processors"):
        for inner in part.get(key) or ():
            yield from _types(inner)
