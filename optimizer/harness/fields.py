"""Tables of the fields of manifest.json, its contract and report.json, with types and bounds.

bundle/manifest.py and contract.py describe the fields. Unknown keys are accepted in the manifest,
because later versions may add some, and refused in the contract, where every key changes answers.
"""

from __future__ import annotations

from typing import Any

from . import bounds
from .schema import (
    anything,
    choice,
    file_name,
    flag,
    float_number,
    list_of,
    map_of,
    null_or,
    number,
    one_of,
    record,
    refuse,
    text,
    whole,
)

NAME = text(200, r"[^\x00-\x1f]+", "a text of 1 to 200 characters, on one line")
PRODUCT = text(
    100, r"[a-z0-9][a-z0-9._-]*", "a-z, 0-9, '.', '_' and '-', 100 at most, as a recipe has it"
)
"""Name that becomes part of paths, addresses and other tools' files."""
ADAPTER = text(
    60,
    r"[A-Za-z0-9][A-Za-z0-9._-]*",
    "A-Z, a-z, 0-9, '.', '_' and '-', 60 at most, as a recipe has it",
)
PROSE = text(100_000)
SHA256 = text(64, "[0-9a-f]{64}", "64 hexadecimal digits")
SIZE = whole(0, 1 << 50)  # bytes
COUNT = whole(1, 1 << 31)
THREADS = whole(0, 1024)
VERSION = text(60, r"[0-9][0-9A-Za-z.+!_-]*", "a version")

TENSOR = record(
    {
        "name": NAME,
        "dtype": NAME,
        "axes": list_of(one_of(NAME, COUNT), 0, 16),
    },
    closed=True,
)
TOKENIZER = record(
    {
        "file": NAME,
        "max_length": COUNT,
        "pad_id": whole(0, 1 << 31),
        "pad_token": text(200),
    },
    {
        "pad_type_id": whole(0, 1 << 31),
        "mask_id": null_or(whole(0, 1 << 31)),
        "mask_token": null_or(text(200)),
        "padded_to": null_or(COUNT),
    },
    closed=True,
)
GENERATION = record(
    {
        "layers": whole(1, 10_000),
        "kv_heads": whole(1, 1 << 20),
        "head_dim": whole(1, 1 << 20),
        "vocabulary": COUNT,
        "context": COUNT,
        "eos_ids": list_of(whole(0, 1 << 31), 1, 1000),
    },
    {
        "bos_id": null_or(whole(0, 1 << 31)),
        "chat_template": null_or(text(1 << 20)),
        "defaults": map_of(one_of(flag, number(0, 1e9))),
        "adapters": list_of(ADAPTER, 1, 16),
    },
    closed=True,
)
SIDE = whole(1, 1 << 31)
CHANNELS = null_or(list_of(number(-1e9, 1e9), 1, 3))
IMAGE = record(
    {
        "channels": SIDE,
        "height": SIDE,
        "width": SIDE,
        "resize": null_or(map_of(SIDE, 1)),
        "resample": NAME,
        "crop": null_or(list_of(SIDE, 2, 2)),
        "rescale": null_or(number(-1e9, 1e9)),
        "offset": number(-1e9, 1e9),
        "mean": CHANNELS,
        "std": CHANNELS,
        "divide": CHANNELS,
    },
    {
        "letterbox": null_or(record({"fill": whole(0, 255), "place": NAME}, closed=True)),
        "bgr": flag,
    },
    closed=True,
)
DETECTIONS = record(
    {
        "layout": NAME,
        "box": NAME,
        "units": NAME,
        "activation": NAME,
        "nms": null_or(number(0, 1)),
        "threshold": number(0, 1),
        "most": COUNT,
    },
    closed=True,
)
EMBEDDING = record(
    {},
    {
        "prompts": map_of(text(100_000)),
        "prompt": null_or(text(1000)),
        "include_prompt": flag,
        "layers": list_of(
            record(
                {"kind": NAME},
                {
                    "inputs": whole(0, 1 << 16),
                    "outputs": whole(0, 1 << 16),
                    "bias": flag,
                    "activation": NAME,
                    "residual": flag,
                },
                closed=True,
            ),
            0,
            100,
        ),
        "file": null_or(text(200, r"[A-Za-z0-9_]+\.npy", "the name of a .npy file")),
        "dimensions": null_or(COUNT),
        "similarity": null_or(NAME),
        "quantized": null_or(
            record(
                {"types": list_of(NAME, 1, 10), "dimensions": list_of(COUNT, 1, 100)},
                {"ranges": map_of(list_of(list_of(number(-1e30, 1e30), 1, 1 << 16), 2, 2))},
                closed=True,
            )
        ),
    },
    closed=True,
)
ANSWERS = record(
    {
        "doc_stride": whole(0, 1 << 31),
        "max_answer_len": COUNT,
        "handle_impossible_answer": flag,
    },
    {"top_k": whole(1, 1000)},
    closed=True,
)
SPARSE = record(
    {"pooling": NAME, "activation": NAME}, {"max_active_dims": null_or(COUNT)}, closed=True
)
ZERO_SHOT = record(
    {
        "candidate_labels": list_of(text(1000), 1, 1000),
        "hypothesis_template": text(1000),
        "multi_label": flag,
        "entailment": whole(0, 1 << 16),
    },
    closed=True,
)
LABEL_TEXTS = record(
    {"hypothesis_template": text(1000), "scale": number(0, 1e6), "bias": number(-1e6, 1e6)},
    closed=True,
)
CONTRACT = record(
    {
        "task": NAME,
        "inputs": list_of(TENSOR, 1, 1000),
        "outputs": list_of(TENSOR, 1, 1000),
    },
    {
        "version": whole(1, 1000),
        "input_kind": NAME,
        "tokenizer": null_or(TOKENIZER),
        "image": null_or(IMAGE),
        "pooling": null_or(one_of(NAME, list_of(NAME, 1, 100))),
        "embedding": null_or(EMBEDDING),
        "normalize": null_or(flag),
        "labels": null_or(list_of(text(1000), 1)),
        "activation": null_or(choice("identity", "sigmoid")),
        "thresholds": null_or(list_of(number(0, 1), 2)),
        "answers": null_or(ANSWERS),
        "zero_shot": null_or(ZERO_SHOT),
        "label_texts": null_or(LABEL_TEXTS),
        "sparse": null_or(SPARSE),
        "template": null_or(list_of(text(100_000), 3, 3)),
        "aggregation": null_or(choice("none", "simple", "first", "average", "max")),
        "generation": null_or(GENERATION),
        "detections": null_or(DETECTIONS),
    },
    closed=True,
)


def _span(value: Any, where: str) -> None:
    """Raise BundleError for a range of shapes in a bundle's manifest that is not [min, opt, max]:
    three ascending whole numbers."""
    list_of(whole(0, 1 << 31), 3, 3)(value, where)
    low, opt, high = value
    if not low <= opt <= high:
        refuse(value, where, "[min, opt, max], ascending")


def _profile(value: Any, where: str) -> None:
    """Raise BundleError for a profile in a bundle's manifest that is not {axis: [min, opt, max]}.

    "buckets" may list replacements of some axes.
    """
    map_of(anything)(value, where)
    for axis, span in value.items():
        if axis == "buckets":
            null_or(list_of(map_of(null_or(_span)), 0, 1000))(span, f"{where}.buckets")
        else:
            _span(span, f"{where}.{axis}")
    if "past" in value and "sequence" not in value:
        refuse(sorted(value), where, "sequence beside past")


FIT = record(
    {},
    {
        "runtime_minimum": VERSION,
        "runtime_version": VERSION,
        "driver_minimum": VERSION,
        "os": NAME,
        "architecture": NAME,
        "shapes": one_of(list_of(_profile, 1, 1000), _profile),
        "compute_capabilities": list_of(NAME, 0, 1000),
        "gpu": NAME,
        "workspace_gb": null_or(number(0, 1e6)),
        "sparse_weights": flag,
        "hardware_compatible": choice("none", "ampere_plus", "same_compute_capability"),
        "version_compatible": flag,
        "refittable": flag,
        "strip_weights": flag,
        "device": choice("cpu", "gpu", "npu"),
        "device_name": PROSE,
        "float": choice("fp32", "bf16", "fp16"),
        "hint": choice("latency", "throughput"),
        "dynamic_quantization": whole(0, 1 << 10),
        "integer_products": flag,
        "paged_cache": flag,
        "kv_cache": choice("float", "int8"),
        "divide_batches": flag,
        "cuda_graphs": flag,
        "tensor_parallel_size": whole(1, 1 << 10),
        "pipeline_parallel_size": whole(1, 1 << 10),
        "max_model_len": null_or(whole(1, 1 << 31)),
        "compute_capability": VERSION,
        "kv_cache_dtype": choice("auto", "fp8"),
    },
)
ENGINE = record(
    {
        "target": NAME,
        "runtime": NAME,
        "device": NAME,
        "threads": THREADS,
        "model": file_name,
        "model_files": list_of(file_name, 1),
        "engine": null_or(file_name),
        "deferred": flag,
        "why": PROSE,
        "fit": FIT,
    },
    {
        "provider": null_or(NAME),
        "timing_cache": null_or(file_name),
        "fallbacks": list_of(text(1000)),
    },
)
BUILT_ENGINE = record(
    {
        "engine": file_name,
        "fit": record(
            {
                "runtime_version": VERSION,
                "compute_capabilities": list_of(NAME),
                "os": NAME,
                "architecture": NAME,
            }
        ),
    }
)
"""Additional fields of an engine that has an engine file."""
PROFILE = record({"batch": _span, "sequence": _span})
WITH_SHAPES = record({"fit": record({"shapes": one_of(list_of(PROFILE, 1, 1000), PROFILE)})})
"""Additional fields of an engine of a runtime with engine files, built or to be built."""

LATENCY = record(
    {},
    {
        "batch": null_or(list_of(COUNT, 0, 1000)),
        "sequence": null_or(list_of(COUNT, 0, 1000)),
        "iterations": null_or(COUNT),
        "new_tokens": null_or(COUNT),
    },
)
SERVE = {
    "rows": null_or(whole(1, bounds.BATCH)),
    "delay_ms": null_or(whole(0, bounds.DELAY_MS)),
    "workers": null_or(whole(1, bounds.THREADS)),
    "slots": null_or(whole(1, bounds.SLOTS)),
    "context": null_or(whole(0, bounds.SEQUENCE)),
    "max_wait": null_or(number(bounds.WAIT_LEAST, bounds.WAIT)),
}
"""Defaults of a server of the bundle: server/options.py."""
JUDGED_ON = record({}, {"columns": map_of(text(256))})
"""Data of the evaluation: {field: column}."""
RECIPE = record(
    {},
    {
        "validate": null_or(record({}, {"latency": null_or(LATENCY), "data": null_or(JUDGED_ON)})),
        "serve": null_or(record({}, SERVE)),
    },
)
FILE = record({"sha256": SHA256, "size": SIZE, "measured": flag})
MANIFEST = record(
    {
        "digest": SHA256,
        "content_digest": SHA256,
        "name": PRODUCT,
        "version": PRODUCT,
        "verdict": NAME,
        "source": record({"source": text(10_000)}, {"revision": null_or(NAME)}),
        "contract": CONTRACT,
        "engines": list_of(ENGINE, 1, 1000),
        "files": map_of(FILE, 1, file_name),
        "recipe": RECIPE,
    },
    {
        "verdicts": map_of(NAME),
        "dropped": list_of(record({"target": NAME, "gate": NAME, "message": PROSE})),
        "licence": null_or(text(10_000)),
        "licence_files": list_of(file_name),
        "calibration": map_of(SHA256),
        "packages": map_of(NAME),
        "runnable": null_or(flag),
        "texts": SHA256,
    },
)

FIGURE = null_or(float_number)
RATIO = record({"median": FIGURE, "interval": list_of(FIGURE, 2, 2)}, {"to": NAME})
TIMES = record({"end_to_end": record({"p50": FIGURE}, {"p99": FIGURE})})
CELL = one_of(
    record(
        {"batch": COUNT, "prompt": COUNT},
        {"ratio": null_or(record({"ttft": RATIO, "inter_token": RATIO}, {"to": NAME}))},
    ),
    record(
        {"batch": COUNT, "sequence": COUNT, "systems": record({"candidate": TIMES})},
        {"ratio": null_or(RATIO)},
    ),
)
"""Cell of a text-generation model, or of a model that answers in one run."""
SPEED = record(
    {
        "cells": list_of(CELL),
        "machine": record({}, {"cpu": null_or(NAME), "cores": null_or(whole(0, 1 << 20))}),
        "threads": null_or(THREADS),
    },
    {"size": record({}, {"candidate_bytes": null_or(SIZE)})},
)
QUALITY = record(
    {"metric": NAME, "candidate": record({"value": FIGURE})},
    {"cosine": null_or(record({}, {"mean": FIGURE}))},
)
REPORTS = list_of(
    record(
        {"target": NAME},
        {
            "quality": null_or(QUALITY),
            "speed": null_or(SPEED),
            "not_measured": null_or(map_of(anything)),
        },
    ),
    0,
    1000,
)
