"""A wrong field of tokenizer_config.json is named with its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.foundation.errors import CheckpointError
from optimizer.load.tokenizer import tokenizer_fields

CLS = {"content": "[CLS]", "lstrip": False, "special": True}


def write(folder: Path, file: str = "tokenizer_config.json", **fields: Any) -> Path:
    (folder / file).write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("file", tokenizer_fields.FILES)
@pytest.mark.parametrize(
    ("field", "value", "path"),
    [
        ("pad_token", 7, "pad_token"),
        ("bos_token", {"a": 1}, "bos_token"),
        ("model_max_length", "x", "model_max_length"),
        ("added_tokens_decoder", {"a": CLS}, "added_tokens_decoder.a"),
        ("additional_special_tokens", [7], "additional_special_tokens.0"),
        ("padding_side", "up", "padding_side"),
    ],
)
def test_a_wrong_field_is_named(
    tmp_path: Path, file: str, field: str, value: Any, path: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"{file}: {path}: .*was found. Accepted: "):
        tokenizer_fields.check(write(tmp_path, file, **{field: value}))


def test_what_transformers_writes_is_taken(tiny_bert: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>"]})
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    tokenizer.save_pretrained(tmp_path)
    tokenizer_fields.check(tmp_path)
    decoder = {"0": CLS}
    tokenizer_fields.check(
        write(tmp_path, pad_token=CLS, model_max_length=int(1e30), added_tokens_decoder=decoder)
    )
