"""List the kinds of source of a checkpoint, in order; the first that takes a source reads it."""

from __future__ import annotations

from pathlib import Path

from optimizer.load.providers.gguf import GGUF
from optimizer.load.providers.logit_score import LOGIT_SCORE
from optimizer.load.providers.pairs import PAIR
from optimizer.load.providers.provider import Loaded, Provider
from optimizer.load.providers.quantized import QUANTIZED
from optimizer.load.providers.timm import TIMM
from optimizer.load.providers.transformers import TRANSFORMERS
from optimizer.recipe.schema import Model

__all__ = ["PROVIDERS", "Loaded", "Provider", "provider"]

PROVIDERS = (GGUF, LOGIT_SCORE, QUANTIZED, TIMM, PAIR, TRANSFORMERS)


def provider(section: Model, folder: Path) -> Provider:
    """Find the provider that reads a source whose files are in `folder`."""
    return next(p for p in PROVIDERS if p.takes(section, folder))
