"""Store LoRA adapters beside a model that is compressed without them (model.adapters: keep: hot).

    peft's adapter, the written checkpoint -> out/adapters/NAME.safetensors
                                              out/adapters/NAME/    the files of peft, for validate

The matrices and the scaling are read from the modules that peft makes, so that every option of
LoraConfig (alpha and rank patterns, rank stabilization, layers) has peft's meaning. An adapter must
be a pair of matrices beside each linear module. Memory: the model in float32.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.progress import say
from optimizer.harness.contract import adapter_file
from optimizer.harness.runtimes.ort.adapters import A, B
from optimizer.load.adapters import adapter as adapter_files
from optimizer.load.adapters import merge
from optimizer.load.adapters.adapter import CONFIG, PREFIX, WEIGHTS, Adapter
from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.model.checkpoint.model import choose_auto_class
from optimizer.recipe.schema import Model

ACCEPTED = "LoRA of linear modules of the blocks: tensors lora_A.weight and lora_B.weight alone"
MERGE = "Merge it (model.adapters: [FOLDER]), into a bundle of its own."
OTHERS = {
    "lora_magnitude_vector": "DoRA, whose norm is of base and adapter together",
    "lora_embedding": "an adapted embedding",
    ".bias": "a trained bias",
}
"""{part of a tensor's name: the kind of adapter that has it}."""
HEADS = ("lm_head", "embed_out", "output")
INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights with which peft leaves the model's own weights as they are."""


def find(section: Model) -> dict[str, Adapter]:
    """Return {name: adapter} of the adapters that are kept apart. Raises CheckpointError for a
    folder without an adapter, and for an adapter that is not LoRA of linear modules."""
    opened = {
        name: adapter_files.open_named(section, source) for name, source in section.hot.items()
    }
    for name, one in opened.items():
        _check_kind(name, one)
    return opened


def _check_kind(name: str, one: Adapter) -> None:
    """Raise CheckpointError for an adapter with more than LoRA's two matrices."""
    config, where = one.config, f"model.adapters.sources.{name}: {one.folder}"
    if config.get("peft_type") != "LORA":
        problem = f"its peft_type is {config.get('peft_type')}"
        raise CheckpointError(problem, where=where, accepted=ACCEPTED, fix=MERGE)
    saved = config.get("modules_to_save") or config.get("trainable_token_indices")
    settings = {"use_dora": OTHERS["lora_magnitude_vector"], "lora_bias": OTHERS[".bias"]}
    named = [text for key, text in settings.items() if config.get(key)]
    named += [f"whole modules or rows beside LoRA ({saved})"] if saved else []
    initial = config.get("init_lora_weights")
    changes = {"init_lora_weights": initial not in INITIAL and initial}
    changes["layer_replication"] = config.get("layer_replication")
    named += [f"a change of the model itself ({k}: {v})" for k, v in changes.items() if v]
    for tensor in sorted(one.header):
        if not tensor.endswith((".lora_A.weight", ".lora_B.weight")):
            kind = next((text for part, text in OTHERS.items() if part in tensor), "a whole tensor")
            named.append(f"{kind} ({tensor})")
    if named:
        raise CheckpointError(
            f"it has more than LoRA's matrices: {named[0]}",
            where=where,
            accepted=ACCEPTED,
            fix=MERGE,
        )
    heads = [n for n in one.header if n.split(".")[-3] in HEADS]
    if heads:
        raise CheckpointError(
            f"it changes the head ({heads[0]})", where=where, accepted=ACCEPTED, fix=MERGE
        )
    adapter_files.check_trained(one, where, {})


def write(section: Model, out: Path) -> None:
    """Write the adapters of a model whose checkpoint lies in `out`, the folder of load.

    Raises CheckpointError for an adapter that is not accepted or does not fit the model,
    MachineError without peft.
    """
    adapters = find(section)
    if not adapters:
        return
    peft = merge.import_peft()
    checkpoint = out / "checkpoint"
    with quiet():
        config = read_json(checkpoint / "config.json")
        model = choose_auto_class(section.task, config["model_type"]).from_pretrained(
            checkpoint,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=section.trust_remote_code,
        )
    for name, one in adapters.items():
        with quiet():
            matrices = _read(peft, model, one)
        file = out / adapter_file(name)
        file.parent.mkdir(exist_ok=True)
        save_file(matrices, file)
        own = file.with_suffix("")
        own.mkdir()
        for part in (CONFIG, WEIGHTS):
            shutil.copyfile(one.folder / part, own / part)
        ranks = sorted({t.shape[1] for n, t in matrices.items() if n.endswith(A)})
        changes = f"{name} changes {len(matrices) // 2} modules, rank {_range(ranks)}"
        say(f"load: {changes}: kept hot{one.other_base(section)}")


def _range(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"


def _read(peft: Any, model: nn.Module, one: Adapter) -> dict[str, Tensor]:
    """Return {name of the graph's input: matrix} of an adapter, as peft holds it."""
    where = str(one.folder)
    wrapped = merge.wrap(peft, model, one)
    try:
        merge.check_all_read(peft, wrapped, one.header, one)
        layer = peft.tuners.lora.layer
        matrices: dict[str, Tensor] = {}
        for name, module in wrapped.named_modules():
            if not isinstance(module, layer.LoraLayer):
                continue
            base = name.removeprefix(PREFIX)
            (adapter,) = module.active_adapters
            plain = type(module) is layer.Linear and type(module.base_layer) is nn.Linear
            if not plain or adapter in module.lora_variant:
                variant = module.lora_variant.get(adapter, module.get_base_layer())
                raise CheckpointError(
                    f"its change of {base} is more than two matrices ({type(variant).__name__})",
                    where=where,
                    accepted=ACCEPTED,
                    fix=MERGE,
                )
            scaling = float(module.scaling[adapter])
            matrices[f"{base}{A}"] = module.lora_A[adapter].weight.detach().float().T.contiguous()
            changed = module.lora_B[adapter].weight.detach().float() * scaling
            matrices[f"{base}{B}"] = changed.T.contiguous()
    finally:
        wrapped.unload()
    if bad := [name for name, value in matrices.items() if not value.isfinite().all()]:
        raise CheckpointError(
            f"{bad[0]} has NaN or infinite values",
            where=where,
            fix="The adapter's training diverged: use another.",
        )
    return matrices
