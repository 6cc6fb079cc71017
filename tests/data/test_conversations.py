"""Conversations become the tokens that transformers' chat template gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from optimizer.data import conversations
from optimizer.data.datasets import cut_windows, read_samples
from optimizer.foundation.errors import DataError
from optimizer.harness import contract as contracts
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.text import TextTokenizer, load_tokenizer
from optimizer.load.stage import STAGE
from optimizer.recipe.schema import DataSpec, Model
from tests.conftest import sentences
from tests.decoders import TEMPLATE

TEXTS = sentences(12, seed=3)
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": t}, {"role": "assistant", "content": f"<|im_end|> {i} "}]
    for i, t in enumerate(TEXTS)
]
CHATS[0].insert(0, {"role": "system", "content": "Be brief.", "name": "owner"})


class Chatting(NamedTuple):
    """A decoder whose template writes the token that begins texts, and the day."""

    reference: Any  # transformers' tokenizer
    contract: Contract
    tokenizer: TextTokenizer


@pytest.fixture(scope="module")
def chatting(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Chatting:
    from transformers import AutoTokenizer

    root = tmp_path_factory.mktemp("chatting")
    shutil.copytree(tiny_llama, root / "model")
    reference = AutoTokenizer.from_pretrained(root / "model")
    day = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    reference.chat_template = "{{ bos_token }}{{ messages[0].name }}" + day + TEMPLATE
    reference.save_pretrained(root / "model")
    (root / "out").mkdir()
    STAGE.run(Model(source=str(root / "model"), task="text-generation"), out=root / "out")
    contract = contracts.read(root / "out/contract.json")
    tokenizer = load_tokenizer(root / "out/checkpoint", contract)
    reference.chat_template = reference.chat_template.replace(day, "26 Jul 2024")
    return Chatting(reference, contract, tokenizer)


def write(folder: Path, chats: Sequence[Any], kind: str = "json") -> DataSpec:
    import pyarrow
    import pyarrow.parquet

    file = folder / f"chats.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"chat": list(chats)}), file)
    else:
        file.write_text("".join(json.dumps({"chat": chat}) + "\n" for chat in chats))
    return DataSpec(source=kind, files=(str(file),), columns={"messages": "chat"})


def sent(chat: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The conversation as ShareGPT has it."""
    names = {"user": "human", "assistant": "gpt"}
    renamed = []
    for message in chat:
        role, content, *more = message.values()
        renamed.append({"from": names.get(role, role), "value": content})
        renamed[-1] |= {"name": more[0]} if more else {}
    return renamed


@pytest.mark.parametrize("kind", ["json", "parquet", "from and value"])
def test_tokens_are_those_of_apply_chat_template(
    kind: str, chatting: Chatting, tmp_path: Path
) -> None:
    chats = [sent(chat) for chat in CHATS] if kind == "from and value" else CHATS
    rows = read_samples(write(tmp_path, chats, "parquet" if kind == "parquet" else "json"))
    expected = [
        i
        for chat in CHATS
        for i in chatting.reference.apply_chat_template(chat, tokenize=True)["input_ids"]
    ]
    length = 16
    cut = cut_windows(rows, chatting.tokenizer, chatting.contract, length)
    assert len(cut) == len(expected) // length > 20
    assert np.concatenate(cut).tolist() == expected[: len(cut) * length]


def test_a_model_without_a_template_is_refused_with_what_to_do(
    chatting: Chatting, tmp_path: Path
) -> None:
    decoder = replace(chatting.contract.decoder, chat_template=None)
    contract = replace(chatting.contract, generation=decoder)
    with pytest.raises(DataError, match=r"no chat template.*columns: {text: COLUMN}"):
        conversations.render(read_samples(write(tmp_path, CHATS)), contract, chatting.tokenizer)


CALL = {"role": "user", "content": "Hi", "calls": [{"name": "f"}]}


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([CHATS[1], [CALL]], "row 1.*calls of message 0 is .*name"),
        ([CHATS[1], [{"role": "user"}]], "row 1.*content of message 0 is missing"),
        (["Hello"], "row 0.*Hello is not a list of messages"),
    ],
)
def test_a_cell_that_no_template_takes_is_refused_with_its_row(
    cells: list[Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words):
        read_samples(write(tmp_path, cells))
