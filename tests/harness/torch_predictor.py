"""The harness on a model in torch, without an exported graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from optimizer.harness import contract as contracts
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.harness.tasks.answering import Predictor
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model


def torch_predictor(loaded: Path) -> Predictor:
    """Predictor of a classifier. loaded: folder of the load stage"""
    contract = contracts.read(loaded / "contract.json")
    model = load_torch_model(open_checkpoint(loaded), contract.task)

    def infer(batch: Any) -> dict[str, Any]:
        with torch.no_grad():
            outputs = model(**{n: torch.from_numpy(a) for n, a in batch.items()})
        return {"logits": outputs.logits.numpy()}

    return Predictor(contract, load_tokenizer(loaded / "checkpoint", contract), infer)
