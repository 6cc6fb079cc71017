"""Constants of a graph that are too small for outputs to show, above all in float16: each function
Materials, summary or graph -> what is wrong, with the checkpoint's names.

1. epsilons   of each norm of the torch model, in whichever form the graph has the norm
2. functions  GELU by erf or by tanh, as the torch module computes it
3. buffers    an initializer with the name of a torch buffer holds its values
4. angles     tables of cosines and sines are those of the rotary embedding's frequencies
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from optimizer.foundation.rounding.random_rounding import ULPS
from optimizer.lower.onnx import cut
from optimizer.lower.onnx.opened import Source
from optimizer.validate.ledger.pieces.roundoff import UNIT
from optimizer.validate.materials import Materials

TABLES = {"rotary_cos": np.cos, "rotary_sin": np.sin}  # of lower/ort/attention.py


def constants(m: Materials, graph: Source, summary: cut.GraphSummary) -> list[str]:
    """Laws 1 to 4."""
    problems = epsilons(m, summary.epsilons) + functions(m, summary.gelus)
    return problems + buffers(m, graph) + angles(m, graph)


def epsilons(m: Materials, in_graph: Mapping[str, Sequence[float]]) -> list[str]:
    """Law 1, of the norms whose weight the graph holds. in_graph: {module: each norm's}."""
    problems = []
    for name, module in m.float_model.named_modules():
        expected = _epsilon(module)
        if expected is None or f"{name}.weight" not in m.names.parameters:
            continue
        if name not in in_graph:
            problems.append(
                f"{name}: no epsilon is found in the graph, torch's is {expected:.3g}; expected a "
                "norm in one operator, or the square root of a mean plus a constant"
            )
        problems += [
            f"{name}: epsilon is {epsilon:.3g}, torch's is {expected:.3g}"
            for epsilon in in_graph.get(name, ())
            if not np.isclose(epsilon, expected, rtol=2 * UNIT["fp32"], atol=0)
        ]
    return problems


def _epsilon(module: nn.Module) -> float | None:
    """Of a norm; RMS norms of transformers are classes of each architecture's own, known by the
    name they give it."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return epsilon if isinstance(epsilon, float) and hasattr(module, "weight") else None


def functions(m: Materials, forms: Mapping[str, str]) -> list[str]:
    """Law 2. forms: {module: "none" (erf) or "tanh"}."""
    modules = dict(m.float_model.named_modules())
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    problems = []
    for name, form in forms.items():
        module = modules.get(name)
        if not name or module is None or any(True for _ in module.children()):
            continue
        with torch.no_grad():
            values = module(x)
        far = {f: float((nn.functional.gelu(x, approximate=f) - values).abs().max()) for f in FORMS}
        nearest = min(far, key=lambda f: far[f])
        if form != nearest:
            problems.append(
                f"{name}: GELU is {FORMS[form]} in the graph, {FORMS[nearest]} in torch"
            )
    return problems


FORMS = {"none": "by erf", "tanh": "by tanh"}


def buffers(m: Materials, graph: Source) -> list[str]:
    """Law 3. Those that the exporter computed away have no initializer, and are not looked for."""
    ours = dict(m.folded_model.named_buffers())
    problems = []
    for name, stored in cut.initializers_among(graph, ours).items():
        value = ours[name].detach().numpy().astype(stored.dtype)
        if stored.size != value.size or not np.array_equal(stored.ravel(), value.ravel()):
            problems.append(f"{name}: the graph holds other values")
    return problems


def angles(m: Materials, graph: Source) -> list[str]:
    """Law 4. The angle is rounded once, its cosine to ULPS units in the last place."""
    problems = []
    for name, table in cut.initializers_among(graph, TABLES).items():
        far = []
        for buffer, frequencies in m.float_model.named_buffers():
            owner = m.float_model.get_submodule(buffer.rpartition(".")[0])
            if not buffer.endswith("inv_freq") or len(frequencies) != table.shape[1]:
                continue
            scale = float(getattr(owner, "attention_scaling", 1.0))
            angle = np.arange(len(table))[:, None] * frequencies.detach().double().numpy()
            bound = UNIT["fp32"] * (angle + 2 * ULPS + 1)
            error = np.abs(table.astype(np.float64) / scale - TABLES[name](angle))
            far.append((float((error / bound).max()), buffer))
        if far and not min(far)[0] <= 1:
            problems.append(
                f"{min(far)[1]}: {name} is {min(far)[0]:.3g} times as far from its angles as "
                "rounding goes"
            )
    return problems
