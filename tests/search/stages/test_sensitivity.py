"""Sensitivities of a decoder's modules, from which a search chooses those in a finer format."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from optimizer.compress.methods.weights.rtn import rtn
from optimizer.foundation.qtensor import Scheme
from optimizer.search.stages import sensitivity
from tests.compress.decoders import GROUPS, loaded, section
from tests.decoders import write_tiny_decoder

ON_GRID = "model.layers.1.mlp.up_proj"


def test_a_module_whose_weights_its_format_holds_exactly_gains_nothing(tmp_path: Path) -> None:
    model = write_tiny_decoder(tmp_path / "model", "llama")
    file = model / "model.safetensors"
    tensors, name = load_file(file), f"{ON_GRID}.weight"
    for _ in range(2):  # the scale of rounded values may differ from that of the values
        tensors[name] = rtn(tensors[name].float(), Scheme(**GROUPS)).dequantize()  # type: ignore[arg-type]
    save_file(tensors, file, {"format": "pt"})
    source = loaded(model, tmp_path / "load")
    (tmp_path / "out").mkdir()
    sensitivity.run(sensitivity.make_section(section(source)), source, tmp_path / "out")
    document = json.loads((tmp_path / "out" / sensitivity.FILE).read_text())
    errors = {module: entry["error"] for module, entry in document.items()}
    assert len(errors) == 14
    assert errors.pop(ON_GRID) < 1e-3 * min(errors.values())
