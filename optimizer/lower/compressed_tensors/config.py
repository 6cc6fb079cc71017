"""quantization_config of a compressed-tensors folder: who is coded, and how.

Modules coded alike are one config group. A single group targets "Linear" and every float matrix
is in `ignore`, which is how llm-compressor writes it. Several groups name their modules: vLLM
looks up a fused layer (query, key and value in one) by its class before its parts' names, so a
group for the class beside one for names would win where it should not.

What the format cannot say is refused here, with what to change:
 1. inputs multiplied at run time (factors)
 2. coded inputs with weights other than 8 bits, symmetric, one scale a row or tensor
 3. a weight that transformers holds in a Conv1D, which its readers do not look for
 4. a model whose norms are folded into its convolutions: its readers expect the norms
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from optimizer.foundation.errors import RecipeError
from optimizer.foundation.qtensor import Scheme
from optimizer.foundation.state import Activations, CompressedState
from optimizer.model.architectures.families import FAMILIES
from optimizer.model.checkpoint.checkpoint import Checkpoint

PACKED, INTEGER, MIXED = "pack-quantized", "int-quantized", "mixed-precision"


@dataclass(frozen=True)
class Coding:
    """How one module is coded. symmetric_input: of static ranges."""

    weight: Scheme
    activations: Activations
    symmetric_input: bool

    @property
    def format(self) -> str:
        return PACKED if self.activations is None else INTEGER

    def describe(self) -> dict[str, str | None]:
        return {
            "weight": str(self.weight),
            "activation": None if self.activations is None else f"int8 {self.activations}",
        }

    def group(self, targets: list[str]) -> dict[str, Any]:
        """The entry of config_groups for the modules `targets`."""
        inputs = None
        if self.activations is not None:
            inputs = {
                "num_bits": 8,
                "type": "int",
                "symmetric": self.symmetric_input,
                "strategy": self.activations,
                "group_size": None,
                "dynamic": self.activations == "token",
            }
        w = self.weight
        weights = {
            "num_bits": w.bits,
            "type": "int",
            "symmetric": w.symmetric,
            "strategy": w.granularity,
            "group_size": w.group_size,
            "dynamic": False,
        }
        return {
            "targets": targets,
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
        }


def check_model(config: Mapping[str, Any], at: str) -> None:
    """Case 4. config: of config.json; at: the target's path in the recipe. Raises RecipeError."""
    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is not None and family.batch_norms is not None:
        raise RecipeError(
            f"architecture {model_type!r} is not written as compressed-tensors ({at}): its "
            "convolutions are quantized with their norms folded in, and transformers builds the "
            "model with norms",
            where="targets: compressed-tensors",
            accepted="models of linear layers, such as a ViT",
            fix="Remove the target compressed-tensors, or use another, e.g. onnxruntime.",
        )


def scheme_by_row(scheme: Scheme) -> Scheme:
    return replace(scheme, granularity="channel") if scheme.granularity == "tensor" else scheme


def symmetric_inputs(state: CompressedState) -> bool:
    """Whether no static range needs a zero point. One that does gives all of them one: the parts
    of a fused layer must be of one kind."""
    return all(r.zero_point == 128 for r in state.ranges.values())


def codings(checkpoint: Checkpoint, state: CompressedState, embedding: str) -> dict[str, Coding]:
    """{module: its coding} without that of the parameter `embedding`, which is written as float.
    Raises RecipeError for what the list above names."""
    if state.factors:
        site = min(state.factors)
        raise RecipeError(
            f"smoothing left {len(state.factors)} inputs to be multiplied at run time ({site}, …); "
            "the format has no place for that",
            where="targets: compressed-tensors",
            fix="Set quantize.fold_only: true, or remove compressed-tensors.",
        )
    row = FAMILIES.get(str(checkpoint.config.get("model_type")))
    symmetric = symmetric_inputs(state)
    codings_by_module: dict[str, Coding] = {}
    for name, q in state.weights.items():
        module = name.removesuffix(".weight")
        if name == embedding:
            continue
        if row is not None and row.is_transposed(name):
            raise RecipeError(
                f"{module} is a Conv1D in transformers, whose compressed-tensors reader looks for "
                "linear layers only",
                where="targets: compressed-tensors",
                fix=f"Remove compressed-tensors for {row.model_type}.",
            )
        activations = state.activations_of(module)
        plain = q.scheme.bits == 8 and q.scheme.symmetric and q.scheme.granularity != "group"
        if activations is not None and not plain:
            raise RecipeError(
                f"{module} has coded inputs and a weight of {q.scheme.bits} bits per "
                f"{q.scheme.granularity}{'' if q.scheme.symmetric else ', asymmetric'}",
                where="targets: compressed-tensors",
                accepted="with activations, weights of bits: 8, symmetric: true, granularity: "
                "channel or tensor",
                fix="Remove the activations block, or change quantize.weights.",
            )
        codings_by_module[module] = Coding(scheme_by_row(q.scheme), activations, symmetric)
    if not codings_by_module:
        raise RecipeError("nothing is quantized", where="targets: compressed-tensors")
    return codings_by_module


def float_modules(checkpoint: Checkpoint, coded: dict[str, Coding], head: str) -> list[str]:
    """Modules with a matrix that is not coded, the head included: none may be taken for coded."""
    names = {n for n in checkpoint.tensors if n.endswith(".weight")}
    matrices = {n for n in names if len(checkpoint.shape(n)) == 2}
    matrices |= {f"{head}.weight"} if head else set()
    return sorted({n.removesuffix(".weight") for n in matrices} - coded.keys())


def absent(coded: dict[str, Coding], head: str) -> list[str]:
    """Patterns of linear modules that transformers' model may have and the folder does not, which
    are then not quantized: an encoder's pooler, where the task has no use for it."""
    return [] if head or any("pooler" in module for module in coded) else ["re:.*pooler.*"]


def notes(coded: dict[str, Coding]) -> list[str]:
    """What a reader of the folder must know, of these codings."""
    remarks = []
    if any(not c.weight.symmetric for c in coded.values()):
        remarks.append(
            "asymmetric weights: transformers 5.23 loads them with "
            "quantization_config=CompressedTensorsConfig(dequantize=True)"
        )
    if any(c.weight.bits == 3 for c in coded.values()):
        remarks.append("3 bits: transformers reads them, vLLM has kernels for 4 and 8 bits")
    if any(c.activations == "token" for c in coded.values()):
        remarks.append(
            "inputs are coded at run time: vLLM divides a token's largest value by 127, "
            "transformers (compressed_tensors) by 127.5"
        )
    if any(c.activations == "tensor" and not c.symmetric_input for c in coded.values()):
        remarks.append("static ranges with a zero point: vLLM takes them and calls them untested")
    return remarks


def zeros(state: CompressedState) -> list[str]:
    """What becomes of pruned weights: the sparse formats that compressed-tensors had
    (sparse-24-bitmask, sparse-bitmask, marlin-24) are refused by its reader after 0.14."""
    if not state.sparsity:
        return []
    patterns = " and ".join(sorted(set(state.sparsity.values())))
    return [
        f"{len(state.sparsity)} weights are sparse ({patterns}), stored dense: compressed-tensors "
        "reads no sparse format any more, so that the folder is not smaller and nothing is faster "
        "for it"
    ]


def quantization_config(coded: dict[str, Coding], ignore: list[str]) -> dict[str, Any]:
    """The document, the same whatever the order of `coded`."""
    alike: dict[Coding, list[str]] = {}
    for module in sorted(coded):
        alike.setdefault(coded[module], []).append(module)
    formats = sorted({c.format for c in alike})
    groups = {
        f"group_{i}": coding.group(["Linear"] if len(alike) == 1 else modules)
        for i, (coding, modules) in enumerate(alike.items())
    }
    if len(formats) > 1:
        for group, coding in zip(groups.values(), alike, strict=True):
            group["format"] = coding.format
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
