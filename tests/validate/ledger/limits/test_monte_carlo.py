"""Correct runs differ by the requested roundoff: without roundoff nothing moves, and integers
never do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from optimizer.compress.methods.weights.rtn import rtn
from optimizer.compress.simulate import QuantLinear
from optimizer.foundation.qtensor import Scheme
from optimizer.foundation.rounding.random_rounding import TABLE, Arithmetic, RandomRounding
from optimizer.foundation.state import Range
from optimizer.harness.inputs.batch import Batch
from optimizer.validate.ledger import trace
from optimizer.validate.ledger.limits import monte_carlo
from optimizer.validate.ledger.limits.monte_carlo import RoundedModel
from optimizer.validate.ledger.pieces.roundoff import UNIT
from tests.conftest import heavy_tailed

WIDTH = 32
MASK = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
IDS = np.arange(12).reshape(2, 6) % 10
BATCH = Batch({"input_ids": IDS, "attention_mask": MASK}, (), (), MASK.astype(bool))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(heavy_tailed((10, WIDTH), 1, 1.0))
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight = nn.Parameter(heavy_tailed((WIDTH, WIDTH), 2, 0.2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, return_dict: bool) -> Any:
        rows = self.table(input_ids)
        hidden = self.linear(self.norm(rows)).relu()
        scores = (hidden @ hidden.transpose(1, 2)).softmax(-1)
        counted = (attention_mask.cumsum(1) - 1).clamp(min=0)
        return {"rows": rows, "out": scores @ hidden, "counted": counted, "kept": return_dict}


@pytest.fixture
def model() -> nn.Module:
    return Small().eval().requires_grad_(False)


def outputs(model: nn.Module, arithmetic: Arithmetic, count: int = 1, seed: int = 0) -> Any:
    names = ("rows", "out", "counted")
    rounded = RoundedModel(model, ["linear"], arithmetic)
    runs = monte_carlo.make_runs(rounded, [BATCH], names, range(seed, seed + count))
    return [run[0] for run in runs]


EXACT = Arithmetic(unit=0.0, sums=0.0)


def test_no_roundoff_gives_the_same_bits(model: nn.Module) -> None:
    with torch.no_grad():
        plain = model(**{n: torch.from_numpy(a) for n, a in BATCH.items()}, return_dict=True)
    (found,) = outputs(model, EXACT)
    for name, array in found.items():
        np.testing.assert_array_equal(array, plain[name].numpy())


@pytest.mark.parametrize("part", ["unit", "sums"])
def test_what_moves_grows_with_the_roundoff(model: nn.Module, part: str) -> None:
    (exact,) = outputs(model, EXACT)

    def moved(by: float) -> float:
        given = {"unit": 0.0, "sums": 0.0, part: by}
        (found,) = outputs(model, Arithmetic(**given))
        return float(np.linalg.norm(found["out"].astype(np.float64) - exact["out"]))

    assert moved(2.0**-16) == pytest.approx(16 * moved(2.0**-20), rel=0.2)


def test_integers_and_rows_that_are_only_moved_keep_their_bits(model: nn.Module) -> None:
    (exact,) = outputs(model, EXACT)
    (found,) = outputs(model, Arithmetic())
    np.testing.assert_array_equal(found["counted"], exact["counted"])
    np.testing.assert_array_equal(found["rows"], exact["rows"])
    assert not np.array_equal(found["out"], exact["out"])


def test_runs_differ_from_each_other_and_not_from_themselves(model: nn.Module) -> None:
    first, second = outputs(model, Arithmetic(), count=2)
    again = outputs(model, Arithmetic(), count=2)
    assert not np.array_equal(first["out"], second["out"])
    np.testing.assert_array_equal(again[1]["out"], second["out"])


def test_the_model_is_left_as_it_was(model: nn.Module) -> None:
    before = {n: p.clone() for n, p in model.named_parameters()}
    outputs(model, Arithmetic(unit=UNIT["fp16"], replaced={"linear.weight": 8.0}))
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    assert not model.get_submodule("linear")._forward_hooks


@pytest.mark.parametrize("every", [False, True])
def test_one_value_of_each_example_or_token_moves_by_one_step(every: bool) -> None:
    mode = RandomRounding(Arithmetic(), seed=1)
    mask = torch.from_numpy(BATCH["attention_mask"]).bool()
    x = heavy_tailed((2, 6, WIDTH), 3, 1.0)
    moved = monte_carlo._flipped(x, torch.full((2, 6, 1), 0.25), mask, mode, every) - x
    assert torch.allclose(moved[moved != 0].abs(), torch.tensor(0.25))
    changed = (moved != 0).sum(-1)
    if every:
        assert changed.tolist() == [[1] * 6] * 2
    else:
        assert changed.sum(1).tolist() == [1, 1]
        assert not changed[~mask].any()


@pytest.mark.parametrize(
    ("covered", "activations", "block", "expected"),
    [
        (None, None, 0, False),
        (None, None, 32, True),
        (None, "token", 0, True),
        (Range(-1.0, 1.0), "tensor", 0, True),
    ],
)
def test_values_flip_where_a_module_or_its_kernel_reads_integers(
    covered: Range | None, activations: Any, block: int, expected: bool
) -> None:
    q = rtn(heavy_tailed((8, 64), 1, 0.2), Scheme(bits=8, granularity="channel"))
    model = nn.Sequential(QuantLinear(q, None, activations, covered))
    blocks = {"0": block} if block else {}
    assert monte_carlo.flips_values(model, ["0"], Arithmetic(blocks=blocks)) is expected


def test_a_quantized_module_meets_a_flip_of_its_own_step(model: nn.Module) -> None:
    linear = model.get_submodule("linear")
    assert isinstance(linear, nn.Linear)
    q = rtn(linear.weight, Scheme(8, granularity="channel"))
    covered = Range(-4.0, 4.0)
    model.linear = QuantLinear(q, linear.bias, "tensor", covered)
    (exact,) = outputs(model, EXACT)
    (other,) = outputs(model, EXACT, seed=1)
    assert not np.array_equal(exact["out"], other["out"])


def test_between_linear_modules_these_answer_what_the_trace_says(model: nn.Module) -> None:
    one = trace.trace_run(model, BATCH, ["out"], ["linear"])
    linear = model.get_submodule("linear")
    linear.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH), requires_grad=False)  # not multiplied
    ((exact,),) = monte_carlo.run_between(RoundedModel(model, (), EXACT), [one], ["out"], [0])
    np.testing.assert_array_equal(exact["linear:input:0"], one.inputs["linear", 0])
    np.testing.assert_array_equal(exact["out"], one.result["out"])
    ((moved,),) = monte_carlo.run_between(
        RoundedModel(model, (), Arithmetic()), [one], ["out"], [0]
    )
    assert 0 < np.abs(moved["out"] - exact["out"]).max() < 1e-4 * np.abs(exact["out"]).max()
    assert model.get_submodule("linear") is linear


def test_runs_at_the_same_time_give_the_bits_of_one_alone(model: nn.Module) -> None:
    coarse = Arithmetic(unit=UNIT["fp16"])  # rounds parameters too
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (alone,) = outputs(model, coarse)
    several = outputs(model, coarse, 5)
    for name, array in alone.items():
        np.testing.assert_array_equal(several[0][name], array)
    assert len({run["out"].tobytes() for run in several}) == 5
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_large_output_is_moved_in_parts_with_the_bits_of_a_small_one(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    (at_once,) = outputs(model, Arithmetic())
    monkeypatch.setattr(monte_carlo, "TABLE", 3 * WIDTH)
    (in_parts,) = outputs(model, Arithmetic())
    np.testing.assert_array_equal(in_parts["out"], at_once["out"])


def test_a_tensor_longer_than_the_table_is_moved_by_the_same_numbers() -> None:
    value = torch.ones(TABLE + 1000)
    one, other = (RandomRounding(Arithmetic(), 3) for _ in range(2))
    moved = one.moved(value, 0.5)
    torch.testing.assert_close(moved, 1 + 0.5 * other.noise(value), rtol=0, atol=0)


def test_the_copy_of_a_run_has_one_module_in_two_places_once() -> None:
    linear = nn.Linear(2, 2)
    model = nn.ModuleDict({"first": linear, "second": linear, "tied": nn.Linear(2, 2)})
    model["tied"].weight = linear.weight
    own = monte_carlo.copy_modules(model)
    assert own["first"] is own["second"] is not linear
    assert own["tied"].weight is own["first"].weight is not linear.weight


def test_no_mode_of_torch_stays_after_runs(model: nn.Module) -> None:
    outputs(model, Arithmetic(), 4)
    assert not is_in_torch_dispatch_mode()


def test_an_error_inside_a_linear_module_is_the_one_that_is_raised(model: nn.Module) -> None:
    good, bad = (trace.trace_run(model, BATCH, ["out"], ["linear"]) for _ in range(2))
    del bad.outputs["linear", 0]
    with pytest.raises(KeyError, match="linear"):
        list(monte_carlo.run_between(RoundedModel(model, (), EXACT), [good, bad], ["out"], [0]))
    (found,) = outputs(model, EXACT)
    assert found["out"].any()


def test_infinity_of_a_mask_is_never_moved_to_nan() -> None:
    mask = torch.full((64,), -torch.inf)
    with RandomRounding(Arithmetic(), seed=0):
        moved = torch.zeros(64) + mask
    assert not moved.isnan().any()
    assert (moved <= torch.finfo(torch.float32).min).all()
