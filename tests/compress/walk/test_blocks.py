"""The walk sees what the model sees: the same numbers, real tokens only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from optimizer.compress.apply.weights.rounding import QuantizedInputs, measure_hessian
from optimizer.compress.walk import blocks as walk
from optimizer.compress.walk.capture import _compact, capture
from optimizer.compress.walk.model_source import ModelSource, open_source
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.qtensor import Scheme
from optimizer.foundation.sections.method_options import GptqOptions
from optimizer.harness.contract import read
from optimizer.harness.inputs.kind import InputKind
from optimizer.harness.inputs.text import TEXT
from optimizer.load.stage import STAGE as LOAD
from optimizer.model.architectures.families import FAMILIES
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import build_skeleton, load_torch_model, materialize
from optimizer.recipe.schema import Model
from tests.conftest import heavy_tailed
from tests.vision import TASKS, write

CLASSIFY = "image-classification"
BLOCKS = ("encoder.layer.0", "encoder.layer.1")
QKV = [f"encoder.layer.0.attention.self.{n}" for n in ("query", "key", "value")]
PADDED = {
    "input_ids": torch.tensor([[2, 60, 70, 80, 3], [2, 61, 3, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
}


def opened(loaded: Path) -> ModelSource:
    checkpoint = open_checkpoint(loaded)
    model = build_skeleton(checkpoint, "sentence-embedding")
    return ModelSource(model, checkpoint.tensors, FAMILIES["bert"], "")


def group_of(loaded: Path, batches: list[dict[str, Tensor]]) -> walk.BlockGroup:
    """The first block of a skeleton whose blocks are filled, and the stream before it."""
    source = opened(loaded)
    stream = capture(source, BLOCKS, batches)
    for block in BLOCKS:
        materialize(source.model, block, source.tensors)
    return walk.BlockGroup(source.model, source.family, stream, range(1), BLOCKS[:1], {})


@pytest.fixture
def walked(loaded: Path) -> walk.BlockGroup:
    return group_of(loaded, [PADDED])


def test_block_by_block_is_the_whole_model(loaded: Path, walked: walk.BlockGroup) -> None:
    stream = walked.stream
    for segment in walk.split_segments(stream.uses[0]):
        walk.advance(replace(walked, segment=segment))
    with torch.no_grad():
        whole = load_torch_model(open_checkpoint(loaded), "sentence-embedding")(**PADDED)[0]
    assert torch.equal(stream.hidden[0], whole)


@pytest.mark.parametrize(
    "kind", ["convnext", "efficientnet", "mobilenet_v2", "resnet", "segformer", "swin", "yolos"]
)
def test_unequal_blocks_one_by_one_are_the_whole_model(kind: str, tmp_path: Path) -> None:
    """Of batches of unequal size, in shapes that change from block to block, or with positions that
    are added between blocks."""
    (tmp_path / "load").mkdir()
    task = TASKS.get(kind, CLASSIFY)
    model = Model(source=str(write(tmp_path / kind, kind)), task=task)
    LOAD.run(model, out=tmp_path / "load")
    source = open_source(task, tmp_path / "load")
    image = read(tmp_path / "load" / "contract.json").images
    batches = [{"pixel_values": heavy_tailed((n, 3, image.height, image.width), n)} for n in (2, 3)]
    stream = capture(source, source.blocks, batches)
    assert all(p.is_meta for p in source.model.parameters())
    assert [use.block for use in stream.uses[1]] == list(source.blocks)
    base = load_torch_model(open_checkpoint(tmp_path / "load"), task).get_submodule(
        source.family.base
    )
    ends: list[Tensor] = []
    last = base.get_submodule(source.blocks[-1].removeprefix(source.prefix))
    last.register_forward_hook(lambda *called: ends.append(walk.get_hidden(called[-1])))
    materialize(source.model, "", source.tensors)
    with torch.no_grad():
        for batch, hidden, uses in zip(batches, stream.hidden, stream.uses, strict=True):
            base(**batch)
            for use in uses:
                hidden = use.apply(source.model, hidden)
            assert torch.equal(hidden, ends[-1])


def test_inputs_of_a_kind_that_is_never_padded_are_real_as_a_whole(loaded: Path) -> None:
    source = replace(opened(loaded), inputs=replace(TEXT, real=InputKind.real))
    stream = capture(source, BLOCKS, [PADDED])
    assert stream.tokens == PADDED["input_ids"].numel()


def test_capture_leaves_a_skeleton(loaded: Path) -> None:
    source = opened(loaded)
    capture(source, BLOCKS, [PADDED])
    assert all(p.is_meta for p in source.model.parameters())
    assert all("forward" not in m.__dict__ for m in source.model.modules())


def test_a_quantized_module_that_never_runs_is_named(walked: walk.BlockGroup) -> None:
    elsewhere = "encoder.layer.1.output.dense"
    group = replace(walked, schemes=dict.fromkeys([QKV[0], elsewhere], Scheme(8)))
    with pytest.raises(CheckpointError, match=f"{elsewhere}.*so its range is unknown"):
        walk.find_all_sharing(group, "its range is unknown")


def test_padding_is_never_seen(walked: walk.BlockGroup) -> None:
    stream = walked.stream
    rows: list[Tensor] = []
    walk.observe(walked, lambda _n, r, _real: rows.append(r), QKV)
    assert len(rows) == len(QKV)
    assert torch.equal(rows[0], stream.hidden[0][PADDED["attention_mask"].bool()])
    assert stream.tokens == 8 == len(rows[0])


def test_one_module_is_observed_and_nothing_after_it_runs_once_its_calls_are_counted(
    loaded: Path,
) -> None:
    walked = group_of(loaded, [PADDED, PADDED])
    ran: list[str] = []
    walked.linear("encoder.layer.0.output.dense").register_forward_hook(
        lambda *_: ran.append("output")
    )
    walk.observe_one(walked, lambda name, _rows, _real: ran.append(name), QKV[0])
    assert ran == [QKV[0], "output", QKV[0]]


def test_a_module_that_is_called_twice_shows_both_inputs_of_every_batch(loaded: Path) -> None:
    """DeBERTa's projections read relative positions after the hidden states."""
    group = group_of(loaded, [PADDED, PADDED])
    positions = torch.randn(1, 7, group.linear(QKV[0]).in_features)
    attention = group.model.get_submodule(QKV[0].rpartition(".")[0])

    def read_positions(*_: object) -> None:
        for name in QKV[:2]:
            group.linear(name)(positions)

    attention.register_forward_hook(read_positions)
    rows: list[int] = []
    walk.observe_one(group, lambda _name, rows_, _real: rows.append(len(rows_)), QKV[0])
    assert rows == [8, 7, 8, 7]
    assert walk.find_sharing(group, QKV) == {QKV[0]: QKV[0], QKV[1]: QKV[0], QKV[2]: QKV[2]}


def test_the_float_reference_advances_by_itself(walked: walk.BlockGroup) -> None:
    before = walked.stream.hidden[0].clone()
    walked.stream.float_reference = [before.clone()]
    walk.advance_float_reference(walked)
    assert torch.equal(walked.stream.hidden[0], before)
    walk.advance(walked)
    assert torch.equal(walked.stream.hidden[0], walked.stream.float_reference[0])


def test_readers_of_one_tensor_are_recognised(walked: walk.BlockGroup) -> None:
    other = "encoder.layer.0.output.dense"
    leader = walk.find_sharing(walked, [*QKV, other])
    assert leader == {**dict.fromkeys(QKV, QKV[0]), other: other}


def test_an_input_without_tokens_has_no_padding() -> None:
    real = PADDED["attention_mask"].bool()
    flat = torch.randn(10, 3)
    assert len(walk.select_real_rows(flat, real)) == 8
    assert len(walk.select_real_rows(torch.randn(1, 7, 3), real)) == 7


@pytest.mark.parametrize("padded", [PADDED, {n: t[:1] for n, t in PADDED.items()}])
@pytest.mark.parametrize("first_token", [0.0, 0.6])
def test_the_statistic_counts_the_first_token_of_every_text_as_it_is_told(
    loaded: Path, padded: dict[str, Tensor], first_token: float
) -> None:
    group = group_of(loaded, [padded, padded])
    stream = group.stream
    asked = GptqOptions(first_token=first_token, token_limit=1e9)
    hessian, _ = measure_hessian(group, QKV[0], QuantizedInputs(), asked)
    texts = [
        x[real] for x, real in zip(stream.hidden[0], padded["attention_mask"].bool(), strict=True)
    ]
    times = [max(1.0, first_token / (1 - first_token) * (len(x) - 1)) for x in texts]
    more = sum((t - 1) * x[:1].T @ x[:1] for t, x in zip(times, texts, strict=True))
    assert torch.allclose(hessian, 2 * (sum(x.T @ x for x in texts) + more), rtol=1e-4, atol=1e-4)


def test_a_statistic_summed_in_parts_is_whole(
    walked: walk.BlockGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = GptqOptions(token_limit=1e9)
    whole, _ = measure_hessian(walked, QKV[0], QuantizedInputs(), asked)
    monkeypatch.setattr("optimizer.compress.apply.weights.rounding.PART", 12)
    parts, _ = measure_hessian(walked, QKV[0], QuantizedInputs(), asked)
    assert torch.allclose(parts, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("factored", [False, True])
def test_what_earlier_errors_ask_of_a_weight_may_be_summed_before_or_after_its_product(
    walked: walk.BlockGroup, factored: bool
) -> None:
    x = walked.stream.hidden[0][PADDED["attention_mask"].bool()]
    floats = [x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))]
    factor = torch.linspace(0.5, 2.0, x.shape[1]) if factored else torch.ones(x.shape[1])
    inputs = QuantizedInputs(factors={QKV[0]: factor} if factored else {})
    weight = inputs.weight(QKV[0], walked.linear(QKV[0]))
    asked = GptqOptions(first_token=0.0, token_limit=1e9)
    (_, drift), (_, pull) = (
        measure_hessian(walked, QKV[0], inputs, asked, floats, w) for w in (None, weight)
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
    walked: walk.BlockGroup,
) -> None:
    stream = walked.stream
    stream.float = "bf16"
    made: list[tuple[Tensor, Tensor]] = []

    def see(_name: str, rows: Tensor, _real: Tensor) -> None:
        with stream.sums():
            made.append((rows.T @ rows, rows))

    walk.observe(walked, see, QKV)
    total, rows = made[0]
    assert not torch.equal(total, total.bfloat16().float())
    assert torch.allclose(total, rows.T @ rows, rtol=2**-7, atol=1e-3)
    assert torch.backends.mkldnn.matmul.fp32_precision != "bf16"
