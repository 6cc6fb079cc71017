"""Text generation: prefill of the prompts, then decode steps of one token per row.

    made = generate(contract, runner, tokenizer, ["Once upon a time"], Options(max_new_tokens=64))
    made[0].text, made[0].finish

    options.py         options of a request and their defaults
    loop.py            prompts through the model, step by step
    row.py             one prompt: its next token, its text, its end
    sampling.py        logits to the next token
    prompt_lookup.py   tokens guessed from the text and verified together
    grammar.py         tokens that a JSON schema allows next
    logprobs.py        log probabilities of tokens
    text.py            tokens to whole characters, up to a stop string

inputs/chat.py renders conversations. The loop runs on every runtime that implements
runtimes/decoder.py. Laws: loop.py, row.py, prompt_lookup.py.
"""

from __future__ import annotations

from .loop import BATCH, Completion, generate, stream
from .options import Options, Sampling
from .row import Piece

__all__ = ["BATCH", "Completion", "Options", "Piece", "Sampling", "generate", "stream"]
