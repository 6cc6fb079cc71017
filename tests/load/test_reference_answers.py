"""Forty-five architectures with heads are read as transformers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.validate.ledger import trace
from tests.conftest import heavy_tailed, sentences, write_tokenizer
from tests.load.conftest import Load

WIDTH: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
SIZES: dict[str, dict[str, Any]] = {
    "albert": {**WIDTH, "embedding_size": 16},
    "bert": WIDTH,
    "deberta-v2": {
        **WIDTH,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 16,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    },
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "electra": {**WIDTH, "embedding_size": 16},
    "modernbert": {**WIDTH, "global_attn_every_n_layers": 2, "local_attention": 8},
    "mpnet": WIDTH,
    "roberta": WIDTH,
    "xlm-roberta": WIDTH,
}
HEADS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "text-classification": ("SequenceClassification", {"num_labels": 3}, ("logits",)),
    "text-ranking": ("SequenceClassification", {"num_labels": 1}, ("logits",)),
    "token-classification": ("TokenClassification", {"num_labels": 5}, ("logits",)),
    "fill-mask": ("MaskedLM", {}, ("logits",)),
    "question-answering": ("QuestionAnswering", {}, ("start_logits", "end_logits")),
}
"""Task: (ending of transformers' class, fields of the config, its outputs)."""
SAME = 1e-4  # float32 sums in another order


def write_model(folder: Path, kind: str, task: str) -> Any:
    """A random model of heavy tails with its tokenizer; returns it as transformers opens it."""
    ending, fields, _ = HEADS[task]
    folder.mkdir()
    rows = write_tokenizer(folder)
    sizes = {"vocab_size": rows, "pad_token_id": 0, **SIZES[kind], **fields}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    auto = getattr(transformers, f"AutoModelFor{ending}")
    model = auto.from_config(config)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.add_(heavy_tailed(tuple(parameter.shape), i, 0.1))
    model.save_pretrained(folder)
    return auto.from_pretrained(folder).eval()


@pytest.mark.parametrize("task", HEADS)
@pytest.mark.parametrize("kind", SIZES)
def test_the_outputs_are_those_of_transformers_own_class_and_tokenizer(
    load: Load, tmp_path: Path, kind: str, task: str
) -> None:
    theirs = write_model(tmp_path / "model", kind, task)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    first, second = sentences(4, seed=1), None
    if task in ("text-ranking", "question-answering"):
        first = [" ".join(text.split()[:3]) for text in first]
        second = sentences(4, seed=2)
    out = load(tmp_path / "model", task)
    contract = contracts.read(out / "contract.json")
    encoder = load_tokenizer(out / "checkpoint", contract)
    batch = tasks.encode(contract, encoder, first, second)
    (output,) = contract.outputs
    model = load_torch_model(open_checkpoint(out), task)
    found = trace.run(model, batch, [output.name])[output.name]
    with torch.no_grad():
        answer = theirs(**tokenizer(first, second, padding=True, return_tensors="pt"))
    expected = np.stack([answer[name].numpy() for name in HEADS[task][2]], -1)
    expected = expected.reshape(found.shape)
    if found.shape[:2] == batch.real.shape:
        found, expected = found[batch.real], expected[batch.real]
    assert expected.std() > 10 * SAME  # a model of one answer would equal any other
    np.testing.assert_allclose(found, expected, rtol=SAME, atol=SAME)
