"""export: the float ONNX graph of the checkpoint, with the state's replaced parameters in it.

Writes model.onnx (and model.onnx.data above 2 GiB) and names.json (see names.py). Before it
is done, the graph is run against the torch model on several shapes, padding included; a
difference above TOLERANCE is a LedgerError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from optimizer import state as compressed_state
from optimizer.errors import LedgerError
from optimizer.export import names, onnx_file
from optimizer.export.clean import clean
from optimizer.export.onnx_from_torch import export
from optimizer.harness.runtimes.ort import OrtRunner
from optimizer.load.checkpoint import Checkpoint, open_checkpoint
from optimizer.load.model import torch_model
from optimizer.progress import say
from optimizer.recipe import Export
from optimizer.store import Estimate, Shapes, Stage

TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2}
"""Relative L2 of the graph's output to the float32 torch model's, over real tokens."""

Arrays = dict[str, Any]


def run(section: Export, source: Path, state: Path, *, out: Path) -> None:
    """source: the load stage's folder. state: the compress stage's; only `replaced` is used.

    Raises LedgerError when the graph and the torch model disagree, OptimizeError when a weight
    cannot be found in the graph.
    """
    contract = json.loads((source / "contract.json").read_text(encoding="utf-8"))
    checkpoint = open_checkpoint(source)
    compressed = compressed_state.read(state)
    reference = torch_model(checkpoint, contract["task"], overrides=compressed.replaced)
    limits = vocabulary(checkpoint.config, contract)
    inputs = [random_inputs(contract, limits, *shape) for shape in check_shapes(contract)]
    expected = [torch_outputs(reference, contract, i) for i in inputs]
    examples = {k: torch.from_numpy(v) for k, v in inputs[-1].items()}
    float_values = parameters(reference, checkpoint, compressed.replaced)
    model = clean(export(cast(reference, section.float), contract, examples, section.opset))
    paired = names.pair(model, float_values, linear_modules(reference), compressed.weights)
    onnx_file.save(model, out / "model.onnx")
    text = json.dumps(paired.as_dict(), indent=1, sort_keys=True)
    (out / "names.json").write_text(text, encoding="utf-8")
    check(out / "model.onnx", inputs, expected, TOLERANCE[section.float])


def cast(model: nn.Module, precision: str) -> nn.Module:
    """The model in the float type of the graph's float part, in place."""
    return model.half() if precision == "fp16" else model


def linear_modules(model: nn.Module) -> list[str]:
    """Every nn.Linear, under each name it is reachable by first."""
    return [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]


def parameters(
    model: nn.Module, checkpoint: Checkpoint, replaced: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Every parameter's value as the files have it, not as the torch model in memory does.

    A tied parameter that the checkpoint stores once has the value of the one it is tied to.
    """
    same: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        same.setdefault(id(parameter), []).append(name)
    values: dict[str, Tensor] = {}
    for group in same.values():
        for kind in (replaced, checkpoint.tensors):
            stored = [n for n in group if n in kind]
            if stored:
                values.update({n: kind[n if n in kind else stored[0]] for n in group})
                break
    return values


def vocabulary(config: Mapping[str, Any], contract: Mapping[str, Any]) -> dict[str, int]:
    """How many values each input may take."""
    sizes = {
        "input_ids": int(config["vocab_size"]),
        "token_type_ids": int(config.get("type_vocab_size", 1)),
        "attention_mask": 2,
    }
    return {i["name"]: sizes[i["name"]] for i in contract["inputs"]}


def check_shapes(contract: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(batch, sequence) of the check: single, batched, and as long as the model goes."""
    longest = int(contract["tokenizer"]["max_length"])
    return [(1, min(5, longest)), (2, longest), (3, min(17, longest - 1))]


def random_inputs(
    contract: Mapping[str, Any], limits: Mapping[str, int], batch: int, sequence: int
) -> Arrays:
    """Tokens drawn with a fixed seed; each row but the first ends in ever more padding."""
    rng = np.random.default_rng(batch * 1000 + sequence)
    lengths = [max(1, sequence - row * sequence // (batch + 1)) for row in range(batch)]
    real = np.arange(sequence)[None] < np.array(lengths)[:, None]
    pads = {
        "input_ids": int(contract["tokenizer"]["pad_id"]),
        "token_type_ids": int(contract["tokenizer"].get("pad_type_id", 0)),
    }
    made = {}
    for name, limit in limits.items():
        drawn = rng.integers(0, limit, (batch, sequence))
        if name == "input_ids":
            drawn = np.where(drawn == pads[name], (drawn + 1) % limit, drawn)
        made[name] = np.where(real, drawn, pads.get(name, 0)).astype(np.int64)
    if "attention_mask" in made:
        made["attention_mask"] = real.astype(np.int64)
    return made


@torch.no_grad()
def torch_outputs(model: nn.Module, contract: Mapping[str, Any], inputs: Arrays) -> Arrays:
    """What the float torch model answers, by output name."""
    result = model(**{k: torch.from_numpy(v) for k, v in inputs.items()}, return_dict=True)
    return {o["name"]: result[o["name"]].numpy() for o in contract["outputs"]}


def check(model: Path, inputs: list[Arrays], expected: list[Arrays], tolerance: float) -> None:
    """Raise LedgerError when any output of any shape is further than `tolerance` from expected."""
    worst = 0.0
    with OrtRunner(model, device="cpu") as runner:
        for given, wanted in zip(inputs, expected, strict=True):
            got = runner.infer(given)
            mask = given.get("attention_mask")
            for name, value in wanted.items():
                error = distance(got[name], value, mask)
                if not error <= tolerance:
                    shape = "x".join(map(str, next(iter(given.values())).shape))
                    raise LedgerError(
                        f"{name} of the exported graph is {error:.2e} (relative L2) from the "
                        f"torch model at batch x sequence {shape}",
                        where="export: torch -> ONNX",
                        accepted=f"at most {tolerance:.0e}",
                    )
                worst = max(worst, error)
    say(f"export: graph equals torch within {worst:.1e} (relative L2) on {len(inputs)} shapes")


def distance(got: Any, wanted: Any, mask: Any = None) -> float:
    """Relative L2 over real tokens: rows that a (batch, sequence) mask leaves out do not count."""
    if got.shape != wanted.shape:
        return float("inf")
    if mask is not None and wanted.ndim == 3:
        got, wanted = got[mask.astype(bool)], wanted[mask.astype(bool)]
    norm = float(np.linalg.norm(wanted.astype(np.float64)))
    return float(np.linalg.norm(got.astype(np.float64) - wanted.astype(np.float64))) / (norm or 1.0)


def estimate(section: Export, shapes: Shapes) -> Estimate:
    """Time is the exporter's, which grows with operators, here counted by tensors."""
    size = sum(map(prod, shapes.values())) * 4
    return Estimate(
        memory=(700 << 20) + 3 * size,
        disk=size // 2 if section.float == "fp16" else size,
        seconds=4 + 0.08 * len(shapes),
    )


STAGE = Stage(
    "export",
    1,
    run,
    packages=("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime"),
    estimate=estimate,
)
