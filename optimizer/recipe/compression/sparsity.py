"""The sparsity section of a recipe: which weights are zero, by which method.

SPARSITY_METHODS is the only place that knows the methods' names. A record imports no torch: what it
does is named by a string, "package.module:function".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from optimizer.foundation.sections import fields
from optimizer.foundation.sections.method_options import HessianOptions, SparsegptOptions
from optimizer.foundation.sections.section import Section
from optimizer.foundation.source_digest import source_digest
from optimizer.foundation.sparsity import UNSTRUCTURED, Pattern

_APPLY = "optimizer.compress.apply.pruning."
AMOUNT = 0.5


@dataclass(frozen=True)
class SparsityMethod:
    """A way to choose what is pruned.

    apply: (compress/apply/pruning.Prunable, Sparsity) -> (values (out, in), mask, note). law: what
    the ledger knows of it: "recomputed": the mask follows from the weights alone, and what is kept
    stays; "kept": what is kept stays, and the mask is judged by the output error; "adjusted": what
    is kept is adjusted to what is not, and both are judged by the output error. calibrated: looks
    at activations (second moments of a weight's inputs). float_target: can make up for the errors
    of earlier blocks. passes: how often calibration tokens go through the blocks for it.
    """

    name: str
    apply: str
    law: Literal["recomputed", "kept", "adjusted"]
    calibrated: bool = False
    float_target: bool = False
    passes: float = 0.0


SPARSITY_METHODS: Mapping[str, SparsityMethod] = {
    m.name: m
    for m in (
        SparsityMethod("magnitude", _APPLY + "magnitude:prune", "recomputed"),
        SparsityMethod("wanda", _APPLY + "wanda:prune", "kept", calibrated=True, passes=1.5),
        SparsityMethod(
            "sparsegpt",
            _APPLY + "sparsegpt:prune",
            "adjusted",
            calibrated=True,
            float_target=True,
            passes=2.5,
        ),
    )
}


def _known(name: str) -> str:
    if name not in SPARSITY_METHODS:
        raise ValueError(
            f"{name!r} is no method of sparsity; accepted: {', '.join(SPARSITY_METHODS)}"
        )
    return name


def _quoted(text: Any) -> Any:
    if isinstance(text, int):
        raise ValueError(
            f"{text} was found: YAML reads 2:4 without quotes as a number (2 minutes and 4); write "
            'it in quotes: "2:4"'
        )
    return text


def _pattern(text: str) -> str:
    if text != UNSTRUCTURED:
        Pattern.parse(text)
        if text.startswith(UNSTRUCTURED):
            raise ValueError(
                f"pattern {text!r}: use pattern: {UNSTRUCTURED} and amount: "
                f"{Pattern.parse(text).amount:g}"
            )
    return text


class Sparsity(Section):
    """In the same walk as quantize: prune, then round what is left, by one Hessian. Without a
    quantize section the weights that are left stay float."""

    method: Annotated[
        str, AfterValidator(_known), WithJsonSchema({"enum": list(SPARSITY_METHODS)})
    ] = Field(description="a module in optimizer/compress/apply/pruning/")
    pattern: Annotated[str, BeforeValidator(_quoted), AfterValidator(_pattern)] = Field(
        "2:4",
        description='"N:M": of every M neighbouring inputs of an output N are kept; '
        f"{UNSTRUCTURED}: a share of each output's",
    )
    amount: float | None = Field(
        None, gt=0, lt=1, description=f"pattern: {UNSTRUCTURED}: the share pruned ({AMOUNT})"
    )
    modules: tuple[fields.Pattern, ...] = Field(
        ("*",), min_length=1, description="module name patterns (fnmatch); head and embedding never"
    )
    keep_dense: tuple[fields.Pattern, ...] = Field(
        (), description="module name patterns (fnmatch); one that matches nothing is an error"
    )
    sparsegpt: SparsegptOptions = SparsegptOptions()

    @property
    def record(self) -> SparsityMethod:
        """Of the method."""
        return SPARSITY_METHODS[self.method]

    @cached_property
    def shape(self) -> Pattern:
        """The pattern with its amount."""
        if self.pattern == UNSTRUCTURED:
            return Pattern(amount=AMOUNT if self.amount is None else self.amount)
        return Pattern.parse(self.pattern)

    @property
    def adjusts(self) -> bool:
        """Whether the weights that are kept change."""
        return self.record.law == "adjusted"

    @property
    def float_target(self) -> bool:
        """Whether weights that stay float aim at the float model's output."""
        return self.record.float_target and self.sparsegpt.float_target is not False

    @model_validator(mode="after")
    def _fields_belong_together(self) -> Sparsity:
        if self.amount is not None and self.pattern != UNSTRUCTURED:
            raise ValueError(
                f"amount belongs to pattern: {UNSTRUCTURED}; {self.pattern} says itself how many "
                "weights are kept"
            )
        own = [name for name in SPARSITY_METHODS if name in self.model_fields_set]
        for name in own:
            if name != self.method:
                raise ValueError(f"{name}: options are given, and method is {self.method}")
        return self


def code(sparsity: Sparsity | None) -> dict[str, str]:
    """{method: digest of the code behind it}: as methods.code."""
    if sparsity is None:
        return {}
    module = sparsity.record.apply.partition(":")[0]
    return {f"sparsity {sparsity.method}": source_digest(module, own=True)}


def check(sparsity: Sparsity, quantize: Any) -> None:
    """Raise ValueError where pruning and quantize, a Quantize, do not go together."""
    refused = [m.name for m in quantize.chosen if not m.takes_mask]
    if refused:
        raise ValueError(
            f"sparsity with quantize.method {' and '.join(refused)}: it may move a pruned weight "
            "away from zero; use methods: [gptq], or leave sparsity out"
        )
    for name in ("allocate", "keep_float_auto"):
        if getattr(quantize, name) is not None:
            raise ValueError(
                f"sparsity with quantize.{name}: its sensitivities are those of dense weights; "
                "leave one of them out"
            )
    rounds = not quantize.leaves_float
    if sparsity.adjusts and rounds and quantize.block_rounding.law == "nearest":
        raise ValueError(
            f"sparsity.method {sparsity.method} adjusts the weights that are kept, and "
            f"{quantize.block_rounding.name} would round them without a view of that; use "
            "quantize.methods: [gptq], or sparsity.method: wanda"
        )
    if rounds and sparsity.method in sparsity.model_fields_set:
        shared = sorted(set(HessianOptions.model_fields) & sparsity.sparsegpt.model_fields_set)
        if shared:
            raise ValueError(
                f"sparsity.{sparsity.method}.{shared[0]}: both share one Hessian; set "
                f"quantize.gptq.{shared[0]}"
            )
    blocks = [("quantize.weights", quantize.weights)]
    blocks += [(f"quantize.layers.{i}.weights", r.weights) for i, r in enumerate(quantize.layers)]
    for where, weights in blocks if rounds else ():
        size = weights.group_size
        if size is not None and size % sparsity.shape.unit:
            raise ValueError(
                f"sparsity.pattern {sparsity.pattern}: {sparsity.shape.of} does not divide "
                f"{where}.group_size {size}; use one that it divides"
            )
