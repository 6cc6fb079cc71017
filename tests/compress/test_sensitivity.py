"""Predicted costs, held against what changed weights do to a tiny model's answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from optimizer.compress.gptq import gptq
from optimizer.compress.rtn import rtn
from optimizer.compress.sensitivity import Slopes, metric, output_slopes, predicted
from optimizer.qtensor import Scheme
from tests.compress import correlated
from tests.compress.test_distill import Batch, Tiny, batches

G16 = Scheme(4, granularity="group", group_size=16)


def weighted(model: Tiny, slopes: Mapping[str, Slopes], on: list[Batch]) -> dict[str, Tensor]:
    """A of each linear."""
    seen: dict[str, list[Tensor]] = {}
    linears, _ = model.named()

    def keep(name: str) -> Callable[..., None]:
        return lambda _m, args: seen.setdefault(name, []).append(args[0].flatten(0, -2))

    handles = [m.register_forward_pre_hook(keep(n)) for n, m in linears.items()]
    with torch.no_grad():
        for batch in on:
            model(batch)
    for handle in handles:
        handle.remove()
    found = {}
    for name, rows in seen.items():
        x, share = torch.cat(rows), torch.cat(slopes[name].tokens)
        found[name] = (x * share[:, None] / share.sum()).T @ x
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


def test_what_rounding_one_weight_costs_is_foretold() -> None:
    model, text = Tiny(), batches(40)
    linears, _ = model.named()
    slopes = output_slopes(model, model.embedding, linears, text)
    seen = weighted(model, slopes, text)
    for name, linear in linears.items():
        for bits in (3, 4, 8):
            scheme = Scheme(bits)
            weight = linear.weight.detach()
            said = predicted(weight, scheme, slopes[name].outputs, metric(seen[name]))
            true = divergence(model, name, rtn(weight, scheme).dequantize(), text)
            assert said == pytest.approx(true, rel=0.5)


def test_padding_has_no_say_in_the_mean() -> None:
    model, plain = Tiny(), batches(4)
    padded = [
        {
            "input_ids": torch.cat([b["input_ids"], torch.full((2, 5), 7)], 1),
            "attention_mask": torch.cat([b["attention_mask"], torch.zeros(2, 5)], 1),
        }
        for b in plain
    ]
    linears, _ = model.named()
    one, two = (output_slopes(model, model.embedding, linears, b) for b in (plain, padded))
    assert all(torch.allclose(one[n].outputs, two[n].outputs, rtol=1e-4) for n in one)
    assert all(len(t) == 32 for n in two for t in two[n].tokens)


def test_the_same_seed_draws_the_same_text() -> None:
    model, text = Tiny(), batches(2)
    linears, _ = model.named()
    one, two, other = (
        output_slopes(model, model.embedding, linears, text, seed=s) for s in (1, 1, 2)
    )
    first = [made["linears.0"].outputs for made in (one, two, other)]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


def test_a_module_that_no_answer_depends_on_is_named() -> None:
    model = Tiny()
    linears = {**model.named()[0], "idle": nn.Linear(2, 2)}
    with pytest.raises(ValueError, match="idle"):
        output_slopes(model, model.embedding, linears, batches(1))


def test_what_gptq_cannot_move_on_multiplies_to_the_determinant() -> None:
    _, moment = correlated.layer(inputs=32)
    costs = metric(moment, moment)
    assert costs.importance is not None
    damped = moment.double() + 0.01 * moment.diagonal().mean() * torch.eye(32)
    assert float(costs.importance.double().log().sum()) == pytest.approx(
        float(damped.logdet()), rel=1e-4
    )
    assert bool((costs.importance <= damped.diagonal() * 1.0001).all())


def test_independent_inputs_answer_for_nothing() -> None:
    moment = torch.diag(torch.rand(32, generator=torch.Generator().manual_seed(1)) + 0.5)
    other = torch.diag(torch.rand(32, generator=torch.Generator().manual_seed(2)))
    costs = metric(other, moment)
    assert costs.left is not None
    assert torch.allclose(costs.left, other.diagonal(), rtol=1e-4)


@pytest.mark.parametrize("seed", [1, 5])
def test_what_gptq_leaves_is_foretold_where_tokens_count_unequally(seed: int) -> None:
    weight, moment = correlated.layer(seed)
    x = correlated.rows(1500, 128, seed)
    share = x[:, 1].abs().clamp(max=1)
    other = (x * share[:, None] / share.sum()).T @ x
    slopes = torch.rand(len(weight), generator=torch.Generator().manual_seed(1)) + 0.5
    error = gptq(weight, moment, G16, sweeps=0).q.dequantize() - weight
    true = 0.5 * float(slopes @ ((error @ other) * error).sum(1))
    assert predicted(weight, G16, slopes, metric(other, moment)) == pytest.approx(true, rel=0.35)
    assert predicted(weight, G16, slopes, metric(other)) > 1.5 * true
