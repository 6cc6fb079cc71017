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

from optimizer.foundation.errors import CheckpointError
from optimizer.harness import tasks
from optimizer.load import source
from optimizer.load.weights import Stored
from optimizer.model.checkpoint.checkpoint import Entry, read_entry, read_header, read_json
from optimizer.recipe.schema import Model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
"""Beginning of every name in an adapter's file."""
FILES = (CONFIG, WEIGHTS, PICKLE)
SIDES = (".lora_A.", ".lora_B.")
"""Parts of the names of LoRA's two matrices."""
HEADS = ("classifier.weight", "score.weight", "classifier.out_proj.weight")
"""Endings of the names of a classifier's last weight, (labels, width)."""


@dataclass(frozen=True)
class Adapter:
    """One adapter.

    name: as in the recipe, or the folder of the model that it lies beside
    """

    name: str
    source: source.Source

    @property
    def folder(self) -> Path:
        return self.source.folder

    @property
    def config(self) -> Mapping[str, Any]:
        """Content of adapter_config.json."""
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
    def header(self) -> Mapping[str, Entry]:
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
    def replaced(self) -> Mapping[str, Entry]:
        """{parameter: tensor} of what it replaces whole, such as a classifier."""
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


def check_trained(one: Adapter, where: str) -> None:
    """Raise CheckpointError for LoRA matrices that change nothing, because one of each two is zero,
    as peft initializes them. Reads the matrices."""
    header = one.header
    pairs = {name: name.replace(*SIDES) for name in header if SIDES[0] in name}
    if not pairs or len(header) > 2 * len(pairs):  # it has more than matrices
        return
    for first, second in pairs.items():
        sides = [header[name] for name in (second, first) if name in header]
        if len(sides) < 2 or all(read_entry(side).any() for side in sides):
            return
    raise CheckpointError(
        f"it changes nothing: a matrix of each of its {len(pairs)} products is all zero, as before "
        "training",
        where=where,
        accepted="an adapter that was trained",
        fix="Give the folder that was saved after training.",
    )


def _section(section: Model, name: str) -> Model:
    return Model(source=name, task=section.task, base=section.base)


def replace_tensors(stored: Mapping[str, Stored], adapters: Sequence[Adapter]) -> dict[str, Stored]:
    """The tensors of a model's files with those that its adapters replace whole."""
    replaced = dict(stored)
    for one in adapters:
        replaced |= one.replaced
    return replaced


def digests(section: Model) -> dict[str, str]:
    """{adapter: its files' digests}, the part of the load stage's key; {} without model.adapters.
    An adapter beside the weights is among the source's files."""
    taken: dict[str, str] = {}
    for number, name in enumerate(section.adapter_sources):
        open_named(section, name)  # its messages name the key
        own = source.digests(_section(section, name))
        taken |= {f"adapter {number}: {f}": d for f, d in own.items()}
    return taken


def describe_files(section: Model, resolved: source.Source) -> dict[str, dict[str, Any]]:
    """{file: {"sha256", "size"}} of a source, and of its adapters as "<name>: <file>"."""
    places = [("", resolved)]
    places += [(f"{name}: ", open_named(section, name).source) for name in section.adapter_sources]
    return {
        f"{prefix}{file.relative_to(place.folder)}": {
            "sha256": source.digest(file),
            "size": file.stat().st_size,
        }
        for prefix, place in places
        for file in source.files(place)
    }


def is_alone(folder: Path) -> bool:
    """Return True for a folder of an adapter without the model that it was trained on."""
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
    if not tasks.task(section.task).classifies:
        return
    for adapter in find(section, folder):
        rows = [e.shape[0] for n, e in adapter.header.items() if n.endswith(HEADS)]
        if rows and rows[-1] != config.num_labels:
            config.num_labels = int(rows[-1])
