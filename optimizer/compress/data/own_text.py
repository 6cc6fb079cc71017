"""Generate calibration text with the float model (as LLM-QAT, Liu et al. 2023, arXiv 2305.17888),
from prompts of a few tokens of the given text.

It needs no data, and prevents overfitting to a few windows of real text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from optimizer.model.checkpoint import one_query
from optimizer.model.checkpoint.model import has_sdpa

PROMPT = 4  # tokens of the given text per prompt
LONGEST = 256  # tokens of one generated text; a window holds several
TOGETHER = 64  # texts generated together


@torch.no_grad()
def generate(model: nn.Module, text: Tensor, count: int, seed: int) -> Tensor:
    """Generate calibration windows (count, length) int64 with the float model, sampled at
    temperature 1.

    model: causal language model in memory; its weights are left in bfloat16
    text: (windows, length) int64, source of the prompts
    """
    generator = torch.Generator().manual_seed(seed)
    length = text.shape[1]
    texts = -(-length // LONGEST)
    each = -(-length // texts)
    starts = torch.randint(0, max(1, length - PROMPT), (count * texts,), generator=generator)
    prompts = torch.stack(
        [text[i % len(text), s : s + PROMPT] for i, s in enumerate(starts.tolist())]
    )
    for parameter in model.parameters():  # not the buffers: rotary frequencies need float32
        parameter.data = parameter.data.to(torch.bfloat16)
    writer: Any = model
    before = writer.config._attn_implementation
    if has_sdpa(model):  # one_query is made of it
        writer.set_attn_implementation(one_query.register())
    device = next(model.parameters()).device
    parts = [_generate(writer, p.to(device), each, generator) for p in prompts.split(TOGETHER)]
    writer.set_attn_implementation(before)
    return torch.cat(parts).cpu().reshape(count, -1)[:, :length].contiguous()


def _generate(model: Any, prompts: Tensor, length: int, generator: torch.Generator) -> Tensor:
    ids, cache, step = prompts, None, prompts
    while ids.shape[1] < length:
        out = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        step = _sample_token(out.logits[:, -1].float().softmax(-1), generator)
        ids = torch.cat([ids, step], 1)
    return ids


def _sample_token(chances: Tensor, generator: torch.Generator) -> Tensor:
    """Sample, for generated calibration text, one index per row (rows, 1) of probabilities (rows,
    vocabulary) by inverting their running sum. (torch.multinomial draws a number per token of the
    vocabulary, as slow as the blocks.)"""
    sums = chances.cumsum(-1)
    drawn = torch.rand(len(chances), 1, generator=generator)
    aim = drawn.to(sums.device) * sums[:, -1:]
    return torch.searchsorted(sums, aim, right=True).clamp_(max=chances.shape[-1] - 1)
