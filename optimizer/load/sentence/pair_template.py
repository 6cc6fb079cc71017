"""Find the text that a causal language model reads of a query and its document: model.template of
the recipe, or the chat template of a folder that CrossEncoder saved, rendered once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.reading import quote_error
from optimizer.load.config.model_folder import model_folder
from optimizer.load.config.modules_json import locate_config
from optimizer.load.preparation import Described
from optimizer.load.sentence import cross_encoder
from optimizer.load.sentence.keys import find_unread_keys
from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.recipe.answers import split_template

MESSAGE, TEMPLATED, FLAT = "message", "chat_template", "flat"
TRANSFORMER = "CausalTransformer"  # key of KEYS
ACCEPTED = {TEMPLATED, "add_generation_prompt", "enable_thinking"}  # of processing_kwargs
TODAY = "strftime_now"
QUERY, DOCUMENT = " \n\x02query\x02 \n", " \n\x02document\x02 \n"
"""Stand for texts while a template is rendered, with the space around them that it may remove."""


def find(d: Described, tokenizer: Any) -> tuple[str, ...] | None:
    """The texts before a query, between it and its document, and behind both; None where the
    tokenizer joins them. tokenizer: transformers'. Raises CheckpointError for a chat template that
    changes the texts, and for a folder that does not say how a pair is read."""
    chosen = d.section.template
    saved = (d.root / "modules.json").is_file()
    folder = model_folder(d.root)
    file = locate_config(folder)
    config = read_json(file) if file.is_file() else {}
    modes = config.get("modality_config")
    plain = saved and isinstance(modes, dict) and MESSAGE not in modes
    if unread := find_unread_keys(file, TRANSFORMER, config):
        raise CheckpointError(f"it is not read here: {unread[0]}", where=str(file))
    if chosen is not None and not plain:
        parts: Sequence[str] = split_template(chosen)
    elif not saved or (chosen is not None and plain):
        raise CheckpointError(
            "the folder does not say in which text the model reads a query and its document"
            if chosen is None
            else "the folder says that a query and its document are read without a template",
            where="model.template" if chosen else f"{d.root}: modules.json",
            accepted="no template" if chosen else "a folder that CrossEncoder saved",
            fix="Remove it from the recipe."
            if chosen
            else 'Set model.template: "... {query} ... {document} ..." in the recipe to the text '
            "that the model was trained with; docs/recipe.md, Rerankers, has Qwen3-Reranker's.",
        )
    elif plain or tokenizer.chat_template is None:
        return None
    else:
        parts = _rendered(d, tokenizer, config, folder)
    return tuple(parts)


def _rendered(d: Described, tokenizer: Any, config: Mapping[str, Any], folder: Path) -> list[str]:
    """Render the chat template of a reranker for one pair, and return the parts of the text around
    query and document.

    config: the Transformer module's, in `folder`
    """
    modes = config.get("modality_config") or {}
    kwargs = config.get("processing_kwargs") or {}
    options = kwargs.get(TEMPLATED) or {}
    if others := sorted({*kwargs, *options} - ACCEPTED):
        raise CheckpointError(
            f"processing_kwargs has {others[0]!r}, which is not read here",
            where=str(locate_config(folder)),
            accepted=", ".join(sorted(ACCEPTED)),
        )
    flat = modes.get(MESSAGE, {}).get("format", FLAT) == FLAT
    prompt = cross_encoder.read_prompt(d.root)
    first = [("system", prompt)] if prompt else []
    messages = [
        {"role": role, "content": text if flat else [{"type": "text", "text": text}]}
        for role, text in (*first, ("query", QUERY), ("document", DOCUMENT))
    ]
    where = f"{folder}: chat_template"
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception as e:  # of Jinja, or raised by the template
        raise CheckpointError(
            f"the chat template does not take a query and a document ({quote_error(e)[:200]})",
            where=where,
            accepted='a template that prints the messages of roles "query" and "document"',
        ) from e
    before, _, rest = text.partition(QUERY)
    between, _, after = rest.partition(DOCUMENT)
    whole = text.count(QUERY) == 1 == text.count(DOCUMENT)
    if not whole or before + QUERY + between + DOCUMENT + after != text:
        raise CheckpointError(
            "the chat template does not print a query and then a document once and unchanged",
            where=where,
            accepted='a template that prints the messages of roles "query" and "document"',
            fix="Set model.template in the recipe to the text that the model was trained with.",
        )
    if TODAY in str(tokenizer.chat_template):
        raise CheckpointError(
            f"the chat template prints today's date ({TODAY})",
            where=where,
            accepted="a template whose text is the same every day",
            fix="Set model.template in the recipe to the text that the model was trained with.",
        )
    return [before, between, after]
