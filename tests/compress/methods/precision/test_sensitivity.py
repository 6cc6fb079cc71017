"""Predicted costs, held against what changed weights do to a tiny model's answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from optimizer.compress.methods.precision.language_model import LanguageModel
from optimizer.compress.methods.precision.sensitivity import (
    Curvature,
    predict_cost,
    visit_output_gradients,
)
from optimizer.compress.methods.weights.rtn import rtn
from optimizer.foundation.qtensor import Scheme
from tests.compress.methods.weights.test_scale_tuning import Batch, Tiny, batches


def curvatures(model: Tiny, texts: list[Batch], seed: int = 0) -> dict[str, Curvature]:
    """By linear, from its inputs and the gradients at its output."""
    linears, _ = model.named()
    slopes: dict[str, list[Tensor]] = {n: [] for n in linears}
    inputs: dict[str, list[Tensor]] = {n: [] for n in linears}

    def keep(name: str) -> Callable[..., None]:
        return lambda _m, args: inputs[name].append(args[0].detach())

    handles = [m.register_forward_pre_hook(keep(n)) for n, m in linears.items()]
    whole = LanguageModel(model, model.embedding, linears)
    visit_output_gradients(whole, texts, lambda n, s: slopes[n].append(s), seed=seed)
    for handle in handles:
        handle.remove()
    found = {n: Curvature(m.out_features, m.in_features) for n, m in linears.items()}
    for name, curvature in found.items():
        for text, slope, x in zip(texts, slopes[name], inputs[name], strict=True):
            curvature.add(slope, x[text["attention_mask"].bool()])
    return found


def divergence(model: Tiny, name: str, weight: Tensor, on: list[Batch]) -> float:
    """Mean KL in nats when one weight is another."""
    linear = model.named()[0][name]
    with torch.no_grad():
        p = torch.cat([(model(b) @ model.embedding.T).log_softmax(-1).flatten(0, 1) for b in on])
        kept, linear.weight = linear.weight, nn.Parameter(weight)
        q = torch.cat([(model(b) @ model.embedding.T).log_softmax(-1).flatten(0, 1) for b in on])
        linear.weight = kept
    return float(nn.functional.kl_div(q, p, log_target=True, reduction="batchmean"))


def singles(count: int) -> list[Batch]:
    """Texts, one by one."""
    return [{k: t[i : i + 1] for k, t in b.items()} for b in batches(count // 2) for i in (0, 1)]


def test_what_rounding_one_weight_costs_is_foretold() -> None:
    model, texts = Tiny(), singles(80)
    linears, _ = model.named()
    curved = curvatures(model, texts)
    for name, linear in linears.items():
        for bits in (3, 4, 8):
            weight, scheme = linear.weight.detach(), Scheme(bits)
            said = predict_cost(weight, scheme, curved[name].outputs, curved[name].inputs)
            true = divergence(model, name, rtn(weight, scheme).dequantize(), texts)
            assert said == pytest.approx(true, rel=0.5)


def test_padding_has_no_say() -> None:
    model, plain = Tiny(), singles(8)
    padded = [
        {
            "input_ids": torch.cat([b["input_ids"], torch.full((1, 5), 7)], 1),
            "attention_mask": torch.cat([b["attention_mask"], torch.zeros(1, 5)], 1),
        }
        for b in plain
    ]
    one, two = (curvatures(model, texts) for texts in (plain, padded))
    for name in one:
        assert torch.allclose(one[name].outputs, two[name].outputs, rtol=1e-4)
        assert torch.allclose(one[name].inputs, two[name].inputs, rtol=1e-3, atol=1e-7)


def test_the_same_seed_draws_the_same_text() -> None:
    first = [curvatures(Tiny(), singles(2), seed)["linears.0"].outputs for seed in (1, 1, 2)]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


def test_a_module_that_no_answer_depends_on_is_named() -> None:
    model = Tiny()
    linears = {**model.named()[0], "idle": nn.Linear(2, 2)}
    whole = LanguageModel(model, model.embedding, linears)
    with pytest.raises(ValueError, match="idle"):
        visit_output_gradients(whole, singles(2), lambda _n, _s: None)


def test_curvature_is_that_of_whole_texts() -> None:
    """Two tokens whose gradients cancel cost nothing together."""
    curved = Curvature(2, 3)
    curved.add(torch.tensor([[1.0, 2.0], [-1.0, -2.0]]), torch.ones(2, 3))
    assert not bool(curved.outputs.any())
    assert not bool(curved.inputs.any())
