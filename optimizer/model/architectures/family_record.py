"""What is known of an architecture, and under which names: the type of a row of families.py."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

from optimizer.harness import tasks
from optimizer.harness.inputs.text import TEXT
from optimizer.model.architectures.linear_blocks import FeedForward, Heads, SmoothPair
from optimizer.model.architectures.residual_blocks import BatchNorms, Chain, Summand
from optimizer.recipe.schema import Task


@dataclass(frozen=True)
class Family:
    """One architecture.

    blocks: the list of blocks, or of unequal ones "*" for each of a list, and in "{a,b}" what runs
    one after another there: lists of blocks, and blocks by themselves, those that are there.
    inputs: the kind of what it takes. base: the attribute that holds the base model in a model with
    a head. linears: those that every block has (options of a config can add some, such as
    DeBERTa's own position projections when share_att_key is off); of unequal blocks, those that
    any has. batch_norms: those that are folded. chains: what is rebuilt with identities. summands:
    quantized as inputs of modules are, where they are an identity in the model, so that a runtime
    can add integers. attention_products: the module of a block whose children query, key and value
    transformers multiplies by an attention that it takes by name, with a plain softmax between; ""
    where the products are others. any_size: it takes images of any size, whatever the config calls
    theirs. whole_pool: the pooling whose window is larger than any image
    (model/checkpoint/whole_pools.py), "" where there is none.

    Of a decoder, all but `head` relative to the base model or to a block: head, its output
    projection, a name in the whole model. final_norm: between the last block and the head, "" when
    it is not known. writes: the linears of a block whose output is added to the residual. value,
    output: the attention projections that a smooth pair joins. position_ids: whether the model
    takes them. transposed: linears whose weight a checkpoint holds as (in, out). stored_as:
    (part of a name in the files, what transformers calls it), replaced in this order.

    For making a smaller checkpoint: feed_forward, the neurons; attention, the heads, None where the
    config cannot carry fewer (the size of a head is hidden_size / heads there); hidden, the
    config's name for the width of the hidden states, "" where there are no fewer channels with the
    same heads; depth, its name for the number of blocks, "" where not every block can be left out;
    per_block, its lists with a value per block.
    """

    model_type: str
    base: str
    blocks: str
    embeddings: str
    linears: tuple[str, ...]
    smooth: tuple[SmoothPair, ...]
    pre_norm: bool = False
    shared_blocks: bool = False  # one block is applied several times: walk it once, all calls in
    positions_after_padding: bool = False  # position ids start at pad_token_id + 1
    kind: Literal["encoder", "decoder"] = "encoder"
    inputs: str = TEXT.name
    head: str = ""
    final_norm: str = ""
    writes: tuple[str, ...] = ()
    value: str = ""
    output: str = ""
    position_ids: bool = True
    transposed: tuple[str, ...] = ()
    feed_forward: FeedForward | None = None
    attention: Heads | None = None
    hidden: str = ""
    depth: str = ""
    per_block: tuple[str, ...] = ()
    stored_as: tuple[tuple[str, str], ...] = ()
    batch_norms: BatchNorms | None = None
    chains: tuple[Chain, ...] = ()
    any_size: bool = False
    whole_pool: str = ""
    summands: tuple[Summand, ...] = ()
    attention_products: str = ""

    def summands_of(self, block: str, modules: Container[str]) -> dict[str, Summand]:
        """{module: what it hands on} of a block. modules: the names of the model's, which need not
        have all of these. Of rows of one module the first applies whose convolution is there."""
        chosen: dict[str, Summand] = {}
        for summand in self.summands:
            if f"{block}.{summand.convolution}" in modules:
                chosen.setdefault(f"{block}.{summand.module}", summand)
        return chosen

    @property
    def uneven(self) -> bool:
        """Whether its blocks differ in the shapes of what they read."""
        return "*" in self.blocks or "{" in self.blocks

    @property
    def norms(self) -> tuple[str, ...]:
        """Those of a block whose output linears read, relative to it."""
        return tuple(p.producer for p in self.smooth if p.producer not in self.linears)

    def is_transposed(self, parameter: str) -> bool:
        """Whether a checkpoint holds this parameter as (in, out)."""
        return any(f".{parameter}".endswith(f".{name}.weight") for name in self.transposed)

    @property
    def base_prefix(self) -> str:
        """ "bert.": what names in a model with a head start with."""
        return f"{self.base}."

    def prefix(self, task: Task) -> str:
        """What the base model's names start with in the model of this task: "" or "bert."."""
        return "" if tasks.task(task).headless else self.base_prefix
