"""Small random causal language models that can tell faults apart, with a real tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.made_once import once

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WIDTH, HEADS, KV_HEADS, INNER = 64, 4, 2, 128


def write_decoder_tokenizer(folder: Path) -> int:
    """Byte-level BPE with a few merges and three special tokens; returns the vocabulary size.

    Every byte is a token, so that a character of several bytes arrives in pieces.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from tests.conftest import sentences

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(sentences(200), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=specials[0], eos_token=specials[2]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return int(core.get_vocab_size())


def _config(kind: str, vocabulary: int, layers: int, tied: bool) -> Any:
    import transformers

    common: dict[str, Any] = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 2}
    if kind == "gpt2":
        return transformers.GPT2Config(
            **common, n_embd=WIDTH, n_layer=layers, n_head=HEADS, n_inner=INNER, n_positions=256
        )
    if kind == "opt":
        return transformers.OPTConfig(
            **common,
            hidden_size=WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            ffn_dim=INNER,
            word_embed_proj_dim=WIDTH,
            max_position_embeddings=256,
            pad_token_id=2,
        )
    if kind.startswith("gemma"):
        common |= {"query_pre_attn_scalar": WIDTH // HEADS, "sliding_window": 256}
    config = {
        "gemma2": transformers.Gemma2Config,
        "gemma3_text": transformers.Gemma3TextConfig,
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }[kind]
    return config(
        **common,
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=WIDTH // HEADS,
        intermediate_size=INNER,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )


@once
def write_tiny_decoder(
    folder: Path,
    kind: str = "llama",
    *,
    layers: int = 2,
    tied: bool = True,
    seed: int = 0,
    embedded: int = WIDTH,
    task: str = "text-generation",
    **fields: object,
) -> Path:
    """A Hugging Face folder: width 64, 4 heads (2 for keys and values), heavy-tailed weights.

    kind: llama, mistral, qwen2, qwen3, gemma2, gemma3_text, gpt2 or opt. embedded: what opt
    projects to. task: of the model's class. fields: others of its config. Norm gains and biases are
    not trivial, so that dropping or swapping one shows.
    """
    from optimizer.model.checkpoint.model import choose_auto_class
    from tests.conftest import heavy_tailed

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = write_decoder_tokenizer(folder)
    config = _config(kind, vocabulary, layers, tied)
    if embedded != WIDTH:
        config.word_embed_proj_dim = embedded
    for name, value in fields.items():
        setattr(config, name, value)
    model = choose_auto_class(task, kind).from_config(config, dtype=torch.float32)  # type: ignore[arg-type]
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            values = heavy_tailed(tuple(parameter.shape), seed * 1000 + i, 0.15)
            if "embed" in name or "wte" in name:
                values = values * 3
            if ("norm" in name and name.endswith("weight")) or ("ln_" in name and "weight" in name):
                values = 1 + values
            parameter.copy_(values)
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nA random test model.\n")
    return folder
