"""Find the folder of a transformer's config.json in that of a model."""

from __future__ import annotations

from pathlib import Path

from optimizer.foundation.errors import CheckpointError
from optimizer.load.adapters import adapter
from optimizer.load.config.modules_json import TRANSFORMERS, locate_module, read_modules


def model_folder(root: Path) -> Path:
    """The folder of the transformer's config.json: `root`, or for a sentence-transformers model the
    folder of its Transformer module in modules.json. Raises CheckpointError for modules without a
    Transformer, and for an adapter that lies there without a model."""
    if (root / "modules.json").is_file():
        modules = read_modules(root)
        kinds = [str(module.get("type", "")) for module in modules]
        if modules and not any(kind.endswith(TRANSFORMERS) for kind in kinds):
            raise CheckpointError(
                f"its modules are {', '.join(kind.rpartition('.')[2] for kind in kinds)}, and none "
                "of them is a Transformer, which reads every text",
                where=str(root / "modules.json"),
                accepted="a list that begins with Transformer",
            )
        for module, kind in zip(modules, kinds, strict=True):
            if kind.endswith(TRANSFORMERS) and module.get("path"):
                return locate_module(root, module)
    adapter.check_not_alone(root)
    return root
