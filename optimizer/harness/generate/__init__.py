"""Text generation: prompts in, texts out, one token at a time.

    made = generate(contract, runner, tokenizer, ["Once upon a time"], Options(max_new_tokens=64))
    made[0].text, made[0].finish

    options.py     what may be asked, and what is done where nothing was
    inputs/chat.py        a conversation to the text the model was trained on, laid out in a process
                          with
                   limits of time and memory (inputs/template_process.py)
    loop.py        prompts through the model, step by step
    row.py         one of them: its next token, its text, its end
    sampling.py    logits to the next token
    grammar.py     which tokens a JSON schema allows next; logprobs.py: how likely tokens are
    text.py        tokens to whole characters, up to a stop string

The loop runs over any runtime that has runtimes/decoder.py's two methods.
"""

from __future__ import annotations

from .loop import BATCH, Completion, generate, stream
from .options import Options, Sampling
from .row import Piece

__all__ = ["BATCH", "Completion", "Options", "Piece", "Sampling", "generate", "stream"]
