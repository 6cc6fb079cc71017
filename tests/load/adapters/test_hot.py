"""Adapters that stay apart are stored with peft's own values, and others than LoRA are refused."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from optimizer.foundation.errors import CheckpointError
from tests.load.adapters.saved import save_adapter
from tests.load.conftest import edit_json

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="pip install peft"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
Load = Callable[..., Path]
DECODER = "text-generation"
PATTERNS = {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"down_proj": 3}, "use_rslora": True}


def stored(model: Path, adapter: Path, load: Load) -> Path:
    return load(
        model, DECODER, adapters={"keep": "hot", "sources": {"sql": {"source": str(adapter)}}}
    )


def test_the_stored_matrices_make_the_change_that_peft_makes(
    tiny_llama: Path, tmp_path: Path, load: Load
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    wrapped = save_adapter(base, tmp_path / "sql", 1, target_modules="all-linear", **PATTERNS)
    out = stored(tiny_llama, tmp_path / "sql", load)
    matrices = load_file(out / "adapters/sql.safetensors")
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in wrapped.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert {name.rsplit(".", 1)[0] for name in matrices} == layers.keys()
    for name, module in layers.items():
        change = (matrices[f"{name}.lora_A"] @ matrices[f"{name}.lora_B"]).T
        torch.testing.assert_close(change, module.get_delta_weight("default").detach())
    weights = load_file(out / "checkpoint/model.safetensors")
    assert torch.equal(weights[f"{name}.weight"], module.base_layer.weight)  # not merged


def test_an_adapter_that_names_another_model_is_kept_with_a_note(
    tiny_llama: Path, tmp_path: Path, load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    save_adapter(base, tmp_path / "sql", 1, target_modules=["q_proj"])
    stored(tiny_llama, tmp_path / "sql", load)
    assert "as its model" not in capsys.readouterr().err
    edit_json(tmp_path / "sql/adapter_config.json", base_model_name_or_path="other/model")
    stored(tiny_llama, tmp_path / "sql", load)
    assert "it names other/model as its model" in capsys.readouterr().err


def test_an_adapter_that_was_never_trained_is_refused(
    tiny_llama: Path, tmp_path: Path, load: Load
) -> None:
    import peft

    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "sql")
    with pytest.raises(CheckpointError, match=r"changes nothing.*as before training"):
        stored(tiny_llama, tmp_path / "sql", load)
    with pytest.raises(CheckpointError, match=r"changes nothing.*as before training"):
        load(tiny_llama, DECODER, adapters=(str(tmp_path / "sql"),))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "DoRA"),
    "saved module": ({"modules_to_save": ["norm"]}, r"beside LoRA.*norm"),
    "bias": ({"lora_bias": True}, "a trained bias"),
    "changed base": ({"init_lora_weights": "olora"}, "change of the model itself.*olora"),
    "more layers": ({"layer_replication": [[0, 2], [1, 2]]}, "change of the model itself"),
    "embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, "more than LoRA"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_an_adapter_with_more_than_two_matrices_is_refused(
    case: tuple[dict[str, Any], str], tiny_llama: Path, tmp_path: Path, load: Load
) -> None:
    options, match = case
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    save_adapter(base, tmp_path / "sql", 1, **{"target_modules": ["q_proj"], **options})
    with pytest.raises(CheckpointError, match=match) as refused:
        stored(tiny_llama, tmp_path / "sql", load)
    assert "Merge it" in refused.value.fix
