"""Run a decoder with an explicit KV cache, in ONNX Runtime or in torch, by one interface.

A cache is a dict by the names of the graph's inputs, past_key_values.{layer}.key and .value, each
(batch, kv_heads, past, head_dim). Batches are padded on the left, so the last tokens of all rows,
and the tokens generated after them, are aligned. The harness's own functions pad and count tokens
(tasks/text_generation.py); ledger/laws/decoder/step_laws.py checks them at every length.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from optimizer.harness.contract import Contract, Generation
from optimizer.harness.inputs import kv_cache
from optimizer.harness.tasks.text_generation import build_step_arrays
from optimizer.validate.ledger.distance import Array

Cache = dict[str, Array]


class CachedDecoder(Protocol):
    """A decoder that validate runs one step at a time with an explicit KV cache. `step` returns the
    logits (batch, sequence, vocabulary) float32 of the new tokens, and a KV cache that includes
    them.

    ids: new tokens (batch, sequence) int64
    mask: (batch, past + sequence), 1 for real tokens and 0 for padding
    cache: KV cache of the `past` tokens before, which is not changed; None: no tokens before
    """

    def step(self, ids: Array, mask: Array, cache: Cache | None) -> tuple[Array, Cache]: ...


def empty_cache(made_of: Generation, batch: int) -> Cache:
    """Make for a decoder that is judged a KV cache of length 0 for `batch` rows; `made_of` has its
    layers, heads and width."""
    shape = (batch, made_of.kv_heads, 0, made_of.head_dim)
    return {name: np.zeros(shape, np.float32) for name, _ in kv_cache.list_names(made_of.layers)}


class OnnxDecoder:
    """Decoder that is judged, in an open runner with the interface of OrtRunner."""

    def __init__(self, runner: Any, contract: Contract) -> None:
        self._runner, self._contract, self._made_of = runner, contract, contract.decoder
        self._kinds = {n: k for n, k in runner.inputs.items() if kv_cache.is_past(n)}

    def step(self, ids: Array, mask: Array, cache: Cache | None) -> tuple[Array, Cache]:
        past_cache = empty_cache(self._made_of, len(ids)) if cache is None else cache
        past = {n: past_cache[n].astype(k, copy=False) for n, k in self._kinds.items()}
        outputs = self._runner.infer({**build_step_arrays(self._contract, ids, mask), **past})
        names = kv_cache.list_names(self._made_of.layers)
        return outputs["logits"], {past: outputs[present] for past, present in names}


class TorchDecoder:
    """Decoder for the laws, in torch: a causal language model of transformers."""

    def __init__(self, model: nn.Module, contract: Contract) -> None:
        self._model, self._contract = model, contract
        self._device = next(model.parameters()).device

    def step(self, ids: Array, mask: Array, cache: Cache | None) -> tuple[Array, Cache]:
        arrays = build_step_arrays(self._contract, ids, mask)
        tensors = {
            n: torch.from_numpy(np.ascontiguousarray(a)).to(self._device) for n, a in arrays.items()
        }
        past = _torch_cache(cache, self._device)
        with torch.no_grad():
            output = self._model(**tensors, past_key_values=past, use_cache=True, return_dict=True)
        return output.logits.cpu().numpy(), read_cache(output.past_key_values)


def _torch_cache(cache: Cache | None, device: torch.device) -> Any:
    from transformers import DynamicCache

    if cache is None:
        return DynamicCache()
    pairs = [torch.tensor(a, device=device) for a in cache.values()]  # DynamicCache changes them
    return DynamicCache(list(zip(pairs[0::2], pairs[1::2], strict=True)))


def read_cache(transformers_cache: Any) -> Cache:
    """Convert a KV cache of transformers, to judge a decoder, to {name of the graph's input:
    array}, in float32."""
    pairs = [(layer.keys, layer.values) for layer in transformers_cache.layers]
    flat = [t.detach().float().cpu().numpy() for pair in pairs for t in pair]
    names = [past for past, _ in kv_cache.list_names(len(pairs))]
    return dict(zip(names, flat, strict=True))


def compute_logits(system: CachedDecoder, ids: Array) -> Array:
    """Compute, to compare two systems, the logits (tokens, vocabulary) of one text `ids` (tokens,)
    in a single step."""
    logits: Array = system.step(ids[None], np.ones((1, len(ids)), np.int64), None)[0][0]
    return logits


def generate_greedily(system: CachedDecoder, prompts: Array, new: int) -> Array:
    """Generate, to compare two systems, `new` tokens per prompt, each the likeliest one, and return
    them (batch, new).

    prompts: token ids (batch, tokens), all of one length

    Generation does not stop at end tokens.
    """
    mask = np.ones_like(prompts)
    logits, cache = system.step(prompts, mask, None)
    tokens = [logits[:, -1].argmax(-1)]
    while len(tokens) < new:
        mask = np.concatenate([mask, np.ones((len(mask), 1), mask.dtype)], 1)
        logits, cache = system.step(tokens[-1][:, None], mask, cache)
        tokens.append(logits[:, -1].argmax(-1))
    return np.stack(tokens, 1)
