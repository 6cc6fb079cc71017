"""More text to calibrate on, written by the float model itself (as in LLM-QAT, Liu et al. 2023,
arXiv 2305.17888): samples of its own distribution, begun with a few tokens of the given text.

A few windows of real text are quickly learned by heart; the model's own text costs no data and
keeps what is fitted to them general.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from optimizer.model.checkpoint import one_query
from optimizer.model.checkpoint.model import has_sdpa

PROMPT = 4  # tokens taken from the given text: enough to start on different subjects
LONGEST = 256  # tokens of one text; windows are filled with several, as with given texts
TOGETHER = 64  # texts written at once


@torch.no_grad()
def continued(model: nn.Module, text: Tensor, count: int, seed: int) -> Tensor:
    """count windows as long as those of text, (count, length) int64, sampled at temperature 1.

    model: a causal language model that holds its weights; they are left in bfloat16. text
    (windows, length) int64.
    """
    generator = torch.Generator().manual_seed(seed)
    length = text.shape[1]
    texts = -(-length // LONGEST)
    each = -(-length // texts)
    starts = torch.randint(0, max(1, length - PROMPT), (count * texts,), generator=generator)
    prompts = torch.stack(
        [text[i % len(text), s : s + PROMPT] for i, s in enumerate(starts.tolist())]
    )
    for parameter in model.parameters():  # not the buffers: rotary frequencies need their digits
        parameter.data = parameter.data.to(torch.bfloat16)
    writer: Any = model
    before = writer.config._attn_implementation
    if has_sdpa(model):  # what it is made of
        writer.set_attn_implementation(one_query.register())
    parts = [_sampled(writer, p, each, generator) for p in prompts.split(TOGETHER)]
    writer.set_attn_implementation(before)
    return torch.cat(parts).reshape(count, -1)[:, :length].contiguous()


def _sampled(model: Any, prompts: Tensor, length: int, generator: torch.Generator) -> Tensor:
    ids, cache, step = prompts, None, prompts
    while ids.shape[1] < length:
        out = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        step = _drawn(out.logits[:, -1].float().softmax(-1), generator)
        ids = torch.cat([ids, step], 1)
    return ids


def _drawn(chances: Tensor, generator: torch.Generator) -> Tensor:
    """One index per row (rows, 1) of chances (rows, vocabulary), by inverting their running sum.
    (torch.multinomial draws a number for every token of the vocabulary: as slow as the blocks.)"""
    sums = chances.cumsum(-1)
    aim = torch.rand(len(chances), 1, generator=generator) * sums[:, -1:]
    return torch.searchsorted(sums, aim, right=True).clamp_(max=chances.shape[-1] - 1)
