"""Tests that need a GPU. `make test-gpu` runs these, and then benchmarks/gpu/suite.py."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu import check, models, parts
from benchmarks.gpu.plan import unfit
from benchmarks.gpu.systems import SYSTEMS
from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.bundle.engines import spans
from optimizer.harness.bundle.fit import judge_engines
from optimizer.harness.bundle.fit_columns import REQUIRED
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.harness.runtimes.trt.build import builder
from optimizer.validate.ledger.distance import measure_distance
from optimizer.validate.ledger.pieces.roundoff import UNIT
from tests.harness import small_model
from tests.harness.runtimes.ort.test_run import arrays
from tests.package.bundles import small_bundle

pytestmark = pytest.mark.gpu
HERE = describe_machine()
MANY = 256  # roundoffs: more than the small model has operators and terms in a sum


def need(runtime: str, provider: str = "cuda") -> None:
    """Skip, with the reason, where this machine cannot run a runtime."""
    if HERE.gpu is None:
        pytest.skip("no GPU was found")
    missing = [g[0] for g in REQUIRED[runtime, provider] if HERE.version(g) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    if runtime in builder.PRODUCTS and (why := unfit(runtime, HERE)):
        pytest.skip(why)


@pytest.mark.parametrize("provider", ["cuda", "tensorrt", "tensorrt-rtx"])
@pytest.mark.parametrize("graphs", [False, True])
def test_onnx_runtime_computes_on_the_gpu_what_it_computes_on_the_cpu(
    provider: str, graphs: bool, tmp_path: Path
) -> None:
    need("onnxruntime", provider)
    model = small_model.model(tmp_path / "model.onnx", mixing=not graphs)
    with (
        OrtRunner(model, threads=1) as cpu,
        OrtRunner(model, device=provider, bound=True, graphs=graphs) as runner,
    ):
        for shape in [(2, 5), (1, 7), (2, 5), (2, 5)]:
            wanted = cpu.infer(arrays(*shape))["last_hidden_state"]
            got = runner.infer(arrays(*shape))["last_hidden_state"]
            assert measure_distance(zip(got, wanted, strict=True)).worst <= MANY * UNIT["fp32"]


def coding_error(folder: Path) -> float:
    """Compute the relative L2 error that quantization causes in the small model."""
    with (
        OrtRunner(small_model.model(folder / "float.onnx"), threads=1) as plain,
        OrtRunner(small_model.model(folder / "coded.onnx", dialect="trt_qdq"), threads=1) as coded,
    ):
        name = "last_hidden_state"
        found, wanted = (r.infer(arrays(2, 8))[name] for r in (coded, plain))
    return measure_distance(zip(found, wanted, strict=True)).relative_l2


@pytest.mark.parametrize("product", ["tensorrt-rtx", "tensorrt"])
def test_a_deferred_engine_is_built_at_first_start_and_answers_as_the_cpu_does(
    product: str, tmp_path: Path
) -> None:
    need(product)
    target = small_bundle.RTX.replace("tensorrt-rtx", product)
    made = small_bundle.make(tmp_path / "made", (target, small_bundle.ORT)) / "bundle"
    left = {"deferred": True, "engine": None, "why": "left for this machine"}
    small_bundle.edited(made, lambda m: m["engines"][0].update(left))
    manifest = json.loads((made / "manifest.json").read_text())
    (row,) = judge_engines(manifest, HERE, runtime=product)
    if row.how is None:
        pytest.skip(row.reason)
    said: list[str] = []
    cache = tmp_path / "cache"
    with (
        Bundle(made, runtime=product, say=said.append, cache=cache) as engine,
        Bundle(made, runtime="onnxruntime") as cpu,
    ):
        texts = ["good film", "a bad, slow and poor one"]
        found, wanted = (
            np.asarray([a["embedding"] for a in b.predict(texts)]) for b in (engine, cpu)
        )
        assert measure_distance(zip(found, wanted, strict=True)).worst <= 2**0.5 * coding_error(
            tmp_path
        )
    assert any("for this GPU" in line for line in said)
    assert list(cache.glob("*/model.engine"))


@pytest.mark.parametrize("product", ["tensorrt-rtx", "tensorrt"])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_engines_answer_as_the_cpu_does_replayed_resident_and_from_their_cache(
    kind: str, product: str, tmp_path: Path
) -> None:
    need(product)
    prepared = models.prepare(kind, tmp_path, True, None)
    for variant in ("float", "lowered"):
        engine = tmp_path / f"{variant}.engine"
        builder.build(
            Path(prepared[variant]),
            engine,
            shapes=spans(prepared["shapes"]),
            product=product,
            options=builder.BuildOptions(compute_capabilities=parts.named_gpu(product)),
        )
        judge = check.judge(variant, prepared)
        system = SYSTEMS[kind, product]({**prepared, "engine": str(engine)}, False)
        if kind == "encoder":
            assert not check.encoder_problem(system, judge, 2, 16)
        else:
            assert not check.decoder_problem(system, judge, 2)
        system.close()
