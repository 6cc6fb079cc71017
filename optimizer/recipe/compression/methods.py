"""Table of the compression methods, one record each; no other module contains their names.

A method that is not in METHODS is looked up among the entry points "optimizer.methods" of installed
distributions, each of which is a Method. To import no torch, a record names functions by strings,
"package.module:function".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

from optimizer.foundation.errors import RecipeError
from optimizer.foundation.references import list_entry_points, load_entry_point, record_code
from optimizer.foundation.sections import method_options as options
from optimizer.foundation.sections.section import Section
from optimizer.foundation.source_digest import digest_sources
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
"""Time at which a method runs, in this order, and the arguments of its `apply` (types of
optimizer/compress/;
quantize: the recipe's section):

model-transform  (ModelSource, quantize) -> ModelSource: the same function in other weights
smoothing        (BlockGroup, quantize) -> Folded: of some blocks, before they are rounded
rounding         (FloatWeight, quantize) -> (QTensor, note): the integers of one weight
float            (Prunable) -> (Tensor, note): float weights, pruned by the sparsity section
block-tuning     (BlockGroup, {module: QTensor}, quantize) -> (Tuned, note): after that
model-tuning     (ModelSource, CompressedState, Windows, compression) -> (Tuned, note): after the
                 walk; options derive from ModelTuningOptions
pass-through     (folder of load, folder to write): replaces the walk over the blocks
"""

JudgedBy = Literal["nearest", "output error", "learned", ""]
"""The ledger's judgement of the integers that a method chooses:

nearest       each must be the nearest one of its scale
output error  compared with the same method on resampled inputs
learned       trained by gradients through a block or the model, without a null model
""            not judged, which the ledger reports
"""


@dataclass(frozen=True)
class Method:
    """Record of one compression method that a recipe can name.

    name: word in the recipe, and file name in compress/apply/
    kind: see Kind
    apply: function "package.module:function", see Kind
    options: class of its section in the recipe, quantize.<name>
    judged_by: see JudgedBy
    limits: function "package.module:function", (quantize, calibrate, bits) -> MethodLimits of
        validate/ledger/limits/rounding_limits.py: bounds of scales and norm weights
    calibrated: True where the method reads activations
    second_moments: True where the method rounds by the Hessian of the inputs (FloatWeight has it)
    float_reference: (options, static_activations) -> True where the method compares with the float
        model's hidden states at the same place
    range_search: (options) -> the method that rounds after a smoothing method, in place of rounding
        to nearest; None: no such method
    needs_activations: True where quantize.activations is required
    weight_only: True where quantize.activations is refused
    folds: weights that the method changes by folding: "some" near the norms, or "all"; "": none
    folds_norms: norm weights are "scaled", or folded "away" to ones; "": unchanged
    folds_biases: True where the method divides outputs of layers, biases included
    learns_norms: True where the method trains norm weights
    unties_head: (options) -> True where a tied head becomes a weight of its own
    takes_mask: True where pruned weights stay 0 (FloatWeight.mask), as sparsity requires
    convolutions: True where the method also quantizes convolutions, given as matrices
    float8: True where the method also rounds to FP8 and FP4 values
    passes: (options, calibrate) -> passes of the calibration tokens through the blocks
    moments: True where the method holds matrices of (widest input) squared
    """

    name: str
    kind: Kind
    apply: str
    options: type[Section] | None = None
    judged_by: JudgedBy = ""
    limits: str = ""
    calibrated: bool = False
    second_moments: bool = False
    float_reference: Callable[[Any, bool], bool] = lambda _options, _static: False
    range_search: Callable[[Any], Method | None] = lambda _options: None
    needs_activations: bool = False
    weight_only: bool = False
    folds: Literal["", "some", "all"] = ""
    folds_norms: Literal["", "scaled", "away"] = ""
    folds_biases: bool = False
    learns_norms: bool = False
    unties_head: Callable[[Any], bool] = lambda _options: False
    takes_mask: bool = False
    convolutions: bool = False
    float8: bool = False
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
    judged_by="nearest",
    limits=_LIMITS + "nearest",
    takes_mask=True,
    convolutions=True,
    float8=True,
)
"""The default rounding method."""

UNROUNDED = Method(
    "float_weights", "float", _WEIGHTS + "float_weights:prune_weight", takes_mask=True
)
"""Stands in for rounding in a recipe with a sparsity section and without a quantize section."""

OUTPUT_SEARCHED = Method(
    "awq",
    "rounding",
    _ACTIVATIONS + "awq:round_weight",
    judged_by="nearest",
    limits=_LIMITS + "clipped",
    calibrated=True,
    second_moments=True,
    takes_mask=True,
)
"""The rounding of awq alone: to nearest, each range searched by the output error."""


def _gptq_aims_at_float(gptq: options.GptqOptions, static_activations: bool) -> bool:
    """Implement Method.float_reference of gptq: by default not with static ranges
    (docs/decisions/0022)."""
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
            "equalization",
            "model-transform",
            _ACTIVATIONS + "equalization:equalize",
            folds="some",
            folds_biases=True,
            takes_mask=True,
            convolutions=True,
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
            judged_by="output error",
            limits=_LIMITS + "gptq",
            calibrated=True,
            second_moments=True,
            float_reference=_gptq_aims_at_float,
            takes_mask=True,
            passes=lambda _options, _calibrate: 1,
            moments=True,
        ),
        Method(
            "autoround",
            "block-tuning",
            _WEIGHTS + "autoround:learn",
            options=options.AutoroundOptions,
            judged_by="learned",
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
            judged_by="learned",
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
"""{name in an earlier version: name today}"""


def find_method(name: str) -> Method:
    """Look up the record of a method that the recipe names, in the table or in an installed
    distribution.

    Raises KeyError for an unknown name, TypeError for an entry point that is not a Method of that
    name.
    """
    if name in METHODS:
        return METHODS[name]
    record = load_entry_point(GROUP, name)
    if not isinstance(record, Method) or record.name != name:
        raise TypeError(f"the entry point {name} of {GROUP} is {record!r}, not a Method {name!r}")
    return record


def list_names() -> list[str]:
    """Return the names of all methods that a recipe can choose: first METHODS, then entry points of
    other distributions."""
    return list(dict.fromkeys([*METHODS, *list_entry_points(GROUP)]))


def list_calibrated() -> list[str]:
    """Return the names of the methods that need calibration data.

    Records of other distributions that fail to load are omitted; `find_method` raises the error if
    a recipe names one.
    """
    needing = []
    for name in list_names():
        with suppress(ImportError, AttributeError, TypeError, RecipeError):
            needing += [name] if find_method(name).calibrated else []
    return needing


def refuse_old_name(name: Any) -> Any:
    """Return `name`, a method in a recipe. Raises ValueError with today's name for a name of an
    earlier version."""
    if isinstance(name, str) and name in RENAMED:
        raise ValueError(f"this method was renamed to {RENAMED[name]}; use {RENAMED[name]}")
    return name


def place(record: Method) -> tuple[int, int]:
    """Return the sort key of a recipe's method: by kind, then by the table. Methods of other
    distributions come last."""
    names = list(METHODS)
    at = names.index(record.name) if record.name in names else len(names)
    return get_args(Kind).index(record.kind), at


def digest_code(records: Iterable[Method], limits: bool = False) -> dict[str, str]:
    """Return {"<kind> <name>": digest of the method's code}, for the key of a step that calls the
    method. Digests of a stage's imports lack this code, because functions of methods are named by
    strings.

    limits: True to include the code of the methods' limits
    """
    records = list(records)
    references = {f"{r.kind} {r.name}": r.apply for r in records}
    if limits:
        references |= {f"{r.kind} {r.name} limits": r.limits for r in records if r.limits}
    modules = {what: name.partition(":")[0] for what, name in references.items()}
    digests = {what: digest_sources(module, own=True) for what, module in modules.items()}
    for name in {record.name for record in records} - set(METHODS):
        digests |= record_code(GROUP, name)
    return digests
