"""Decoders that answer over HTTP, timed by the load generator of `optimize load`.

    vllm:SCHEME     vLLM's server with a folder of target `vllm`, in one scheme of SCHEMES
    serve:RUNTIME   `optimize serve` with a bundle of that runtime, which for vllm starts vLLM

Each request has a text of its own, of PROMPT words, and its answer NEW tokens. SIZES requests are
sent at once, for ROUNDS rounds. A cell has the time to the first token, the time between tokens and
the tokens per second of all requests together.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import NEW, PROMPT
from benchmarks.gpu.models import WORDS

SCHEMES = {
    "w4a16": "{methods: [rtn], weights: {bits: 4, granularity: group, group_size: 64}}",
    "w8a8": "{methods: [rtn], weights: {bits: 8}, activations: {granularity: token}}",
    "fp8": "{methods: [rtn], weights: {type: float8}, "
    "activations: {type: float8, granularity: token}}",
    "nvfp4": "{methods: [rtn], weights: {type: float4}}",
    "w4a4": "{methods: [rtn], weights: {type: float4}, activations: {type: float4}}",
}
"""{scheme: section `quantize` of its recipe}."""
NAME = "decoder"
SIZES, ROUNDS = (1, 8, 32), 3
TINY_SIZES, TINY_ROUNDS, TINY_NEW = (1, 2), 1, 4
PATIENCE = 600.0  # seconds for one answer


def origin(work: Path) -> dict[str, str]:
    """Origin of the weights, as part prepare:decoder wrote it."""
    prepared = json.loads((work / f"prepared-{NAME}.json").read_text())
    return {"weights": prepared["weights"]}


def write_folder(work: Path, scheme: str) -> tuple[Path, dict[str, Any]]:
    """Quantize and lower the model of part prepare:decoder for vLLM. Returns the folder and the
    `fit` of its engine (harness/runtimes/vllm.py)."""
    from optimizer.compress.stage import STAGE as compress
    from optimizer.load.stage import STAGE as load
    from optimizer.lower.build import STAGE as build
    from optimizer.lower.stage import STAGE as lower
    from optimizer.recipe import file as recipe_file
    from optimizer.store import Store

    changed = [f"quantize={SCHEMES[scheme]}", "targets=[{runtime: vllm}]"]
    recipe = recipe_file.read(work / NAME / "recipe.yaml", changed)
    store, target = Store(work / "store"), recipe.targets[0]
    loaded = store.step(load, recipe.model)
    state = store.step(compress, recipe.compression, loaded)
    model = store.step(lower, target, loaded, state, loaded)
    engine = json.loads((store.step(build, target, model).path / "engine.json").read_text())
    return model.path / "model", engine["fit"]


def check_machine(fit: dict[str, Any]) -> None:
    """Raise MachineError where vLLM cannot serve an engine here."""
    from importlib.util import find_spec

    from optimizer.harness.runtimes import machine, vllm

    importable = find_spec("vllm") is not None
    packages = machine.describe_machine().packages
    vllm.check(fit, packages, machine.list_gpus(), importable=importable)


@contextmanager
def start_vllm(folder: Path, fit: dict[str, Any]) -> Iterator[str]:
    """Yield the URL of vLLM's server of a folder. Raises MachineError where it does not start."""
    from optimizer.harness.commands import vllm_server
    from optimizer.harness.runtimes import vllm

    where = "127.0.0.1", vllm_server.free_port("127.0.0.1")
    url = f"http://{where[0]}:{where[1]}"
    child = subprocess.Popen(vllm.build_command(fit, folder, NAME, where, generates=True))
    try:
        vllm_server.wait_until_ready(child, f"{url}/health")
        yield url
    finally:
        vllm_server.end(child)


def changes(runtime: str, rehearse: bool) -> list[str]:
    """List the --set values that make the decoder's recipe one of a bundle for `runtime`.

    Parts ledger:* judge quality: here the margin is one that no model exceeds, and the text is
    divided into short windows, because a gate needs about twenty to decide.
    """
    options = "" if runtime == "vllm" else f", device: {'cpu' if rehearse else 'cuda'}"
    return [
        f"quantize={SCHEMES['w4a16']}",
        f"targets=[{{runtime: {runtime}{options}}}]",
        "validate.max_drop=100",
        "validate.sequence_length=16",
    ]


def serve_options(runtime: str, rehearse: bool) -> list[str]:
    """List the options of `optimize serve` with which all requests of a size run at once."""
    if runtime == "vllm":
        return []
    return ["--batching", "padded", "--slots", str(max(TINY_SIZES if rehearse else SIZES))]


def measure(url: str, rehearse: bool) -> list[dict[str, Any]]:
    """Time a server; see measure.measure_together."""
    from optimizer.load_test.http_client import HttpClient
    from optimizer.load_test.measure import measure_together

    sizes, rounds, tokens = (
        (TINY_SIZES, TINY_ROUNDS, TINY_NEW) if rehearse else (SIZES, ROUNDS, NEW)
    )
    client = HttpClient(url, "", tokens, PATIENCE)
    return measure_together(client, texts(sum(sizes) * rounds + 1), sizes, rounds)


def texts(count: int) -> list[str]:
    """Draw distinct texts of PROMPT words, so that no server finds one in its prefix cache."""
    chance = random.Random(0)
    return [" ".join(chance.choices(WORDS, k=PROMPT)) for _ in range(count)]
