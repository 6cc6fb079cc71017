"""llama.cpp itself reads our files: the same tokens of texts, the same greedy continuations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from optimizer.foundation import state as compressed_state
from optimizer.foundation.state import CompressedState
from optimizer.lower.gguf import folder
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.recipe.targets import GgufTarget
from tests.conftest import sentences
from tests.decoders import write_tiny_decoder
from tests.lower.gguf.test_vocabulary import DIGITS, LLAMA3, PLAIN, QWEN2, split

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("xllamacpp"), reason="pip install xllamacpp==2026.10.11549"),
]
SPLITS = {
    "gpt-2": (PLAIN, False),
    "smollm": (DIGITS, False),
    "qwen2": (split(QWEN2), False),
    "llama-bpe": (split(LLAMA3), True),
    "smaug-bpe": (split(LLAMA3), False),
}
PIECES = (
    *("12345 and 6789.01", "I'll, HE'S, we'Re", "  two  spaces", "tabs\t\tand\n\n\nlines \n x"),
    *("naïve café", "日本語のテキスト", "привет мир", "🦙🦙 emoji", "a_b-c=d;e(f)", "٣٤٥ १२३", " "),
)


def texts() -> list[str]:
    """A thousand: words, digits, contractions, spaces, scripts, in other neighbourhoods."""
    words = sentences(1000, seed=5)
    n = len(PIECES)
    return [f"{PIECES[i % n]}{w} {PIECES[i // n % n]}" for i, w in enumerate(words)]


def tokenizer_of(folder_path: Path, pre: Any, whole_words: bool) -> None:
    """Put a tokenizer there whose merges join what only a split keeps apart."""
    file = folder_path / "tokenizer.json"
    old = Tokenizer.from_file(str(file))
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=old.get_vocab_size(),
        special_tokens=[t.content for _, t in sorted(old.get_added_tokens_decoder().items())],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(PIECES * 9, trainer)
    trained.pre_tokenizer = pre
    trained.decoder = old.decoder
    document = json.loads(trained.to_str())
    document["model"]["ignore_merges"] = whole_words
    file.write_text(json.dumps(document))


def lowered(root: Path, kind: str, pre: Any = PLAIN, whole_words: bool = False) -> Path:
    """A tiny float decoder whose tokenizer splits so, as a GGUF file; its folder."""
    tokenizer_of(write_tiny_decoder(root / "load" / "checkpoint", kind), pre, whole_words)
    for name in ("state", "out"):
        (root / name).mkdir()
    compressed_state.write(CompressedState({}), root / "state")
    section = GgufTarget(runtime="gguf", float="fp32")
    folder.lower(section, root / "load", root / "state", root, root / "out")
    return root


@contextmanager
def served(root: Path) -> Iterator[Any]:
    """Client of llama.cpp's server: (path, document) -> document."""
    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = str(root / "out" / folder.FILE)
    options.n_ctx, options.cpuparams.n_threads, options.warmup = 256, 1, False
    server = xllamacpp.Server(options)  # it stops when nothing refers to it
    address = server.listening_address

    def ask(path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        request = Request(address + path, json.dumps(body).encode(), headers)
        with urlopen(request, timeout=60) as reply:
            return json.load(reply)

    yield ask


@pytest.mark.parametrize("name", SPLITS)
def test_a_thousand_texts_have_the_tokens_of_tokenizers(name: str, tmp_path: Path) -> None:
    pre, whole_words = SPLITS[name]
    root = lowered(tmp_path, "llama", pre, whole_words)
    tokenizer = Tokenizer.from_file(str(root / "load" / "checkpoint" / "tokenizer.json"))
    with served(root) as ask:
        for text in texts():
            found = ask("/tokenize", {"content": text, "add_special": True})["tokens"]
            assert found == tokenizer.encode(text).ids, text


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
def test_greedy_continuations_are_torchs(kind: str, tmp_path: Path) -> None:
    root = lowered(tmp_path, kind)
    model: Any = load_torch_model(open_checkpoint(root / "load"), "text-generation")
    ids = [5, 60, 117, 200, 31, 9, 250, 77]
    options = {"n_predict": 12, "temperature": 0, "return_tokens": True, "ignore_eos": True}
    with served(root) as ask:
        found = ask("/completion", {"prompt": ids, "cache_prompt": False, **options})["tokens"]
    row = torch.tensor([ids])
    with torch.no_grad():
        for _ in found:
            logits = model(row).logits[:, -1]
            logits[:, 2] = -torch.inf  # the end of a text, which is ignored
            row = torch.cat([row, logits.argmax(-1, keepdim=True)], 1)
    assert len(found) == 12
    assert found == row[0, len(ids) :].tolist()
