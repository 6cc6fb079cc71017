"""Settings of a sentence embedding besides pooling: the section `embedding` of a contract.

    text      prompts[prompt] + text                    sentence-transformers' default prompt
    pooled    tokens of the prompt are left out         include_prompt: false
    vector    layers in order, then normalize, then the first `dimensions` numbers

A layer is one of
    {"kind": "dense", "inputs": 384, "outputs": 256, "bias": true, "activation": "tanh",
     "residual": false}                                 y = f(W x + b), with residual y + x (y + R x
                                                        where inputs and outputs differ)
    {"kind": "layer_norm", "inputs": 384}               torch.nn.LayerNorm
    {"kind": "normalize"}                               unit length
Their parameters are the numbers of `file` (.npy, float32, one axis), in this order: W (outputs,
inputs), b, R; weight and bias of a layer_norm. The file lies beside the tokenizer.

    quantized {"types": ["int8", "binary"], "dimensions": [384, 128],
               "ranges": {"384": [[lowest of each number], [highest]], "128": ...}}
               forms in which vectors may be asked for (tasks/embeddings/quantized_embedding.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from .errors import require

KINDS = ("dense", "layer_norm", "normalize")
ACTIVATIONS = ("identity", "tanh", "relu", "gelu", "sigmoid", "silu", "leaky_relu", "elu")
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
EMPTY_PROMPTS = {"query": "", "document": ""}
"""Prompts that sentence-transformers gives every model; a model's own replace them."""
LARGEST = 1 << 16  # maximum inputs and outputs of a layer


@dataclass(frozen=True)
class EmbeddingType:
    """Type, chosen in a bundle's contract, in which the numbers of an embedding are stored.

    bits: bits per number
    dtype: numpy's name of the type of the stored array
    """

    bits: int
    dtype: str

    @property
    def ranged(self) -> bool:
        """True if integers are scaled by the range of each dimension of the embeddings."""
        return self.bits == 8

    def bytes(self, dimensions: int) -> int:
        """Return the bytes of one stored embedding of this type."""
        return (self.bits * dimensions + 7) // 8


TYPES = {
    "float32": EmbeddingType(32, "float32"),
    "int8": EmbeddingType(8, "int8"),
    "uint8": EmbeddingType(8, "uint8"),
    "binary": EmbeddingType(1, "int8"),
    "ubinary": EmbeddingType(1, "uint8"),
}
"""{name, as in sentence-transformers' quantize_embeddings: type}."""
FLOAT = "float32"


@dataclass(frozen=True)
class QuantizedVectors:
    """Part of a bundle's contract: quantized and shortened forms in which embeddings may be
    requested.

    Each form's search quality was judged when the bundle was made.

    types: names of TYPES
    dimensions: accepted numbers of dimensions
    ranges: {dimensions: (lowest, highest value of each dimension)}, for types that need ranges
    """

    types: tuple[str, ...]
    dimensions: tuple[int, ...]
    ranges: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = "embedding.quantized"
        known = bool(self.types) and set(self.types) <= set(TYPES)
        require(known, f"{where}.types", self.types, ", ".join(TYPES))
        fits = all(0 < n <= LARGEST for n in self.dimensions) and bool(self.dimensions)
        require(fits, f"{where}.dimensions", self.dimensions, f"numbers from 1 to {LARGEST}")
        ranged = any(TYPES[name].ranged for name in self.types)
        for size in self.dimensions if ranged else ():
            low, high = self.ranges.get(str(size), ((), ()))
            fits = len(low) == len(high) == size
            fits = fits and all(a <= b for a, b in zip(low, high, strict=True))
            accepted = "the lowest and the highest of each number"
            require(fits, f"{where}.ranges.{size}", f"{len(low)}, {len(high)} numbers", accepted)


@dataclass(frozen=True)
class LayerAfterPooling:
    """One layer after the pooling of an embedding, as a bundle's contract describes it.

    kind: "dense", "layer_norm" or "normalize", as described above
    inputs, outputs: dimensions of its input and output; outputs only for dense layers
    bias: True if a dense layer adds a bias
    activation: name of ACTIVATIONS, applied by a dense layer
    residual: True if a dense layer adds its input, projected if dimensions differ
    """

    kind: str
    inputs: int = 0
    outputs: int = 0
    bias: bool = False
    activation: str = "identity"
    residual: bool = False

    def __post_init__(self) -> None:
        require(self.kind in KINDS, "embedding.layers: kind", self.kind, ", ".join(KINDS))
        accepted = ", ".join(ACTIVATIONS)
        known = self.activation in ACTIVATIONS
        require(known, "embedding.layers: activation", self.activation, accepted)
        sizes = [(), ("inputs",), ("inputs", "outputs")][KINDS[::-1].index(self.kind)]
        for name in sizes:
            value = getattr(self, name)
            fits = 0 < value <= LARGEST
            require(fits, f"embedding.layers: {name}", value, f"1 to {LARGEST}")

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the layer's parameters, in the order of the file."""
        if self.kind == "layer_norm":
            return ((self.inputs,), (self.inputs,))
        if self.kind == "normalize":
            return ()
        weight, projected = (self.outputs, self.inputs), self.inputs != self.outputs
        more = ((self.outputs,),) if self.bias else ()
        return (weight, *more, *((weight,) if self.residual and projected else ()))


@dataclass(frozen=True)
class EmbeddingSettings:
    """Section `embedding` of a bundle's contract: settings of a sentence embedding.

    prompts: {name: text that may stand before an input}
    prompt: name of the default prompt; null: none
    include_prompt: False leaves the tokens of the prompt out of the pooling
    layers: layers after the pooling, before `normalize`
    file: file of their parameters; null without parameters
    dimensions: number of dimensions of an answer, the first of the vector; null: all
    similarity: function of SIMILARITIES by which vectors are meant to be compared; null: unknown
    quantized: further forms of the vectors; null: none
    """

    prompts: Mapping[str, str] = field(default_factory=dict)
    prompt: str | None = None
    include_prompt: bool = True
    layers: tuple[LayerAfterPooling, ...] = ()
    file: str | None = None
    dimensions: int | None = None
    similarity: str | None = None
    quantized: QuantizedVectors | None = None

    def __post_init__(self) -> None:
        named = self.prompt is None or self.prompt in self.all_prompts
        require(named, "embedding.prompt", self.prompt, ", ".join(self.all_prompts))
        known = self.similarity in (None, *SIMILARITIES)
        require(known, "embedding.similarity", self.similarity, ", ".join(SIMILARITIES))
        accepted = "a file name where layers have parameters, else null"
        require((self.file is not None) == bool(self.count), "embedding.file", self.file, accepted)

    @property
    def all_prompts(self) -> dict[str, str]:
        """Prompts of a contract by name, including the empty ones that every model accepts."""
        return {**EMPTY_PROMPTS, **self.prompts}

    @property
    def text(self) -> str:
        """Text of the default prompt, which is put before each text; "" without one."""
        return "" if self.prompt is None else self.all_prompts[self.prompt]

    @property
    def count(self) -> int:
        """Number of parameters of all layers after the pooling."""
        return sum(prod(shape) for layer in self.layers for shape in layer.shapes)

    def parameters(self, values: Any) -> Iterator[tuple[LayerAfterPooling, list[Any]]]:
        """Yield (layer after the pooling, its parameter arrays) in order. values: all parameters,
        float32, one axis"""
        at = 0
        for layer in self.layers:
            arrays = []
            for shape in layer.shapes:
                arrays.append(values[at : at + prod(shape)].reshape(shape))
                at += prod(shape)
            yield layer, arrays

    def width(self, pooled: int) -> int:
        """Return the number of dimensions of an answer's embedding, by the contract.

        pooled: dimensions after the pooling
        """
        outputs = [layer.outputs for layer in self.layers if layer.kind == "dense"]
        width = outputs[-1] if outputs else pooled
        return width if self.dimensions is None else min(width, self.dimensions)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> EmbeddingSettings:
        """Parse the section `embedding` of a contract."""
        layers = tuple(LayerAfterPooling(**layer) for layer in document.get("layers", ()))
        forms = document.get("quantized")
        if forms is not None:
            ranges = {n: (tuple(r[0]), tuple(r[1])) for n, r in forms.get("ranges", {}).items()}
            forms = QuantizedVectors(tuple(forms["types"]), tuple(forms["dimensions"]), ranges)
        return cls(**{**document, "layers": layers, "quantized": forms})
