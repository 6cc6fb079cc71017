"""Adapters as peft saves them, with random weights of visible size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save_adapter(model: Any, out: Path, seed: int, **options: Any) -> Any:
    """Save an adapter with random weights of a model; return peft's model."""
    import peft

    torch.manual_seed(seed)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **options)).eval()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    wrapped.save_pretrained(out)
    return wrapped
