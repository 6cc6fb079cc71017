"""What a platform's files are for a reader: how they are started, and what they follow from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Written:
    """start: commands, in which OUT is the folder. server: see Server.document; None where the
    platform has its own."""

    start: Sequence[str]
    server: Mapping[str, Any] | None = None
