"""Check that compression methods, and the recipe sections about them, can be combined.

The checks read the methods' records; `Recipe` calls them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from optimizer.harness import tasks
from optimizer.harness.inputs.image import IMAGE
from optimizer.harness.inputs.tensors import TENSORS
from optimizer.harness.inputs.text import TEXT
from optimizer.recipe.compression import methods
from optimizer.recipe.compression.methods import Method

if TYPE_CHECKING:
    from optimizer.recipe.compression.quantize import Quantize
    from optimizer.recipe.data import DataSpec
    from optimizer.recipe.model import Model
    from optimizer.recipe.recover import Learning, Qat
    from optimizer.recipe.reduce import Reduce
    from optimizer.recipe.stage_sections import Compression

SHAPES_ONLY = 8
"""Texts that activation ranges are measured on when only the speed of the model matters."""


def check(quantize: Quantize) -> None:
    """Refuse a recipe: raise ValueError for methods that cannot be combined with each other or with
    other keys of the section."""
    if quantize.method and quantize.methods:
        raise ValueError("method and methods are both given; use one of them")
    _check_order(quantize.chosen)
    _check_alone(quantize)
    _check_rounding(quantize)
    _check_folds(quantize.chosen)
    _check_activations(quantize)
    _check_allocation(quantize)
    _check_float8(quantize)
    for name in quantize.model_fields_set - {m.name for m in quantize.chosen}:
        record = methods.METHODS.get(name)
        if record is not None and record.options is not None:
            raise ValueError(f"{name}: options are given, but methods does not name {name}")


def check_labels(learning: Learning, data: DataSpec, task: str) -> None:
    """Refuse a recipe: raise ValueError for a loss on labels where the task or the data have no
    labels."""
    place = f"{learning.PLACE}.losses.labels"
    if not learning.losses.labels:
        return
    record = tasks.find_task(task)
    if not record.classifies or record.per_position or record.ranks:
        raise ValueError(f"{place}: only text-classification has a label per text; leave it out")
    if "label" not in data.columns:
        raise ValueError(
            f"{place}: its data has no label; add columns: {{text: ..., label: ...}}, or leave it "
            "out"
        )


def check_generated(learning: Learning, task: str) -> None:
    """Refuse a recipe: raise ValueError for generated text where the task's model does not
    generate."""
    if learning.generated and not tasks.find_task(task).generates:
        writing = ", ".join(tasks.list_generating())
        raise ValueError(
            f"{learning.PLACE}.generated: only task {writing} generates text; the task is {task}; "
            "leave it out"
        )


def check_deterministic(reduce: Reduce | None, qat: Qat | None) -> None:
    """Refuse a recipe: raise ValueError for options whose result depends on the processor even with
    portable kernels."""
    if reduce is not None and reduce.latency_gain is not None:
        raise ValueError(
            "compress.deterministic: reduce.goal.latency_gain chooses sizes by this machine's "
            "timing; give keep, parameters or depth, or leave deterministic out"
        )
    for learning in (reduce.recover if reduce else None, qat):
        if learning is None:
            continue
        for field, portable in (
            ("device", ("cpu",)),
            ("precision", ("fp32",)),
            ("processes", ("auto", 1)),
            ("max_hours", (None,)),
        ):
            if getattr(learning, field, portable[0]) not in portable:
                raise ValueError(
                    f"compress.deterministic: {learning.PLACE}.{field} is "
                    f"{getattr(learning, field)}, which depends on the machine; give "
                    f"{field}: {'null' if portable[0] is None else portable[-1]}"
                )


def check_training(quantize: Quantize) -> None:
    """Refuse a recipe: raise ValueError for options that qat cannot train: qat needs quantized
    linears under the checkpoint's names."""
    if quantize.leaves_float:
        raise ValueError("qat trains quantized weights; the recipe quantizes nothing; remove qat")
    if transforms := quantize.of_kind("model-transform"):
        raise ValueError(
            f"qat with {_names(transforms)}: it changes the embeddings, which qat does not train; "
            "remove one of them"
        )
    if quantize.kv_cache != "float":
        raise ValueError(
            f"qat with quantize.kv_cache: {quantize.kv_cache}: qat does not train through a "
            "quantized cache; remove one of them"
        )
    if quantize.is_float:
        raise ValueError("qat with type: float8 or float4: qat trains integers; remove one of them")
    if quantize.keep_float_auto is not None:
        raise ValueError(
            "qat with quantize.keep_float_auto: it measures errors before training corrects them; "
            "name modules in keep_float"
        )
    if quantize.integer_attention:
        raise ValueError(
            "qat with quantize.activations.attention: int8: qat does not train quantized products "
            "of attention; use attention: float"
        )
    for name in ("head", "embedding"):
        if getattr(quantize, name) != "float":
            raise ValueError(
                f"qat with quantize.{name}: embeddings and heads tied to them are not trained; "
                f"use {name}: float"
            )


def cheapen(section: Compression) -> Compression:
    """Return a recipe's compression section that is cheap to run and whose model has the same
    graph, hence the same speed.

    Methods that add to the graph or fold into it stay, calibrated on at most SHAPES_ONLY texts.
    Weights are rounded to nearest and not pruned (pruned by magnitude where nothing is quantized),
    because the time does not depend on their values.
    """
    quantize, calibrate = section.quantize, section.calibrate
    kept = quantize.of_kind("pass-through", "model-transform", "smoothing", "float")
    chosen = {
        "method": None,
        "methods": tuple(m.name for m in kept or (methods.NEAREST,)),
        "allocate": None,
        "keep_float_auto": None,
    }
    few = None
    if calibrate is not None:
        samples = min(calibrate.samples, SHAPES_ONLY)
        few = calibrate.model_copy(update={"samples": samples, "generated": 0})
    sparsity = section.sparsity if quantize.leaves_float else None
    if sparsity is not None:
        sparsity = sparsity.model_copy(update={"method": "magnitude"})
    plain = quantize.model_copy(update=chosen)
    update = {
        "quantize": plain,
        "sparsity": sparsity,
        "calibrate": few if plain.calibrated else None,
    }
    return section.model_copy(update=update)


def _names(records: tuple[Method, ...] | list[Method]) -> str:
    return " and ".join(m.name for m in records)


def _check_order(chosen: tuple[Method, ...]) -> None:
    places = [methods.place(m) for m in chosen]
    if places != sorted(places) or len({m.name for m in chosen}) < len(chosen):
        order = sorted([*methods.METHODS.values(), *chosen], key=methods.place)
        names = dict.fromkeys(m.name for m in order)
        raise ValueError(
            f"methods {[m.name for m in chosen]}: each once, and in this order: {', '.join(names)}"
        )


def _check_alone(quantize: Quantize) -> None:
    """Refuse further options of a recipe where the checkpoint's own integers are kept, or where
    nothing is quantized."""
    more = quantize.model_fields_set - {"method", "methods"}
    if quantize.passes_through and (len(quantize.chosen) > 1 or more):
        name = _names(quantize.of_kind("pass-through"))
        raise ValueError(f"{name} takes the checkpoint's own integers; nothing else can be set")
    if quantize.leaves_float and (len(quantize.chosen) > 1 or more):
        name = _names(quantize.of_kind("float"))
        raise ValueError(f"{name} leaves every weight in float; nothing else can be set")


def _check_rounding(quantize: Quantize) -> None:
    rounding = quantize.of_kind("rounding")
    rest = [*rounding, *quantize.of_kind("block-tuning")]
    if methods.NEAREST in rounding and len(rest) > 1:
        others = _names([m for m in rest if m is not methods.NEAREST])
        raise ValueError(
            f"{methods.NEAREST.name} chooses the integers alone; leave it out beside {others}"
        )
    for kind in (rounding, quantize.of_kind("model-transform"), quantize.of_kind("model-tuning")):
        if len(kind) > 1:
            raise ValueError(f"{_names(kind)} do the same; use one of them")


def _check_folds(chosen: tuple[Method, ...]) -> None:
    fold = [m for m in chosen if m.folds_norms]
    learn = [m for m in chosen if m.learns_norms]
    if len(fold) > 1 and learn:
        raise ValueError(
            f"{_names(fold)} both fold into the norm weights, which {_names(learn)} trains: the "
            f"ledger cannot separate their effects; leave one of {_names(fold)} out"
        )
    divide = [m for m in chosen if m.folds_biases]
    smooth = [m for m in chosen if m.kind == "smoothing"]
    if divide and smooth:
        raise ValueError(
            f"{_names([*divide, *smooth])} fold factors into the same weights, which the ledger "
            f"reads back from them; leave {_names(divide)} or {_names(smooth)} out"
        )
    if len(learn) > 1:
        raise ValueError(f"{_names(learn)} both train the norm weights; use one of them")


def _check_activations(quantize: Quantize) -> None:
    for m in quantize.chosen:
        if m.needs_activations and quantize.activations is None:
            raise ValueError(
                f"method {m.name} moves outliers from activations to weights and needs an "
                f"activations block; add one, or use method: {methods.NEAREST.name}"
            )
        if m.weight_only and quantize.activations is not None:
            raise ValueError(f"method {m.name} trains on float inputs; use gptq with activations")


def _check_float8(quantize: Quantize) -> None:
    """Refuse options of a recipe that FP8 and FP4 do not support, and FP8 or FP4 together with
    integers."""
    if not quantize.is_float:
        return
    inputs = quantize.activations
    kinds = [w.type for w in quantize.every_weights.values() if w.is_float]
    type_ = next(iter(kinds), inputs.type if inputs else "")
    if others := tuple(m for m in quantize.chosen if not m.float8):
        able = ", ".join(m.name for m in methods.METHODS.values() if m.float8)
        raise ValueError(f"type: {type_} with {_names(others)}: it is rounded by {able} alone")
    for place in ("head", "embedding"):
        if getattr(quantize, place) != "float":
            raise ValueError(f"{place}: beside type: {type_} it stays float; use {place}: float")
    for option in ("allocate", "bias_correction", "keep_float_auto"):
        if getattr(quantize, option):
            raise ValueError(f"type: {type_} with {option}: it is for integers; leave one out")
    for place, weights in quantize.every_weights.items():
        if not weights.is_float:
            raise ValueError(
                f"{place} has type: int beside type: {type_}; give every weights block type: "
                f"{type_}, or name modules in keep_float"
            )
    if inputs is None:
        return
    for place, weights in quantize.every_weights.items():
        if inputs.type != weights.type:
            rest = "" if weights.type == "float4" else ", granularity: token"
            raise ValueError(
                f"activations has type: {inputs.type} with {place} of type: {weights.type}; use "
                f"activations: {{type: {weights.type}{rest}}}, or leave activations out"
            )
    if inputs.type == "float4":
        return
    in_groups = inputs.granularity == "group"
    for place, weights in quantize.every_weights.items():
        if (weights.granularity == "block") != in_groups:
            raise ValueError(
                f"{place} has granularity: {weights.granularity} and activations granularity: "
                f"{inputs.granularity}; kernels multiply weights in blocks by inputs in groups: "
                "use block with group, or channel with token or tensor"
            )


def _check_allocation(quantize: Quantize) -> None:
    if quantize.allocate is None:
        return
    if quantize.activations is not None:
        raise ValueError("allocate measures errors of weights only; leave activations out")
    if quantize.rounding.judged_by != "nearest" and quantize.allocate.average_bits is None:
        raise ValueError(
            "allocate assigns bits by the error of rounding to nearest; "
            f"with {quantize.rounding.name} uniform weights are better (measured for gptq: 0.083 "
            "against 0.088 nats). Leave one of them out, or give allocate.average_bits"
        )


def check_inputs(task: str, specs: Mapping[str, DataSpec]) -> None:
    """Refuse a recipe: raise ValueError for data whose kind of input differs from the task's.

    specs: {place in the recipe: data set}
    """
    kind, columns = tasks.find_task(task).inputs, {k.columns[0] for k in (TEXT, IMAGE, TENSORS)}
    if not columns & set(kind.columns):
        return  # a kind of another package
    for place, spec in specs.items():
        chat = "messages" in spec.columns and not place.startswith("slo")
        if chat and not tasks.find_task(task).generates:
            raise ValueError(
                f"{place}.columns has messages, which task {', '.join(tasks.list_generating())} "
                f"reads; {task} takes {kind.name}s; give {kind.columns[0]}: <column of the data "
                "set>"
            )
        if kind.columns[0] not in spec.columns and not chat:
            others = ", ".join(sorted(columns & set(spec.columns))) or "none"
            raise ValueError(
                f"task {task} takes {kind.name}s; {place}.columns has {others}; "
                f"give {kind.columns[0]}: <column of the data set>"
            )


def check_of_files(model: Model) -> None:
    """Refuse a recipe: raise ValueError for a key of ONNX files in the section of another kind of
    model."""
    keys = ("onnx_file", "outputs", "axes", "ranges", "module")
    present = [key for key in keys if getattr(model, key)]
    task = tasks.find_task(model.task)
    if present and not task.of_file:
        raise ValueError(
            f"model.{present[0]} is for tasks tensors and detector, and the task is {model.task}; "
            "remove it, or set one of these"
        )
    reads = "detections" in task.optional
    if reads and model.detections is None:
        raise ValueError(f"task {model.task} needs model.detections, with the names of its labels")
    stray = [key for key in ("image", "detections") if getattr(model, key) and not reads]
    if stray:
        raise ValueError(
            f"model.{stray[0]} is for task detector, and the task is {model.task}; remove it"
        )
    of_source = ("onnx_file", "axes", "revision", "subfolder", "adapters", "gguf_file")
    stray = [key for key in of_source if getattr(model, key)]
    if model.module is not None and stray:
        raise ValueError(f"model.{stray[0]} is for a model with source; remove it")


def check_of_texts(task: str, sections: Mapping[str, Any]) -> None:
    """Refuse a recipe: raise ValueError for a section that only tasks on texts have.

    sections: {place in the recipe: section or None}
    """
    kind = tasks.find_task(task).inputs
    present = [place for place, value in sections.items() if value is not None]
    if kind.name != TEXT.name and present:
        raise ValueError(
            f"{present[0]} is for tasks that take texts; {task} takes {kind.name}s; remove it"
        )
