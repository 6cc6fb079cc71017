"""Merge adapters by peft, in float32, into a folder as save_pretrained writes it.

The merged folder is then loaded as any other, so that no later stage knows of adapters, and the
reference that everything is judged against is peft's own merged model.

Memory: the model in float32.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimizer.foundation.errors import CheckpointError, MachineError
from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.progress import say
from optimizer.foundation.reading import quote_error, reading
from optimizer.load import source
from optimizer.load.adapters import adapter as adapter_files
from optimizer.load.adapters.adapter import PREFIX, Adapter
from optimizer.load.quantized import folder as quantized
from optimizer.load.source import Source
from optimizer.model.checkpoint.checkpoint import TensorPlace, read_entry
from optimizer.model.checkpoint.model import choose_auto_class
from optimizer.recipe.schema import Model

OF_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf")


def merge(
    section: Model,
    resolved: Source,
    folder: Path,
    adapters: Sequence[Adapter],
    config: Any,
    scratch: Path,
) -> Source:
    """Write the model with its adapters merged, in order, below `scratch`, an empty folder; return
    the source that it then is.

    resolved: the model's source
    folder: folder of its config.json
    config: its transformers config, with the number of labels that the adapters bring

    Raises CheckpointError for an adapter that cannot be merged, does not fit the model, or has a
    tensor without a place in it; MachineError without peft.
    """
    peft = import_peft()
    if quantized.find(folder) is not None:
        raise CheckpointError(
            "adapters cannot be merged into quantized weights",
            where=str(folder),
            accepted="float weights",
            fix="Set model.source to the float checkpoint that was quantized.",
        )
    base, root = scratch / "base", scratch / "merged"
    merged = root / folder.relative_to(resolved.folder)
    _link_files(folder, base)
    with reading(folder), quiet():
        model, loading = choose_auto_class(section.task, config.model_type).from_pretrained(
            base,
            config=config,
            dtype=torch.float32,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=section.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # of a head that an adapter replaces
        )
    mismatched = {name for name, *_ in loading["mismatched_keys"]}
    absent = mismatched | set(loading["missing_keys"])
    for one in adapters:
        kind, note = one.config.get("peft_type"), one.other_base(section)
        say(f"load: merging {one.name} ({kind}) into {section.source}{note}")
        model = _merge_one(peft, model, one)
        absent -= {name.removeprefix(PREFIX) for name in one.header}
    if wrong := sorted(mismatched & absent):
        raise CheckpointError(
            f"config.json gives {wrong[0]!r} another shape than the weights have",
            where=str(folder),
            fix="config.json and the weights are of different models: get both again.",
        )
    kept = {n: t for n, t in model.state_dict().items() if n not in absent}
    try:
        with quiet():
            model.save_pretrained(merged, state_dict=kept)
        for place in (resolved, *(one.source for one in adapters)):
            _copy_settings(place, root, merged)
    except Exception as e:  # of a full disk safetensors raises an error of its own
        size = sum(tensor.nbytes for tensor in kept.values()) / 1e9
        raise MachineError(
            f"the merged model cannot be written ({quote_error(e)})",
            where=str(scratch),
            fix=f"Set TMPDIR to a folder with {size:.2g} GB free; the model is written there in "
            "float32.",
        ) from e
    return Source(root, root, resolved.revision)


def leave_out(resolved: Source, scratch: Path) -> Source:
    """Return the source without an adapter that lies in its folder, linked below `scratch`, because
    transformers would apply it."""
    for file in source.list_files(resolved):
        if file.name not in adapter_files.FILES:
            link = scratch / file.relative_to(resolved.folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.resolve())
    return Source(scratch, scratch, resolved.revision)


def import_peft() -> Any:
    try:
        import peft
    except ImportError as e:
        raise MachineError(
            f"adapters are read by peft, which cannot be imported ({e})",
            where="model.adapters",
            fix="pip install 'optimize-toolchain[adapters]'; or merge them yourself: "
            "model.merge_and_unload().save_pretrained(FOLDER).",
        ) from None
    return peft


def _merge_one(peft: Any, model: Any, adapter: Adapter) -> Any:
    """Merge one adapter into the parameters of `model`, and return the model."""
    where = str(adapter.folder)
    header = adapter.header
    adapter_files.check_trained(adapter, where, model.state_dict())
    _fit_vocabulary(model, adapter)
    wrapped = wrap(peft, model, adapter)
    if not hasattr(wrapped.base_model, "merge_and_unload"):
        raise CheckpointError(
            f"an adapter of type {adapter.config.get('peft_type')} cannot be merged into weights",
            where=f"{where}/{adapter_files.CONFIG}: peft_type",
            accepted="LORA (with or without use_dora), and other types that peft can merge",
        )
    check_all_read(peft, wrapped, header, adapter)
    _check_untied(wrapped, where)
    try:
        with quiet():
            return wrapped.merge_and_unload(safe_merge=True)
    except Exception as e:
        raise CheckpointError(
            f"peft cannot merge the adapter ({quote_error(e)})",
            where=where,
            fix="If the message names NaN, the adapter's training diverged: use another.",
        ) from e


def wrap(peft: Any, model: Any, adapter: Adapter) -> Any:
    """Return peft's model of `model` and the adapter. Raises CheckpointError where it has none."""
    try:
        with quiet():
            return peft.PeftModel.from_pretrained(model, adapter.folder, local_files_only=True)
    except Exception as e:  # each method of peft fails differently
        raise CheckpointError(
            f"peft cannot load the adapter into the model ({quote_error(e)})",
            where=str(adapter.folder),
            accepted=f"an adapter of the model in model.source{_trained_on(adapter)}",
        ) from e


def _trained_on(adapter: Adapter) -> str:
    return f"; this one names {adapter.base}" if adapter.base else ""


def check_all_read(
    peft: Any, wrapped: Any, header: Mapping[str, TensorPlace], adapter: Adapter
) -> None:
    """Raise CheckpointError unless peft holds every tensor of the adapter's file, with its values,
    and no other for the adapter; it skips others with a warning at most."""
    with quiet():
        state = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    tables = {PREFIX + n.removeprefix(PREFIX): t for n, t in wrapped.state_dict().items()}
    tables |= {n.replace(".base_layer", ""): t for n, t in tables.items()}
    read = {name: state.get(name, tables.get(name)) for name in header}
    lost = sorted(n for n, t in read.items() if t is None or not _equal(t, header[n]))
    without = sorted(state.keys() - header.keys())
    if lost or without:
        problem = (
            f"{len(lost)} tensors have no place in the model, such as {lost[0]!r}"
            if lost
            else f"{len(without)} tensors are missing, such as {without[0]!r}"
        )
        raise CheckpointError(
            problem,
            where=str(adapter.folder / adapter_files.WEIGHTS),
            accepted=f"an adapter of the model in model.source{_trained_on(adapter)}",
            fix="Get the adapter's files again, or set model.source to its model.",
        )


def _equal(tensor: Tensor, entry: TensorPlace) -> bool:
    """Compare a tensor of the model that peft opened with the adapter file's; NaN equals NaN, which
    merging refuses with its reason."""
    stored = read_entry(entry).to(tensor.dtype)
    return tensor.shape == stored.shape and torch.equal(tensor.nan_to_num(), stored.nan_to_num())


def _check_untied(wrapped: Any, where: str) -> None:
    """Raise CheckpointError for an adapter of a parameter that two modules share: peft applies it
    to one of them, and merged it would change both."""
    modules = dict(wrapped.get_base_model().named_modules())
    places: dict[int, list[str]] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            places.setdefault(id(parameter), []).append(name)
    for name, module in modules.items():
        base = getattr(module, "base_layer", None)
        for parameter in () if base is None else base.parameters(recurse=False):
            others = [n for n in places[id(parameter)] if n != f"{name}.base_layer"]
            if others:
                raise CheckpointError(
                    f"it changes {name} alone, whose weight is tied to {', '.join(others)}",
                    where=where,
                    accepted="adapters of weights that one module reads",
                    fix="Save the model untied (tie_word_embeddings: false in config.json, and "
                    "both tensors in its file), or train without that module.",
                )


def _fit_vocabulary(model: Any, adapter: Adapter) -> None:
    """Give the model the number of embedding rows in the adapter's file; peft saves them where
    tokens were added."""
    table = model.get_input_embeddings()
    rows = {
        entry.shape[0]
        for name, entry in adapter.header.items()
        if name.endswith(("embed_tokens.weight", "word_embeddings.weight", "wte.weight"))
    }
    if table is not None and rows and rows != {table.weight.shape[0]}:
        with quiet():
            model.resize_token_embeddings(max(rows))


def _link_files(folder: Path, out: Path) -> None:
    """Link the files of a source model, without an adapter's, which transformers would apply
    itself."""
    out.mkdir()
    for file in folder.iterdir():
        if file.is_file() and file.name not in adapter_files.FILES:
            (out / file.name).symlink_to(file.resolve())


def _copy_settings(place: Source, root: Path, merged: Path) -> None:
    """Copy the files of a source to the merged checkpoint's folder `root`, without those of the
    model's weights and its config.json; an adapter's replace the model's.

    merged: folder of the merged model, in `root`
    """
    for file in source.list_files(place):
        copy = root / file.relative_to(place.folder)
        written = copy.parent == merged and any(map(file.match, (*OF_WEIGHTS, "config.json")))
        if not written and file.name not in adapter_files.FILES:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
