"""Find the tokens whose logits rank, of a causal language model under sentence-transformers'
LogitScore or with Qwen3-Reranker's yes and no."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.progress import say
from optimizer.harness import tasks
from optimizer.load.adapters import adapter
from optimizer.load.config.model_type import CONFIG
from optimizer.load.config.modules_json import locate_module, read_modules
from optimizer.load.sentence.keys import find_unread_keys
from optimizer.load.tokenizer.tokenizer import open_tokenizer
from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.recipe.schema import Model

MODULE = "LogitScore"
WORDS = ("yes", "no")  # tokens of a folder without the module, the library's default
CLASSIFIER = "ForSequenceClassification"
LANGUAGE_MODEL = "ForCausalLM"  # end of the name of a class with a head over the vocabulary
CHANGED = {  # fields of a config that change logits behind the head: value without effect
    "final_logit_softcapping": None,
    "logits_scaling": 1,
    "logit_scale": 1,
    "lm_head_multiplier": 1,
}


def takes(section: Model, folder: Path) -> bool:
    """Return True for a causal language model under a task that ranks, where no adapter brings
    another head. folder: of config.json"""
    file = folder / CONFIG
    if (
        not tasks.find_task(section.task).ranks
        or section.gguf_file is not None
        or not file.is_file()
    ):
        return False
    named = read_json(file).get("architectures")
    first = str(named[0]) if isinstance(named, list) and named else ""
    headed = (n for one in adapter.find(section, folder) for n in one.header)
    return first.endswith(LANGUAGE_MODEL) and not any(n.endswith(adapter.HEADS) for n in headed)


def set_head(config: Any, folder: Path, section: Model) -> None:
    """Make a transformers config that of the classifier. Raises CheckpointError for a model whose
    logits are more than a product with the head's rows."""
    for name, neutral in CHANGED.items():
        value = getattr(config, name, None)
        if value not in (None, neutral):
            raise CheckpointError(
                f"{name} is {value}, which changes the logits of yes and no after the head",
                where=f"{folder / CONFIG}: {name}",
                accepted=f"{neutral}, for task {section.task}",
                fix="Rank with another model, or set model.task: text-generation and read the "
                "logprobs of the two tokens from /v1/completions.",
            )
    if config.get_text_config() is not config:
        raise CheckpointError(
            f"{config.model_type} reads more than texts",
            where=f"{folder / CONFIG}: model_type",
            accepted=f"a decoder of texts, for task {section.task}",
        )
    config.architectures = [config.architectures[0].removesuffix(LANGUAGE_MODEL) + CLASSIFIER]
    config.num_labels = 1
    if config.pad_token_id is None and (folder / "tokenizer_config.json").is_file():
        config.pad_token_id = open_tokenizer(folder, section.trust_remote_code).pad_token_id


def read_tokens(root: Path, folder: Path, section: Model) -> tuple[int, int | None]:
    """Find the tokens whose logits score a pair: (id of "yes", id of "no" or None), from the
    folder's module LogitScore, or those of WORDS in a folder without modules. Raises
    CheckpointError for others."""
    if not (root / "modules.json").is_file():
        tokenizer = open_tokenizer(folder, section.trust_remote_code)
        ids = [tokenizer.get_vocab().get(word) for word in WORDS]
        if missing := [word for word, n in zip(WORDS, ids, strict=True) if n is None]:
            raise CheckpointError(
                f"the tokenizer has no token {missing[0]!r}",
                where=str(folder),
                accepted=f"a vocabulary with {' and '.join(WORDS)}, or a folder that CrossEncoder "
                f"saved with its module {MODULE}",
            )
        say(
            f"load: the score of a pair is the logit of {WORDS[0]!r} minus that of {WORDS[1]!r}; "
            f"for other tokens give a folder that CrossEncoder saved with its module {MODULE}"
        )
        return int(ids[0]), int(ids[1])
    modules = read_modules(root)
    last = modules[-1]
    if not str(last.get("type", "")).endswith(f".{MODULE}"):
        raise CheckpointError(
            f"the last module is {last.get('type')}",
            where=str(root / "modules.json"),
            accepted=f"Transformer, then {MODULE}, for a causal language model that ranks",
        )
    file = locate_module(root, last) / CONFIG
    document = read_json(file)
    if unread := find_unread_keys(file, MODULE, document):
        raise CheckpointError(f"it is not read here: {unread[0]}", where=str(file))
    yes, no = document.get("true_token_id"), document.get("false_token_id")
    for value in (yes, 0 if no is None else no):
        if type(value) is not int or value < 0:
            raise CheckpointError(
                f"{str(value)[:80]!r} was found", where=str(file), accepted="the id of a token"
            )
    return int(str(yes)), no
