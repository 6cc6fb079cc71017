"""Find keys of a sentence-transformers folder that are not read and that may change its answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimizer.harness.tasks import fill_mask, text_generation
from optimizer.harness.tasks.embeddings import feature_extraction

READ = object()
"""Stands for any value: the key is read, or changes no answer of `encode`."""
NOTHING: tuple[Any, ...] = (None, {}, [], False, "")
TEXT_ONLY = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
SCORES_ONLY = {"text": {"method": "forward", "method_output_name": "logits"}}
VECTOR, LOGITS = "sentence_embedding", "causal_logits"
KEYS: Mapping[str, Mapping[str, Any]] = {
    "modules.json": dict.fromkeys(("idx", "name", "path", "type"), READ),
    "config_sentence_transformers.json": {
        **dict.fromkeys(("__version__", "prompts", "default_prompt_name"), READ),
        **dict.fromkeys(("similarity_fn_name", "truncate_dim", "requirements"), READ),
        "model_type": "SentenceTransformer",
    },
    "SparseEncoder": {
        **dict.fromkeys(("__version__", "prompts", "default_prompt_name"), READ),
        **dict.fromkeys(("similarity_fn_name", "max_active_dims", "requirements"), READ),
        "model_type": "SparseEncoder",
    },
    "Transformer": {
        **dict.fromkeys(("max_seq_length", "do_lower_case", "unpad_inputs"), READ),
        "transformer_task": feature_extraction.TASK.name,
        "modality_config": TEXT_ONLY,
        "module_output_name": "token_embeddings",
    },
    "CausalTransformer": {
        **dict.fromkeys(("max_seq_length", "unpad_inputs", "modality_config"), READ),
        "transformer_task": text_generation.TASK.name,
        "module_output_name": LOGITS,
        "processing_kwargs": READ,
    },
    "LogitScore": {
        **dict.fromkeys(("true_token_id", "false_token_id"), READ),
        "module_input_name": LOGITS,
    },
    "MLMTransformer": {
        **dict.fromkeys(("max_seq_length", "do_lower_case", "unpad_inputs"), READ),
        "transformer_task": fill_mask.TASK.name,
        "modality_config": SCORES_ONLY,
        "module_output_name": "token_embeddings",
    },
    "SpladePooling": {
        **dict.fromkeys(("pooling_strategy", "activation_function"), READ),
        **dict.fromkeys(("embedding_dimension", "word_embedding_dimension"), READ),
    },
    "Pooling": {
        **dict.fromkeys(("embedding_dimension", "word_embedding_dimension"), READ),
        **dict.fromkeys(("pooling_mode", "include_prompt"), READ),
        **dict.fromkeys(("pooling_mode_cls_token", "pooling_mode_max_tokens"), READ),
        **dict.fromkeys(("pooling_mode_mean_tokens", "pooling_mode_mean_sqrt_len_tokens"), READ),
        **dict.fromkeys(("pooling_mode_weightedmean_tokens", "pooling_mode_lasttoken"), READ),
    },
    "Dense": {
        **dict.fromkeys(("in_features", "out_features", "bias", "activation_function"), READ),
        "use_residual": READ,
        "module_input_name": VECTOR,
        "module_output_name": VECTOR,
    },
    "LayerNorm": {"dimension": READ},
    "Normalize": {"module_input_name": VECTOR, "module_output_name": VECTOR},
    "Dropout": {"dropout": READ},
}
"""{file, or class of a module or a model: {key: value at which it changes nothing}}; any other key
changes nothing at a value of NOTHING."""


def find_unread_keys(file: Path, kind: str, document: Mapping[str, Any]) -> list[str]:
    """Write sentences on keys of `document`, a file of the sentence-transformers folder that is
    loaded, with a value that load does not read.

    kind: key of KEYS
    """
    known, unread = KEYS[kind], []
    for key, value in document.items():
        default = known.get(key)
        if default is READ or value == default or value in NOTHING:
            continue
        unread.append(f"{file}: {key} is {str(value)[:80]!r}")
    kind_name = str(document.get("type", "")) if kind == "modules.json" else ""
    if kind_name and not kind_name.startswith("sentence_transformers."):
        unread.append(f"{file}: type is {kind_name[:80]!r}, a class of its own")
    return unread
