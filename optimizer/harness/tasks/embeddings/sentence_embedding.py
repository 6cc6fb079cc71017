"""sentence-embedding: one vector per text, pooled over the tokens that are not padding.

    pooled = pooling of the hidden states, several joined      contract.pooling
    vector = layers of `embedding` in order, then normalize
    answer = its first `dimensions` numbers, not normalized again

This is SentenceTransformer.encode of the same folder. Products run row by row, so that the other
texts of a batch change no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...embedding_settings import FLOAT, LayerAfterPooling
from ...errors import BundleError, InputError
from ...inputs.batch import Array, Batch
from ...inputs.text import TEXT
from ..task import Task
from ..text_classification import sigmoid
from .quantized_embedding import quantize, read_ranges

if TYPE_CHECKING:
    from ...contract import Contract

SHOWN = 4  # numbers of an embedding that `predict` prints without --json
SMALLEST_NORM = 1e-12  # torch.nn.functional.normalize's eps
LAYER_NORM_EPS = 1e-5  # torch.nn.LayerNorm's


def decode(contract: Contract, hidden: Array, mask: Array) -> Array:
    """Pool hidden states (batch, sequence, width) to embeddings (batch, numbers), as the contract
    says.

    A mean is summed in sequence order, and padding is on the right, so that padding adds zeros at
    the end of the sum and changes no bit of the result.

    mask: (batch, sequence), True at the positions to pool
    """
    parts = [POOL[name](hidden, mask) for name in contract.poolings]
    vectors = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    settings = contract.vectors
    if settings.layers:
        vectors = _apply_layers(contract, vectors)
    if contract.normalize:
        vectors = normalize(vectors)
    return np.ascontiguousarray(vectors[:, : settings.dimensions])


def _mean(hidden: Array, mask: Array) -> Array:
    return np.asarray(_sum(hidden, mask) / _count(mask))


def _mean_sqrt(hidden: Array, mask: Array) -> Array:
    return np.asarray(_sum(hidden, mask) / np.sqrt(_count(mask)))


def _weighted_mean(hidden: Array, mask: Array) -> Array:
    """Pool to an embedding: return the mean of the tokens, each weighted by its position, from
    1."""
    weights = mask * np.arange(1, mask.shape[1] + 1, dtype=np.float32)
    total = np.maximum(weights.sum(axis=1, keepdims=True), np.float32(1))
    return np.asarray(_sum(hidden * weights[..., None], mask) / total)


def _max(hidden: Array, mask: Array) -> Array:
    return np.asarray(np.where(mask[..., None], hidden, np.float32(-np.inf)).max(axis=1))


def _first(hidden: Array, mask: Array) -> Array:
    return np.asarray(hidden[np.arange(len(hidden)), mask.argmax(axis=1)])


def _last(hidden: Array, mask: Array) -> Array:
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
    return np.asarray(hidden[np.arange(len(hidden)), last])


def _sum(hidden: Array, mask: Array) -> Array:
    return np.asarray(np.where(mask[..., None], hidden, np.float32(0)).sum(axis=1))


def _count(mask: Array) -> Array:
    return np.asarray(np.maximum(mask.sum(axis=1, keepdims=True), 1).astype(np.float32))


POOL: Mapping[str, Callable[[Array, Array], Array]] = {
    "mean": _mean,
    "cls": _first,
    "max": _max,
    "mean_sqrt_len_tokens": _mean_sqrt,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}
"""(hidden states, mask of positions to pool) -> (batch, width), by name of contract.POOLINGS."""


def normalize(vectors: Array) -> Array:
    """Scale embeddings (batch, numbers) to unit length."""
    norm = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    return np.asarray(vectors / np.maximum(norm, np.float32(SMALLEST_NORM)))


def _apply_layers(contract: Contract, vectors: Array) -> Array:
    settings, values = contract.vectors, contract.layer_weights
    if values is None and settings.count:
        raise BundleError(
            "the parameters of its layers were not read",
            where=f"embedding.file: {settings.file}",
            fix="Open the contract with its folder: Contract.open_layers.",
        )
    for layer, arrays in settings.parameters(values):
        vectors = LAYERS[layer.kind](layer, vectors, arrays)
    return vectors


def _dense(layer: LayerAfterPooling, vectors: Array, arrays: list[Array]) -> Array:
    weight = arrays[0]
    out = np.stack([weight @ row for row in vectors])
    if layer.bias:
        out = out + arrays[1]
    out = ACTIVATIONS[layer.activation](out.astype(np.float64)).astype(np.float32)
    if layer.residual:
        projected = layer.inputs != layer.outputs
        out = out + (np.stack([arrays[-1] @ row for row in vectors]) if projected else vectors)
    return np.asarray(out)


def _layer_norm(_: LayerAfterPooling, vectors: Array, arrays: list[Array]) -> Array:
    """Compute, after the pooling of an embedding, torch.nn.LayerNorm, in float64 and rounded
    once."""
    weight, bias = arrays
    x = vectors.astype(np.float64)
    x = x - x.mean(axis=1, keepdims=True)
    deviation = np.sqrt(np.square(x).mean(axis=1, keepdims=True) + LAYER_NORM_EPS)
    return np.asarray((x / deviation * weight + bias).astype(np.float32))


LAYERS: Mapping[str, Callable[[LayerAfterPooling, Array, list[Array]], Array]] = {
    "dense": _dense,
    "layer_norm": _layer_norm,
    "normalize": lambda _layer, vectors, _arrays: normalize(vectors),
}


def _gelu(x: Array) -> Array:
    """Compute GELU after the pooling of an embedding, x Phi(x), with erfc, which keeps the digits
    of a negative x."""
    tails = np.array([math.erfc(-v / math.sqrt(2)) for v in x.ravel()]).reshape(x.shape)
    return np.asarray(x * tails / 2)


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu,
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "leaky_relu": lambda x: np.where(x >= 0, x, 0.01 * x),
    "elu": lambda x: np.where(x >= 0, x, np.expm1(np.minimum(x, 0))),
}
"""Activation of a dense layer by the name in embedding_settings.ACTIVATIONS, in float64."""


def shorten(contract: Contract, vectors: Array, dimensions: int) -> Array:
    """Return the first `dimensions` numbers of embeddings (batch, numbers).

    They are scaled to unit length again if the model's own answers are, as OpenAI's field
    `dimensions` does. The model's own width leaves vectors unchanged.
    """
    if dimensions == vectors.shape[1]:
        return vectors
    short = vectors[:, :dimensions]
    return normalize(short) if contract.normalize else np.ascontiguousarray(short)


def with_form(contract: Contract, kind: str | None, dimensions: int | None) -> Contract:
    """Return the contract with embeddings of another type or width; None: the model's own.

    Raises InputError as choose_form does.
    """
    if kind is None and dimensions is None:
        return contract
    return replace(contract, form=choose_form(contract, kind, dimensions))


def choose_form(contract: Contract, kind: str | None, dimensions: int | None) -> tuple[str, int]:
    """Return (type, dimensions) of the embeddings that a request asks for.

    kind: name of embedding_settings.TYPES; None: float32
    dimensions: numbers of the vector; None: the model's own for float32, else the contract's first

    Raises InputError for a form that the contract does not have.
    """
    contract = contract.texts or contract
    if contract.task != TASK.name:
        raise InputError(f"the task is {contract.task}", where="type", accepted=f"task {TASK.name}")
    width, forms = tensors(contract)["embedding"][1][0], contract.vectors.quantized
    if kind in (None, FLOAT):
        size = width if dimensions is None else dimensions
        if not 1 <= size <= width:
            raise InputError(
                f"{size} was given", where="dimensions", accepted=f"1 to the model's {width}"
            )
        return FLOAT, size
    types = () if forms is None else forms.types
    if forms is None or kind not in types:
        raise InputError(
            f"vectors of type {str(kind)[:40]!r} were not proven for this model",
            where="type",
            accepted=", ".join(dict.fromkeys((FLOAT, *types))),
            fix="Name the type in section embeddings of the recipe, and run it again.",
        )
    size = forms.dimensions[0] if dimensions is None else dimensions
    if size not in forms.dimensions:
        raise InputError(
            f"{size} numbers of type {kind} were not proven for this model",
            where="dimensions",
            accepted=", ".join(map(str, forms.dimensions)),
        )
    return kind, size


def convert(contract: Contract, vectors: Array, kind: str, dimensions: int) -> Array:
    """Shorten embeddings (batch, numbers) and quantize them.

    kind, dimensions: results of choose_form
    """
    return quantize(shorten(contract, vectors, dimensions), kind, read_ranges(contract, dimensions))


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Return the task's answers, {"embedding": numbers} per text, in the contract's form."""
    del batch
    if contract.form is not None:
        values = convert(contract, values, *contract.form)
    return [{"embedding": row.tolist()} for row in values]


def tensors(contract: Contract) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {field of an embedding's answer: (dtype, shape per input)} for servers that send
    arrays."""
    (output,) = (o for o in contract.outputs if o.name == TASK.output)
    pooled = int(output.axes[-1]) * len(contract.poolings)
    return {"embedding": ("float32", (contract.vectors.width(pooled),))}


def line(answer: Mapping[str, Any]) -> str:
    """Write an answer of the task in one line for a person: the first numbers of the embedding."""
    numbers = answer["embedding"]
    first = " ".join(f"{x:.4f}" if isinstance(x, float) else str(x) for x in numbers[:SHOWN])
    return f"[{first} ...] {len(numbers)} numbers (--json prints all)"


TASK = Task(
    name="sentence-embedding",
    inputs=TEXT,
    output="last_hidden_state",
    answer_output="sentence_embedding",
    axes=("batch", "sequence", "width"),
    metrics={
        "cosine": (),
        "probe_accuracy": (("label",),),
        "retrieval": (("text_pair",), ("label",)),
        "spearman": (("text_pair", "score"),),
    },
    decode=decode,
    answers=answers,
    line=line,
    tensors=tensors,
    arrays=("token_type_ids",),
    sections=("pooling", "normalize"),
    optional=("embedding",),
    headless=True,
    pipeline_tag="sentence-similarity",
    not_in_browser="",
)
