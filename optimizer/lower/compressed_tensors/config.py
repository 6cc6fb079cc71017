"""Build the quantization_config of a compressed-tensors folder.

Modules with the same quantization are one config group. A single group targets "Linear" and every
float matrix is in `ignore`, as llm-compressor writes it. Several groups name their modules: vLLM
looks up a fused layer (query, key and value in one) by its class before its parts' names, so a
group for the class would win over one for names.

Refused, because the format cannot hold it:
 1. inputs multiplied at run time (factors)
 2. quantized inputs with weights other than 8 bits, symmetric, one scale per row or tensor, and
    NVFP4; inputs and weights of different types
 3. a weight that transformers holds in a Conv1D, which its readers skip
 4. a model whose norms are folded into its convolutions: its readers expect the norms
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from optimizer.foundation.errors import RecipeError
from optimizer.foundation.qtensor import BLOCK, Scheme
from optimizer.foundation.rounding import float8
from optimizer.foundation.state import PER_TOKEN, Activations, CompressedState
from optimizer.model.architectures.families import FAMILIES
from optimizer.model.checkpoint.checkpoint import Checkpoint

PACKED, INTEGER, MIXED = "pack-quantized", "int-quantized", "mixed-precision"
FLOAT8, FLOAT4 = "float-quantized", "nvfp4-pack-quantized"
FLOAT4_SCALES = {"strategy": "tensor_group", "scale_dtype": str(float8.DTYPE)}
KV_CACHE = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor",
    "group_size": None,
    "dynamic": False,
}


@dataclass(frozen=True)
class ModuleScheme:
    """Quantization of one module, and its entry in the format.

    symmetric_input: True where no static range needs a zero point
    """

    weight: Scheme
    activations: Activations
    symmetric_input: bool

    @property
    def format(self) -> str:
        """The name in compressed-tensors for this kind of weight, such as "pack-quantized"."""
        if self.weight.is_float:
            return FLOAT8 if self.weight.is_float8 else FLOAT4
        return PACKED if self.activations is None else INTEGER

    @property
    def strategy(self) -> str | None:
        """Granularity of the inputs' quantization as compressed-tensors names it: "tensor",
        "token", "group"; None for float."""
        return None if self.activations is None else self.activations.rpartition(" ")[2]

    def describe(self) -> dict[str, str | None]:
        """Return the module's entry of lowering.json, {"weight": .., "activation": ..}."""
        kind = self.weight.type if self.weight.is_float else "int8"
        return {
            "weight": str(self.weight),
            "activation": None if self.strategy is None else f"{kind} {self.strategy}",
        }

    def group(self, targets: list[str]) -> dict[str, Any]:
        """Build the entry of config_groups in a compressed-tensors config for modules with this
        quantization.

        targets: names of the modules, or "Linear"
        """
        inputs, w = None, self.weight
        kind = "float" if w.is_float else "int"
        if self.activations is not None:
            inputs = {
                "num_bits": 8,
                "type": kind,
                "symmetric": self.symmetric_input,
                "strategy": self.strategy,
                "group_size": BLOCK if self.strategy == "group" else None,
                "dynamic": self.activations in PER_TOKEN,
            }
        weights = {
            "num_bits": w.bits,
            "type": kind,
            "symmetric": w.symmetric,
            "strategy": w.granularity,
            "group_size": w.group_size,
            "dynamic": False,
        }
        if w.granularity == "block":
            weights["block_structure"] = [BLOCK, BLOCK]
        if w.type == "float4":
            weights |= FLOAT4_SCALES
            inputs = inputs and inputs | FLOAT4_SCALES | {
                "num_bits": w.bits,
                "symmetric": True,
                "group_size": w.group_size,
                "dynamic": "local",
            }
        return {
            "targets": targets,
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
        }


def check_model(config: Mapping[str, Any], at: str, *_: object) -> None:
    """Raise RecipeError for a model whose norms are folded into its convolutions, which no reader
    of the folder expects (case 4).

    config: content of config.json
    at: path of the target in the recipe
    """
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


def expand_scheme(scheme: Scheme) -> Scheme:
    return replace(scheme, granularity="channel") if scheme.granularity == "tensor" else scheme


def has_symmetric_inputs(state: CompressedState) -> bool:
    """Test for a compressed-tensors folder that no static range needs a zero point. If one does,
    all are written with zero points, because the parts of a fused layer must be of one kind."""
    return all(r.zero_point == 128 for r in state.ranges.values())


def list_module_schemes(
    checkpoint: Checkpoint, state: CompressedState, embedding: str
) -> dict[str, ModuleScheme]:
    """Return in compressed-tensors' terms {module: its quantization} of every quantized weight of
    the state.

    embedding: name of the parameter to leave out, because it is written as float
    Raises RecipeError in cases 1 to 3.
    """
    if state.factors:
        site = min(state.factors)
        raise RecipeError(
            f"smoothing left {len(state.factors)} inputs to multiply at run time ({site}, …); "
            "the format has no place for that",
            where="targets: compressed-tensors",
            fix="Set quantize.fold_only: true, or remove compressed-tensors.",
        )
    row = FAMILIES.get(str(checkpoint.config.get("model_type")))
    symmetric = has_symmetric_inputs(state)
    schemes: dict[str, ModuleScheme] = {}
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
        if activations is not None and not plain and q.scheme.type != "float4":
            raise RecipeError(
                f"{module} has quantized inputs and a weight of {q.scheme.bits} bits per "
                f"{q.scheme.granularity}{'' if q.scheme.symmetric else ', asymmetric'}",
                where="targets: compressed-tensors",
                accepted="with activations, weights of bits: 8, symmetric: true, granularity: "
                "channel or tensor",
                fix="Remove the activations block, or change quantize.weights.",
            )
        kind = q.scheme.type if q.scheme.is_float else ""
        if activations is not None and activations.rpartition(" ")[0] != kind:
            raise RecipeError(
                f"{module} has inputs in {activations} and weights in {q.scheme}",
                where="targets: compressed-tensors",
                accepted="both FP8, both NVFP4, or both int8",
            )
        schemes[module] = ModuleScheme(expand_scheme(q.scheme), activations, symmetric)
    if not schemes:
        raise RecipeError("nothing is quantized", where="targets: compressed-tensors")
    return schemes


def list_float_modules(
    checkpoint: Checkpoint, schemes: dict[str, ModuleScheme], head: str
) -> list[str]:
    """List for a compressed-tensors config the modules with a float matrix, and `head`, for the
    config's `ignore`."""
    names = {n for n in checkpoint.tensors if n.endswith(".weight")}
    matrices = {n for n in names if len(checkpoint.shape(n)) == 2}
    matrices |= {f"{head}.weight"} if head else set()
    return sorted({n.removesuffix(".weight") for n in matrices} - schemes.keys())


def list_absent_patterns(schemes: dict[str, ModuleScheme], head: str) -> list[str]:
    """List patterns, for the config's `ignore`, of modules that transformers' model may have and
    the folder lacks: the pooler of an encoder whose task does not use it."""
    return [] if head or any("pooler" in module for module in schemes) else ["re:.*pooler.*"]


def write_notes(schemes: dict[str, ModuleScheme], *, caches: bool = False) -> list[str]:
    """Write sentences for users of a compressed-tensors folder on what vLLM and transformers cannot
    do with these schemes.

    caches: True where the KV caches are in FP8
    """
    remarks = []
    if caches:
        remarks.append(
            "KV cache in FP8: where vLLM's attention multiplies in FP8 (FlashAttention 3, "
            "FlashInfer), it rounds queries too, by scale 1, which is not the proven model"
        )
    if any(not c.weight.symmetric for c in schemes.values()):
        remarks.append(
            "asymmetric weights: transformers 5.23 loads them with "
            "quantization_config=CompressedTensorsConfig(dequantize=True)"
        )
    if any(c.weight.bits == 3 for c in schemes.values()):
        remarks.append("3 bits: transformers reads them, vLLM has kernels for 4 and 8 bits")
    if any(c.activations == "token" for c in schemes.values()):
        remarks.append(
            "inputs are quantized at run time: vLLM divides a token's largest value by 127, "
            "transformers (compressed_tensors) by 127.5"
        )
    if any(c.weight.is_float8 for c in schemes.values()):
        remarks.append(
            "FP8: vLLM multiplies FP8 from compute capability 8.9 on (L4, RTX 40, H100), and "
            "before that de-quantizes the weights; not measured here"
        )
    if any(c.activations == "float4 group" for c in schemes.values()):
        remarks.append(
            "NVFP4 inputs: vLLM and SGLang round them on compute capability 10.0 or newer, and "
            "multiply in 16 bits on older GPUs, which is not the proven model; not measured here"
        )
    elif any(c.weight.type == "float4" for c in schemes.values()):
        remarks.append(
            "NVFP4 weights with float inputs: vLLM de-quantizes them in its Marlin kernels from "
            "compute capability 7.5 on; not measured here"
        )
    if any(c.weight.granularity == "block" for c in schemes.values()):
        remarks.append(
            "scales of blocks: where vLLM multiplies with DeepGEMM, it rounds them and those of "
            "the inputs up to powers of two, which is not the proven model; "
            "VLLM_USE_DEEP_GEMM_E8M0=0 turns that off"
        )
    if any(c.activations == "tensor" and not c.symmetric_input for c in schemes.values()):
        remarks.append("static ranges with a zero point: vLLM takes them and calls them untested")
    return remarks


def write_sparsity_notes(state: CompressedState) -> list[str]:
    """Write a sentence on pruned weights, which are stored dense; [] without any.

    Readers after compressed-tensors 0.14 refuse its sparse formats (sparse-24-bitmask,
    sparse-bitmask, marlin-24).
    """
    if not state.sparsity:
        return []
    patterns = " and ".join(sorted(set(state.sparsity.values())))
    return [
        f"{len(state.sparsity)} weights are sparse ({patterns}), stored dense: compressed-tensors "
        "no longer reads sparse formats, so sparsity makes the folder neither smaller nor faster"
    ]


def build_quantization_config(
    schemes: dict[str, ModuleScheme], ignore: list[str], *, caches: bool = False
) -> dict[str, Any]:
    """Build quantization_config, the same for any order of `schemes`.

    ignore: float modules
    caches: True where the KV caches are in FP8
    """
    alike: dict[ModuleScheme, list[str]] = {}
    for module in sorted(schemes):
        alike.setdefault(schemes[module], []).append(module)
    formats = sorted({c.format for c in alike})
    groups = {
        f"group_{i}": scheme.group(["Linear"] if len(alike) == 1 else modules)
        for i, (scheme, modules) in enumerate(alike.items())
    }
    if len(formats) > 1:
        for group, scheme in zip(groups.values(), alike, strict=True):
            group["format"] = scheme.format
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": KV_CACHE if caches else None,
        "global_compression_ratio": None,
    }
