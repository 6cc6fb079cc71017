"""Large layers and little memory give the same integers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optimizer.compress import simulate, stage
from optimizer.compress.apply.weights import rounding as rounding_module
from optimizer.compress.simulate import QuantLinear
from optimizer.foundation import state as states
from tests.compress.checkpoints import contents
from tests.compress.decoders import compress, error, loaded, section
from tests.decoders import write_tiny_decoder


def test_spilling_activations_changes_no_byte(llama: Path, tmp_path: Path) -> None:
    compress(llama, tmp_path / "a", methods=["gptq"])
    (tmp_path / "b").mkdir()
    stage.run(section(llama, memory_gb=1e-9, methods=["gptq"]), llama, out=tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("methods", [["gptq"], ["awq", "gptq"]])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_wide_layer_is_rounded_alone_and_used_as_codes_and_gets_the_same(
    tmp_path: Path, methods: list[str], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = loaded(write_tiny_decoder(tmp_path / "qwen2", "qwen2"), tmp_path / "load")
    plain = section(source, methods=methods)
    asked = plain.model_copy(
        update={"compress": plain.compress.model_copy(update={"precision": precision})}
    )
    made, used = [], []
    forward = QuantLinear.forward

    def listening(self: QuantLinear, x: torch.Tensor) -> torch.Tensor:
        used.append(self.integers is not None)
        return forward(self, x)

    monkeypatch.setattr(QuantLinear, "forward", listening)
    for name in ("narrow", "wide"):
        (tmp_path / name).mkdir()
        used.clear()
        stage.run(asked, source, tmp_path / name)
        made.append(states.read(tmp_path / name))
        assert set(used) == {name == "wide"}
        monkeypatch.setattr(rounding_module, "HELD", 0)
        monkeypatch.setattr(rounding_module, "ALONE", 0)
        monkeypatch.setattr(simulate, "AT_ONCE", 7 * 64)
    narrow, wide = made
    for name, q in narrow.weights.items():
        if ".0." in name:  # sums in another order add up block after block
            same = (q.integers == wide.weights[name].integers).float().mean()
            assert float(same) > 0.95, name
    assert error(source, wide) == pytest.approx(error(source, narrow), rel=0.1)
