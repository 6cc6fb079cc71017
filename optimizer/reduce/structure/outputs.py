"""Compute a model's answers from the hidden states behind its last block, the distance of two
models' answers, and the log-likelihood of drawn answers: all that reduce needs outside the
blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import normalize

from optimizer.compress.walk.capture import Batch
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.model.checkpoint.model import materialize, release
from optimizer.reduce.methods.divergence import add_absence, kullback_leibler, measure_angle
from optimizer.reduce.methods.losses import pool
from optimizer.reduce.structure.layout import ReducedCheckpoint


@dataclass(frozen=True)
class LayersOutsideBlocks:
    """The layers of a model that is reduced outside its blocks, with weights inside the context of
    `open_outputs`.

    beside: values that a block returns besides the hidden states; None: it returns only these
    """

    layout: ReducedCheckpoint
    contract: Contract
    beside: tuple[Any, ...] | None

    def answers(self, batch: Batch, real: Tensor, hidden: Tensor) -> Tensor:
        """Compute answers (texts, rows, width) of the model that is reduced from the output of the
        last block: logits per token or per text, or embeddings, normalized where the contract
        requires it.

        real: mask of real tokens (texts, sequence) bool
        hidden: output of the last block (texts, sequence, features)
        """
        model: Any = self.layout.source.model
        with _injected(self.layout, hidden, self.beside):
            extra = {"use_cache": False} if self.layout.source.decodes else {}
            output = model(**batch, **extra)
        if not hasattr(output, "last_hidden_state"):
            logits: Tensor = output.logits
            return logits if logits.ndim == 3 else logits[:, None]
        states: Tensor = output.last_hidden_state
        pooling = self.contract.pooling
        if pooling is None:
            return states
        vectors = pool(states, real, self.contract.poolings)
        settings = self.contract.vectors
        if settings.layers:
            vectors = self._layers(vectors)
        vectors = normalize(vectors, dim=-1) if self.contract.normalize else vectors
        return vectors[:, None, : settings.dimensions]

    def _layers(self, vectors: Tensor) -> Tensor:
        """Pass pooled vectors through the layers that the contract of an embedding model lists
        after pooling."""
        for layer, arrays in self.contract.vectors.parameters(self.contract.layer_weights):
            tensors = [torch.from_numpy(a) for a in arrays]
            if layer.kind == "normalize":
                vectors = normalize(vectors, dim=-1)
            elif layer.kind == "layer_norm":
                vectors = functional.layer_norm(vectors, (layer.inputs,), tensors[0], tensors[1])
            else:
                bias = tensors[1] if layer.bias else None
                out = functional.linear(vectors, tensors[0], bias)
                if layer.activation != "identity":
                    out = getattr(functional, layer.activation)(out)
                projected = layer.inputs != layer.outputs
                beside = functional.linear(vectors, tensors[-1]) if projected else vectors
                vectors = out + beside if layer.residual else out
        return vectors

    def distance(self, reference: Tensor, answers: Tensor, real: Tensor) -> Tensor:
        """Measure how far removing blocks or units moves answers, (rows,) per real token or per
        text: KL of logits in nats, squared difference of numbers, or 1 - cosine."""
        keep = real if reference.shape[1] == real.shape[1] else real.any(1, keepdim=True)
        one, other = reference[keep], answers[keep]
        if self.is_regression:
            return (one - other).square().sum(-1)
        if self.contract.multi_label:
            each = kullback_leibler(add_absence(one), add_absence(other))
            return each.view(len(one), -1).sum(-1)
        return (kullback_leibler if self.classifies else measure_angle)(one, other)

    def log_likelihood(self, answers: Tensor, real: Tensor, generator: torch.Generator) -> Tensor:
        """Return the log-likelihood of answers drawn from the model itself, summed over texts.

        Classes and tokens are drawn from their categorical distribution, vectors from a Gaussian of
        variance 1. So the mean square of the gradient is the Fisher information, not an estimate
        from labels.
        """
        if self.is_regression or not self.classifies:
            noise = torch.randn(answers.shape, generator=generator)
            weights = real[..., None] if answers.shape[1] == real.shape[1] else torch.tensor(1.0)
            return (answers * noise * weights).sum()
        keep = real if answers.shape[1] == real.shape[1] else real.any(1, keepdim=True)
        logits = add_absence(answers[keep]) if self.contract.multi_label else answers[keep]
        log_chances = logits.log_softmax(-1)
        with torch.no_grad():
            uniform = torch.rand(log_chances.shape, generator=generator)
            drawn = (log_chances - (-uniform.clamp(min=1e-30).log()).log()).argmax(-1)  # Gumbel
        return log_chances.gather(-1, drawn[:, None]).sum()

    @property
    def is_regression(self) -> bool:
        """True for a regression that is reduced, whose outputs are numbers and not logits."""
        one = len(self.contract.labels or ()) == 1
        return self.contract.activation == "identity" or one

    @property
    def classifies(self) -> bool:
        """True where answers of the model that is reduced are logits."""
        task = tasks.look_up(self.contract)
        return bool(task.classifies or task.generates or task.fills)


@contextmanager
def open_outputs(layout: ReducedCheckpoint, batch: Batch) -> Iterator[LayersOutsideBlocks]:
    """Load the weights outside the blocks and yield the layers there; the weights are released at
    the end.

    batch: any batch; the first block runs once on its first text, to see the values that it returns
    """
    model, tensors = layout.source.model, layout.source.tensors
    inside = tuple(f"{block}." for block in layout.blocks)
    for name in (n for n in tensors if not n.startswith(inside)):
        materialize(model, name, tensors)
    try:
        contract = contracts.read(layout.folder / "contract.json")
        yield LayersOutsideBlocks(layout, contract, _values_beside(layout, batch))
    finally:
        release(model)


def _values_beside(layout: ReducedCheckpoint, batch: Batch) -> tuple[Any, ...] | None:
    """Run the first block of the model that is reduced on one text; return the values that it
    returns besides the hidden states, None if it returns only these."""
    outputs: list[Any] = []
    first: Any = layout.source.model.get_submodule(layout.blocks[0])
    run = first.forward

    def look(*args: Any, **kwargs: Any) -> Any:
        outputs.append(run(*args, **kwargs))
        raise _FirstBlockDone

    materialize(layout.source.model, layout.blocks[0], layout.source.tensors)
    first.forward = look
    try:
        with torch.no_grad(), suppress(_FirstBlockDone):
            layout.source.base(**{name: t[:1] for name, t in batch.items()})
    finally:
        del first.forward
        release(layout.source.model, layout.blocks[0])
    return outputs[0][1:] if isinstance(outputs[0], tuple) else None


class _FirstBlockDone(Exception):
    """Raised once the first block of the model that is reduced has run, to skip the others."""


@contextmanager
def _injected(
    layout: ReducedCheckpoint, hidden: Tensor, beside: tuple[Any, ...] | None
) -> Iterator[None]:
    """Inside, let every block return `hidden` in place of its own output, together with the values
    in `beside` unless that is None."""
    blocks: Sequence[Any] = [layout.source.model.get_submodule(name) for name in layout.blocks]
    for block in blocks:
        block.forward = lambda *_, **__: hidden if beside is None else (hidden, *beside)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
