"""Scales and norm weights tuned end to end, on a tiny random language model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimizer.compress.methods.precision.language_model import Batch, LanguageModel
from optimizer.compress.methods.weights.rtn import rtn
from optimizer.compress.methods.weights.scale_tuning import (
    LearningRates,
    TuningSettings,
    tune_scales,
)
from optimizer.compress.methods.weights.tuned import Tuned
from optimizer.foundation.qtensor import Scheme
from optimizer.foundation.sections.method_options import ScaleTuningOptions
from tests.conftest import heavy_tailed

WIDTH, VOCABULARY = 32, 50
SCHEMES = [
    Scheme(4, granularity="group", group_size=16),
    Scheme(4, symmetric=False, granularity="group", group_size=16),
    Scheme(4, granularity="group", group_size=16, full_range=True),
    Scheme(3),
    Scheme(4, granularity="tensor"),
]


class Tiny(nn.Module):
    """Embedding, three residual linears with norm weights, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=generator))
        self.norm_weights = nn.ParameterList(torch.ones(WIDTH) for _ in range(3))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        for i, linear in enumerate(self.linears):
            linear.weight = nn.Parameter(heavy_tailed((WIDTH, WIDTH), seed=i))

    def forward(self, batch: Batch) -> Tensor:
        x = self.embedding[batch["input_ids"]]
        for gain, linear in zip(self.norm_weights, self.linears, strict=True):
            x = x + torch.tanh(linear(x * gain))
        return x / 4

    def named(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return (
            {f"linears.{i}": m for i, m in enumerate(self.linears)},
            {f"norm_weights.{i}": g for i, g in enumerate(self.norm_weights)},
        )


def batches(n: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(0, VOCABULARY, (2, 16), generator=generator),
            "attention_mask": torch.ones(2, 16, dtype=torch.int64),
        }
        for _ in range(n)
    ]


def tuned(model: Tiny, scheme: Scheme = SCHEMES[0], **changed: Any) -> Tuned:
    linears, norm_weights = model.named()
    start = {name: rtn(m.weight.detach(), scheme) for name, m in linears.items()}
    data = {"batches": batches(12), "held_out": batches(4, seed=1)}
    data |= {name: changed.pop(name) for name in data if name in changed}
    rates = changed.pop("rates", LearningRates(4e-3, 4e-3))
    training = TuningSettings(rates, changed.pop("dtype", torch.float32))
    options = ScaleTuningOptions(**{"epochs": 6} | changed)
    whole = LanguageModel(model, model.embedding, linears, norm_weights)
    return tune_scales(whole, start, data["batches"], data["held_out"], options, training)


def divergence(model: Tiny, made: Tuned, on: list[Batch]) -> float:
    """Mean KL(float || made), by torch's own loss."""
    other = Tiny()
    linears, norm_weights = other.named()
    for name, linear in linears.items():
        linear.weight = nn.Parameter(made.weights[name].dequantize())
    with torch.no_grad():
        for name, gain in norm_weights.items():
            gain.copy_(made.norm_weights[name])
        p, q = (
            torch.cat([(m(b) @ m.embedding.T).log_softmax(-1).flatten(0, 1) for b in on])
            for m in (model, other)
        )
    return float(nn.functional.kl_div(q, p, log_target=True, reduction="batchmean"))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_answers_come_closer_on_text_held_out(scheme: Scheme) -> None:
    made = tuned(Tiny(), scheme)
    assert made.after < 0.9 * made.before


def test_the_loss_reported_is_the_kl_of_what_is_returned() -> None:
    model = Tiny()
    made = tuned(model)
    assert divergence(model, made, batches(4, seed=1)) == pytest.approx(made.after, rel=1e-4)


def test_the_codes_stay() -> None:
    model = Tiny()
    made = tuned(model)
    for name, linear in model.named()[0].items():
        assert torch.equal(
            made.weights[name].integers, rtn(linear.weight.detach(), SCHEMES[0]).integers
        )


def test_steps_that_only_do_harm_leave_the_start() -> None:
    made = tuned(Tiny(), rates=LearningRates(2.0, 2.0))
    assert made.after == made.before
    assert all(torch.equal(g, torch.ones(WIDTH)) for g in made.norm_weights.values())


def test_the_model_holds_its_own_weights_afterwards() -> None:
    model = Tiny()
    kept = {n: p.detach().clone() for n, p in model.state_dict().items()}
    tuned(model)
    assert all(torch.equal(v, kept[n]) for n, v in model.state_dict().items())


def test_the_same_seed_gives_the_same_scales() -> None:
    one, two, other = (tuned(Tiny(), epochs=1, seed=s) for s in (1, 1, 2))
    assert torch.equal(one.weights["linears.0"].scale, two.weights["linears.0"].scale)
    assert not torch.equal(one.norm_weights["norm_weights.0"], other.norm_weights["norm_weights.0"])


def test_padding_has_no_say() -> None:
    plain = batches(12)
    padded = [
        {
            "input_ids": torch.cat([torch.full((2, 5), 7), b["input_ids"]], 1),
            "attention_mask": torch.cat([torch.zeros(2, 5), b["attention_mask"]], 1),
        }
        for b in plain
    ]
    one, two = (tuned(Tiny(), batches=b, epochs=2) for b in (plain, padded))
    assert one.after == pytest.approx(two.after, rel=1e-3)


def test_nothing_held_out_is_refused() -> None:
    with pytest.raises(ValueError, match="held_out"):
        tuned(Tiny(), held_out=[])


def test_a_start_for_other_modules_is_refused() -> None:
    model = Tiny()
    linears, norm_weights = model.named()
    whole = LanguageModel(model, model.embedding, linears, norm_weights)
    with pytest.raises(ValueError, match="must name"):
        tune_scales(whole, {}, batches(1), batches(1), ScaleTuningOptions(epochs=1))
