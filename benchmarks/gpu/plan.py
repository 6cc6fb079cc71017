"""Parts of suite.py in order, and the reasons for which one does not run here.

A part is stopped early enough that every later part that can run still has its `least` seconds;
their sum is below the suite's twelve minutes. Parts that do not fit run only with --only, and say
so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from optimizer.harness.bundle import fit_columns
from optimizer.harness.runtimes.machine import Machine
from optimizer.harness.runtimes.trt.products import PRODUCTS

ROOT = Path(__file__).resolve().parents[2]

SECONDS = 710  # of twelve minutes, less start and writing
OURS = (
    "pydantic",
    "torch",
    "transformers",
    "onnx",
    "onnxscript",
    "tokenizers",
    "onnxruntime",
    "datasets",
)
NOT_ASKED_FOR = "it was not asked for (--only)"
TRT = "cuda.bindings"
RTX = "tensorrt-rtx"
SEES_CUDA = {  # module -> code that prints why it does not compute on the GPU
    "torch": "import torch; torch.cuda.is_available() or "
    "print(f'torch {torch.__version__} sees no CUDA device')",
    "onnxruntime": "import onnxruntime as o; p = o.get_available_providers(); "
    "'CUDAExecutionProvider' in p or print(f'this ONNX Runtime {o.__version__} is without "
    "CUDAExecutionProvider (onnxruntime-gpu has it)')",
}


@dataclass(frozen=True)
class Part:
    """One part of the suite.

    least: minimum seconds left to start it
    most: maximum seconds that it may take
    needs: modules that it imports
    cuda: modules that must compute on the GPU
    after: parts whose files it reads
    gpu: True where a rehearsal cannot run it either
    product: member of the TensorRT family
    recipe: shipped recipe that it runs
    planned: False where it runs only with --only
    """

    name: str
    least: int
    most: int
    needs: tuple[str, ...] = ()
    cuda: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    gpu: bool = False
    product: str = ""
    recipe: str = ""
    planned: bool = True

    @property
    def source(self) -> str:
        """Name of the recipe whose --source it reads, or ""."""
        models = {"prepare:encoder": "minilm-int8", "prepare:decoder": "smollm2-int4"}
        return self.recipe or models.get(self.name, "")


@dataclass(frozen=True)
class Here:
    """This machine.

    no_cuda: {module: why it does not compute on the GPU}
    """

    machine: Machine
    no_cuda: Mapping[str, str] = field(default_factory=dict)


def served(kind: str, variant: str, system: str = "served") -> Part:
    """A model for ONNX Runtime CUDA, run as a bundle runs it.

    system: "served", or "slots" with continuous batching
    """
    needs = ("onnxruntime",)
    return Part(f"{kind}:{system}:{variant}", 14, 40, needs, needs, (f"prepare:{kind}",))


def peer(kind: str, system: str, least: int, most: int, *needs: str, gpu: bool = False) -> Part:
    return Part(f"{kind}:{system}", least, most, needs, needs[:1], (f"prepare:{kind}",), gpu=gpu)


def build(kind: str, product: str, least: int) -> Part:
    row = PRODUCTS[product]
    return Part(
        f"build:{kind}:{product}",
        least,
        90,
        (row.module,),
        after=(f"prepare:{kind}",),
        gpu=row.needs_gpu,
        product=product,
    )


def engine(kind: str, product: str, variant: str) -> Part:
    return Part(
        f"{kind}:{product}:{variant}",
        10,
        40,
        (PRODUCTS[product].module, TRT),
        after=(f"build:{kind}:{product}",),
        gpu=True,
        product=product,
    )


def vllm(scheme: str, planned: bool = False) -> Part:
    """vLLM with a folder of one scheme of serving.SCHEMES."""
    needs = ("vllm", "aiohttp", *OURS)
    cuda, after = ("torch",), ("prepare:decoder",)
    return Part(f"vllm:{scheme}", 75, 240 if planned else 900, needs, cuda, after, planned=planned)


def serve(runtime: str, *needs: str) -> Part:
    """`optimize serve` with a bundle of the decoder, proven first."""
    after = ("prepare:decoder",)
    needs = ("aiohttp", *needs, *OURS)
    return Part(f"serve:{runtime}", 120, 3600, needs, ("torch",), after, planned=False)


def proof(recipe: str, runtime: str, planned: bool = False) -> Part:
    product = runtime if runtime in PRODUCTS else ""
    return Part(
        f"ledger:{recipe}:{runtime}",
        60,
        200 if planned else 3600,
        (*OURS, *((PRODUCTS[product].module, TRT) if product else ())),
        () if product else ("onnxruntime",),
        gpu=True,
        product=product,
        recipe=recipe,
        planned=planned,
    )


RUNTIMES = (RTX, "tensorrt", "onnxruntime")
VLLM_ALONE = ("smollm2-fp8",)
"""Recipes that no runtime of the suite takes: `check` refuses FP8 for them."""
BEYOND = (
    "smollm2-int4",
    "smollm2-int4-gguf",
    "smollm2-int4-openvino",
    "smollm2-int8",
    "smollm2-search",
    "minilm-int8-fastest",
    "minilm-int8-openvino",
    "minilm-int8-search",
    "minilm-int8-web",
    "minilm-pruned-int8",
    "minilm-qat-w4a8",
    "smollm2-sparse-int4",
    "llama-3.2-1b-int4",
    "llama-3.2-1b-pruned-int4",
    "qwen3-4b-int4",
    "jargon-reranker-int8",
    "vit-fashion-int8",
    "resnet-fashion-int8",
    "efficientnet-lite0-int8",
    "efficientnet-lite0-search",
)
"""Recipes whose compression does not fit beside the other parts."""

PARTS = (
    Part("validity", 5, 40, ("tensorrt_rtx",), gpu=True, product=RTX),
    Part("bandwidth", 5, 30, ("torch",), ("torch",), gpu=True),
    Part("prepare:encoder", 25, 100, OURS),
    build("encoder", RTX, 10),
    build("encoder", "tensorrt", 20),
    peer("encoder", "torch-eager", 14, 40, "torch", "transformers"),
    peer("encoder", "onnxruntime", 14, 40, "onnxruntime"),
    served("encoder", "cuda"),
    *(engine("encoder", p, f) for p in (RTX, "tensorrt") for f in ("float", "lowered")),
    *(proof("minilm-int8", runtime, planned=True) for runtime in RUNTIMES),
    Part("prepare:decoder", 40, 150, OURS),
    build("decoder", RTX, 15),
    build("decoder", "tensorrt", 25),
    peer("decoder", "torch-eager", 14, 40, "torch", "transformers"),
    peer("decoder", "onnxruntime", 14, 40, "onnxruntime"),
    *(served("decoder", variant) for variant in ("cuda", "cuda-lowered")),
    served("decoder", "cuda-lowered", "slots"),
    *(engine("decoder", p, f) for p in (RTX, "tensorrt") for f in ("float", "lowered")),
    peer("encoder", "torch-compile", 110, 200, "torch", "transformers", gpu=True),
    peer("decoder", "torch-compile", 110, 200, "torch", "transformers", gpu=True),
    vllm("w4a16", planned=True),
    *(vllm(scheme) for scheme in ("w8a8", "fp8", "nvfp4", "w4a4")),
    serve("vllm", "vllm"),
    serve("onnxruntime", "starlette", "uvicorn", "h11"),
    *(proof(recipe, runtime) for recipe in BEYOND for runtime in RUNTIMES),
)


def with_earlier(names: Collection[str]) -> list[str]:
    """Return parts and those whose files they read, in order."""
    chosen = set(names)
    for part in reversed(PARTS):  # which all follow those that they read
        if part.name in chosen:
            chosen |= {*part.after}
    return [p.name for p in PARTS if p.name in chosen]


def look(machine: Machine) -> Here:
    """Check each package here on the GPU, in a process of its own."""
    if machine.gpu is None:
        return Here(machine)
    return Here(machine, {m: why for m in SEES_CUDA if present(m) and (why := _blind(m))})


def _blind(module: str) -> str:
    command = [sys.executable, "-c", SEES_CUDA[module]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return f"{module} was not imported within 60 s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"{module} cannot be imported"])[-1]
    return done.stdout.strip()


def forbidden(part: Part, here: Here, args: argparse.Namespace) -> str:
    """Explain why a part can never run here; "" if it can."""
    if args.only and part.name not in args.only:
        return NOT_ASKED_FOR
    if here.machine.gpu is None and (part.gpu or not args.rehearse):
        return "no GPU was found"
    if part.product and here.machine.gpu is not None and (why := unfit(part.product, here.machine)):
        return why
    missing = [m for m in part.needs if not present(m)]
    if missing:
        return f"package: {', '.join(missing)} cannot be imported here"
    blind = [here.no_cuda[m] for m in part.cuda if m in here.no_cuda]
    if blind and not args.rehearse:
        return f"package: {'; '.join(blind)}"
    if part.recipe and (absent := _source(part.recipe, args.source)):
        return f"package: {absent}"
    if not part.planned and part.name not in args.only:
        return (
            f"time: not among the planned twelve minutes; --only {part.name} --seconds 3600 runs it"
        )
    return ""


def unfit(product: str, machine: Machine) -> str:
    """Explain from the fit table why a product has no engine on this GPU; "" if it has."""
    fit = {"driver_minimum": PRODUCTS[product].driver_minimum}
    entry = {"runtime": product, "device": "cuda", "fit": fit}
    asked = fit_columns.FitContext(entry, machine, frozenset())
    return fit_columns.builder(asked) or fit_columns.driver(asked)


def obstacle(
    part: Part, done: Mapping[str, Any], here: Here, left: float, args: argparse.Namespace
) -> str:
    """Explain why a part does not run now; "" if it does."""
    if why := forbidden(part, here, args):
        return why
    idle = [name for name in part.after if done[name]["status"] != "ran"]
    if idle:
        return f"it takes its files from {', '.join(idle)}, which did not run"
    said = done.get("validity", {}).get("result")
    if part.product == RTX and said and said["validity"] == "INVALID":
        return f"the runtime refuses its engines here: {', '.join(said['means'])}"
    twin = [p for p in twins(part) if done.get(p, {}).get("status") in ("ran", "failed")]
    if twin and part.name not in args.only:
        again = f"--only {part.name} runs it"
        return f"time: planned with one runtime per recipe, and {twin[0]} ran; {again}"
    if left < part.least:
        return f"time: it takes {part.least} s or more, {max(left, 0):.0f} are left"
    return ""


def twins(part: Part) -> list[str]:
    """List the other parts of the same recipe."""
    return [p.name for p in PARTS if part.recipe and p.recipe == part.recipe and p != part]


def limit(part: Part, here: Here, left: float, args: argparse.Namespace) -> float:
    """Compute the time limit of a part in seconds; a rehearsal has only the suite's."""
    if args.rehearse:
        return left
    return max(part.least, min(part.most, left - reserved(part, here, args)))


def reserved(part: Part, here: Here, args: argparse.Namespace) -> int:
    """Sum the least seconds of later parts, with one runtime per recipe."""
    later = PARTS[PARTS.index(part) + 1 :] if part in PARTS else ()
    able = [p for p in later if not forbidden(p, here, args) and part.name not in twins(p)]
    recipes = {p.recipe: p.least for p in able if p.recipe}
    return sum(p.least for p in able if not p.recipe) + sum(recipes.values())


def present(module: str) -> bool:
    """Return True if the module can be imported."""
    try:
        return find_spec(module) is not None
    except ImportError:  # the package around it is missing
        return False


def _source(recipe: str, given: Mapping[str, str]) -> str:
    """Explain why a recipe's checkpoint is missing here; "" if it is not."""
    import yaml

    if recipe in given:
        return "" if Path(given[recipe]).is_dir() else f"{given[recipe]} is not a folder"
    path = ROOT / "recipes" / f"{recipe}.yaml"
    source = str(yaml.safe_load(path.read_text(encoding="utf-8"))["model"]["source"])
    kind, _, package = source.partition("python-package:")
    if kind:
        return f"{source} is on a hub, and the suite is offline; give --source {recipe}=FOLDER"
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"{package}, which brings the weights, is not installed; or give --source"
    return ""
