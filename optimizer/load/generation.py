"""What a decoder's contract says beyond its inputs: the cache, where a text ends, the template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.progress import say
from optimizer.foundation.reading import words
from optimizer.harness.contract import SAMPLING
from optimizer.harness.errors import InputError
from optimizer.harness.generate.options import Options
from optimizer.harness.inputs import chat
from optimizer.harness.inputs.template_process import NotJinja, Rejected, TooMuch
from optimizer.harness.tasks import text_generation
from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.model.checkpoint.model import auto_class

GENERATION_CONFIG = "generation_config.json"
BY_LENGTH = ("dynamic", "longrope")  # transformers' dynamic_rope_update computes them anew


def advice(folder: Path) -> dict[str, Any]:
    """generation_config.json; empty when there is none."""
    file = folder / GENERATION_CONFIG
    return read_json(file) if file.is_file() else {}


def generation(config: Any, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """The `generation` document of contract.json, but for the context.

    Raises CheckpointError when nothing says which token
    ends a text, an id lies outside the vocabulary, or the model keeps no cache of keys and values.
    """
    advised = advice(folder)
    layers, kv_heads, head_dim, vocabulary = _cache(config)
    eos = eos_ids(config, advised, tokenizer.eos_token_id)
    bos = tokenizer.bos_token_id
    outside = [i for i in (*eos, *([] if bos is None else [bos])) if not 0 <= i < vocabulary]
    if outside:
        raise CheckpointError(
            f"token id {outside[0]} begins or ends a text, and the model has {vocabulary} tokens",
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
        "chat_template": _template(tokenizer, folder),
        "defaults": _defaults(advised, folder / GENERATION_CONFIG),
    }


def _defaults(advised: dict[str, Any], file: Path) -> dict[str, Any]:
    """What generation_config.json says of sampling. Raises CheckpointError for a value that the
    option of that name does not take."""
    present = {key: advised[key] for key in SAMPLING if advised.get(key) is not None}
    for key, value in present.items():  # as other programs write the same
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


def eos_ids(config: Any, advised: dict[str, Any], tokenizers_own: int | None) -> list[int]:
    """The ids that end a text: generation_config.json's, as transformers has it, else the
    config's; the tokenizer's own first where it is one of them, for templates name that one."""
    configured = advised.get("eos_token_id")
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
            "no token is said to end a text, so generation would never stop",
            where=f"eos_token_id in {GENERATION_CONFIG} and config.json",
            accepted="an id, or a list of ids",
            fix="Set eos_token_id in one of them to the tokenizer's"
            + (f": {tokenizers_own}." if tokenizers_own is not None else "."),
        )
    return sorted(dict.fromkeys(ids), key=lambda i: i != tokenizers_own)


def context(config: Any) -> int | None:
    """The longest sequence the model is a plain causal one for; None when nothing says.

    Layers that see a window of the last tokens alone are as good as others up to that window,
    and beyond it differ from what is exported here.
    """
    positions: int | None = getattr(config, "max_position_embeddings", None)
    kinds = getattr(config, "layer_types", None)
    window: int | None = getattr(config, "sliding_window", None)
    if window is None or not (kinds is None or "sliding_attention" in kinds):
        return positions
    if positions is None or window < positions:
        say(f"load: layers see a window of {window} tokens: that is the longest text here")
        return window
    return positions


def _cache(config: Any) -> tuple[int, int, int, int]:
    """(layers, key/value heads, size of a head, width of the logits), measured: the model is run
    on the meta device, which has shapes and no numbers, and its cache is looked at. Names in
    configs differ by architecture; shapes do not."""
    trouble = ""
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rope in BY_LENGTH:
        raise CheckpointError(
            f"rope_type {rope!r}: its frequencies change with the length of a text, and a graph "
            "has one set of them",
            where="config.json: rope_parameters.rope_type",
            accepted=f"others than {', '.join(BY_LENGTH)}",
            fix="Take a model that was trained for the lengths you need.",
        )
    try:
        with torch.device("meta"), torch.no_grad():
            model = auto_class(text_generation.TASK.name).from_config(
                config, attn_implementation="eager"
            )
            ids = torch.zeros((1, 3), dtype=torch.int64)
            output = model.eval()(input_ids=ids, attention_mask=ids + 1, use_cache=True)
        shapes = {
            (tuple(x.keys.shape), tuple(x.values.shape)) for x in output.past_key_values.layers
        }
        layers = len(output.past_key_values.layers)
    except Exception as e:  # each architecture has its own way to fail on a config that is off
        shapes, layers, trouble = set(), 0, f" ({(str(e).splitlines() or [repr(e)])[0][:160]})"
    keys, values = next(iter(shapes), ((), ()))
    if len(shapes) != 1 or len(keys) != 4 or keys != values:
        raise CheckpointError(
            f"architecture {config.model_type!r} is not covered: it keeps no cache of one key and "
            f"one value [batch, heads, tokens, size] per layer, the same in all{trouble}",
            where="config.json",
            fix="Check the numbers in config.json: heads must divide the hidden size.",
        )
    return layers, keys[1], keys[3], int(output.logits.shape[-1])


def _template(tokenizer: Any, folder: Path) -> str | None:
    """The chat template in chat_template.jinja or tokenizer_config.json, as transformers reads it;
    of several, the one called default. Raises CheckpointError for what is not Jinja, or takes too
    much memory or time for a conversation of one message."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        others = sorted(set(template) - {"default"})
        if others:
            say(f"load: chat templates {', '.join(others)} are left out; the default one is kept")
        template = template.get("default")
    if template is None:
        return None
    where = f"{folder}: chat_template in chat_template.jinja or tokenizer_config.json"
    fix = "Correct it, or remove it: prompts are then given as plain texts."
    try:
        chat.apply_template(str(template), [{"role": "user", "content": "Hello"}], {})
    except NotJinja as e:
        raise CheckpointError(
            f"the chat template is not Jinja ({words(e)})", where=where, fix=fix
        ) from e
    except TooMuch as e:
        raise CheckpointError(
            f"the chat template cannot be rendered ({words(e)})", where=where, fix=fix
        ) from e
    except Rejected as e:  # it may want other messages
        say(f"load: the chat template refuses one message of a user ({words(e)})")
    return str(template)
