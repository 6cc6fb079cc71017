"""Rounded again on resampled texts, a correct row resembles its null model and a worse one does
not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from optimizer.compress.stage import STAGE as COMPRESS
from optimizer.foundation.qtensor import QTensor
from optimizer.load.stage import STAGE as LOAD
from optimizer.validate.ledger.laws import state_laws
from optimizer.validate.ledger.limits import resampled
from optimizer.validate.ledger.limits.resampled import ResampledRows, Suspect
from optimizer.validate.materials import Materials
from tests.decoders import write_tiny_decoder
from tests.validate.decoder_runs import INT4, DecoderRun, decoder_recipe
from tests.validate.runs import FOLDERS

PARAMETER = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    """A decoder of one block, its weights by gptq; nothing after compress."""
    root = tmp_path_factory.mktemp("resampled")
    model = write_tiny_decoder(root / "checkpoint", layers=1)
    recipe = decoder_recipe(str(model), root, {"method": "gptq", "weights": INT4})
    for name in FOLDERS:
        (root / name).mkdir()
    LOAD.run(recipe.model, out=root / "source")
    COMPRESS.run(recipe.compression, root / "source", out=root / "state")
    return DecoderRun(root, recipe.validation(recipe.targets[0])).materials()


def suspects(rows: range, looks: int) -> list[Suspect]:
    statistic = state_laws._holding(None, False)
    return [Suspect(PARAMETER, row, statistic, f"row {row}", looks) for row in rows]


def judged(m: Materials, change: Callable[[QTensor], QTensor], rows: range) -> list[str]:
    """Problems of the rows when the state's weight is changed."""
    state = m.state
    weights = dict(state.weights)
    weights[PARAMETER] = change(weights[PARAMETER])
    other = replace(m)  # a cached state would hide the change
    other.__dict__["state"] = replace(state, weights=weights)
    for name in ("simulated_model", "folded_model", "float_model"):
        other.__dict__[name] = getattr(m, name)
    refused, unjudged = resampled.judge_suspects(other, suspects(rows, 64))
    assert unjudged == []
    return refused


def test_rows_as_the_method_rounded_them_are_not_refused(rounded: Materials) -> None:
    assert judged(rounded, lambda q: q, range(64)) == []


def test_rows_that_hold_less_of_their_weight_are_refused_and_no_others(rounded: Materials) -> None:
    def lost(q: QTensor) -> QTensor:
        codes = q.integers.clone()
        codes[3] = codes[3] // 2
        return replace(q, integers=codes)

    refused = judged(rounded, lost, range(8))
    assert len(refused) == 1
    assert refused[0].startswith("row 3;")


def test_a_correct_row_is_refused_as_rarely_as_is_said() -> None:
    """Simulated: 2,000 null models of six resamples of 24 rows, no look beyond its limit."""
    draw = np.random.default_rng(1)
    for _ in range(2_000):
        null = draw.normal(0.97, 0.01, (resampled.RESAMPLES + 1, resampled.CONTROLS))
        mine, null = null[0, 0], null[1:]
        assert abs(mine - null[:, 0].mean()) <= resampled._limit(null, 0, looks=1000)


def test_a_row_that_varies_more_than_the_others_has_a_wider_limit() -> None:
    null = np.random.default_rng(2).normal(0, 1e-3, (resampled.RESAMPLES, resampled.CONTROLS))
    wide = null.copy()
    wide[:, 5] *= 100
    assert resampled._limit(wide, 5, 10) > 10 * resampled._limit(null, 5, 10)


def test_a_learned_weight_has_no_null_model_and_is_not_refused(rounded: Materials) -> None:
    other = replace(rounded)
    other.rounding = lambda name: replace(rounded.rounding(name), learned=True)  # type: ignore[method-assign]
    refused, unjudged = resampled.judge_suspects(other, suspects(range(2), 64))
    assert refused == []
    assert len(unjudged) == 2


def chosen(parameter: str, m: Materials) -> ResampledRows:
    weight = m.rounded_weight(parameter)
    return ResampledRows(parameter, torch.arange(len(weight)), weight, ())


def test_sums_taken_in_one_pass_are_those_that_each_weight_has_alone(rounded: Materials) -> None:
    names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    several = [chosen(f"model.layers.0.{n}.weight", rounded) for n in names]
    alone = [resampled._sums(rounded, [one])[0] for one in several]
    for together, own in zip(resampled._sums(rounded, several), alone, strict=True):
        for sums, expected in zip(together, own, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(sums, expected, strict=True))


def test_a_pass_holds_no_more_than_the_float_weights_or_one_weights_sums(
    rounded: Materials,
) -> None:
    most = sum(4 * p.numel() for p in rounded.float_model.parameters())
    large = chosen(PARAMETER, rounded)
    small = replace(large, weight=large.weight[:, :16])
    several = [small, large, *[small] * (3 * most // small.memory), large]
    groups = list(resampled._together(rounded, several))
    sizes = [sum(c.memory for c in group) for group in groups]
    assert [c for group in groups for c in group] == several
    assert all(size <= most for size, g in zip(sizes, groups, strict=True) if len(g) > 1)
    assert all(
        size + after[0].memory > most for size, after in zip(sizes[:-1], groups[1:], strict=True)
    )


def test_a_resample_is_the_method_on_the_texts_counted_anew(rounded: Materials) -> None:
    """Poisson counts of mean 1: sums differ from each other, and their mean is near the plain
    sum's."""
    (sums,) = resampled._sums(rounded, [chosen(PARAMETER, rounded)])
    first, second = sums[0][0], sums[1][0]
    assert not torch.equal(first, second)
    traces = torch.stack([h.trace() for h, _ in sums])
    assert float(traces.std() / traces.mean()) < 1


@pytest.mark.parametrize("lengths", [(7,), (4, 3)])
def test_each_text_counts_as_often_as_was_drawn(
    rounded: Materials, lengths: tuple[int, ...]
) -> None:
    """H and P are the texts' own sums, each times its Poisson count: of one text and of several."""
    one = chosen(PARAMETER, rounded)
    draw = torch.Generator().manual_seed(3)
    rows = torch.randn(sum(lengths), one.weight.shape[1], generator=draw)
    missed = torch.randn(sum(lengths), len(one.weight), generator=draw)
    real = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    collecting = resampled._Accumulator(rounded, one)
    collecting._count(real, rows, missed)
    counts = torch.Generator().manual_seed(1)
    for h, p in collecting.sums():
        times = torch.poisson(torch.ones(len(lengths)), generator=counts)
        parts = zip(times, rows.split(lengths), missed.split(lengths), strict=True)
        sums = [(n * x.T @ x, n * x.T @ m) for n, x, m in parts]
        torch.testing.assert_close(h, sum(a for a, _ in sums))
        assert p is not None
        torch.testing.assert_close(p, sum(b for _, b in sums))
