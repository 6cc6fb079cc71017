"""The methods of compression, a record each: METHODS is the only place that knows their names.

A method that is not in the table is looked up among the entry points "optimizer.methods" of
installed distributions, whose object is its record. A record imports no torch: what a method does
is named by strings, "package.module:function".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

from optimizer.foundation.errors import RecipeError
from optimizer.foundation.references import from_entry_point, offered, record_code
from optimizer.foundation.sections import method_options as options
from optimizer.foundation.sections.section import Section
from optimizer.foundation.source_digest import source_digest
from optimizer.recipe.data import Calibrate

GROUP = "optimizer.methods"
Kind = Literal[
    "model-transform",
    "smoothing",
    "rounding",
    "float",
    "block-tuning",
    "model-tuning",
    "pass-through",
]
"""Where in the walk a method works, in this order, and how `apply` is called (the types are those
of optimizer/compress/; quantize is the recipe's whole section):

model-transform  (ModelSource, quantize) -> ModelSource: the same function in other weights
smoothing        (BlockGroup, quantize) -> Folded: of a group of blocks, before they are rounded
rounding         (FloatWeight, quantize) -> (QTensor, note): the integers of one weight
float            (Prunable) -> (Tensor, note): weights stay float, pruned by the sparsity section
block-tuning     (BlockGroup, {module: QTensor}, quantize) -> (Tuned, note): after that
model-tuning     (ModelSource, CompressedState, Windows, compression) -> (Tuned, note): after the
                 walk; options derive from ModelTuningOptions
pass-through     (folder of load, folder to write): no walk at all
"""

Law = Literal["nearest", "output error", "learned", ""]
"""What the ledger can say of the integers a method chooses:

nearest       each is the nearest of its scale
output error  chosen by what comes out: judged against the same method on resampled inputs
learned       follow gradients through a block or the model: no null model
""            nothing is known: the ledger says that they are not judged
"""


@dataclass(frozen=True)
class Method:
    """A method of compression.

    name: in the recipe, and of its file in compress/apply/. kind: see Kind. apply:
    "package.module:function". options: its section of the recipe, quantize.<name>.

    law: see Law. limits: "package.module:function", (quantize, calibrate, bits) ->
    validate/ledger/rounding_limits.Limits: what a scale or a norm weight may become.

    calibrated: looks at activations. second_moments: rounds by those of the inputs (FloatWeight
    has them). float_reference: compares with the float model's hidden states at the same place.
    range_search: a smoothing method's own way to round where only rounding to nearest follows.

    needs_activations, weight_only: what quantize.activations must or must not be. folds: which
    weights become others: "some" near the norms, "all". folds_norms: norm weights are "scaled",
    or folded "away" to ones. learns_norms: they follow a gradient. unties_head: a tied head
    becomes a weight of its own.

    takes_mask: leaves a pruned weight 0 (FloatWeight.mask), so that it goes with sparsity.
    convolutions: chooses integers of convolutions too, whose weights it gets as matrices.

    passes: how often the calibration tokens go through the blocks for it. moments: memory for
    matrices as large as the square of the widest input.
    """

    name: str
    kind: Kind
    apply: str
    options: type[Section] | None = None
    law: Law = ""
    limits: str = ""
    calibrated: bool = False
    second_moments: bool = False
    float_reference: Callable[[Any, bool], bool] = lambda _options, _static: False
    range_search: Callable[[Any], Method | None] = lambda _options: None
    needs_activations: bool = False
    weight_only: bool = False
    folds: Literal["", "some", "all"] = ""
    folds_norms: Literal["", "scaled", "away"] = ""
    learns_norms: bool = False
    unties_head: Callable[[Any], bool] = lambda _options: False
    takes_mask: bool = False
    convolutions: bool = False
    passes: Callable[[Any, Calibrate], float] = lambda _options, _calibrate: 0.0
    moments: bool = False

    def __post_init__(self) -> None:
        tunes = self.kind in ("smoothing", "block-tuning", "model-tuning")
        if (tunes or self.second_moments) and not self.calibrated:
            raise ValueError(
                f"method {self.name}: kind {self.kind} and second moments need activations; set "
                "calibrated=True"
            )


_LIMITS = "optimizer.validate.ledger.limits.rounding_limits:"
_WEIGHTS = "optimizer.compress.apply.weights."
_ACTIVATIONS = "optimizer.compress.apply.activations."

NEAREST = Method(
    "rtn",
    "rounding",
    _WEIGHTS + "rtn:round_weight",
    law="nearest",
    limits=_LIMITS + "nearest",
    takes_mask=True,
    convolutions=True,
)
"""What rounds where the recipe names nothing else."""

UNROUNDED = Method(
    "float_weights", "float", _WEIGHTS + "float_weights:prune_weight", takes_mask=True
)
"""What stands in for rounding where a recipe has a sparsity section and no quantize section."""

OUTPUT_SEARCHED = Method(
    "awq",
    "rounding",
    _ACTIVATIONS + "awq:round_weight",
    law="nearest",
    limits=_LIMITS + "clipped",
    calibrated=True,
    second_moments=True,
    takes_mask=True,
)
"""How awq rounds by itself: to nearest, each range searched by the output error."""


def _gptq_aims_at_float(gptq: options.GptqOptions, static_activations: bool) -> bool:
    """By default not with static ranges (docs/decisions.md: GPTQ and static ranges)."""
    return not static_activations if gptq.float_target is None else gptq.float_target


def _autoround_passes(autoround: options.AutoroundOptions, calibrate: Calibrate) -> float:
    return 3 * (autoround.steps * calibrate.batch_size / calibrate.samples + 1)


METHODS: Mapping[str, Method] = {
    m.name: m
    for m in (
        Method(
            "rotation",
            "model-transform",
            _ACTIVATIONS + "rotation:rotate",
            options=options.RotationOptions,
            folds="all",
            folds_norms="away",
            unties_head=lambda rotation: rotation.residual,
            takes_mask=True,
        ),
        Method(
            "smoothquant",
            "smoothing",
            _ACTIVATIONS + "smoothquant:smooth",
            calibrated=True,
            needs_activations=True,
            folds="some",
            folds_norms="scaled",
            takes_mask=True,
            passes=lambda _options, _calibrate: 1,
        ),
        Method(
            "awq",
            "smoothing",
            _ACTIVATIONS + "awq:scale",
            options=options.AwqOptions,
            calibrated=True,
            range_search=lambda awq: OUTPUT_SEARCHED if awq.clip else None,
            folds="all",
            folds_norms="scaled",
            takes_mask=True,
            passes=lambda _options, _calibrate: 1,
            moments=True,
        ),
        NEAREST,
        Method(
            "gptq",
            "rounding",
            _WEIGHTS + "gptq:round_weight",
            options=options.GptqOptions,
            law="output error",
            limits=_LIMITS + "gptq",
            calibrated=True,
            second_moments=True,
            float_reference=_gptq_aims_at_float,
            takes_mask=True,
            passes=lambda _options, _calibrate: 2.5,
            moments=True,
        ),
        Method(
            "autoround",
            "block-tuning",
            _WEIGHTS + "autoround:learn",
            options=options.AutoroundOptions,
            law="learned",
            limits=_LIMITS + "autoround",
            calibrated=True,
            float_reference=lambda _options, _static: True,
            learns_norms=True,
            convolutions=True,
            passes=_autoround_passes,
            moments=True,
        ),
        Method(
            "scale_tuning",
            "model-tuning",
            _WEIGHTS + "scale_tuning:tune",
            options=options.ScaleTuningOptions,
            law="learned",
            limits=_LIMITS + "scale_tuning",
            calibrated=True,
            weight_only=True,
            learns_norms=True,
            takes_mask=True,
        ),
        UNROUNDED,
        Method("pass_through", "pass-through", _WEIGHTS + "pass_through:take"),
    )
}

RENAMED: Mapping[str, str] = {
    "distill": "scale_tuning",
    "keep": "pass_through",
    "rotate": "rotation",
}
"""{a method's name in earlier versions: its name today}."""


def method(name: str) -> Method:
    """The record of a method, of ours or of an installed distribution.

    Raises KeyError for a name that nobody has, TypeError for an entry point that is no record of
    that name.
    """
    if name in METHODS:
        return METHODS[name]
    record = from_entry_point(GROUP, name)
    if not isinstance(record, Method) or record.name != name:
        raise TypeError(f"the entry point {name} of {GROUP} is {record!r}, not a Method {name!r}")
    return record


def names() -> list[str]:
    """Of every method, the table's first."""
    return list(dict.fromkeys([*METHODS, *offered(GROUP)]))


def calibrated() -> list[str]:
    """The names of the methods that need calibration data. A record of another distribution that
    cannot be loaded is left out: `method` says why, where a recipe names it."""
    needing = []
    for name in names():
        with suppress(ImportError, AttributeError, TypeError, RecipeError):
            needing += [name] if method(name).calibrated else []
    return needing


def refuse_old_name(name: Any) -> Any:
    """name, unless it is one of earlier versions: ValueError with today's."""
    if isinstance(name, str) and name in RENAMED:
        raise ValueError(f"{name} is called {RENAMED[name]} now; use {RENAMED[name]}")
    return name


def place(record: Method) -> tuple[int, int]:
    """Where a method stands in a recipe: by kind, then as in the table; others after ours."""
    names = list(METHODS)
    at = names.index(record.name) if record.name in names else len(names)
    return get_args(Kind).index(record.kind), at


def code(records: Iterable[Method], limits: bool = False) -> dict[str, str]:
    """{method: digest of the code behind it}: part of the key of a step that calls it, because no
    import leads from a stage to what is named by a string. limits: of that code too."""
    records = list(records)
    references = {f"{r.kind} {r.name}": r.apply for r in records}
    if limits:
        references |= {f"{r.kind} {r.name} limits": r.limits for r in records if r.limits}
    modules = {what: name.partition(":")[0] for what, name in references.items()}
    digests = {what: source_digest(module, own=True) for what, module in modules.items()}
    for name in {record.name for record in records} - set(METHODS):
        digests |= record_code(GROUP, name)
    return digests
