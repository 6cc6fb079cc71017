"""The sparsity section of a recipe, and the table of pruning methods.

Only this module contains the methods' names. To import no torch, a record names its function by a
string, "package.module:function".
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
from optimizer.foundation.source_digest import digest_sources
from optimizer.foundation.sparsity import UNSTRUCTURED, Pattern

_APPLY = "optimizer.compress.apply.pruning."
AMOUNT = 0.5


@dataclass(frozen=True)
class SparsityMethod:
    """Record of one pruning method that a recipe can name.

    apply: function "package.module:function", (Prunable) -> Sparse of compress/apply/pruning
    judged_by: how the ledger judges it. "recomputed": the mask follows from the weights alone;
        "kept": the mask is judged by the output error; "adjusted": the mask and the remaining
        weights, which change, are judged by the output error
    calibrated: the method reads activations (the Hessian of a weight's inputs)
    float_target: the method can correct errors of earlier blocks
    passes: passes of the calibration tokens through the blocks
    """

    name: str
    apply: str
    judged_by: Literal["recomputed", "kept", "adjusted"]
    calibrated: bool = False
    float_target: bool = False
    passes: float = 0.0


SPARSITY_METHODS: Mapping[str, SparsityMethod] = {
    m.name: m
    for m in (
        SparsityMethod("magnitude", _APPLY + "magnitude:prune", "recomputed"),
        SparsityMethod("wanda", _APPLY + "wanda:prune", "kept", calibrated=True, passes=1),
        SparsityMethod(
            "sparsegpt",
            _APPLY + "sparsegpt:prune",
            "adjusted",
            calibrated=True,
            float_target=True,
            passes=1,
        ),
    )
}


def _check_method(name: str) -> str:
    if name not in SPARSITY_METHODS:
        raise ValueError(
            f"{name!r} is not a method of sparsity; accepted: {', '.join(SPARSITY_METHODS)}"
        )
    return name


def _refuse_number(text: Any) -> Any:
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
    """Recipe section on pruning, in the same pass over the blocks as quantize: prune a weight, then
    round what remains, with one Hessian.

    Without a quantize section the remaining weights stay float.
    """

    method: Annotated[
        str, AfterValidator(_check_method), WithJsonSchema({"enum": list(SPARSITY_METHODS)})
    ] = Field(description="a module in optimizer/compress/apply/pruning/")
    pattern: Annotated[str, BeforeValidator(_refuse_number), AfterValidator(_pattern)] = Field(
        "2:4",
        description='"N:M": N of every M neighbouring inputs of an output stay; '
        f"{UNSTRUCTURED}: a share of each output's inputs stays",
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
        """Record of the pruning method that the recipe names."""
        return SPARSITY_METHODS[self.method]

    @cached_property
    def shape(self) -> Pattern:
        """Pattern in which the recipe prunes weights, such as 2:4, or the share of zeros of an
        unstructured one."""
        if self.pattern == UNSTRUCTURED:
            return Pattern(amount=AMOUNT if self.amount is None else self.amount)
        return Pattern.parse(self.pattern)

    @property
    def adjusts(self) -> bool:
        """True where the recipe's pruning method also changes the weights that remain."""
        return self.record.judged_by == "adjusted"

    @property
    def float_target(self) -> bool:
        """True where the recipe's pruning fits remaining float weights to the float model's output,
        which corrects errors of earlier blocks."""
        return self.record.float_target and self.sparsegpt.float_target is not False

    @model_validator(mode="after")
    def _fields_belong_together(self) -> Sparsity:
        if self.amount is not None and self.pattern != UNSTRUCTURED:
            raise ValueError(
                f"amount belongs to pattern: {UNSTRUCTURED}; {self.pattern} fixes the share of "
                "zeros; leave amount out"
            )
        own = [name for name in SPARSITY_METHODS if name in self.model_fields_set]
        for name in own:
            if name != self.method:
                raise ValueError(f"{name}: options are given, and method is {self.method}")
        return self


def digest_code(sparsity: Sparsity | None) -> dict[str, str]:
    """Return {"sparsity <method>": digest of the method's code}, for the key of a step that calls
    the method; {} without sparsity."""
    if sparsity is None:
        return {}
    module = sparsity.record.apply.partition(":")[0]
    return {f"sparsity {sparsity.method}": digest_sources(module, own=True)}


def check(sparsity: Sparsity, quantize: Any) -> None:
    """Refuse a recipe: raise ValueError where pruning and `quantize`, a Quantize, cannot be
    combined."""
    refused = [m.name for m in quantize.chosen if not m.takes_mask]
    if refused:
        raise ValueError(
            f"sparsity with quantize.method {' and '.join(refused)}: it may change a pruned weight "
            "from zero; use methods: [gptq], or leave sparsity out"
        )
    if quantize.is_float:
        raise ValueError(
            "sparsity with type: float8 or float4: only integers are pruned; leave it out"
        )
    for name in ("allocate", "keep_float_auto"):
        if getattr(quantize, name) is not None:
            raise ValueError(
                f"sparsity with quantize.{name}: its sensitivities are those of dense weights; "
                "leave one of them out"
            )
    rounds = not quantize.leaves_float
    if sparsity.adjusts and rounds and quantize.block_rounding.judged_by == "nearest":
        raise ValueError(
            f"sparsity.method {sparsity.method} adjusts the remaining weights, and "
            f"{quantize.block_rounding.name} would round them without regard to that; use "
            "quantize.methods: [gptq], or sparsity.method: wanda"
        )
    if rounds and sparsity.method in sparsity.model_fields_set:
        shared = sorted(set(HessianOptions.model_fields) & sparsity.sparsegpt.model_fields_set)
        if shared:
            raise ValueError(
                f"sparsity.{sparsity.method}.{shared[0]}: pruning and rounding share one "
                f"Hessian; set quantize.gptq.{shared[0]}"
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
