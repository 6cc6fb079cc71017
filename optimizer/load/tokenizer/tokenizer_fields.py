"""Check the fields of tokenizer_config.json and special_tokens_map.json before transformers reads
them, because its errors do not name the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from optimizer.foundation.errors import CheckpointError
from optimizer.model.checkpoint.checkpoint import read_json

FILES = ("tokenizer_config.json", "special_tokens_map.json")
FIX = "Correct it there, or get the file again."
MESSAGES = {  # {pydantic's words: words of the message}
    "a valid dictionary or instance of Written": 'an object with "content"',
    "Field required": 'an object with "content"',
    "String should match pattern '^[0-9]{1,9}$'": "an id in quotes",
}
KINDS = ("str", "Written", "list", "dict", "int", "float")  # types in pydantic's paths


class Written(BaseModel):
    """A token of tokenizer.json that is written as an object with its properties."""

    model_config = ConfigDict(strict=True, extra="ignore")

    content: str


Token = str | Written
Id = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Side = Literal["left", "right"] | None


class Fields(BaseModel):
    """Types of the fields of tokenizer_config.json that transformers accepts; every field may be
    absent or null."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    bos_token: Token | None = None
    eos_token: Token | None = None
    unk_token: Token | None = None
    sep_token: Token | None = None
    pad_token: Token | None = None
    cls_token: Token | None = None
    mask_token: Token | None = None
    additional_special_tokens: list[Token] | None = None
    extra_special_tokens: list[Token] | dict[str, Token | list[Token]] | None = None
    added_tokens_decoder: dict[Id, Written] | None = None
    tokenizer_class: str | None = None
    model_max_length: int | float | None = None
    padding_side: Side = None
    truncation_side: Side = None
    model_input_names: list[str] | None = None
    auto_map: dict[str, Any] | list[Any] | None = None
    chat_template: str | list[Any] | dict[str, Any] | None = None


def check(folder: Path) -> None:
    """Raise CheckpointError naming the file and the first field that is wrong."""
    for name in FILES:
        if (folder / name).is_file():
            _check(read_json(folder / name), folder / name)


def _check(document: Mapping[str, Any], file: Path) -> None:
    try:
        Fields.model_validate(dict(document))
    except ValidationError as e:
        problems = e.errors()
        field = str(problems[0]["loc"][0])
        accepted = [_accepted(p["msg"]) for p in problems if p["loc"][0] == field]
        path = ".".join(str(p) for p in problems[0]["loc"] if p not in KINDS and "[" not in str(p))
        raise CheckpointError(
            f"{str(problems[0]['input'])[:80]!r} was found",
            where=f"{file}: {path}",
            accepted=", or ".join(dict.fromkeys(accepted)),
            fix=FIX,
        ) from None


def _accepted(message: str) -> str:
    message = message.removeprefix("Input should be ")
    return MESSAGES.get(message, message)
