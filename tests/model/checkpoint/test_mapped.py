"""Tests of tensors in mapped files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.mapped import (
    SMALLEST,
    Scratch,
    WidenedTensor,
    map_tensor,
    map_weight,
)
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.validate.ledger.limits.monte_carlo import copy_modules
from tests.decoders import write_tiny_decoder


@pytest.fixture(params=[torch.bfloat16, torch.float16])
def weight(request: pytest.FixtureRequest) -> torch.Tensor:
    """Weight (out, in) float32 of SMALLEST bytes whose values half precision holds exactly."""
    values = torch.randn(SMALLEST // 1024, 256)
    values[0, :2] = torch.tensor([2.0**-24, -0.0])  # the smallest value of float16
    return values.to(request.param).float()


def test_a_mapped_tensor_has_the_same_values_and_its_file_no_name(tmp_path: Path) -> None:
    values = torch.randn(SMALLEST // 4, 3).T
    mapped = map_tensor(values, tmp_path)
    assert torch.equal(mapped, values)
    assert mapped.data_ptr() != values.data_ptr()
    assert not list(tmp_path.iterdir())


def test_changing_a_mapped_tensor_changes_no_other_of_the_same_values() -> None:
    values = torch.zeros(SMALLEST)
    first, second = map_tensor(values), map_tensor(values)
    first += 1
    assert not second.any()
    assert not values.any()


def test_a_small_tensor_stays_in_memory() -> None:
    values = torch.ones(SMALLEST // 4 - 1)
    assert map_tensor(values) is values


def test_the_memory_of_the_process_does_not_grow_with_a_mapped_tensor(tmp_path: Path) -> None:
    def allocated() -> int:
        fields = Path("/proc/self/smaps_rollup").read_text().split("\n")
        return 1024 * sum(int(f.split()[1]) for f in fields if f.startswith("Anonymous:"))

    values = map_tensor(torch.zeros(1 << 24), tmp_path)
    before = allocated()
    assert float(values.sum()) == 0
    assert allocated() - before < values.nbytes // 4


def test_a_weight_of_half_precision_lies_in_half_the_bytes_and_keeps_its_values(
    weight: torch.Tensor,
) -> None:
    mapped = map_weight(weight, Scratch())
    assert isinstance(mapped, WidenedTensor)
    assert mapped.stored.nbytes == weight.nbytes // 2
    assert mapped.dtype == torch.float32
    assert torch.equal(mapped, weight)
    assert (mapped.detach().numpy() == weight.numpy()).all()


def test_a_weight_that_half_precision_does_not_hold_stays_float32(weight: torch.Tensor) -> None:
    weight[3, 5] = 1 + 2**-20
    mapped = map_weight(weight, Scratch())
    assert not isinstance(mapped, WidenedTensor)
    assert torch.equal(mapped, weight)


def test_products_and_look_ups_of_a_widened_weight_have_the_same_bits(
    weight: torch.Tensor,
) -> None:
    mapped, x = map_weight(weight, Scratch()), torch.randn(2, 5, 256)
    ids = torch.randint(0, len(weight), (2, 5))
    bias = torch.randn(len(weight))
    for used in (nn.functional.linear, lambda x, w: nn.functional.linear(x, w, bias)):
        assert torch.equal(used(x, mapped), used(x, weight))
    assert torch.equal(nn.functional.embedding(ids, mapped), weight[ids])


def test_no_result_changes_when_another_widened_weight_is_used(weight: torch.Tensor) -> None:
    scratch = Scratch()
    first, second = map_weight(weight, scratch), map_weight(-weight, scratch)
    used = (
        lambda w: w.view(-1),
        lambda w: w[3],
        lambda w: w[:, 5:9],
        lambda w: w.split(512)[1],
        lambda w: w.view(torch.int32),
        lambda w: w.expand(2, *w.shape),
        lambda w: w.abs(),
        lambda w: w.T @ w,
    )
    results = [use(first) for use in used]
    assert torch.equal(first + second, torch.zeros_like(weight))
    assert torch.equal(second * 2, -2 * weight)
    assert all(torch.equal(r, use(weight)) for r, use in zip(results, used, strict=True))


def test_changing_a_widened_weight_or_a_view_of_it_is_refused(weight: torch.Tensor) -> None:
    mapped = map_weight(weight, Scratch())
    for changed in (mapped, mapped.detach(), mapped.T, mapped[3], mapped.view(-1), mapped[:, 5]):
        with pytest.raises(TypeError, match="half precision"):
            changed.mul_(2)
    with pytest.raises(TypeError, match="half precision"):
        mapped[3, 5] = 0


def test_a_decoder_of_widened_weights_has_the_logits_of_float32(tmp_path: Path) -> None:
    file = write_tiny_decoder(tmp_path / "checkpoint", intermediate_size=SMALLEST // 256)
    tensors = load_file(file / "model.safetensors")
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(halves, file / "model.safetensors", {"format": "pt"})
    scratch = Scratch()
    plain, widened = (
        load_torch_model(open_checkpoint(tmp_path), "text-generation", place=place)
        for place in (lambda tensor: tensor, lambda tensor: map_weight(tensor, scratch))
    )
    assert sum(isinstance(p, WidenedTensor) for p in widened.parameters()) == 6
    ids, models = torch.tensor([[5, 6, 7, 8]]), (widened, copy_modules(widened))
    with torch.no_grad(), ThreadPoolExecutor(2) as threads:  # each thread has a scratch of its own
        for logits in threads.map(lambda i: models[i % 2](ids).logits, range(8)):
            assert torch.equal(logits, plain(ids).logits)
