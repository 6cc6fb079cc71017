"""The proof of a decoder is the same where its weights lie in half precision."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from optimizer.model.checkpoint.mapped import SMALLEST, WidenedTensor
from optimizer.validate.ledger import ledger
from optimizer.validate.materials import Materials
from tests.decoders import write_tiny_decoder
from tests.validate.decoder_runs import SCHEMES, decoder_recipe, make_decoder
from tests.validate.runs import hops_from


def prove(materials: Materials) -> list[ledger.LedgerEntry]:
    return [ledger.run_hop(hop, materials) for hop in hops_from(materials, "load")]


def test_the_ledger_of_halved_weights_has_every_number_of_that_in_float32(tmp_path: Path) -> None:
    model = write_tiny_decoder(
        tmp_path / "model", "qwen3", layers=1, intermediate_size=SMALLEST // 256
    )
    file = model / "model.safetensors"
    halves = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(halves, file, {"format": "pt"})
    recipe = decoder_recipe(str(model), tmp_path, SCHEMES["gptq"])
    run = make_decoder(tmp_path / "run", recipe)
    plain, halved = run.materials(), run.materials()
    halved.__dict__["halves_weights"] = True
    assert prove(halved) == prove(plain)
    assert sum(isinstance(p, WidenedTensor) for p in halved.float_model.parameters()) == 3
    assert not any(isinstance(p, WidenedTensor) for p in plain.float_model.parameters())
