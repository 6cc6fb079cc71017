"""A teacher and its student, and the pairs of their hidden states and attentions to compare.

For a student that was cut from its teacher, the input of each block is compared with the input of
the teacher's block that it was cut from, the last output with the teacher's, and the attention of
each head with that of the head it was cut from. The blocks of any other student are spread evenly
over the teacher's: block i of n stands for the i-th n-th of the teacher's blocks, and its output is
compared with that of the last of these. If the numbers of heads differ, attention is compared as
the mean over the heads, which is a distribution over the keys too.
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
from optimizer.model.architectures.architecture import find_family
from optimizer.model.architectures.family_record import Family
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import has_sdpa, load_torch_model
from optimizer.recipe.recover import LossWeights
from optimizer.reduce.methods import losses
from optimizer.reduce.methods.divergence import add_absence

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Pairing:
    """Parts of the teacher that each block of the student is compared with. Each list has one item
    per block.

    states: index of the teacher's hidden state for the block's output; index i is the output of i
        blocks
    attention: index of the teacher's block whose attention is compared with the block's attention
    heads: query heads of that teacher's block from which the student's were cut, in order; None:
        all, or the student was not cut from the teacher
    """

    states: Sequence[int]
    attention: Sequence[int]
    heads: Sequence[Sequence[int] | None]


@dataclass(frozen=True)
class Kept:
    """Parts of a teacher from which its student was cut.

    blocks: indices of the teacher's kept blocks, ascending
    heads: indices of the kept key/value heads of each kept block; None: all
    """

    blocks: Sequence[int]
    heads: Sequence[Sequence[int] | None]


def pair_kept(kept: Kept, blocks: int, share: int) -> Pairing:
    """Pair the blocks of a student that was cut from its teacher with the teacher's.

    kept: parts of the teacher that the student has
    blocks: number of the teacher's blocks
    share: number of adjacent query heads per key/value head
    """
    heads = [
        None if groups is None else [head * share + i for head in groups for i in range(share)]
        for groups in kept.heads
    ]
    return Pairing((*kept.blocks[1:], blocks), tuple(kept.blocks), heads)


def pair_evenly(student: int, teacher: int) -> Pairing:
    """Pair the blocks of a student that was not cut from its teacher evenly with the teacher's.

    student: number of the student's blocks
    teacher: number of the teacher's blocks
    """
    ends = [max(1, round((i + 1) * teacher / student)) for i in range(student)]
    return Pairing(ends, [end - 1 for end in ends], [None] * student)


@dataclass(frozen=True)
class TeacherAndStudent:
    """A teacher and its student, both complete models in eval mode.

    family, prefix: architecture of the student, and prefix of its base model's names
    pairing: parts of the teacher that the student's blocks are compared with
    parameters: parameters to train; None: see `trained`
    rates: {parameter: its own learning rate}
    shares: {parameter: factor of the training's learning rate}
    reach: distance that a parameter may move in a trial of the rate search
    from_nothing: True for a student with random weights, whose embeddings are trained too
    maps: one linear map per block from the student's width to the teacher's; None for equal widths
    products: float type of the matrix products in training; held-out losses use float32
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
        return tasks.look_up(self.contract)

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of the hidden states (student, teacher)."""
        models: Sequence[Any] = (self.student, self.teacher)
        return int(models[0].config.hidden_size), int(models[1].config.hidden_size)

    @property
    def same_width(self) -> bool:
        return self.widths[0] == self.widths[1]

    @cached_property
    def trained(self) -> dict[str, nn.Parameter]:
        """{name: parameter to train}: all but embeddings and parameters tied to them. A student cut
        from its teacher has the teacher's embeddings; in others only the rows that occur in the
        texts would be trained. A student with random weights trains its embeddings too."""
        if self.parameters is not None:
            return dict(self.parameters)
        fixed = set() if self.from_nothing else self.embeddings
        return {n: p for n, p in self.student.named_parameters() if n not in fixed}

    @property
    def map_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of `maps`, which are trained too but are not part of the student."""
        if self.maps is None:
            return {}
        return {f"map/{name}": p for name, p in self.maps.named_parameters()}

    @property
    def embeddings(self) -> set[str]:
        """Names of the parameters in embeddings, position embeddings included."""
        start = f"{self.prefix}{self.family.embeddings}."
        tables = {
            f"{name}.weight"
            for name, module in self.student.named_modules()
            if isinstance(module, nn.Embedding)
        }
        return tables | {n for n, _ in self.student.named_parameters() if n.startswith(start)}

    @property
    def device(self) -> torch.device:
        """Device of the teacher and the student, to which their batches are moved."""
        return next(self.student.parameters()).device

    def to(self, device: torch.device) -> TeacherAndStudent:
        """Move both models to a device, in place, and return the pair."""
        for model in (self.teacher, self.student):
            model.to(device)
        return self

    def loss_names(self, weights: LossWeights, labelled: bool) -> list[str]:
        """Return the names of the losses that `losses` computes, in its order.

        labelled: True if texts have labels
        """
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
        """Return {loss: value} of a batch: the loss of the output, and every other loss with a
        weight.

        labels: label ids of the batch; None without labels
        temperature: divisor of the logits in the output's loss
        products: float type of the models' matrix products; losses are computed in float32
        """
        student, teacher = self.answers(batch, weights, products)
        real = batch["attention_mask"].to(self.device).bool()
        values = {"output": self._output(student, teacher, real, temperature)}
        if weights.hidden > 0:
            states = [student.hidden_states[i + 1] for i in range(len(self.pairing.states))]
            if self.maps is not None:
                states = [to_teacher(h) for to_teacher, h in zip(self.maps, states, strict=True)]
            pairs = zip(states, self.pairing.states, strict=True)
            each = [losses.hidden(s, teacher.hidden_states[i], real) for s, i in pairs]
            values["hidden"] = torch.stack(each).mean()
        if weights.attention > 0:
            values["attention"] = self._attention(student, teacher, real)
        if weights.labels > 0 and labels is not None:
            values["labels"] = nn.functional.cross_entropy(student.logits, labels.to(self.device))
        return values

    def answers(
        self, batch: Batch, weights: LossWeights, products: torch.dtype = torch.float32
    ) -> tuple[Any, Any]:
        """Return the outputs of (student, teacher) in float32, with hidden states and attentions
        where their loss has a weight. The student's outputs have a gradient if gradients are
        enabled.

        products: float type of the models' matrix products
        """
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
        """Return the loss of the task's output. It is the KL divergence of logits (for a
        multi-label model of each label's probability), the squared difference of numbers, `hidden`
        for models without pooling, and else the cosine and relations of pooled vectors (only
        relations for unequal widths)."""
        task = self.task
        student, teacher = (getattr(answer, task.output) for answer in (mine, theirs))
        if task.classifies or task.generates or task.fills:
            if task.per_position:
                student, teacher = student[real], teacher[real]
            if student.shape[-1] == 1 or self.contract.activation == "identity":  # numbers
                return losses.difference(student, teacher)
            if self.contract.multi_label:  # each label against its absence
                one, other = add_absence(student), add_absence(teacher)
                labels: int = student.shape[-1]
                return losses.divergence(one, other, temperature) * labels
            return losses.divergence(student, teacher, temperature)
        if self.contract.pooling is None:
            return losses.hidden(student, teacher, real)
        vectors = [losses.pool(s, real, self.contract.poolings) for s in (student, teacher)]
        relations = losses.relations(*vectors)
        return losses.direction(*vectors) + relations if self.same_width else relations

    def check_teacher(self, batch: Batch) -> None:
        """Raise CheckpointError for a teacher that answers the same text differently twice. Its own
        code is then random in eval mode, and a student cannot learn noise."""
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
    """Convert an output of teacher or student to float32, because a loss subtracts nearly equal
    numbers."""
    for name, value in answer.items():
        if isinstance(value, Tensor):
            answer[name] = value.float()
        elif isinstance(value, tuple):
            answer[name] = tuple(v.float() for v in value)
    return answer


def open_pair(
    teacher: Path, student: Path, kept: Kept | None, losses: LossWeights
) -> TeacherAndStudent:
    """Open the teacher and the student from folders in the layout of load.

    kept: parts of the teacher that the student has; None: the student was not cut from the teacher,
        or has all of the teacher's blocks
    losses: weights of the losses that will be computed
    """
    contract = contracts.read(teacher / "contract.json")
    opened = [open_checkpoint(folder) for folder in (teacher, student)]
    models: list[Any] = [load_torch_model(checkpoint, contract.task) for checkpoint in opened]
    for model in models:
        # only eager attention gives its probabilities, and it keeps one for every pair of tokens
        if not losses.attention and has_sdpa(model):
            model.set_attn_implementation("sdpa")
    architecture = find_family(opened[1].config, contract.task, opened[1].folder)
    prefix = architecture.prefix(contract.task)
    blocks, own = (int(m.config.num_hidden_layers) for m in models)
    if kept is None or architecture.shared_blocks:  # where one stored block stands for all
        pairing = pair_evenly(own, blocks)
    else:
        config = models[0].config
        heads = int(config.num_attention_heads)
        groups = getattr(config, "num_key_value_heads", None) or heads
        pairing = pair_kept(kept, blocks, heads // int(groups))
    return TeacherAndStudent(models[0], models[1], architecture, prefix, contract, pairing)
