"""Paged KV cache of OpenVINO: blocks that are assigned to texts on demand (Kwon et al. 2023).

The new tokens of all texts are concatenated in one row, without padding. OpenVINO's transformation
turns the model with states into this form. Besides input_ids and position_ids (tokens,) it takes,
int32:

    past_lens (texts,)                  tokens of each text in the KV cache
    subsequence_begins (texts + 1,)     start of each text's new tokens in the row, and the end
    block_indices                       blocks of the first text, of the second text, ...
    block_indices_begins (texts + 1,)   start of each text's blocks in block_indices, and the end
    max_context_len ()                  tokens of the longest text, new ones included
    key_cache.{i}, value_cache.{i}      (blocks, kv_heads, tokens per block, head_dim)

It has no mask: a token attends to its own text up to itself. Lowering checks that the graph's mask
is causal (lower/openvino/attention.py).

If every text adds one token, OpenVINO divides the blocks of all texts among its threads and sums
partial results per thread, so the bits of a text depend on the other texts and on the number of
threads. If one text adds more tokens, one thread computes each text and head. So a step may include
a companion, two tokens whose scores are discarded, which gives a text the same bits in every step
and on any number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from ...errors import BundleError
from ...inputs.batch import Array
from . import stateful

TOKENS = ("input_ids", "position_ids")
PARTS = ("key_cache", "value_cache")
STEP = (
    *TOKENS,
    "past_lens",
    "subsequence_begins",
    "block_indices",
    "block_indices_begins",
    "max_context_len",
)


class NotPagedError(BundleError):
    """Error of a model that OpenVINO cannot rewrite to a paged KV cache."""


def rewrite_cache_as_pages(ov: Any, model: Any) -> None:
    """Rewrite the KV cache of an ov.Model as blocks that texts get on demand, in place.

    ov: the openvino package

    Raises NotPagedError if OpenVINO cannot rewrite it.
    """
    from openvino._offline_transformations import paged_attention_transformation

    stateful.make_stateful(ov, model)
    try:
        paged_attention_transformation(model)
    except Exception as e:  # the binding raises RuntimeError for everything
        raise NotPagedError(
            f"OpenVINO {ov.get_version()} cannot convert the model to paged attention"
        ) from e
    names = {str(port.any_name) for port in model.inputs}
    others = {n for n in names - set(STEP) if n.partition(".")[0] not in PARTS}
    if others or not set(STEP) <= names:
        raise NotPagedError(
            f"the model's paged form takes {', '.join(sorted(others or names)[:8])}",
            where="OpenVINO",
            accepted=", ".join(STEP),
        )


@dataclass
class _Text:
    """A text in OpenVINO's paged KV cache.

    length: number of its tokens in the KV cache
    blocks: numbers of its blocks, in order
    """

    length: int = 0
    blocks: list[int] = field(default_factory=list)


class Pages:
    """Paged KV cache of one infer request of OpenVINO, for texts that the caller numbers.

    ov: the openvino package
    compiled: ov.CompiledModel in the form of `rewrite_cache_as_pages`
    texts, tokens: initial capacity: texts, and tokens per text; it grows on demand
    companion: add two tokens with discarded scores to steps of single tokens, so that the scores of
        a text do not depend on the other texts
    """

    def __init__(
        self, ov: Any, compiled: Any, texts: int, tokens: int, *, companion: bool = False
    ) -> None:
        self._ov, self._request = ov, compiled.create_infer_request()
        self._ports = _cache_ports(compiled)
        self._block = _block_tokens(self._ports)
        self._texts: dict[int, _Text] = {}
        self._free: list[int] = []
        self._caches: dict[str, Array] = {}
        self._grow(texts * (1 - -tokens // self._block) + companion)
        self._companion = [self._free.pop()] if companion else []

    def open(self, text: int, adapter: str = "") -> None:  # noqa: ARG002
        """Add a text without tokens to OpenVINO's paged KV cache."""
        self._texts[text] = _Text()

    def close(self, text: int) -> None:
        """Remove a text from OpenVINO's paged KV cache, so that its blocks are free for others."""
        self._free += reversed(self._texts.pop(text).blocks)

    def length(self, text: int) -> int:
        """Return the number of tokens of a text in OpenVINO's paged KV cache."""
        return self._texts[text].length

    def run(self, tokens: Mapping[int, Sequence[int] | Array]) -> list[Array]:
        """Run OpenVINO on one or more new tokens of each text; return the scores (tokens,
        vocabulary) of each."""
        new = [np.asarray(ids, np.int64) for ids in tokens.values()]
        texts = [self._texts[number] for number in tokens]
        pasts = [text.length for text in texts]
        for text, ids in zip(texts, new, strict=True):
            self._reserve(text, text.length + len(ids))
            text.length += len(ids)
        used = [text.blocks[: -(-text.length // self._block)] for text in texts]
        spans = [(p, text.length) for p, text in zip(pasts, texts, strict=True)]
        if self._companion and all(len(ids) == 1 for ids in new):
            new, used, spans = [*new, COMPANION], [*used, self._companion], [*spans, (0, 2)]
        return self._infer(new, used, spans)[: len(texts)]

    def _infer(
        self, new: list[Array], used: list[list[int]], spans: list[tuple[int, int]]
    ) -> list[Array]:
        """Run the OpenVINO model on new tokens and return the scores of each text.

        new: new tokens per text.
        used: blocks per text.
        spans: tokens per text before and after the step.
        """
        begins = [0, *accumulate(map(len, new))]
        arrays = {
            "input_ids": np.concatenate(new),
            "position_ids": np.concatenate([np.arange(*span) for span in spans]),
            "past_lens": _int32([before for before, _ in spans]),
            "subsequence_begins": _int32(begins),
            "block_indices": _int32([block for blocks in used for block in blocks]),
            "block_indices_begins": _int32([0, *accumulate(map(len, used))]),
            "max_context_len": _int32(max(after for _, after in spans)),
        }
        scores = np.asarray(self._request.infer(arrays, share_inputs=True)[0])[:, 0]
        return [scores[start:stop] for start, stop in pairwise(begins)]

    def forget(self, text: int, count: int = 1) -> None:
        """Remove the newest `count` tokens of a text from OpenVINO's paged KV cache."""
        self._texts[text].length -= count

    def copy_tokens(self, text: int, start: int, stop: int) -> list[Array]:
        """Return keys and values (heads, tokens, head_dim) of tokens start..stop from OpenVINO's
        paged KV cache, layer by layer.

        bf16 values are returned as their bits, typed float16.
        """
        blocks, within = self._places(text, start, stop)
        return [cache[blocks, :, within].swapaxes(0, 1) for cache in self._caches.values()]

    def append(self, text: int, arrays: Sequence[Array]) -> None:
        """Add tokens to a text in OpenVINO's paged KV cache by their keys and values, as
        `copy_tokens` returns them, without running the model."""
        start = self.length(text)
        stop = start + arrays[0].shape[1]
        self._reserve(self._texts[text], stop)
        blocks, within = self._places(text, start, stop)
        for cache, array in zip(self._caches.values(), arrays, strict=True):
            cache[blocks, :, within] = array.swapaxes(0, 1)
        self._texts[text].length = stop

    def _places(self, text: int, start: int, stop: int) -> tuple[Array, Array]:
        """Return where OpenVINO's paged KV cache has each token of a text: its block, and its index
        in the block."""
        blocks, within = np.divmod(np.arange(start, stop), self._block)
        return np.asarray(self._texts[text].blocks)[blocks], within

    def _reserve(self, text: _Text, length: int) -> None:
        missing = -(-length // self._block) - len(text.blocks)
        if missing > len(self._free):
            have = len(_first(self._caches))
            self._grow(have + max(have, missing - len(self._free)))
        for _ in range(missing):
            text.blocks.append(self._free.pop())

    def _grow(self, blocks: int) -> None:
        """Enlarge the paged KV cache to `blocks` blocks; the system gives memory when a block is
        used."""
        have = 0
        for name, port in self._ports.items():
            kind = port.get_element_type()
            new = np.zeros((blocks, *_sizes(port)), NUMPY[kind.get_type_name()])
            if name in self._caches:
                have = len(self._caches[name])
                new[:have] = self._caches[name]
            self._caches[name] = new
            self._request.set_tensor(name, self._ov.Tensor(new, self._ov.Shape(new.shape), kind))
        self._free = [*range(blocks - 1, have - 1, -1), *self._free]


COMPANION = np.zeros(2, np.int64)
NUMPY: dict[str, Any] = {"f32": np.float32, "bf16": np.float16, "f16": np.float16, "u8": np.uint8}
"""numpy types of the cache's element types; float16 holds the bits of bf16."""


def blocks_bytes(compiled: Any, tokens: int) -> int:
    """Return the bytes of OpenVINO's KV cache blocks of one text, over all layers.

    tokens: length of the text.
    Includes the scales of an 8-bit KV cache.
    """
    ports = _cache_ports(compiled)
    block = 0
    for port in ports.values():
        kind = np.dtype(NUMPY[port.get_element_type().get_type_name()])
        block += prod(_sizes(port)) * kind.itemsize
    return block * -(-tokens // _block_tokens(ports))


def _cache_ports(compiled: Any) -> dict[str, Any]:
    """Return {name: input} of the KV cache of an ov.CompiledModel, starting with layer 0."""
    ports = {str(port.any_name): port for port in compiled.inputs}
    layers = (len(ports) - len(STEP)) // len(PARTS)
    return {n: ports[n] for i in range(layers) for n in (f"{p}.{i}" for p in PARTS)}


def _block_tokens(ports: Mapping[str, Any]) -> int:
    """Return the tokens per block of OpenVINO's KV cache, by the values: 8-bit keys hold scales on
    the token axis."""
    return _sizes(ports[f"{PARTS[1]}.0"])[1]


def _sizes(port: Any) -> tuple[int, ...]:
    """Return the sizes of one block of keys or values in OpenVINO's paged KV cache."""
    return tuple(size.get_length() for size in list(port.get_partial_shape())[1:])


def _first(values: Mapping[str, Any]) -> Any:
    return next(iter(values.values()))


def _int32(values: Any) -> Array:
    return np.asarray(values, np.int32)
