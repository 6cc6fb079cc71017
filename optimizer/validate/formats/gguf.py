"""Check the GGUF file with the gguf package's own de-quantizer and with transformers.

    lower    every tensor and key as the gguf package reads it, compared with the expected one
    engine   outputs of transformers on the CPU, in float32, compared with the state in torch with
             its values rounded to the file's types

The outputs of llama.cpp are not judged: its kernels are not run here, and they round the inputs of
products with quantized weights to 8 bits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimizer.compress.simulate import simulate_state
from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.state import owner_of
from optimizer.load.providers import gguf_file, gguf_header
from optimizer.lower.gguf import folder, read_back
from optimizer.model.checkpoint.model import choose_auto_class, load_torch_model
from optimizer.validate.formats.transformers_runner import TransformersRunner, translate_errors
from optimizer.validate.ledger import trace
from optimizer.validate.ledger.distance import Distance
from optimizer.validate.ledger.entry import HopOutputs, LedgerEntry, make_entry
from optimizer.validate.ledger.ledger import STATE_HOPS, Hop
from optimizer.validate.materials import Materials

TARGET = "target gguf"
ELSEWHERE = "the kernels of llama.cpp, which serves the file, are not run here"
MINIMUM_LIMIT = 15 * 2.0**-11  # steps: a minimum is at most 15 of them, and fp16 has 11 bits
FIELDS = {
    "attention.key_length": "head_dim",
    "context_length": "n_positions",
    "feed_forward_length": "n_inner",
}
"""{key that transformers 5.23 reads for some architectures only: field of the config}."""


def hops(_m: Materials) -> tuple[Hop, ...]:
    """List the hops of the ledger: those of the compressed state, then `lower`, `engine` and
    `harness`. There is no ONNX graph, and the harness does not run the file."""
    return (*STATE_HOPS, lower, engine, harness)


def lower(m: Materials) -> LedgerEntry:
    """Hop `lower`: compare each tensor and key of the file, as the gguf package reads it, with the
    expected one. Asymmetric weights may differ from the state by the rounding of their minimum to
    fp16; everything else must be equal."""
    with translate_errors("the gguf package", TARGET):
        model, words = folder.read_model(m.source, m.state_folder, m.precision)
        problems = list(read_back.describe_differences(_file(m), model, words))
    error = float(m.lowering["error"])
    limit = MINIMUM_LIMIT if error else 0.0
    if error > limit:
        problems.append(
            f"a minimum changes by {error:.2g} of a step; fp16 changes it by at most {limit:.2g}"
        )
    why = "the same integers times the same scales give the same bits"
    if error:
        why = f"{why}; a minimum of Q4_1, up to 15 steps, is rounded to fp16"
    measured = None if problems else Distance(error, error, 1.0, error)
    return LedgerEntry(
        "lower", "state in torch", limit, measured, not problems, why, tuple(problems)
    )


def engine(m: Materials) -> LedgerEntry:
    """Hop `engine`: compare the outputs of the model that transformers loads from the file with the
    compressed state in torch."""
    with translate_errors("transformers", TARGET):
        model, problems = _load(m)
        results = [trace.run(model, batch, m.compared) for batch in m.batches]
    stored = _as_stored(m)
    expected = [trace.trace_run(stored, batch, m.compared, ()) for batch in m.batches]
    spread = m.correct.graph_outputs("state", "fp32")
    start = "state in torch, values as stored"
    entry = make_entry("engine", start, HopOutputs(results, expected, spread), problems)
    return replace(entry, why=f"{entry.why}; {ELSEWHERE}", unproven=ELSEWHERE)


def harness(_m: Materials) -> LedgerEntry:
    """Hop `harness`: an entry that reports that the harness does not run the file. It is the last
    hop, after which the ledger frees the models."""
    why = "llama.cpp runs the file, the harness does not"
    return LedgerEntry("harness", "torch", None, None, None, why)


def open_runner(m: Materials, _device: str) -> TransformersRunner:
    """Open the GGUF file in transformers on the CPU, as the candidate of the quality gates."""
    return TransformersRunner(_load(m)[0], _file(m), m)


def _file(m: Materials) -> Path:
    return m.model / folder.FILE


def _load(m: Materials) -> tuple[nn.Module, list[str]]:
    """Load the file by transformers: (model in float32 with the config in the file, sentences on
    missing or unused tensors)."""
    header = gguf_header.read(_file(m))
    with quiet():
        config = gguf_file.read_config(m.model, folder.FILE, header.tensors)
        architecture = str(header.fields["general.architecture"])
        for key, name in FIELDS.items():
            value = header.fields.get(f"{architecture}.{key}")
            if value is not None and hasattr(config, name):
                setattr(config, name, value)
        model, info = choose_auto_class(m.task, config.model_type).from_pretrained(
            m.model,
            config=config,
            attn_implementation="eager",
            dtype=torch.float32,
            output_loading_info=True,
            **gguf_file.make_arguments(folder.FILE),
        )
    gguf_file.check_whole(model, header.tensors, _file(m))
    problems = [f"transformers: {kind}: {sorted(map(str, n))[:3]}" for kind, n in info.items() if n]
    return model.eval(), problems


def _as_stored(m: Materials) -> nn.Module:
    """The state in torch, with every parameter rounded to its type in the file."""
    model, _ = folder.read_model(m.source, m.state_folder, m.precision)
    twin = simulate_state(load_torch_model(m.checkpoint, m.task), m.state)
    parameters: dict[str, Any] = dict(twin.named_parameters(remove_duplicate=False))
    for entry in model.entries():
        quantized = f"{owner_of(entry.parameter)}.values"
        name = entry.parameter if entry.parameter in parameters else quantized
        parameters[name].data = model.value(entry)
    return twin
