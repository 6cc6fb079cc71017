"""Find the adapters of a model: folders that peft's save_pretrained wrote.

An adapter is a change of another model's weights, so a folder of it alone is not a model: the
recipe names the model in model.source and the adapter in model.adapters. A folder with weights and
an adapter beside them is one to transformers, which applies the adapter while loading; so it is
merged here unless model.adapters says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from optimizer.foundation.errors import CheckpointError
from optimizer.harness import tasks
from optimizer.load import source
from optimizer.load.weights import Stored, read_values
from optimizer.model.checkpoint.checkpoint import TensorPlace, read_entry, read_header, read_json
from optimizer.recipe.schema import Model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
"""Beginning of every name in an adapter's file."""
FILES = (CONFIG, WEIGHTS, PICKLE)
SIDES = (".lora_A.", ".lora_B.")
"""Parts of the names of LoRA's two matrices."""
MAGNITUDE = ".lora_magnitude_vector"
"""Ending of the name of DoRA's norms of a weight's rows."""
HEADS = ("classifier.weight", "score.weight", "classifier.out_proj.weight")
"""Endings of the names of a classifier's last weight, (labels, width)."""


@dataclass(frozen=True)
class Adapter:
    """One LoRA adapter in files.

    name: as in the recipe, or the folder of the model that it lies beside
    """

    name: str
    source: source.Source

    @property
    def folder(self) -> Path:
        return self.source.folder

    @property
    def config(self) -> Mapping[str, Any]:
        """Content of the adapter's adapter_config.json."""
        return read_json(self.folder / CONFIG)

    @property
    def base(self) -> str:
        """Name of the model that it was trained on; "" where its config has none."""
        return str(self.config.get("base_model_name_or_path") or "")

    def other_base(self, section: Model) -> str:
        """Note that it was trained on another model than `section`; "" where both have one name, or
        are one folder."""
        own = Path(section.base, section.source).resolve()
        same = self.base in ("", section.source) or Path(self.base).resolve() == own
        return "" if same else f"; it names {self.base} as its model"

    @property
    def header(self) -> Mapping[str, TensorPlace]:
        """{name: tensor} of its weights. Raises CheckpointError for weights that are missing, or
        only a pickle."""
        file = self.folder / WEIGHTS
        if not file.is_file() and (self.folder / PICKLE).is_file():
            raise CheckpointError(
                f"the adapter is a pickle ({PICKLE}), which can run code when it is read",
                where=str(self.folder),
                accepted=WEIGHTS,
                fix="Load it with peft where you trust it, and save it again with save_pretrained.",
            )
        return read_header(file)

    @property
    def replaced(self) -> Mapping[str, TensorPlace]:
        """Tensors that replace the model's whole parameters, such as a classifier, {parameter:
        tensor}."""
        ends = (".weight", ".bias")
        return {
            name.removeprefix(PREFIX).replace(".base_layer", ""): entry
            for name, entry in self.header.items()
            if name.endswith(ends) and ".lora_" not in name
        }


def find(section: Model, folder: Path) -> tuple[Adapter, ...]:
    """Return the adapters of a model, in the order in which they are merged.

    folder: folder of the model's config.json
    Raises CheckpointError for a folder of model.adapters that is not an adapter, and for adapters
    of a GGUF file; MachineError where a hub cannot be reached.
    """
    if section.merged is None:
        if not (folder / CONFIG).is_file():
            return ()
        return (Adapter(section.source, source.Source(folder, folder, None)),)
    if section.merged and section.gguf_file is not None:
        raise CheckpointError(
            "adapters cannot be merged into a GGUF file",
            where="model.adapters",
            accepted="a folder of float weights in model.source",
            fix="Set model.source to the float checkpoint that the file was made from.",
        )
    return tuple(open_named(section, name) for name in section.merged)


def open_named(section: Model, name: str) -> Adapter:
    """Open an adapter by its folder or hub id. Raises as `find`."""
    own = _section(section, name)
    try:
        resolved = source.resolve(own)
    except CheckpointError as e:
        raise CheckpointError(
            e.problem,
            where="model.adapters",
            accepted="a hub id (owner/name), or a folder",
            fix=e.fix,
        ) from e
    if not (resolved.folder / CONFIG).is_file():
        raise CheckpointError(
            f"{name} has no {CONFIG}",
            where="model.adapters",
            accepted=f"a folder, or a hub's model, with {CONFIG} and {WEIGHTS}",
            fix="Give the folder that peft's save_pretrained wrote.",
        )
    return Adapter(name, resolved)


def check_trained(one: Adapter, where: str, base: Mapping[str, Stored]) -> None:
    """Raise CheckpointError for an adapter that changes nothing: one of the two matrices of each
    product is zero, as peft initializes them, or lora_alpha is; DoRA's magnitudes are the norms of
    the model's rows; and tensors saved whole are the model's. Reads the tensors that decide.

    base: {parameter: tensor} of the model; an adapter's tensor without one changes it
    """
    header, config, saved = one.header, one.config, one.replaced
    pairs = {name: name.replace(*SIDES) for name in header if SIDES[0] in name}
    others = header.keys() - pairs.keys() - set(pairs.values())
    magnitudes = [name for name in others if MAGNITUDE in name]
    if not pairs or len(others) > len(magnitudes) + len(saved):  # another kind of adapter
        return
    alphas = (config.get("lora_alpha"), *(config.get("alpha_pattern") or {}).values())
    for first, second in pairs.items() if any(alphas) else ():
        sides = [header[name] for name in (second, first) if name in header]
        if len(sides) < 2 or all(read_entry(side).any() for side in sides):
            return
    rows = {n: base.get(n.removeprefix(PREFIX).split(MAGNITUDE)[0] + ".weight") for n in magnitudes}
    same = all(_are_norms(header[name], weight) for name, weight in rows.items())
    if not same or not all(_is_equal(entry, base.get(name)) for name, entry in saved.items()):
        return
    zero = "a matrix of each is all zero, as before training" if any(alphas) else "lora_alpha is 0"
    also = f", and its other {len(others)} tensors are the model's own" if others else ""
    raise CheckpointError(
        f"it changes nothing: of its {len(pairs)} products {zero}{also}",
        where=where,
        accepted="an adapter that was trained",
        fix="Give the folder that was saved after training.",
    )


def _is_equal(entry: TensorPlace, own: Stored | None) -> bool:
    """Test that a tensor that a LoRA adapter replaces whole has the loaded model's values."""
    if own is None or tuple(own.shape) != entry.shape:
        return False
    return torch.equal(read_entry(entry).float(), read_values(own).float())


def _are_norms(entry: TensorPlace, weight: Stored | None) -> bool:
    """Test that an adapter's DoRA magnitudes are the norms of a weight's rows, within the rounding
    of a sum of n squares, at most n / 2 + 2 units (Higham, Accuracy and Stability of Numerical
    Algorithms, 2002, section 3.1), and of the coarser of both types."""
    if weight is None or len(weight.shape) != 2 or entry.shape != tuple(weight.shape)[:1]:
        return False
    values = read_values(weight)
    magnitudes, coarser = read_entry(entry), torch.finfo(values.dtype).eps
    coarser = max(coarser, torch.finfo(magnitudes.dtype).eps)
    limit = coarser + (values.shape[1] / 2 + 2) * torch.finfo(torch.float32).eps / 2
    norms = values.double().norm(dim=1)
    return bool(((magnitudes.double() - norms).abs() <= limit * norms).all())


def _section(section: Model, name: str) -> Model:
    return Model(source=name, task=section.task, base=section.base)


def replace_tensors(stored: Mapping[str, Stored], adapters: Sequence[Adapter]) -> dict[str, Stored]:
    """Return the tensors of a loaded model's files, with those that its LoRA adapters replace
    whole."""
    replaced = dict(stored)
    for one in adapters:
        replaced |= one.replaced
    return replaced


def digest_files(section: Model) -> dict[str, str]:
    """Return {adapter: its files' digests}, the part of the load stage's key; {} without
    model.adapters. An adapter beside the weights is among the source's files."""
    taken: dict[str, str] = {}
    for number, name in enumerate(section.adapter_sources):
        open_named(section, name)  # its messages name the key
        own = source.digest_source(_section(section, name))
        taken |= {f"adapter {number}: {f}": d for f, d in own.items()}
    return taken


def describe_files(section: Model, resolved: source.Source) -> dict[str, dict[str, Any]]:
    """Return {file: {"sha256", "size"}} of a source that is loaded, and of its adapters as "<name>:
    <file>"."""
    places = [("", resolved)]
    places += [(f"{name}: ", open_named(section, name).source) for name in section.adapter_sources]
    return {
        f"{prefix}{file.relative_to(place.folder)}": {
            "sha256": source.digest(file),
            "size": file.stat().st_size,
        }
        for prefix, place in places
        for file in source.list_files(place)
    }


def is_alone(folder: Path) -> bool:
    """Return True for a source folder of an adapter without the model that it was trained on."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def check_not_alone(folder: Path) -> None:
    """Raise CheckpointError for a folder that `is_alone`."""
    if not is_alone(folder):
        return
    base = Adapter("", source.Source(folder, folder, None)).base or "the model it was trained on"
    raise CheckpointError(
        f"it has an adapter ({CONFIG}), which changes another model's weights, and no model",
        where=str(folder),
        accepted="a folder with config.json and weights as model.source",
        fix=f"Set model.source: {base} and model.adapters: [{folder}].",
    )


def set_labels(config: Any, section: Model, folder: Path) -> None:
    """Give a transformers config the number of labels of the head that an adapter brings, which
    adapter_config.json does not name."""
    if not tasks.find_task(section.task).classifies:
        return
    for adapter in find(section, folder):
        rows = [e.shape[0] for n, e in adapter.header.items() if n.endswith(HEADS)]
        if rows and rows[-1] != config.num_labels:
            config.num_labels = int(rows[-1])
