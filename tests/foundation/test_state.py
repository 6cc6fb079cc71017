"""The compressed state on disk: reading inverts writing, and other files are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optimizer.compress.methods.pruning.magnitude import magnitude
from optimizer.compress.methods.weights.rtn import rtn
from optimizer.foundation import safetensors_stream, state
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.qtensor import QTensor, Scheme
from optimizer.foundation.sparsity import Pattern
from optimizer.foundation.state import (
    CompressedState,
    Note,
    Range,
    input_name,
    owner_of,
    pack_nibbles,
    read,
    unpack_nibbles,
    weight_name,
    write,
)
from tests.conftest import heavy_tailed

SITE = "block.0.a:input"


def pruned(weight: torch.Tensor) -> torch.Tensor:
    return weight * magnitude(weight, Pattern.parse("2:4"))


def example() -> CompressedState:
    return CompressedState(
        weights={
            "block.0.a.weight": rtn(pruned(heavy_tailed((6, 8), 1)), Scheme(8)),
            "block.0.b.weight": rtn(heavy_tailed((3, 16), 2), Scheme(4, False, "group", 8)),
            "block.0.f.weight": rtn(heavy_tailed((3, 8), 9), Scheme(4, full_range=True)),
            "block.1.odd.weight": rtn(heavy_tailed((2, 7), 3), Scheme(3)),
            "block.1.t.weight": rtn(heavy_tailed((2, 4), 4), Scheme(8, False, "tensor")),
        },
        replaced={
            "block.0.a.bias": heavy_tailed((6,), 5),
            "block.0.c.weight": pruned(heavy_tailed((4, 8), 7)),
        },
        ranges={SITE: Range(-0.3, 1.7), "block.0.b:input": Range.symmetric(2.5)},
        factors={SITE: heavy_tailed((8,), 6).abs() + 0.5},
        activations="tensor",
        sparsity={"block.0.a.weight": "2:4", "block.0.c.weight": "2:4"},
        notes=(Note("head", "float", "keep_float: häd"), Note("x", "fallback", "second")),
    )


def same_q(a: QTensor, b: QTensor) -> bool:
    zero = (a.zero_point is None and b.zero_point is None) or (
        a.zero_point is not None
        and b.zero_point is not None
        and torch.equal(a.zero_point, b.zero_point)
    )
    return (
        a.scheme == b.scheme
        and torch.equal(a.integers, b.integers)
        and torch.equal(a.scale, b.scale)
        and zero
    )


def files(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "state.json").read_bytes(), (folder / "tensors.safetensors").read_bytes()


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    made = example()
    write(made, tmp_path)
    got = read(tmp_path)
    assert got.weights.keys() == made.weights.keys()
    assert all(same_q(got.weights[p], q) for p, q in made.weights.items())
    for ours, theirs in ((made.replaced, got.replaced), (made.factors, got.factors)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(theirs[n], t) for n, t in ours.items())
    for name in ("ranges", "activations", "sparsity", "notes"):
        assert getattr(got, name) == getattr(made, name)


def test_writing_what_was_read_gives_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write(example(), tmp_path / "a")
    write(read(tmp_path / "a"), tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_the_order_in_which_parameters_were_added_does_not_show(tmp_path: Path) -> None:
    made = example()
    turned = CompressedState(
        weights=dict(reversed(list(made.weights.items()))),
        replaced=made.replaced,
        ranges=dict(reversed(list(made.ranges.items()))),
        factors=made.factors,
        activations=made.activations,
        sparsity=made.sparsity,
        notes=made.notes,
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write(made, tmp_path / "a")
    write(turned, tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 1000))
def test_nibbles_come_back_at_any_width(out: int, inputs: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (out, inputs), generator=g, dtype=torch.int8)
    packed = pack_nibbles(codes)
    assert packed.shape == (out, (inputs + 1) // 2)
    assert torch.equal(unpack_nibbles(packed, inputs), codes)


def edit_json(folder: Path, **changes: Any) -> None:
    document = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**document, **changes}))


def edit_tensor(folder: Path, name: str, tensor: Tensor | None) -> None:
    from safetensors.torch import load

    tensors = load((folder / "tensors.safetensors").read_bytes())
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    safetensors_stream.write(tensors.items(), folder / "tensors.safetensors")


SCALE = "block.0.a.weight.scale"
DAMAGE: dict[str, Any] = {
    "another version": lambda f: edit_json(f, version=2),
    "no json": lambda f: (f / "state.json").write_text("{"),
    "a json list": lambda f: (f / "state.json").write_text("[]"),
    "no tensors": lambda f: (f / "tensors.safetensors").unlink(),
    "a truncated file": lambda f: (f / "tensors.safetensors").write_bytes(files(f)[1][:-5]),
    "a missing tensor": lambda f: edit_tensor(f, SCALE, None),
    "an extra tensor": lambda f: edit_tensor(f, "stray", torch.ones(1)),
    "a wrong dtype": lambda f: edit_tensor(f, SCALE, torch.ones(6, 1).half()),
    "a wrong shape": lambda f: edit_tensor(f, SCALE, torch.ones(1, 6)),
    "a missing key": lambda f: (f / "state.json").write_text('{"version":1}'),
    "an inverted range": lambda f: edit_json(f, ranges={SITE: [1.0, -1.0]}),
    "an unknown coding": lambda f: edit_json(f, activations="row"),
    "a malformed note": lambda f: edit_json(f, notes=[{"who": "x"}]),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_state_is_refused_when_opened(what: str, tmp_path: Path) -> None:
    write(example(), tmp_path)
    DAMAGE[what](tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        read(tmp_path)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), 0.1])
def test_a_bad_scale_is_refused_when_its_tensor_is_read(bad: float, tmp_path: Path) -> None:
    write(example(), tmp_path)
    edit_tensor(tmp_path, SCALE, torch.full((6, 1), bad))
    opened = read(tmp_path)
    with pytest.raises(CheckpointError, match=r"block\.0\.a\.weight: scale"):
        opened.weights["block.0.a.weight"]


def test_a_name_that_is_not_there_is_a_key_error(tmp_path: Path) -> None:
    write(example(), tmp_path)
    for mapping in (read(tmp_path).weights, read(tmp_path).replaced, read(tmp_path).factors):
        with pytest.raises(KeyError):
            mapping["nothing"]


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e4, 0), st.floats(0, 1e4))
def test_a_range_covers_both_ends_up_to_a_step(low: float, high: float) -> None:
    covered = Range(low, high)
    step, zero = covered.scale, covered.zero_point
    assert 0 <= zero <= 255
    slack = 0.51 * step + (high - low) * 2**-8
    assert -zero * step <= low + slack
    assert (255 - zero) * step >= high - slack


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-2, 1e4))
def test_a_symmetric_range_keeps_its_zero_in_the_middle(absmax: float) -> None:
    covered = Range.symmetric(absmax)
    assert (covered.zero_point, covered.offset) == (128, 0)
    assert 127 * covered.scale == pytest.approx(absmax, rel=2**-8)


def test_a_range_that_leaves_out_zero_is_refused() -> None:
    for low, high in ((0.1, 1.0), (-1.0, -0.1), (float("nan"), 1.0), (0.0, float("inf"))):
        with pytest.raises(ValueError, match="low <= 0 <= high"):
            Range(low, high)


def test_opening_a_state_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = example()
    write(written, tmp_path)
    monkeypatch.setattr(state, "QTensor", None)
    opened = read(tmp_path)
    assert len(opened.weights) == len(written.weights)
    with pytest.raises(TypeError):
        opened.weights["block.0.a.weight"]


def test_names_of_a_modules_weight_and_input_lead_back_to_it() -> None:
    module = "encoder.layer.0.output.dense"
    assert owner_of(weight_name(module)) == owner_of(input_name(module)) == module


@pytest.mark.parametrize("sparsity", [{"block.0.a.weight": "2/4"}, {"gone.weight": "2:4"}])
def test_a_pattern_that_is_none_or_of_no_parameter_is_refused(
    sparsity: dict[str, str], tmp_path: Path
) -> None:
    made = example()
    with pytest.raises(ValueError, match=r"accepted|neither integers nor"):
        write(replace(made, sparsity=sparsity), tmp_path)
    write(made, tmp_path)
    document = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps(document | {"sparsity": sparsity}))
    with pytest.raises(CheckpointError, match=r"accepted|neither integers nor"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["block.0.b.weight", "block.0.c.weight"])
def test_a_weight_that_its_pattern_forbids_is_refused_by_writer_and_reader(
    name: str, tmp_path: Path
) -> None:
    dense = heavy_tailed((4, 8), 8)
    made = example()
    sound = replace(made, replaced={**made.replaced, "block.0.c.weight": dense}, sparsity={})
    with pytest.raises(ValueError, match=f"{name}: .* weights are kept"):
        write(replace(sound, sparsity={name: "2:4"}), tmp_path)
    write(sound, tmp_path)
    document = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps(document | {"sparsity": {name: "2:4"}}))
    wrong = read(tmp_path)
    with pytest.raises(CheckpointError, match=f"{name}: .* weights are kept"):
        _ = wrong.weights[name] if name in wrong.weights else wrong.replaced[name]


@pytest.mark.parametrize("scheme", [Scheme(4, False, "group", 4), Scheme(8, False, "tensor")])
def test_a_pruned_integer_is_the_zero_point(scheme: Scheme) -> None:
    weight = pruned(heavy_tailed((4, 8), 9) + 0.05)
    assert bool((~rtn(weight, scheme).nonzero())[weight == 0].all())
