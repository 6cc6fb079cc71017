"""Cells of false_alarms.py: a balanced, seeded sample of the clean runs that a recipe can ask for.

A cell is one run of the stages and its ledger. Nothing is planted in it, so a refusal is a false
alarm, or a fault of the product that is not known yet.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from optimizer.checks import accepted
from optimizer.checks.context import Context
from optimizer.foundation.errors import RecipeError
from optimizer.recipe.schema import Recipe

ROOT = Path(__file__).resolve().parents[2]
TEXTS, CALIBRATION, SEQUENCE = 8, 16, 32

ENCODERS = ("bert", "roberta", "mpnet", "distilbert", "albert", "electra", "deberta-v2")
DECODERS = ("llama", "qwen3", "gpt2", "opt")
CLASSIFIERS = ("classifier", "undecided")
REAL = ("minilm", *CLASSIFIERS)
SMOLLM2 = "smollm2"
EMBEDDERS = {"llama-embedder": "mean", "qwen3-embedder": "lasttoken"}
"""Decoders whose hidden states are pooled, by their pooling; the name begins with the decoder's."""
ROTATED = {"llama": {}, "qwen3": {}, SMOLLM2: {}, "opt": {"residual": False}}
"""Rotations need a decoder with RMSNorm; the values alone can be rotated of one with LayerNorm
whose projections are apart (compress/apply/activations/rotation.py)."""

ATEN = ("default", "avx2", "avx512")
"""ATEN_CPU_CAPABILITY: torch's own kernels. default: of any x86-64."""
ATEN_NEEDS = {"avx2": "avx2", "avx512": "avx512f"}
"""The processor's flag without which torch's kernels end in an illegal instruction."""
ONEDNN = ("SSE41", "AVX", "AVX2", "AVX512_CORE", "AVX512_CORE_VNNI", "DEFAULT")
"""ONEDNN_MAX_CPU_ISA: the kernels of oneDNN, at most those that the processor has."""

AXES: dict[str, tuple[Any, ...]] = {
    "model": (*REAL, *ENCODERS, *DECODERS, *EMBEDDERS),
    "scheme": ("W8A8 static", "W8A8 per token", "W4"),
    "method": ("rtn", "smoothquant", "gptq", "awq", "rotation"),
    "range": ("minmax", "percentile", "entropy", "mse", "minmax, symmetric", "–"),
    "bias_correction": (False, True),
    "seed": (0, 1, 2),
    "dialect": ("onnxruntime", "tensorrt-rtx fp16", "tensorrt-rtx fp32"),
    "compress_aten": ATEN,
    "compress_onednn": ONEDNN,
    "compress_threads": (1, 2),
    "validate_aten": ATEN,
    "validate_onednn": ONEDNN,
    "validate_threads": (1, 2),
}
CANDIDATES = 20  # drawn per cell; the one whose pairs of values have occurred least is taken


@dataclass(frozen=True)
class Cell:
    """One value of each axis; the range is "–" where ranges are not static."""

    model: str
    scheme: str
    method: str
    range: str
    bias_correction: bool
    seed: int
    dialect: str
    compress_aten: str
    compress_onednn: str
    compress_threads: int
    validate_aten: str
    validate_onednn: str
    validate_threads: int

    @property
    def key(self) -> str:
        """Name of the cell, the same in every run."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def decoder(self) -> bool:
        return self.model in (*DECODERS, SMOLLM2)

    def environment(self, part: str) -> dict[str, str]:
        """Environment that sets the processor which `part` (compress or validate) detects.

        Threads that wait sleep, because several cells share the machine.
        """
        threads = str(getattr(self, f"{part}_threads"))
        return {
            "ATEN_CPU_CAPABILITY": getattr(self, f"{part}_aten"),
            "ONEDNN_MAX_CPU_ISA": getattr(self, f"{part}_onednn"),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
        }

    @property
    def title(self) -> str:
        ranges = "" if self.range == "–" else f", {self.range}"
        corrected = ", bias correction" if self.bias_correction else ""
        return (
            f"{self.model} {self.seed}, {self.method}, {self.scheme}{ranges}{corrected}, "
            f"{self.dialect}"
        )

    @property
    def personalities(self) -> str:
        parts = (
            f"{getattr(self, f'{p}_aten')}/{getattr(self, f'{p}_onednn')}/"
            f"{getattr(self, f'{p}_threads')}"
            for p in ("compress", "validate")
        )
        return " → ".join(parts)


def cells(
    count: int, seed: int, models: Sequence[str] = (), aten: Sequence[str] = ATEN
) -> list[Cell]:
    """Draw `count` different cells: the same for the same arguments, a prefix of any larger draw.

    models: names to draw from; (): all but SmolLM2, whose cells take minutes
    aten: values of ATEN_CPU_CAPABILITY that this processor can run

    Axes that bind each other take turns: the models, the methods of a model, their schemes, the
    dialects of a scheme. CANDIDATES such cells are drawn, and the one whose values, and pairs of
    values, have occurred least is taken.
    """
    chance = random.Random(seed)
    axes = AXES | {"compress_aten": tuple(aten), "validate_aten": tuple(aten)}
    axes["model"] = tuple(models) or axes["model"]
    seen: Counter[Any] = Counter()
    made: dict[Cell, None] = {}
    turns: dict[tuple[str, ...], list[Any]] = {}

    def turn(names: Sequence[Any], *before: str) -> Any:
        waiting = turns.setdefault(before, [])
        if not waiting:
            waiting += chance.sample(names, len(names))
        return waiting.pop()

    while len(made) < count:
        model = turn(axes["model"])
        method = turn([m for m in AXES["method"] if _accepted(model, m)], model)
        schemes = tuple(dict.fromkeys(scheme for scheme, _ in _accepted(model, method)))
        scheme = turn(schemes, model, method)
        dialects = [d for s, d in _accepted(model, method) if s == scheme]
        corrects = scheme != "W4" and model not in (*DECODERS, SMOLLM2)
        fixed = {
            "model": (model,),
            "method": (method,),
            "scheme": (scheme,),
            "dialect": (turn(dialects, model, scheme, "dialect"),),
            "bias_correction": (turn((False, True) if corrects else (False,), model, scheme),),
        }
        drawn = [drawn_cell(axes | fixed, chance) for _ in range(CANDIDATES)]
        fresh = [c for c in drawn if c not in made]
        if fresh:
            best = min(fresh, key=lambda c: sum(seen[pair] for pair in pairs(c)))
            made[best] = None
            seen.update(pairs(best))
    return list(made)


def drawn_cell(axes: dict[str, tuple[Any, ...]], chance: random.Random) -> Cell:
    """Draw a cell at random that the recipe's own check accepts."""
    while True:
        cell = Cell(**{name: chance.choice(values) for name, values in axes.items()})
        if supported(cell):
            return cell


def pairs(cell: Cell) -> list[tuple[tuple[str, Any], ...]]:
    """List every value, and every two values of different axes."""
    values = list(asdict(cell).items())
    return [*((v,) for v in values), *itertools.combinations(values, 2)]


def supported(cell: Cell) -> bool:
    """Return True if the recipe's check accepts the cell and each of its values has an effect."""
    if (cell.range == "–") == (cell.scheme == "W8A8 static"):
        return False
    if cell.bias_correction and (cell.decoder or cell.scheme == "W4"):
        return False
    return (cell.scheme, cell.dialect) in _accepted(cell.model, cell.method)


@cache
def _accepted(model: str, method: str) -> tuple[tuple[str, str], ...]:
    """List each (scheme, dialect) of a method and model that the check of a recipe accepts."""
    if method == "rotation" and model not in ROTATED:
        return ()
    found = []
    for scheme, dialect in itertools.product(AXES["scheme"], AXES["dialect"]):
        range_ = "minmax" if scheme == "W8A8 static" else "–"
        plain = ("default", "AVX2", 1)
        cell = Cell(model, scheme, method, range_, False, 0, dialect, *plain, *plain)
        try:
            accepted.check(recipe(cell, "somewhere"), Context())
        except (RecipeError, ValueError):
            continue
        found.append((scheme, dialect))
    return tuple(found)


def recipe(cell: Cell, source: str) -> Recipe:
    """Write the cell as a recipe, with no quality gate and a compress budget beyond any need.

    source: the model's folder, or a package's name
    """
    return Recipe.model_validate(
        {
            "name": "false-alarms",
            "model": model_section(cell.model, source),
            "calibrate": {
                "data": _rows("calibrate"),
                "samples": CALIBRATION,
                "sequence_length": SEQUENCE,
                "seed": cell.seed,
            },
            "quantize": _quantize(cell),
            "targets": (_target(cell),),
            "validate": {
                "data": _rows("evaluate"),
                "metric": "perplexity" if cell.decoder else "cosine",
                "quantization_budget": 100.0,
                "latency": {"data": _rows("time"), "must_beat_float": False},
            },
        }
    )


def model_section(model: str, source: str) -> dict[str, Any]:
    """Write the model block of the recipe."""
    if model in (*DECODERS, SMOLLM2):
        packed = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"} if model == SMOLLM2 else {}
        return {"source": source, "task": "text-generation", **packed}
    if model in EMBEDDERS:
        pooled = {"task": "sentence-embedding", "pooling": EMBEDDERS[model]}
        return {"source": source, "max_length": SEQUENCE, **pooled}
    task = "text-classification" if model in CLASSIFIERS else "sentence-embedding"
    return {"source": source, "task": task, "max_length": SEQUENCE}


def _rows(name: str) -> dict[str, Any]:
    file = ROOT / "calibration" / f"sentiment-{name}.jsonl"
    return {"source": "json", "files": (str(file),), "columns": {"text": "text"}}


def _quantize(cell: Cell) -> dict[str, Any]:
    asked: dict[str, Any] = {"methods": (cell.method,)}
    if cell.method == "rotation":
        asked["rotation"] = ROTATED[cell.model]
    if cell.bias_correction:
        asked["bias_correction"] = True
    group = {"granularity": "group", "group_size": 64}
    if cell.scheme == "W4":
        asked["weights"] = {"bits": 4, **group}
        if cell.decoder:
            asked["head"] = {"bits": 8, **group}
        if cell.decoder and cell.dialect == "onnxruntime":
            asked["embedding"] = {"bits": 8, **group}
        return asked
    asked["weights"] = {"bits": 8, "granularity": "channel"}
    if cell.scheme == "W8A8 per token":
        asked["activations"] = {"granularity": "token"}
        return asked
    name, _, symmetric = cell.range.partition(", ")
    asked["activations"] = {"range": name, "symmetric": bool(symmetric)}
    return asked


def _target(cell: Cell) -> dict[str, Any]:
    runtime, _, precision = cell.dialect.partition(" ")
    if not precision:
        return {"runtime": runtime, "threads": 1}
    return {"runtime": runtime, "float": precision, "shapes": {"sequence": (1, SEQUENCE, 128)}}


def covered(chosen: Sequence[Cell]) -> set[tuple[tuple[str, Any], ...]]:
    """List the values and pairs of values that occur."""
    return {pair for cell in chosen for pair in pairs(cell)}
