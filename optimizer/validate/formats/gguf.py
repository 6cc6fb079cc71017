"""The GGUF file, judged by the gguf package's own de-quantizer and by transformers.

    lower    every tensor and every key as the gguf package reads it, against what it should be
    engine   the model as transformers loads and runs it on the CPU, in float32, against the state
             in torch whose values are those of the file's types

What llama.cpp makes of the file is not judged: its kernels are not run here, and they round the
inputs of products with quantized weights to 8 bits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimizer.compress.simulate import simulated
from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.state import owner_of
from optimizer.load.providers import gguf_file
from optimizer.lower.gguf import folder, read_back
from optimizer.model.checkpoint.model import auto_class, torch_model
from optimizer.validate.formats.transformers_runner import Runner, readable
from optimizer.validate.ledger import trace
from optimizer.validate.ledger.distance import Distance
from optimizer.validate.ledger.entry import Entry, Outputs, within
from optimizer.validate.ledger.ledger import STATE_HOPS, Hop
from optimizer.validate.materials import Materials

TARGET = "target gguf"
ELSEWHERE = "the kernels of llama.cpp, which serves the file, are not run here"
MINIMUM_LIMIT = 15 * 2.0**-11  # steps: a minimum is up to 15 of them, and fp16 has 11 bits
FIELDS = {
    "attention.key_length": "head_dim",
    "context_length": "n_positions",
    "feed_forward_length": "n_inner",
}
"""Keys that transformers 5.23 reads for some architectures only: the config's field, if it has
one."""


def hops(_m: Materials) -> tuple[Hop, ...]:
    """No graph is exported, so none is judged; and the harness does not run the file."""
    return (*STATE_HOPS, lower, engine, harness)


def lower(m: Materials) -> Entry:
    """Each tensor and key of the file, by the gguf package. Asymmetric weights may differ from the
    state by what fp16 makes of their minimum; everything else may not."""
    with readable("the gguf package", TARGET):
        model, words = folder.opened(m.source, m.state_folder, m.precision)
        problems = list(read_back.differences(_file(m), model, words))
    error = float(m.lowering["error"])
    limit = MINIMUM_LIMIT if error else 0.0
    if error > limit:
        problems.append(f"a minimum is moved by {error:.2g} of a step; fp16 moves it {limit:.2g}")
    why = "the same integers times the same scales give the same bits"
    if error:
        why = f"{why}; a minimum of Q4_1, up to 15 steps, is rounded to fp16"
    measured = None if problems else Distance(error, error, 1.0, error)
    return Entry("lower", "state in torch", limit, measured, not problems, why, tuple(problems))


def engine(m: Materials) -> Entry:
    """The outputs of the model that transformers loads from the file."""
    with readable("transformers", TARGET):
        model, problems = _loaded(m)
        results = [trace.run(model, batch, m.compared) for batch in m.batches]
    stored = _as_stored(m)
    expected = [trace.traced(stored, batch, m.compared, ()) for batch in m.batches]
    spread = m.correct.graph_outputs("state", "fp32")
    start = "state in torch, values as stored"
    entry = within("engine", start, Outputs(results, expected, spread), problems)
    return replace(entry, why=f"{entry.why}; {ELSEWHERE}", unproven=ELSEWHERE)


def harness(_m: Materials) -> Entry:
    """Not run: it is the last, after which the models are freed."""
    why = "llama.cpp runs the file, the harness does not"
    return Entry("harness", "torch", None, None, None, why)


def opened(m: Materials, _device: str) -> Runner:
    """What answers in validate."""
    return Runner(_loaded(m)[0], _file(m), m)


def _file(m: Materials) -> Path:
    return m.model / folder.FILE


def _loaded(m: Materials) -> tuple[nn.Module, list[str]]:
    """The model in float32, of the config that the file says, and what of the file found no place
    in it."""
    from gguf import GGUFReader

    with quiet():
        opened = GGUFReader(_file(m))
        fields, tensors = opened.fields, gguf_file.sizes(opened)
        config = gguf_file.config_of(m.model, folder.FILE, tensors)
        architecture = str(fields["general.architecture"].contents())
        for key, name in FIELDS.items():
            field = fields.get(f"{architecture}.{key}")
            if field is not None and hasattr(config, name):
                setattr(config, name, field.contents())
        model, info = auto_class(m.task).from_pretrained(
            m.model,
            config=config,
            attn_implementation="eager",
            dtype=torch.float32,
            output_loading_info=True,
            **gguf_file.arguments(folder.FILE),
        )
    gguf_file.check_whole(model, tensors, _file(m))
    problems = [f"transformers: {kind}: {sorted(map(str, n))[:3]}" for kind, n in info.items() if n]
    return model.eval(), problems


def _as_stored(m: Materials) -> nn.Module:
    """The state in torch, every parameter with the value that its type in the file holds."""
    model, _ = folder.opened(m.source, m.state_folder, m.precision)
    twin = simulated(torch_model(m.checkpoint, m.task), m.state)
    parameters: dict[str, Any] = dict(twin.named_parameters(remove_duplicate=False))
    for entry in model.entries():
        quantized = f"{owner_of(entry.parameter)}.values"
        name = entry.parameter if entry.parameter in parameters else quantized
        parameters[name].data = model.value(entry)
    return twin
