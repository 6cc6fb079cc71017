"""What only a GPU can show. `make test-gpu` runs these, and then benchmarks/gpu_suite.py."""

import json
from pathlib import Path

import numpy as np
import pytest

from optimizer.harness.bundle import Bundle
from optimizer.harness.fit_columns import REQUIRED
from optimizer.harness.machine import this_machine
from optimizer.harness.runtimes.ort import OrtRunner
from tests.harness import small_model
from tests.harness.test_ort import arrays
from tests.package import small_bundle

pytestmark = pytest.mark.gpu
HERE = this_machine()


def need(runtime: str, provider: str = "cuda") -> None:
    """Skip, with the reason, where this machine cannot run it."""
    if HERE.gpu is None:
        pytest.skip("no GPU was found")
    missing = [g[0] for g in REQUIRED[runtime, provider] if HERE.version(g) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


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
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("product", ["tensorrt-rtx", "tensorrt"])
def test_a_deferred_engine_is_built_at_first_start_and_answers_as_the_cpu_does(
    product: str, tmp_path: Path
) -> None:
    need(product)
    target = small_bundle.RTX.replace("tensorrt-rtx", product)
    made = small_bundle.make(tmp_path / "made", (target, small_bundle.ORT)) / "bundle"
    manifest = json.loads((made / "manifest.json").read_text())
    manifest["engines"][0] |= {"deferred": True, "engine": None, "why": "left for this machine"}
    (made / "manifest.json").write_text(json.dumps(manifest))
    said: list[str] = []
    cache = tmp_path / "cache"
    with (
        Bundle(made, runtime=product, say=said.append, cache=cache) as engine,
        Bundle(made, runtime="onnxruntime") as cpu,
    ):
        texts = ["good film", "a bad, slow and poor one"]
        np.testing.assert_allclose(engine.predict(texts), cpu.predict(texts), atol=2e-2)
    assert any("for this GPU" in line for line in said)
    assert list(cache.glob("*/model.engine"))
