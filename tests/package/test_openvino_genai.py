"""The folder of OpenVINO GenAI: its own pipelines write what our loop writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optimizer.foundation.errors import LedgerError, MachineError
from optimizer.harness import contract as contracts
from optimizer.harness.generate import Options, generate
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.harness.runtimes.openvino.run import OpenVinoRunner
from optimizer.package import openvino_genai
from optimizer.recipe.schema import OpenVinoTarget
from optimizer.targets import missing_packages
from optimizer.targets.record import Packed
from tests.validate import decoder_runs
from tests.validate.ledger.faults import mutations as m
from tests.validate.ledger.faults.decoder_mutations import DOWN
from tests.validate.runs import Run, for_openvino

PROMPTS = ["the film was", "a very good place in the night with the staff of", "one"]
NEW = 24


def test_without_its_package_a_recipe_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(missing_packages, "package_version", lambda _: None)
    with pytest.raises(MachineError, match="pip install openvino-tokenizers"):
        missing_packages.check_target(OpenVinoTarget(runtime="openvino", genai=True), "targets.0")


@pytest.fixture(scope="module")
def run(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    pytest.importorskip("openvino_genai", reason="pip install openvino-genai")
    root = tmp_path_factory.mktemp("genai")
    (root / "data").mkdir()
    quantize = decoder_runs.SCHEMES["fused"]
    recipe = decoder_runs.decoder_recipe(str(tiny_llama), root / "data", quantize)
    return for_openvino(decoder_runs.make_decoder(root / "run", recipe), root / "ov", genai=True)


@pytest.fixture(scope="module")
def packed(run: Run) -> Callable[[Path], Packed]:
    """Return a function: folder -> bundle in it with only the model."""

    def pack(bundle: Path) -> Packed:
        document = json.loads((run.folder("engine") / "engine.json").read_text())
        entry = {"model": "model/openvino-cpu/model.onnx", "fit": document["fit"]}
        (bundle / entry["model"]).parent.mkdir(parents=True)
        shutil.copyfile(run.folder("model") / "model.onnx", bundle / entry["model"])
        folders = (run.folder(name) for name in ("source", "model", "engine"))
        return Packed("tiny", bundle, entry, *folders, {})

    return pack


@pytest.fixture(scope="module")
def folder(packed: Callable[[Path], Packed], tmp_path_factory: pytest.TempPathFactory) -> Path:
    part = packed(tmp_path_factory.mktemp("bundle"))
    openvino_genai.add(part)
    return (part.bundle / part.entry["model"]).parent


@pytest.fixture(scope="module")
def reference(run: Run, folder: Path) -> list[str]:
    """Text that our loop generates, one prompt at a time."""
    source = run.folder("source")
    contract = contracts.read(source / "contract.json")
    tokenizer = load_tokenizer(source / "checkpoint", contract)
    options = Options(NEW, do_sample=False)
    with OpenVinoRunner(folder / "model.onnx", threads=1) as runner:
        prompts = [tokenizer.encode(text).ids for text in PROMPTS]
        answers = [generate(contract, runner, tokenizer, [ids], options)[0] for ids in prompts]
        return [answer.text for answer in answers]


def config(genai: Any) -> Any:
    settings = genai.GenerationConfig()
    settings.max_new_tokens, settings.do_sample = NEW, False
    settings.apply_chat_template = False
    return settings


def properties(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "openvino_properties.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["SDPA", "PA"])
def test_its_pipeline_writes_what_our_loop_writes(
    attention: str, folder: Path, reference: list[str]
) -> None:
    import openvino_genai as genai

    pipeline = genai.LLMPipeline(
        str(folder), "CPU", ATTENTION_BACKEND=attention, **properties(folder)
    )
    assert [str(pipeline.generate(p, config(genai))) for p in PROMPTS] == reference


@pytest.mark.slow
def test_continuous_batching_writes_what_our_loop_writes(
    folder: Path, reference: list[str]
) -> None:
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties(folder))
    results = pipeline.generate(PROMPTS, [config(genai)] * len(PROMPTS))
    assert [r.m_generation_ids[0] for r in results] == reference


@pytest.mark.slow
def test_opened_without_properties_it_rounds_no_cache(folder: Path) -> None:
    import openvino as ov

    compiled = ov.Core().compile_model(str(folder / "openvino_model.xml"), "CPU")
    assert compiled.get_property("KV_CACHE_PRECISION") == ov.Type.f32
    assert compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE") == 0


@pytest.mark.slow
def test_a_model_that_answers_otherwise_is_refused(
    run: Run, packed: Callable[[Path], Packed], tmp_path: Path
) -> None:
    part, other = packed(tmp_path / "bundle"), run.copy(tmp_path / "run")
    m.values("model", f"{DOWN}.weight_codes", m.first_integer_moved)(other)
    shutil.copyfile(other.folder("model") / "model.onnx", part.bundle / part.entry["model"])
    with pytest.raises(LedgerError, match=r"other logits than model\.onnx"):
        openvino_genai.add(part)
