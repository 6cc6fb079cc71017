"""Encode images, and texts for the second model of a bundle, as rows of the model that reads each.

A text is a str; a path is never one. Without the second model (Contract.texts) texts are refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InputError
from ...inputs import image, text
from ...inputs.batch import Batch
from ...inputs.image import IMAGE
from ...inputs.kind import Encoded
from ...inputs.text import TEXT

if TYPE_CHECKING:
    from ...contract import Contract

SIDE = "texts"  # Encoded.side of a text
IMAGE_FIELD, TEXT_FIELD = IMAGE.columns[0], TEXT.columns[0]
FORMS = f'{{"{TEXT_FIELD}": ...}} or {{"{IMAGE_FIELD}": PATH}}'


def encode(
    contract: Contract,
    tokenizer: Any,
    inputs: Sequence[Any],
    pairs: Sequence[Any] | None = None,
    size: int | None = None,
) -> list[Encoded]:
    """Encode, to be embedded, each text as text.encode does and each image as image.encode does, in
    order.

    tokenizer: tokenizer of the model of texts
    size: maximum tokens of a text; longer ones are truncated
    Raises InputError as these do, and for pairs.
    """
    image.check_some(inputs)
    if pairs is not None and any(pair is not None for pair in pairs):
        raise InputError("an image or a text has no pair", where="pairs")
    texts = [one for one in inputs if isinstance(one, str)]
    images = [one for one in inputs if not isinstance(one, str)]
    read = iter(_texts(contract, tokenizer, texts, size) if texts else ())
    seen = iter(image.encode(contract, None, images) if images else ())
    return [next(read if isinstance(one, str) else seen) for one in inputs]


def _texts(
    contract: Contract, tokenizer: Any, texts: Sequence[str], size: int | None
) -> list[Encoded]:
    if contract.texts is None:
        problem, fix = "it is a text, and this model reads images", "Send it to the whole bundle."
        return [Encoded(one, None, problem=problem, fix=fix) for one in texts]
    encoded = text.encode(contract.texts, tokenizer, texts, None, size)
    return [replace(one, side=SIDE) for one in encoded]


def collate(contract: Contract, encoded: Sequence[Encoded], size: int | None = None) -> Batch:
    """Return for the embedding of images and texts one batch of images or of texts, which different
    models run. Raises InputError for both."""
    if len({one.side for one in encoded}) > 1:
        raise InputError("images and texts do not share a run", where="inputs")
    if encoded[0].side == SIDE and contract.texts is not None:
        return text.collate(contract.texts, encoded)
    return image.collate(contract, encoded, size)


def count_full_lengths(
    contract: Contract, tokenizer: Any, texts: Sequence[str], pairs: Sequence[Any] | None = None
) -> list[int]:
    """Return the number of tokens of each text to embed that was truncated, before truncation."""
    del pairs
    return text.count_full_lengths(contract.texts or contract, tokenizer, texts)


def parse(line: str) -> Any:
    """Parse a line to an input to embed, a text or the path of an image.

    {"text": ...} is a text, {"image": ...} and any line that is not an object is a path.

    Raises InputError for another object.
    """
    if not line.lstrip().startswith("{"):
        return Path(line)
    try:
        ((field, value),) = json.loads(line).items()
    except (ValueError, RecursionError):
        field, value = "", None
    if field not in (TEXT_FIELD, IMAGE_FIELD) or not isinstance(value, str):
        raise InputError("it is another object", where=line[:60], accepted=f"a path, {FORMS}")
    return value if field == TEXT_FIELD else Path(value)


IMAGE_OR_TEXT = replace(
    IMAGE,
    encode=encode,
    collate=collate,
    parse=parse,
    requires=(*IMAGE.requires, *TEXT.requires),
    full_sizes=count_full_lengths,
    instead=TEXT_FIELD,
)
