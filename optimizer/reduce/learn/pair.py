"""A teacher and its student, and what of one is compared with what of the other.

A student that was cut out of its teacher: hidden states where a block of the student begins, whose
input should be the teacher's input of the block it was made of, and behind the last block; and
the attention of a head with that of the head it was made of. A student of its own: its blocks
are spread evenly over the teacher's, and what each gives is compared with what the last of its
share of the teacher's blocks gives; attention, where the heads are not as many, as the mean over
them, which is a distribution over the keys too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optimizer.foundation.errors import CheckpointError
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.tasks import Task
from optimizer.model.architectures.architecture import family
from optimizer.model.architectures.family_record import Family
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import has_sdpa, torch_model
from optimizer.recipe.recover import LossWeights
from optimizer.reduce.methods import losses

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Pairing:
    """For each block of the student, in order. states: which of the teacher's hidden states what it
    gives is compared with; i is what the teacher's first i blocks give. attention: which of the
    teacher's blocks its attention is compared with. heads: which of that block's query heads its
    own were made of, in order; None: all, or of none of them."""

    states: Sequence[int]
    attention: Sequence[int]
    heads: Sequence[Sequence[int] | None]


@dataclass(frozen=True)
class Kept:
    """What of a teacher its student was made of. blocks: the teacher's, in order. heads: for each
    of them the key/value heads that stayed, in order; None: all."""

    blocks: Sequence[int]
    heads: Sequence[Sequence[int] | None]


def of_kept(kept: Kept, blocks: int, share: int) -> Pairing:
    """blocks: the teacher's; share: its query heads for one key/value head, which lie side by
    side."""
    heads = [
        None if own is None else [head * share + i for head in own for i in range(share)]
        for own in kept.heads
    ]
    return Pairing((*kept.blocks[1:], blocks), tuple(kept.blocks), heads)


def evenly(student: int, teacher: int) -> Pairing:
    """Of models with so many blocks that were not made of each other."""
    ends = [max(1, round((i + 1) * teacher / student)) for i in range(student)]
    return Pairing(ends, [end - 1 for end in ends], [None] * student)


@dataclass(frozen=True)
class Pair:
    """A teacher and its student, whole and in eval mode.

    family, and prefix, of the base model's names: the student's. parameters: what is trained; None:
    all that `trained` says. rates: {parameter: learning rate} of those that have one of their own;
    shares: {parameter: of the learning rate} of those that have a multiple. reach: how far one
    should get in a short trial at most, of parameters whose learning rate is found by trials.
    from_nothing: the student has only the values it was initialised with,
    so that its embeddings are trained too. maps: one for each block of the student, of what it
    gives to the teacher's width; None where the widths are the same. products: what both models
    multiply in while learning; what is held out is judged in float32.
    """

    teacher: nn.Module
    student: nn.Module
    family: Family
    prefix: str
    contract: Contract
    pairing: Pairing
    parameters: Mapping[str, nn.Parameter] | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    reach: float | None = None
    from_nothing: bool = False
    maps: nn.ModuleList | None = None
    products: torch.dtype = torch.float32

    @property
    def task(self) -> Task:
        return tasks.of(self.contract)

    @property
    def widths(self) -> tuple[int, int]:
        """Of the hidden states, the student's and the teacher's."""
        models: Sequence[Any] = (self.student, self.teacher)
        return int(models[0].config.hidden_size), int(models[1].config.hidden_size)

    @property
    def same_width(self) -> bool:
        return self.widths[0] == self.widths[1]

    @cached_property
    def trained(self) -> dict[str, nn.Parameter]:
        """By name; every parameter but the embeddings, and what is tied to them: those of a model
        that was made smaller are the teacher's own rows, and of others only the rows that the texts
        reach would learn."""
        if self.parameters is not None:
            return dict(self.parameters)
        fixed = set() if self.from_nothing else self.embeddings
        return {n: p for n, p in self.student.named_parameters() if n not in fixed}

    @property
    def map_parameters(self) -> dict[str, nn.Parameter]:
        """Those of `maps`, which are trained along and are no part of the student."""
        if self.maps is None:
            return {}
        return {f"map/{name}": p for name, p in self.maps.named_parameters()}

    @property
    def embeddings(self) -> set[str]:
        """The names of their parameters, and of positions'."""
        start = f"{self.prefix}{self.family.embeddings}."
        tables = {
            f"{name}.weight"
            for name, module in self.student.named_modules()
            if isinstance(module, nn.Embedding)
        }
        return tables | {n for n, _ in self.student.named_parameters() if n.startswith(start)}

    @property
    def device(self) -> torch.device:
        """Where both models are; batches are moved there."""
        return next(self.student.parameters()).device

    def to(self, device: torch.device) -> Pair:
        """The same, with both models there."""
        for model in (self.teacher, self.student):
            model.to(device)
        return self

    def loss_names(self, weights: LossWeights, labelled: bool) -> list[str]:
        """Of what `losses` computes, in its order."""
        beside = {"hidden": weights.hidden, "attention": weights.attention}
        names = ["output", *(name for name, weight in beside.items() if weight > 0)]
        return [*names, "labels"] if weights.labels > 0 and labelled else names

    def losses(
        self,
        batch: Batch,
        labels: Tensor | None,
        weights: LossWeights,
        temperature: float,
        products: torch.dtype = torch.float32,
    ) -> dict[str, Tensor]:
        """{name: value} of the output's loss and of every other that has a weight, computed in
        float32 of models that multiply in `products`."""
        mine, theirs = self.answers(batch, weights, products)
        real = batch["attention_mask"].to(self.device).bool()
        values = {"output": self._output(mine, theirs, real, temperature)}
        if weights.hidden > 0:
            states = [mine.hidden_states[i + 1] for i in range(len(self.pairing.states))]
            if self.maps is not None:
                states = [to_teacher(h) for to_teacher, h in zip(self.maps, states, strict=True)]
            pairs = zip(states, self.pairing.states, strict=True)
            each = [losses.hidden(m, theirs.hidden_states[i], real) for m, i in pairs]
            values["hidden"] = torch.stack(each).mean()
        if weights.attention > 0:
            values["attention"] = self._attention(mine, theirs, real)
        if weights.labels > 0 and labels is not None:
            values["labels"] = nn.functional.cross_entropy(mine.logits, labels.to(self.device))
        return values

    def answers(
        self, batch: Batch, weights: LossWeights, products: torch.dtype = torch.float32
    ) -> tuple[Any, Any]:
        """The student's, with a gradient where one is asked for, and the teacher's, with the hidden
        states and attentions that have a weight; in float32 of models that multiply in
        `products`."""
        extra: dict[str, Any] = {"output_hidden_states": weights.hidden > 0}
        if weights.attention > 0:
            extra["output_attentions"] = True
        if self.family.kind == "decoder":
            extra["use_cache"] = False
        batch = self._moved(batch)
        with torch.autocast(self.device.type, products, enabled=products != torch.float32):
            with torch.no_grad():
                theirs = _in_float32(self.teacher(**batch, **extra))
            return _in_float32(self.student(**batch, **extra)), theirs

    def _moved(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def _attention(self, mine: Any, theirs: Any, real: Tensor) -> Tensor:
        pairing, each = self.pairing, []
        for own, i, heads in zip(mine.attentions, pairing.attention, pairing.heads, strict=True):
            other = theirs.attentions[i]
            other = other if heads is None else other[:, list(heads)]
            if own.shape[1] != other.shape[1]:
                own, other = (a.mean(1, keepdim=True) for a in (own, other))
            each.append(losses.attention(own, other, real))
        return torch.stack(each).mean()

    def _output(self, mine: Any, theirs: Any, real: Tensor, temperature: float) -> Tensor:
        """Of what the task is about. Vectors of different widths have no cosine: of them only the
        relations of each model's own."""
        task = self.task
        student, teacher = (getattr(answer, task.output) for answer in (mine, theirs))
        if task.classifies or task.generates:
            if task.per_position:
                student, teacher = student[real], teacher[real]
            if student.shape[-1] == 1:  # a number, and no choice among classes
                return losses.difference(student, teacher)
            return losses.divergence(student, teacher, temperature)
        if self.contract.pooling is None:
            return losses.hidden(student, teacher, real)
        vectors = [losses.pooled(s, real, self.contract.pooling) for s in (student, teacher)]
        relations = losses.relations(*vectors)
        return losses.direction(*vectors) + relations if self.same_width else relations

    def check_teacher(self, batch: Batch) -> None:
        """Raises CheckpointError for a teacher that answers the same text differently twice: there
        is nothing to learn from noise (a model in train mode, or its own code, drops at random)."""
        batch = self._moved(batch)
        with torch.no_grad():
            answers = [getattr(self.teacher(**batch), self.task.output) for _ in range(2)]
        if not torch.equal(*answers):
            raise CheckpointError(
                "the reference answers the same text differently twice",
                where="model",
                accepted="a model whose answers are the same each time",
                fix="Remove what draws random numbers from the model's own code in eval mode.",
            )


def _in_float32(answer: Any) -> Any:
    """What a model answered, tensors of another type widened: a loss subtracts numbers that are
    nearly equal."""
    for name, value in answer.items():
        if isinstance(value, Tensor):
            answer[name] = value.float()
        elif isinstance(value, tuple):
            answer[name] = tuple(v.float() for v in value)
    return answer


def open_pair(teacher: Path, student: Path, kept: Kept | None, weights: LossWeights) -> Pair:
    """The models of two folders that are laid out as load's. kept: None where the student was not
    made of the teacher's blocks, or of all. weights: of the losses that will be asked for."""
    contract = contracts.read(teacher / "contract.json")
    opened = [open_checkpoint(folder) for folder in (teacher, student)]
    models: list[Any] = [torch_model(checkpoint, contract.task) for checkpoint in opened]
    for model in models:
        # only eager attention gives its probabilities, and it keeps one for every pair of tokens
        if not weights.attention and has_sdpa(model):
            model.set_attn_implementation("sdpa")
    architecture = family(opened[1].config, opened[1].folder)
    prefix = architecture.prefix(contract.task)
    blocks, own = (int(m.config.num_hidden_layers) for m in models)
    if kept is None or architecture.shared_blocks:  # where one stored block stands for all
        pairing = evenly(own, blocks)
    else:
        config = models[0].config
        heads = int(config.num_attention_heads)
        groups = getattr(config, "num_key_value_heads", None) or heads
        pairing = of_kept(kept, blocks, heads // int(groups))
    return Pair(models[0], models[1], architecture, prefix, contract, pairing)
