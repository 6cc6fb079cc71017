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
class Layer:
    """One layer behind the pooling; see the module's docstring."""

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
        """Shapes of the parameters, in the order of the file."""
        if self.kind == "layer_norm":
            return ((self.inputs,), (self.inputs,))
        if self.kind == "normalize":
            return ()
        weight, projected = (self.outputs, self.inputs), self.inputs != self.outputs
        more = ((self.outputs,),) if self.bias else ()
        return (weight, *more, *((weight,) if self.residual and projected else ()))


@dataclass(frozen=True)
class EmbeddingSettings:
    """Settings of a sentence embedding.

    prompts: texts that may stand before a text, by name
    prompt: name of the one that does unless a request names another; null: none
    include_prompt: False leaves the tokens of the prompt out of the pooling
    layers: layers behind the pooling, before `normalize`
    file: file of their parameters; null without parameters
    dimensions: numbers of an answer, the first of the vector; null: all
    similarity: function of SIMILARITIES by which the makers compare vectors; null: not said
    """

    prompts: Mapping[str, str] = field(default_factory=dict)
    prompt: str | None = None
    include_prompt: bool = True
    layers: tuple[Layer, ...] = ()
    file: str | None = None
    dimensions: int | None = None
    similarity: str | None = None

    def __post_init__(self) -> None:
        named = self.prompt is None or self.prompt in self.all_prompts
        require(named, "embedding.prompt", self.prompt, ", ".join(self.all_prompts))
        known = self.similarity in (None, *SIMILARITIES)
        require(known, "embedding.similarity", self.similarity, ", ".join(SIMILARITIES))
        accepted = "a file name where layers have parameters, else null"
        require((self.file is not None) == bool(self.count), "embedding.file", self.file, accepted)

    @property
    def all_prompts(self) -> dict[str, str]:
        """Prompts by name, with those that every model has."""
        return {**EMPTY_PROMPTS, **self.prompts}

    @property
    def text(self) -> str:
        """Text that stands before every text; "" without a prompt."""
        return "" if self.prompt is None else self.all_prompts[self.prompt]

    @property
    def count(self) -> int:
        """Number of parameters of all layers."""
        return sum(prod(shape) for layer in self.layers for shape in layer.shapes)

    def parameters(self, values: Any) -> Iterator[tuple[Layer, list[Any]]]:
        """(layer, its parameters) in order. values: the array of `file`"""
        at = 0
        for layer in self.layers:
            arrays = []
            for shape in layer.shapes:
                arrays.append(values[at : at + prod(shape)].reshape(shape))
                at += prod(shape)
            yield layer, arrays

    def width(self, pooled: int) -> int:
        """Numbers of an answer. pooled: numbers behind the pooling"""
        outputs = [layer.outputs for layer in self.layers if layer.kind == "dense"]
        width = outputs[-1] if outputs else pooled
        return width if self.dimensions is None else min(width, self.dimensions)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> EmbeddingSettings:
        """Parse the section `embedding` of a contract."""
        layers = tuple(Layer(**layer) for layer in document.get("layers", ()))
        return cls(**{**document, "layers": layers})
