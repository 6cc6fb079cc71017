"""Pairs without a weight to fold into."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.compress.decoders import compress, loaded
from tests.decoders import write_tiny_decoder

QUERY = "model.decoder.layers.0.self_attn.q_proj"
SMOOTH = {
    "weights": {"bits": 8},
    "activations": {"granularity": "token"},
    "strength": 0.5,
    "fold_only": False,
}


@pytest.fixture(scope="module")
def norms_without_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An OPT whose norms have no parameters."""
    root = tmp_path_factory.mktemp("norms_without_weights")
    model = write_tiny_decoder(root / "opt", "opt")
    config = json.loads((model / "config.json").read_text())
    changed = {**config, "layer_norm_elementwise_affine": False}
    (model / "config.json").write_text(json.dumps(changed))
    tensors = load_file(model / "model.safetensors")
    others = {name: t for name, t in tensors.items() if "layer_norm" not in name}
    save_file(others, model / "model.safetensors", {"format": "pt"})
    return loaded(model, root / "load")


def test_smoothquant_multiplies_what_a_norm_without_weights_gives(
    norms_without_weights: Path, tmp_path: Path
) -> None:
    state = compress(norms_without_weights, tmp_path / "out", methods=["smoothquant"], **SMOOTH)
    assert f"{QUERY}:input" in set(state.factors)


def test_awq_notes_what_a_norm_without_weights_cannot_take(
    norms_without_weights: Path, tmp_path: Path
) -> None:
    state = compress(norms_without_weights, tmp_path / "out", methods=["awq"])
    (why,) = [note.why for note in state.notes if note.module == QUERY]
    assert why.endswith("self_attn_layer_norm has no weight to fold into")
