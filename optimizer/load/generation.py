"""Write a decoder's `generation` section: KV cache, end-of-text ids, chat template, defaults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.progress import say
from optimizer.foundation.reading import quote_error
from optimizer.harness.contract import SAMPLING
from optimizer.harness.errors import InputError
from optimizer.harness.generate.options import Options
from optimizer.harness.inputs import chat
from optimizer.harness.inputs.template_process import NotJinja, Rejected, TooMuch
from optimizer.harness.tasks import text_generation
from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.model.checkpoint.model import choose_auto_class

GENERATION_CONFIG = "generation_config.json"
CHANGED = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": 0,
    "dola_layers": None,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "top_h": None,
    "guidance_scale": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "exponential_decay_length_penalty": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "bad_words_ids": None,
    "force_words_ids": None,
    "constraints": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "stop_strings": None,
    "token_healing": None,
    "watermarking_config": None,
}
"""{option of transformers that changes a text and is not read here: its neutral value}."""
BY_LENGTH = ("dynamic", "longrope")  # transformers' dynamic_rope_update recomputes frequencies


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Read a source's generation_config.json; without such a file the options in config.json, where
    transformers then takes them from."""
    file = _options_file(folder)
    document = read_json(file) if file.is_file() else {}
    if file.name == GENERATION_CONFIG:
        return document
    return {k: v for k, v in document.items() if k in (*SAMPLING, *CHANGED)}


def _options_file(folder: Path) -> Path:
    file = folder / GENERATION_CONFIG
    return file if file.is_file() else folder / "config.json"


def read_generation(
    config: Any, tokenizer: Any, folder: Path, adapters: Sequence[str] = ()
) -> dict[str, Any]:
    """The `generation` section of contract.json without `context`. Raises CheckpointError when no
    token ends a text, an id lies outside the vocabulary, the model has no KV cache, or an option of
    CHANGED is set."""
    generation_config = read_generation_config(folder)
    _check_options(config, generation_config, folder)
    layers, kv_heads, head_dim, vocabulary = _measure_cache(config)
    eos = read_eos_ids(config, generation_config, tokenizer.eos_token_id)
    bos = tokenizer.bos_token_id
    outside = [i for i in (*eos, *([] if bos is None else [bos])) if not 0 <= i < vocabulary]
    if outside:
        raise CheckpointError(
            f"token id {outside[0]} begins or ends texts, but the model has {vocabulary} tokens",
            where=f"{folder}: eos_token_id, bos_token_id",
            fix="Use the generation_config.json and the tokenizer that the model was trained with.",
        )
    return {
        "layers": layers,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocabulary": vocabulary,
        "eos_ids": eos,
        "bos_id": bos,
        "chat_template": _read_template(tokenizer, folder),
        "defaults": _defaults(generation_config, _options_file(folder)),
        **({"adapters": list(adapters)} if adapters else {}),
    }


def _check_options(config: Any, generation_config: dict[str, Any], folder: Path) -> None:
    """Raise CheckpointError for an option of CHANGED that is not neutral."""
    for key, neutral in CHANGED.items():
        value = generation_config.get(key)
        if value not in (None, False, [], {}, neutral):
            raise CheckpointError(
                f"{str(value)[:80]!r} was found, with which transformers generates other texts",
                where=f"{_options_file(folder)}: {key}",
                accepted=f"no {key}; read are {', '.join(SAMPLING)}",
                fix="Generation here does not have this option. Remove it from a copy of the "
                "folder to generate without it.",
            )
    if prefix := getattr(config, "prefix", None):
        say(
            f"load: transformers' pipeline puts {str(prefix)[:80]!r} before each prompt (prefix in "
            "config.json); its generate does not, nor do answers here"
        )


def _defaults(generation_config: dict[str, Any], file: Path) -> dict[str, Any]:
    """Read the sampling defaults of a source's generation_config.json for the contract. Raises
    CheckpointError for a value that the option of that name does not accept."""
    present = {
        key: generation_config[key] for key in SAMPLING if generation_config.get(key) is not None
    }
    for key, value in present.items():  # other programs' spellings
        if key == "top_k" and isinstance(value, int | float) and value in (-1, int(value)):
            present[key] = max(int(value), 0)
        if key == "do_sample" and value in (0, 1):
            present[key] = bool(value)
    for key, value in present.items():
        try:
            Options.from_json({key: value})
        except InputError as e:
            raise CheckpointError(
                f"{value!r} was found",
                where=f"{file}: {key}",
                accepted=e.accepted,
                fix="Correct it, or remove it from the file.",
            ) from None
    return present


def read_eos_ids(
    config: Any, generation_config: dict[str, Any], tokenizers_own: int | None
) -> list[int]:
    """Read for the contract the ids that end a text, from generation_config.json, else from
    `config`, in transformers' order. tokenizers_own, the tokenizer's id, comes first if it is among
    them: templates use it."""
    configured = generation_config.get("eos_token_id")
    if configured is None:
        configured = getattr(config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    ids = [] if configured is None else ids
    if not all(type(i) is int for i in ids):
        raise CheckpointError(
            f"{str(configured)[:80]!r} was found",
            where=f"{GENERATION_CONFIG} or config.json: eos_token_id",
            accepted="an id, or a list of ids",
        )
    if not ids:
        raise CheckpointError(
            "no end-of-text token is set, so generation would never stop",
            where=f"eos_token_id in {GENERATION_CONFIG} and config.json",
            accepted="an id, or a list of ids",
            fix="Set eos_token_id in one of them to the tokenizer's"
            + (f": {tokenizers_own}." if tokenizers_own is not None else "."),
        )
    return sorted(dict.fromkeys(ids), key=lambda i: i != tokenizers_own)


def read_context(config: Any) -> int | None:
    """Read from a loaded config the maximum tokens for which full causal attention is exact; None
    when the config has no limit.

    Layers with a sliding window equal full attention up to that window and differ beyond it.
    """
    positions: int | None = getattr(config, "max_position_embeddings", None)
    kinds = getattr(config, "layer_types", None)
    window: int | None = getattr(config, "sliding_window", None)
    if window is None or not (kinds is None or "sliding_attention" in kinds):
        return positions
    if positions is None or window < positions:
        say(f"load: attention layers have a window of {window} tokens, so texts are limited to it")
        return window
    return positions


def check_rotary(config: Any) -> None:
    """Raise CheckpointError at load for rotary frequencies that change with the length of a
    text."""
    rope = getattr(config, "rope_parameters", None) or {}
    each = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # by layer type
    for kind in (one.get("rope_type") for one in each):
        if kind in BY_LENGTH:
            raise CheckpointError(
                f"rope_type {kind!r} changes frequencies with the length of a text, but a graph "
                "has one set of them",
                where="config.json: rope_parameters.rope_type",
                accepted=f"any other than {', '.join(BY_LENGTH)}",
                fix="Use a model that was trained for the lengths you need.",
            )


def _measure_cache(config: Any) -> tuple[int, int, int, int]:
    """Return (layers, key/value heads, size of a head, width of the logits), read from the KV cache
    of a run on the meta device, because the config's names for them differ by architecture."""
    trouble = ""
    try:
        with torch.device("meta"), torch.no_grad():
            model = choose_auto_class(text_generation.TASK.name, config.model_type).from_config(
                config, attn_implementation="eager"
            )
            ids = torch.zeros((1, 3), dtype=torch.int64)
            output = model.eval()(input_ids=ids, attention_mask=ids + 1, use_cache=True)
        shapes = {
            (tuple(x.keys.shape), tuple(x.values.shape)) for x in output.past_key_values.layers
        }
        layers = len(output.past_key_values.layers)
    except Exception as e:  # each architecture fails differently on a wrong config
        shapes, layers, trouble = set(), 0, f" ({(str(e).splitlines() or [repr(e)])[0][:160]})"
    keys, values = next(iter(shapes), ((), ()))
    if len(shapes) != 1 or len(keys) != 4 or keys != values:
        raise CheckpointError(
            f"architecture {config.model_type!r} is not covered: its KV cache is not one key and "
            f"one value [batch, heads, tokens, size] per layer, the same in all{trouble}",
            where="config.json",
            fix="Check the numbers in config.json: heads must divide the hidden size.",
        )
    return layers, keys[1], keys[3], int(output.logits.shape[-1])


def _read_template(tokenizer: Any, folder: Path) -> str | None:
    """The tokenizer's chat template, of several the one named "default"; None without. Raises
    CheckpointError for a template that is not Jinja, or takes too much memory or time."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        others = sorted(set(template) - {"default"})
        if others:
            say(f"load: chat templates {', '.join(others)} are left out; the default is written")
        template = template.get("default")
    if template is None:
        return None
    where = f"{folder}: chat_template in chat_template.jinja or tokenizer_config.json"
    fix = "Correct it, or remove it: prompts are then plain texts."
    try:
        chat.apply_template(str(template), [{"role": "user", "content": "Hello"}], {})
    except NotJinja as e:
        raise CheckpointError(
            f"the chat template is not Jinja ({quote_error(e)})", where=where, fix=fix
        ) from e
    except TooMuch as e:
        raise CheckpointError(
            f"the chat template cannot be rendered ({quote_error(e)})", where=where, fix=fix
        ) from e
    except Rejected as e:  # it may require other messages
        say(
            f"load: the chat template refuses a single user message ({quote_error(e)}); "
            "conversations must have the messages that it requires"
        )
    return str(template)
