"""Record of the facts of an architecture: the type of a row of families.py."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Literal

from optimizer.harness import tasks
from optimizer.harness.inputs.text import TEXT
from optimizer.model.architectures.linear_blocks import FeedForward, Heads, SmoothPair
from optimizer.model.architectures.residual_blocks import BatchNorms, Chain, Summand
from optimizer.recipe.schema import Task

BLOCK = re.compile(r"\.(\d+)\.")  # number of a block in the name of a parameter


@dataclass(frozen=True)
class Family:
    """Facts about one architecture of transformers. Names are relative to the base model or to a
    block; "" for none.

    blocks: list of equal blocks; for unequal ones "*" stands for each item of a list, and "{a,b}"
        for blocks or lists that run one after another, where they exist
    linears: linear layers of every block; for unequal blocks those of any block. Options of a
        config can add some (DeBERTa's position projections without share_att_key)
    summands: identities at which tensors outside linear layers are quantized, so that a runtime can
        add integers
    left_float: (full name of a layer, reason why it is not among `linears`)
    attention_products: module of a block that multiplies query, key and value with a plain softmax
        between, through an attention function that transformers looks up by name
    transposed: linear layers whose weights a checkpoint holds as (in, out)
    stored_as: (part of a name in the files, transformers' name), replaced in this order

    Fields for making a smaller checkpoint:

    attention: heads that can be removed; None where their size follows from hidden_size / heads, so
        that none can
    hidden: name in the config of the hidden width, if channels can be removed without changing the
        heads
    depth: name in the config of the number of blocks, if every block can be removed
    per_block: names in the config of lists with one value per block
    """

    model_type: str
    base: str  # attribute of the base model in a model with a head
    blocks: str
    embeddings: str
    linears: tuple[str, ...]
    smooth: tuple[SmoothPair, ...]
    equalized: tuple[SmoothPair, ...] = ()  # layers of an ONNX graph
    shared_blocks: bool = False  # one block is applied several times: walk it once, with all calls
    positions_after_padding: bool = False  # position ids start at pad_token_id + 1
    kind: Literal["encoder", "decoder"] = "encoder"
    inputs: str = TEXT.name  # kind of input
    head: str = ""  # a decoder's output projection, by its name in the model with a head
    final_norm: str = ""  # a decoder's norm between the last block and the head
    writes: tuple[str, ...] = ()  # a decoder's linears whose output is added to the residual
    value: str = ""  # a decoder's attention projections that a smooth pair joins: value, output
    output: str = ""
    position_ids: bool = True  # a decoder takes them
    transposed: tuple[str, ...] = ()
    feed_forward: FeedForward | None = None
    attention: Heads | None = None
    hidden: str = ""
    depth: str = ""
    per_block: tuple[str, ...] = ()
    stored_as: tuple[tuple[str, str], ...] = ()
    batch_norms: BatchNorms | None = None  # folded into convolutions
    chains: tuple[Chain, ...] = ()  # rebuilt with identities
    added_between: bool = False  # parameters are added to the hidden states between blocks
    reads_blocks: bool = False  # a head reads the outputs of blocks other than the last
    any_size: bool = False  # images of any size, whatever the config's image_size
    per_layer: str = ""  # "module:output" with an item per layer, of which the last alone is read
    global_pool: str = ""  # pooling whose window is larger than any image (global_pools.py)
    summands: tuple[Summand, ...] = ()
    left_float: tuple[tuple[str, str], ...] = ()
    attention_products: str = ""

    def summands_of(self, block: str, modules: Container[str]) -> dict[str, Summand]:
        """Return {name of an identity: its row of `summands`} for one block.

        block: full name of the block
        modules: names of all modules of the model; rows whose convolution is missing are skipped

        If several rows name one identity, the first one whose convolution exists applies.
        """
        chosen: dict[str, Summand] = {}
        for summand in self.summands:
            if f"{block}.{summand.convolution}" in modules:
                chosen.setdefault(f"{block}.{summand.module}", summand)
        return chosen

    def of_task(self, task: Task) -> Family:
        """Return the facts for a model of `task`. A decoder whose task does not generate text runs
        once over a text and has no head over the vocabulary, so it becomes an encoder."""
        if self.kind == "encoder" or tasks.find_task(task).generates:
            return self
        return replace(self, kind="encoder", head="")

    @property
    def uneven(self) -> bool:
        """True for an architecture with blocks that may differ in the shapes of their inputs."""
        return "*" in self.blocks or "{" in self.blocks

    @property
    def quantizes_convolutions(self) -> bool:
        """True for an architecture where convolutions that are followed by a BatchNorm are
        quantized."""
        pairs = () if self.batch_norms is None else self.batch_norms.pairs
        return any(name.endswith(p.convolution) for p in pairs for name in self.linears)

    @property
    def crosses_blocks(self) -> bool:
        """True where something outside the blocks reads or changes values between two blocks, so
        that a model with fewer blocks computes something else than the remaining blocks one after
        another."""
        return self.reads_blocks or self.added_between

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the norms in an architecture's block whose outputs are read by linear layers
        only (producers of smooth pairs)."""
        return tuple(p.producer for p in self.smooth if p.producer not in self.linears)

    def is_transposed(self, parameter: str) -> bool:
        """Return True for a parameter that the architecture's checkpoints hold as (in, out)."""
        return any(f".{parameter}".endswith(f".{name}.weight") for name in self.transposed)

    @property
    def base_prefix(self) -> str:
        """Prefix of the base model's names in a model with a head: "bert."."""
        return f"{self.base}."

    def prefix(self, task: Task) -> str:
        """Prefix of the base model's names in the model of `task`: "bert.", or "" if the task has
        no head."""
        return "" if tasks.find_task(task).headless or not self.base else self.base_prefix
