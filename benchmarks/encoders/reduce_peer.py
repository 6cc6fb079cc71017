"""Importance of MiniLM's neurons by nvidia-modelopt's hooks, in its own environment.

    PEER_PYTHON reduce_peer.py '{"model": FOLDER, "texts": FILE, "out": FILE}'

Called by reduce.py. modelopt.torch.prune itself prunes models of Megatron-Core (mcore_minitron) and
convolutions (fastnas); its hooks for importance run on any linear layer:

L2Norm       of a neuron's mean absolute activation, over texts (Minitron)
Independent  mean absolute activation times the norm of the column that reads it
Iterative    neurons are removed in groups, first those whose removal changes the layer's output
             least given the earlier removals; a group for each BATCH of texts, the texts repeated
             until there is one for each group of about SMALL neurons

texts: JSON, a list of token ids for each text, which go through the model one by one and so without
padding. out: safetensors of "<hook>/<block>": a score per neuron, higher for neurons to keep.
Imports no module of this project.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

BATCH, SMALL = 8, 6


def main() -> None:
    import torch
    from modelopt.torch.prune import importance_hooks as hooks
    from safetensors.torch import save_file
    from transformers import AutoModel

    torch.set_num_threads(1)
    options = json.loads(sys.argv[1])
    texts = json.loads(Path(options["texts"]).read_text(encoding="utf-8"))
    model = AutoModel.from_pretrained(options["model"], dtype=torch.float32).eval()
    before = time.process_time()
    read = inputs(model, texts)
    forward = time.process_time() - before
    scores: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for name in ("L2Norm", "Independent", "Iterative"):
        before = time.process_time()
        for i, layer in enumerate(model.encoder.layer):
            with torch.no_grad():
                score = scored(hooks, name, layer.output.dense, read[i])
            scores[f"{name}/{i}"] = score.float().contiguous()
        seconds[name] = time.process_time() - before + forward
    save_file(scores, options["out"], {"seconds": json.dumps(seconds)})


def inputs(model: Any, texts: list[list[int]]) -> list[list[Any]]:
    """Record the inputs of the layer after the neurons, by block and text: (1, tokens, neurons)."""
    import torch

    layers = [layer.output.dense for layer in model.encoder.layer]
    read: list[list[Any]] = [[] for _ in layers]

    def keep(into: list[Any]) -> Any:
        return lambda _module, args, _output: into.append(args[0])

    handles = [
        layer.register_forward_hook(keep(one)) for layer, one in zip(layers, read, strict=True)
    ]
    with torch.no_grad():
        for ids in texts:
            model(input_ids=torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return read


def scored(hooks: Any, name: str, layer: Any, texts: list[Any]) -> Any:
    """Compute a score per neuron.

    layer: layer that reads the neurons
    texts: inputs of the layer, one per text
    """
    import torch

    if name == "L2Norm":
        hook = hooks.L2NormHook()
        for x in texts:
            hook(layer, (x.transpose(0, 1),), None)  # (tokens, 1, neurons), as Megatron-Core's
        return hook.accumulate()
    if name == "Independent":
        hook = hooks.IndependentChannelContributionHook(layer)
        for x in texts:
            hook(layer, (x,), None)
        return hook.accumulate()
    groups = layer.in_features // SMALL
    hook = hooks.IterativeChannelContributionHook(layer, {"validation_full_iters": groups})
    for group in range(groups):
        some = [texts[(group * BATCH + i) % len(texts)] for i in range(BATCH)]
        x = torch.cat(some, 1)
        # without the bias: the hook compares with a product without one
        hook(layer, (x,), torch.nn.functional.linear(x, layer.weight))
    return hook.accumulate()


if __name__ == "__main__":
    main()
