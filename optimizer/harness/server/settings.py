"""How much a server does at once, and how long requests may wait for more to come.

Each setting is what the command line says, else what the file of --settings says, else what the
bundle's recipe says under `serve:`, else the default here. `optimize tune-serving` writes such a
file by measurement: {"serve": {"rows": 16, ...}}, which is also that section of a recipe.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import BundleError, InputError
from ..fields import SERVE
from ..schema import record
from ..trust.plain_file import read

LARGEST = 1 << 20  # bytes of a settings file
FILE = record({"serve": record({}, SERVE, closed=True)}, closed=True)


@dataclass(frozen=True)
class Settings:
    """rows: of a batch, at most. delay_ms: that the first of them waits for others. workers:
    batches that run at once, each on its share of the threads. slots: texts that are continued at
    once. context: tokens of each, prompt and answer; 0: what the model has. max_wait: seconds that
    requests may wait where more come than are answered; None: it follows from what a batch was
    measured to take."""

    rows: int = 8
    delay_ms: int = 0
    workers: int = 1
    slots: int = 8
    context: int = 0
    max_wait: float | None = None


def chosen(manifest: Mapping[str, Any], args: argparse.Namespace) -> Settings:
    """The settings with which a bundle of this manifest is served. args: the options of serve.
    Raises InputError for a file that cannot be read, or holds something else."""
    sources = [manifest["recipe"].get("serve") or {}, _read(args.settings), vars(args)]
    names = [field.name for field in fields(Settings)]
    values = {
        name: source[name] for source in sources for name in names if source.get(name) is not None
    }
    return Settings(**values)


def _read(file: Path | None) -> Mapping[str, Any]:
    if file is None:
        return {}
    data = read(file, LARGEST)
    try:
        document = json.loads(data)
        FILE(document, "")
    except (ValueError, RecursionError) as e:
        raise InputError(
            f"cannot be read ({e})", where=f"--settings {file}", accepted="a JSON file"
        ) from None
    except BundleError as e:
        raise InputError(e.problem, where=f"{file}: {e.where}", accepted=e.accepted) from None
    return dict(document["serve"])
