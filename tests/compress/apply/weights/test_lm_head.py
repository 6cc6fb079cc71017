"""A decoder's head and embedding, outside the blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from optimizer.compress.apply.weights import lm_head as outside
from optimizer.compress.selection import select
from optimizer.compress.walk.model_source import ModelSource
from optimizer.foundation import state as states
from optimizer.foundation.errors import CheckpointError, RecipeError
from optimizer.model.architectures.architecture import find_family
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import build_skeleton
from tests.compress.decoders import GROUPS, TASK, compress, error, loaded, section
from tests.decoders import write_tiny_decoder


def test_a_tied_head_gets_codes_of_its_own(llama: Path, tmp_path: Path) -> None:
    head = {"bits": 8, "granularity": "channel"}
    state = compress(llama, tmp_path / "out", methods=["rtn"], head=head)
    embedding = open_checkpoint(llama).tensors["model.embed_tokens.weight"]
    coded = state.weights["lm_head.weight"].dequantize()
    assert float((coded - embedding).norm() / embedding.norm()) < 0.02
    assert "model.embed_tokens.weight" not in state.weights


def test_an_embedding_beside_a_tied_float_head_is_refused(llama: Path, tmp_path: Path) -> None:
    table = {"bits": 8, "granularity": "channel"}
    with pytest.raises(RecipeError, match=r"quantize\.embedding: lm_head is tied to model\.embed"):
        compress(llama, tmp_path / "tied", methods=["rtn"], embedding=table)
    untied = compress(llama, tmp_path / "untied", methods=["rotation"], embedding=table)
    assert "model.embed_tokens.weight" in untied.weights


def test_a_head_in_four_bits_is_rounded_by_what_reaches_it(llama: Path, tmp_path: Path) -> None:
    made = {}
    for method in ("rtn", "gptq"):
        state = compress(llama, tmp_path / method, methods=[method], head=GROUPS)
        alone = {"lm_head.weight": state.weights["lm_head.weight"]}
        made[method] = error(llama, states.CompressedState(alone))
    assert made["gptq"] < 0.9 * made["rtn"]


def test_a_head_whose_inputs_are_not_the_last_block_s_is_refused(tmp_path: Path) -> None:
    """OPT-350m projects between the two."""
    folder = write_tiny_decoder(tmp_path / "opt", "opt", embedded=32)
    source = loaded(folder, tmp_path / "load")
    with pytest.raises(CheckpointError, match="reads 32 features and the last block outputs 64"):
        compress(source, tmp_path / "out", methods=["gptq"], head={**GROUPS, "group_size": 32})


def test_a_head_rounded_some_rows_at_a_time_is_the_same(llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(llama)
    facts = find_family(checkpoint.config, TASK)
    quantize = section(llama, methods=["gptq"], head=GROUPS).quantize
    model = build_skeleton(checkpoint, TASK)
    source = ModelSource(model, checkpoint.tensors, facts, facts.prefix(TASK))
    chosen = select(source, quantize)
    features = checkpoint.tensors["model.embed_tokens.weight"].shape[1]
    x = torch.randn(200, features, generator=torch.Generator().manual_seed(0))
    save_file({"moments": x.T @ x}, tmp_path / "m.safetensors")
    one, two = (
        outside.compress(source, quantize, chosen, tmp_path / "m.safetensors", at_once=rows)[
            0
        ].weights["lm_head.weight"]
        for rows in (7, 10**6)
    )
    assert one.integers.shape == two.integers.shape
    assert torch.allclose(one.dequantize(), two.dequantize(), atol=float(two.scale.max()))
    assert float((one.integers == two.integers).float().mean()) > 0.99


def test_a_head_is_weight_only_beside_coded_activations(llama: Path, tmp_path: Path) -> None:
    channel = {"bits": 8, "granularity": "channel"}
    state = compress(
        llama,
        tmp_path / "out",
        weights=channel,
        head=channel,
        activations={"granularity": "token"},
    )
    assert state.activations_of("lm_head") is None
    assert state.activations_of("model.layers.0.mlp.down_proj") == "token"
