"""A causal language model ranks as LogitScore and the card of Qwen3-Reranker do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from optimizer.data.sample import Sample
from optimizer.foundation.errors import CheckpointError
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.recipe.schema import Model
from optimizer.validate import token_counts
from tests.conftest import sentences
from tests.decoders import write_decoder_tokenizer
from tests.load.conftest import Load, edit_json

RANKS = "text-ranking"
PAIRS = [
    *zip(sentences(3, seed=1), [" two\n ", *sentences(2, seed=2)], strict=True),
    ("the film", " ".join(sentences(20, seed=3))),  # is cut
]
TEMPLATE = '<|im_start|>Judge it: "yes" 😀\n<Query>: {query}\n<Document>: {document}<|im_end|>\n'


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random language model with tokens yes and no, its head tied."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("language_model")
    write_decoder_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token, tokenizer.model_max_length = "<|endoftext|>", 200
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(language_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as CrossEncoder saves it, with a prompt."""
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    folder = tmp_path_factory.mktemp("saved")
    transformer = Transformer(str(language_model), transformer_task="text-generation")
    modules = [transformer, LogitScore(40, 41)]
    prompts: dict[str, Any] = {"prompts": {"web": "Find it."}, "default_prompt_name": "web"}
    library.CrossEncoder(modules=modules, device="cpu", **prompts).save_pretrained(str(folder))
    return folder


def scores(out: Path) -> list[float]:
    contract = contracts.read(out / "contract.json")
    texts, pairs = (list(column) for column in zip(*PAIRS, strict=True))
    batch = tasks.encode(contract, load_tokenizer(out / "checkpoint", contract), texts, pairs)
    model = load_torch_model(open_checkpoint(out), contract.task)
    with torch.no_grad():
        logits = model(**{n: torch.from_numpy(a) for n, a in batch.items()}).logits.numpy()
    values = tasks.decode(contract, {"logits": logits}, batch)
    return [one["score"] for one in tasks.build_answers(contract, values, batch)]


def test_the_harness_scores_as_logit_score_with_prompt_and_truncation(
    load: Load, saved: Path
) -> None:
    library = pytest.importorskip("sentence_transformers")
    expected = library.CrossEncoder(str(saved), device="cpu").float().predict(PAIRS, batch_size=1)
    got = scores(load(saved, task=RANKS))
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    assert np.ptp(got) > 0.01


def test_a_template_of_the_recipe_scores_as_the_model_cards_code(
    load: Load, language_model: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(language_model)
    model = AutoModelForCausalLM.from_pretrained(language_model, dtype=torch.float32)
    expected = []
    for query, document in PAIRS[:3]:
        text = TEMPLATE.replace("{query}", query).replace("{document}", document)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            last = model(ids).logits[0, -1, tokenizer.convert_tokens_to_ids(["no", "yes"])]
        expected.append(float(last.softmax(0)[1]))
    out = load(language_model, task=RANKS, template=TEMPLATE)
    np.testing.assert_allclose(scores(out)[:3], expected, rtol=1e-4)
    assert not any("lm_head" in n for n in open_checkpoint(out).tensors)


def test_what_the_tokenizer_does_and_the_template_does_not_is_named(
    load: Load, language_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, processors

    folder = Path(shutil.copytree(language_model, tmp_path / "model"))
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first = ("<|im_start|>", core.token_to_id("<|im_start|>"))
    core.post_processor = processors.TemplateProcessing(f"{first[0]} $A", special_tokens=[first])
    core.save(str(folder / "tokenizer.json"))
    edit_json(folder / "tokenizer_config.json", truncation_side="left")
    warning = "puts '<|im_start|>' before a text"
    load(folder, task=RANKS, template="Judge {query} {document}.", max_length=200)
    shown = capsys.readouterr().err
    assert warning in shown
    assert "logit of 'yes' minus that of 'no'" in shown
    assert "transformers cuts its beginning" in shown
    load(folder, task=RANKS, template=TEMPLATE, max_length=200)
    assert warning not in capsys.readouterr().err


@pytest.mark.parametrize("limit", [8, 30, 1900])
def test_the_recount_of_tokens_cuts_as_the_harness_does(language_model: Path, limit: int) -> None:
    from tokenizers import Tokenizer

    core = Tokenizer.from_file(str(language_model / "tokenizer.json"))
    spec = contracts.TokenizerSpec("tokenizer.json", 2000, 0, "<|endoftext|>")
    parts = ("<|im_start|>Query: ", " Document: ", "<|im_end|> yes or no?")
    contract = contracts.Contract(RANKS, (), (), tokenizer=spec, template=parts)
    query, document = PAIRS[-1]
    encoder = load_tokenizer(language_model, contract)
    (one,) = tasks.look_up(contract).inputs.encode(contract, encoder, [query], [document], limit)
    row = Sample(text=query, text_pair=document)
    assert token_counts.fill_template(core, parts, row, limit).tolist() == one.encoding.ids
    assert one.cut == (limit < 1900)


def _template(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a dropped document": (_template("{{ messages[-2].content }}"), "once and unchanged"),
    "a trimmed text": (
        _template("{% for m in messages %}{{ m.content | trim }}\n{% endfor %}"),
        "once and unchanged",
    ),
    "a role refused": (_template("{{ raise_exception('roles') }}"), "does not take a query"),
    "a scale behind the head": (
        lambda folder: edit_json(folder / "config.json", logits_scaling=4.0),
        "logits_scaling is 4.0",
    ),
    "an option of the tokenizer": (
        lambda folder: edit_json(
            folder / "sentence_bert_config.json", processing_kwargs={"text": {"max_length": 9}}
        ),
        "processing_kwargs",
    ),
    "another module": (
        lambda folder: (folder / "modules.json").write_text(
            json.dumps(json.loads((folder / "modules.json").read_text())[:1])
        ),
        "the last module is",
    ),
    "a token beyond the head": (
        lambda folder: edit_json(folder / "1_LogitScore" / "config.json", true_token_id=9999),
        "has no row",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_folder_cannot_honour_is_refused_by_name(
    load: Load, saved: Path, tmp_path: Path, name: str
) -> None:
    change, message = WRONG[name]
    folder = Path(shutil.copytree(saved, tmp_path / "model"))
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        load(folder, task=RANKS)


def test_a_folder_without_modules_needs_a_template(load: Load, language_model: Path) -> None:
    with pytest.raises(CheckpointError, match="does not say in which text"):
        load(language_model, task=RANKS)


@pytest.mark.parametrize("template", ["{query}", "{document} {query}", "{query}{query}{document}"])
def test_a_template_has_both_places_once_in_order(template: str) -> None:
    with pytest.raises(ValidationError, match="once each"):
        Model(source="m", task=RANKS, template=template)
