"""The walk sees what the model sees: the same numbers, real tokens only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from optimizer.compress.apply.rounding import Inputs, _statistic
from optimizer.compress.walk import blocks as walk
from optimizer.compress.walk.capture import _compact, capture
from optimizer.load.checkpoint import open_checkpoint
from optimizer.load.model import materialize, skeleton, torch_model
from optimizer.recipe.quantize import Gptq

BLOCKS = ("encoder.layer.0", "encoder.layer.1")
QKV = [f"encoder.layer.0.attention.self.{n}" for n in ("query", "key", "value")]
PADDED = {
    "input_ids": torch.tensor([[2, 60, 70, 80, 3], [2, 61, 3, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
}


@pytest.fixture
def walked(loaded: Path) -> tuple[nn.Module, walk.Stream]:
    """A skeleton whose blocks are filled, and the stream before the first."""
    checkpoint = open_checkpoint(loaded)
    model = skeleton(checkpoint, "sentence-embedding")
    stream = capture(model, BLOCKS, checkpoint.tensors, [PADDED])
    for block in BLOCKS:
        materialize(model, block, checkpoint.tensors)
    return model, stream


def test_block_by_block_is_the_whole_model(
    loaded: Path, walked: tuple[nn.Module, walk.Stream]
) -> None:
    model, stream = walked
    for segment in walk.segments(stream.uses[0]):
        walk.run(model, stream, segment, lambda *_: None, (), advance=True)
    with torch.no_grad():
        whole = torch_model(open_checkpoint(loaded), "sentence-embedding")(**PADDED)[0]
    assert torch.equal(stream.hidden[0], whole)


def test_capture_leaves_a_skeleton(loaded: Path) -> None:
    checkpoint = open_checkpoint(loaded)
    model = skeleton(checkpoint, "sentence-embedding")
    capture(model, BLOCKS, checkpoint.tensors, [PADDED])
    assert all(p.is_meta for p in model.parameters())
    assert all("forward" not in m.__dict__ for m in model.modules())


def test_padding_is_never_seen(walked: tuple[nn.Module, walk.Stream]) -> None:
    model, stream = walked
    rows: list[Tensor] = []
    walk.run(model, stream, range(1), lambda _n, r, _real: rows.append(r), QKV)
    assert len(rows) == 1  # query, key and value read one tensor
    assert torch.equal(rows[0], stream.hidden[0][PADDED["attention_mask"].bool()])
    assert stream.tokens == 8 == len(rows[0])


def test_readers_of_one_tensor_are_recognised(walked: tuple[nn.Module, walk.Stream]) -> None:
    model, stream = walked
    other = "encoder.layer.0.output.dense"
    leader = walk.sharing(model, stream, range(1), [*QKV, other])
    assert leader == {**dict.fromkeys(QKV, QKV[0]), other: other}


def test_an_input_without_tokens_has_no_padding() -> None:
    real = PADDED["attention_mask"].bool()
    flat = torch.randn(10, 3)
    assert len(walk.real_rows(flat, real)) == 8
    assert len(walk.real_rows(torch.randn(1, 7, 3), real)) == 7


@pytest.mark.parametrize("padded", [PADDED, {n: t[:1] for n, t in PADDED.items()}])
@pytest.mark.parametrize("first_token", [0.0, 0.6])
def test_the_statistic_counts_the_first_token_of_every_text_as_it_is_told(
    loaded: Path, padded: dict[str, Tensor], first_token: float
) -> None:
    checkpoint = open_checkpoint(loaded)
    model = skeleton(checkpoint, "sentence-embedding")
    stream = capture(model, BLOCKS, checkpoint.tensors, [padded, padded])
    for block in BLOCKS:
        materialize(model, block, checkpoint.tensors)
    asked = Gptq(first_token=first_token, token_limit=1e9)
    hessian, _ = _statistic(model, QKV[0], Inputs(), stream, range(1), None, None, asked)
    texts = [
        x[real] for x, real in zip(stream.hidden[0], padded["attention_mask"].bool(), strict=True)
    ]
    times = [max(1.0, first_token / (1 - first_token) * (len(x) - 1)) for x in texts]
    more = sum((t - 1) * x[:1].T @ x[:1] for t, x in zip(times, texts, strict=True))
    assert torch.allclose(hessian, 2 * (sum(x.T @ x for x in texts) + more), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("factored", [False, True])
def test_what_earlier_errors_ask_of_a_weight_may_be_summed_before_or_after_its_product(
    walked: tuple[nn.Module, walk.Stream], factored: bool
) -> None:
    model, stream = walked
    x = stream.hidden[0][PADDED["attention_mask"].bool()]
    floats = [x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))]
    factor = torch.linspace(0.5, 2.0, x.shape[1]) if factored else torch.ones(x.shape[1])
    inputs = Inputs(factors={QKV[0]: factor} if factored else {})
    weight = inputs.weight(QKV[0], model.get_submodule(QKV[0]))  # type: ignore[arg-type]
    asked = Gptq(first_token=0.0, token_limit=1e9)
    (_, drift), (_, pull) = (
        _statistic(model, QKV[0], inputs, stream, range(1), floats, w, asked)
        for w in (None, weight)
    )
    assert drift is not None
    assert pull is not None
    wanted = (x * factor).T @ ((floats[0] - x) * factor)
    assert torch.allclose(drift, wanted, rtol=1e-4, atol=1e-4)
    assert torch.allclose(pull, wanted @ weight.T, rtol=1e-4, atol=1e-4)


def test_an_expanded_mask_is_kept_as_one_slice() -> None:
    mask = torch.randn(4, 1, 1, 9).expand(4, 1, 9, 9).clone()
    kept = _compact(mask)
    assert torch.equal(kept, mask)
    assert kept.untyped_storage().nbytes() == 4 * 9 * 4
    assert _compact("not a tensor") == "not a tensor"


def test_with_products_in_bf16_what_is_summed_over_tokens_is_not_rounded(
    walked: tuple[nn.Module, walk.Stream],
) -> None:
    model, stream = walked
    stream.float = "bf16"
    made: list[tuple[Tensor, Tensor]] = []

    def see(_name: str, rows: Tensor, _real: Tensor) -> None:
        with stream.sums():
            made.append((rows.T @ rows, rows))

    walk.run(model, stream, range(1), see, QKV)
    total, rows = made[0]
    assert not torch.equal(total, total.bfloat16().float())
    assert torch.allclose(total, rows.T @ rows, rtol=2**-7, atol=1e-3)
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16"
