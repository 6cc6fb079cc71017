"""Each adapter that stays apart is proven against peft, and a planted fault is caught."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from optimizer.data.datasets import Sample, cut_windows
from optimizer.foundation.errors import DataError
from optimizer.harness.contract import adapter_file
from optimizer.harness.runtimes.ort.adapters import read
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.harness.tasks.text_generation import build_step_arrays
from optimizer.lower.stage import STAGE as LOWER
from optimizer.recipe.schema import DataSpec, Model
from optimizer.validate import adapters
from optimizer.validate.adapted import AdaptedMaterials
from optimizer.validate.data import check_windows, read_data
from optimizer.validate.ledger.entry import LedgerEntry
from optimizer.validate.materials import Materials
from tests.conftest import write_rows
from tests.decoders import write_tiny_decoder
from tests.load.adapters.saved import save_adapter
from tests.validate.decoder_runs import INT4, INT8, DecoderRun, decoder_recipe, make_decoder

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
FIRST, SECOND = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"
IDS = np.array([[5, 6, 7, 8, 9], [9, 8, 70, 6, 50]])
MASK = np.ones_like(IDS)
Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> DecoderRun:
    """A tiny llama in INT4 with two adapters; the second changes two kinds of modules."""
    root = tmp_path_factory.mktemp("hot")
    model = write_tiny_decoder(root / "model")
    modules = {"sql": "all-linear", "law": ["q_proj", "v_proj"]}
    for seed, (name, own) in enumerate(modules.items()):
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        save_adapter(base, root / name, seed, target_modules=own)
    sources = {name: {"source": str(root / name)} for name in modules}
    quantize = {"weights": INT4, "head": INT8, "embedding": INT8}
    recipe = decoder_recipe(str(model), root, quantize, fused=True)
    section = {"source": str(model), "task": "text-generation"}
    hot = Model.model_validate({**section, "adapters": {"keep": "hot", "sources": sources}})
    return make_decoder(root / "run", recipe.model_copy(update={"model": hot}))


def materials(run: DecoderRun, name: str = "sql") -> AdaptedMaterials:
    return adapters.make_materials(run.materials(), name)


@pytest.mark.parametrize("name", ["sql", "law"])
def test_every_hop_holds_for_each_adapter(name: str, run: DecoderRun) -> None:
    entries = list(adapters._entries(materials(run, name)))
    assert [e.hop for e in entries] == ["adapter", "compress", "lower", "engine", "harness"]
    assert {e.hop: e.problems for e in entries if not e.ok} == {}


def test_the_graph_with_an_adapter_gives_the_logits_of_peft_on_the_rounded_weights(
    run: DecoderRun,
) -> None:
    m = run.materials()
    model = AutoModelForCausalLM.from_pretrained(m.source / "checkpoint", dtype=torch.float32)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    for name, weight in m.state.weights.items():
        model.get_parameter(name).data = weight.dequantize()
    folder, ids = (m.source / adapter_file("sql")).with_suffix(""), torch.from_numpy(IDS)
    with torch.no_grad():
        plain = model(ids).logits.numpy()
        expected = peft.PeftModel.from_pretrained(model, folder)(ids).logits.numpy()
    with OrtRunner(m.model / "model.onnx", threads=1, fuse=False) as runner:
        adapted = runner.adapted(read(m.source / adapter_file("sql")))
        logits = adapted.decoder(m.contract, 8).step(build_step_arrays(m.contract, IDS, MASK))
    assert np.abs(expected - plain).max() > 1e4 * np.abs(logits - expected).max()


def test_without_an_adapter_the_bits_are_those_of_a_model_without_adapters(
    run: DecoderRun, tmp_path: Path
) -> None:
    own = run.copy(tmp_path / "plain")
    for file in own.folder("source").glob(adapter_file("*")):
        file.unlink()
    (tmp_path / "lower").mkdir()
    folders = [own.folder(name) for name in ("source", "state", "graph")]
    LOWER.run(run.section.target, *folders, out=tmp_path / "lower")
    m = run.materials()
    logits = []
    for folder in (m.model, tmp_path / "lower"):
        with OrtRunner(folder / "model.onnx", threads=1) as runner:
            logits.append(
                runner.decoder(m.contract, 8).step(build_step_arrays(m.contract, IDS, MASK))
            )
    assert logits[0].tobytes() == logits[1].tobytes()


def losses_of_peft(m: Materials, name: str, texts: Sequence[Any]) -> tuple[float, float]:
    """Mean nats per token with the adapter, and without it."""
    base = AutoModelForCausalLM.from_pretrained(m.source / "checkpoint", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, (m.source / adapter_file(name)).with_suffix(""))
    rows = [torch.from_numpy(t)[None] for t in texts]

    def loss() -> float:
        return float(np.mean([model(ids, labels=ids).loss.item() for ids in rows]))

    with torch.no_grad(), model.disable_adapter():
        without = loss()
    with torch.no_grad():
        return loss(), without


def test_an_adapter_is_judged_on_its_own_texts_of_which_another_may_share_some(
    run: DecoderRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "_entries", lambda _: ())  # hops: the tests above
    own = {}
    for name, count in {"sql": 30, "law": 20}.items():
        files = (str(write_rows(tmp_path / f"{name}.jsonl", count, 11)),)
        own[name] = DataSpec(source="json", files=files, columns={"text": "text"})
    section = run.section.model_copy(update={"adapters": own})
    m = replace(run, section=section).materials()
    rows = read_data(section, m.source, m.contract)
    entries, report = list[LedgerEntry](), dict[str, Any]()
    gates = adapters.judge(m, rows, "cpu", entries, report)
    assert {g.name for g in gates} == {f"adapter.{n}.quality.perplexity" for n in own}
    assert [(e.hop, e.ok) for e in entries] == [("rows sql", True), ("rows law", True)]
    for name in own:
        place, judged = f"model.adapters.sources.{name}.data", report["adapters"][name]
        texts = cut_windows(rows[place], m.encoder, m.contract, 48)
        assert (judged["data"], judged["examples"]) == (place, len(texts))
        loss, without = losses_of_peft(m, name, texts)
        assert abs(loss - without) > 1e3 * abs(math.log(judged["baseline"]["value"]) - loss)
    assert report["adapters"]["sql"]["examples"] != report["adapters"]["law"]["examples"]


def test_no_text_that_judges_an_adapter_calibrates(run: DecoderRun) -> None:
    section = run.section
    assert section.calibrate is not None
    section = section.model_copy(update={"adapters": {"sql": section.calibrate.data}})
    m = run.materials()
    with pytest.raises(DataError, match="also in the calibrate data"):
        read_data(section, m.source, m.contract)


def test_texts_that_fill_no_window_are_refused_by_the_name_of_their_adapter(
    run: DecoderRun,
) -> None:
    m = run.materials()
    data = {"validate.data": [Sample("good " * 60)], "model.adapters.sources.sql.data": []}
    with pytest.raises(DataError, match="one window needs 48") as refused:
        check_windows(run.section, data, m.contract, m.encoder)
    assert refused.value.where == "model.adapters.sources.sql.data"


def change(edit: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    """Edit of the matrices that the graph is given."""

    def changed(root: Path) -> None:
        file = root / "source" / adapter_file("sql")
        matrices = load_file(file)
        edit(matrices)
        save_file(matrices, file)

    return changed


def scaled(matrices: dict[str, torch.Tensor]) -> None:
    for name in [n for n in matrices if n.endswith("lora_B")]:
        matrices[name] = matrices[name] * 1.01


def swapped(matrices: dict[str, torch.Tensor]) -> None:
    for side in ("lora_A", "lora_B"):
        a, b = f"{FIRST}.{side}", f"{SECOND}.{side}"
        matrices[a], matrices[b] = matrices[b], matrices[a]


def rewired(root: Path) -> None:
    """Let the graph read the matrices of the other layer."""
    model = onnx.load(root / "model/model.onnx")
    other = {f"{FIRST}.{s}": f"{SECOND}.{s}" for s in ("lora_A", "lora_B")}
    other |= {second: first for first, second in other.items()}
    for node in model.graph.node:
        node.input[:] = [other.get(name, name) for name in node.input]
    onnx.save(model, root / "model/model.onnx")


def untrained(root: Path) -> None:
    folder = root / "source/adapters/sql"
    weights = load_file(folder / "adapter_model.safetensors")
    zeros = {n: v * 0 if "lora_B" in n else v for n, v in weights.items()}
    save_file(zeros, folder / "adapter_model.safetensors", {"format": "pt"})
    change(lambda m: m.update({n: v * 0 for n, v in m.items() if n.endswith("lora_B")}))(root)


FAULTS: dict[str, tuple[Edit, Callable[..., object], str]] = {
    "scaling": (change(scaled), adapters.adapter, "is .* from peft"),
    "other module": (change(swapped), adapters.adapter, "is .* from peft"),
    "graph": (rewired, adapters.lower, "from state in torch"),
    "untrained": (untrained, adapters.adapter, "not trained, or not applied"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_a_fault_is_caught_at_its_hop(
    fault: tuple[Edit, Callable[..., object], str], run: DecoderRun, tmp_path: Path
) -> None:
    edit, hop, match = fault
    own = run.copy(tmp_path / "run")
    edit(own.root)
    entry = hop(materials(replace(own, section=run.section)))
    assert entry.ok is False
    assert re.search(match, " ".join(entry.problems))
