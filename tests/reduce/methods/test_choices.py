"""Each importance keeps its promise, on correlated inputs with heavy tails."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optimizer.reduce.methods import fisher, least_squares, magnitude, second_order
from optimizer.reduce.methods.least_squares import solve_factors, solve_weights
from tests.conftest import heavy_tailed

UNITS, OUT, TOKENS, KEEP = 48, 24, 600, 32


def layer(seed: int) -> tuple[Tensor, Tensor]:
    """weight (out, units) and inputs (tokens, units) that share a few directions."""
    shared = heavy_tailed((TOKENS, 12), seed, 1.0)
    x = shared @ heavy_tailed((12, UNITS), seed + 1, 1.0) + heavy_tailed(
        (TOKENS, UNITS), seed + 2, 0.3
    )
    return heavy_tailed((OUT, UNITS), seed + 3, 1.0), x.relu()


def output_error(kept_weight: Tensor, weight: Tensor, hessian: Tensor, kept: Tensor) -> float:
    """The sum over tokens of |V x_k - W x|^2, on the inputs x that `hessian` was summed over."""
    difference = -weight.double()
    difference[:, kept] += kept_weight.double()
    return float(((difference @ hessian.double()) * difference).sum())


@pytest.mark.parametrize("seed", range(4))
def test_second_order_is_better_than_fisher_and_fisher_than_magnitude(seed: int) -> None:
    """Of the same output error: least squares over all weights holds factors as a special case,
    and factors hold leaving the weights as they are."""
    W, x = layer(10 * seed)
    H = x.T @ x
    # the log-likelihood of a Gaussian observation of y = W x: gradients by the masks
    noise = torch.randn(TOKENS, OUT, generator=torch.Generator().manual_seed(seed))
    gradients = (noise @ W) * x
    kept = {
        "magnitude": magnitude.measure_importance([], W, UNITS).topk(KEEP).indices.sort().values,
        "fisher": fisher.choose(gradients, KEEP),
        "second_order": second_order.choose(W, H, H, UNITS, KEEP),
    }
    error = {
        "magnitude": output_error(W[:, kept["magnitude"]], W, H, kept["magnitude"]),
        "fisher": output_error(solve_factors(W, H, H, kept["fisher"]), W, H, kept["fisher"]),
        "second_order": output_error(
            solve_weights(W, H, H, kept["second_order"]), W, H, kept["second_order"]
        ),
    }
    assert error["second_order"] < error["fisher"] < error["magnitude"]


def test_greedy_second_order_is_near_the_best_choice_there_is() -> None:
    """Of a layer small enough to try every choice."""
    from itertools import combinations

    W, x = layer(3)
    W, x = W[:, :9], x[:, :9]
    H = x.T @ x

    def error(kept: Tensor) -> float:
        return output_error(solve_weights(W, H, H, kept), W, H, kept)

    every = sorted(error(torch.tensor(k)) for k in combinations(range(9), 6))
    greedy = error(second_order.choose(W, H, H, 9, 6))
    assert greedy <= every[len(every) // 20]


def test_adjusted_weights_are_the_least_squares_solution() -> None:
    """Against numpy's own, with the damping as further rows."""
    W, x = layer(5)
    f = x + 0.1 * heavy_tailed((TOKENS, UNITS), 9, 1.0)
    kept = torch.arange(0, UNITS, 2)
    d = least_squares.choose_damping(x.T @ x, kept)
    rows = torch.cat([x[:, kept].double(), d**0.5 * torch.eye(len(kept), dtype=torch.float64)])
    targets = torch.cat([(f @ W.T).double(), d**0.5 * W[:, kept].T.double()])
    expected = torch.linalg.lstsq(rows, targets).solution.T
    torch.testing.assert_close(
        solve_weights(W, x.T @ x, f.T @ x, kept), expected, rtol=1e-4, atol=1e-5
    )


def test_factors_are_the_best_of_their_kind() -> None:
    """No factor can be moved for less error, but for what damping holds back."""
    W, x = layer(6)
    H, kept = x.T @ x, torch.arange(KEEP)
    best = solve_factors(W, H, H, kept)
    error = output_error(best, W, H, kept)
    for column in (0, 7, 20):
        for factor in (0.9, 1.1):
            moved = best.clone()
            moved[:, column] *= factor
            assert output_error(moved, W, H, kept) > 0.999 * error


@pytest.mark.parametrize("size", [1, 4])
def test_second_order_leaves_out_what_repeats_another_unit(size: int) -> None:
    """Its weight is the largest, so magnitude keeps it; but others carry the same signal."""
    units = UNITS // size
    W, x = layer(8)
    W = W.clone()
    x[:, :size] = x[:, size : 2 * size]
    W[:, :size] *= 20
    H = x.T @ x
    kept = second_order.choose(W, H, H, units, units - 1)
    assert len({0, 1} - {*kept.tolist()}) == 1
    columns = (kept[:, None] * size + torch.arange(size)).reshape(-1)
    error = output_error(solve_weights(W, H, H, columns), W, H, columns)
    assert error < 1e-3 * float(((W @ H) * W).sum())


def test_fisher_exchanges_units_whose_gradients_cancel() -> None:
    """Two that each matter, and do nothing together, go before one that matters less alone."""
    g = heavy_tailed((200,), 1, 1.0)
    gradients = torch.stack(
        [g, -g, 0.9 * heavy_tailed((200,), 2, 1.0), heavy_tailed((200,), 3, 3.0)], 1
    )
    assert fisher.choose(gradients, 2).tolist() == [2, 3]
    assert gradients.square().mean(0).argmin() == 2


def test_sums_that_are_not_finite_are_refused() -> None:
    W, x = layer(2)
    x[0, 0] = torch.inf
    with pytest.raises(ValueError, match="NaN or infinite"):
        solve_weights(W, x.T @ x, x.T @ x, torch.arange(4))
