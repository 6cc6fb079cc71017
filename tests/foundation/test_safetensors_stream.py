"""The streaming writer, judged by safetensors' own reader and writer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor

from optimizer.foundation import safetensors_stream

tensors = st.builds(
    lambda dtype, shape, seed: torch.randint(
        0, 2, shape, generator=torch.Generator().manual_seed(seed)
    ).to(dtype),
    st.sampled_from(list(safetensors_stream.DTYPE_NAMES)),
    st.lists(st.integers(0, 5), max_size=3),
    st.integers(0, 9),
)
names = st.text("ab.é_0", min_size=1, max_size=6)


def write(entries: dict[str, Tensor], folder: Path) -> bytes:
    safetensors_stream.write(entries.items(), folder / "t.safetensors")
    return (folder / "t.safetensors").read_bytes()


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(names, tensors, max_size=5))
def test_the_bytes_are_those_of_safetensors_own_writer(
    tmp_path_factory: pytest.TempPathFactory, entries: dict[str, Tensor]
) -> None:
    assert write(entries, tmp_path_factory.mktemp("t")) == save(entries)


def test_safetensors_own_reader_gets_every_tensor_back(tmp_path: Path) -> None:
    entries = {"b.codes": torch.arange(-3, 4, dtype=torch.int8), "a": torch.randn(2, 3)}
    read = load(write(entries, tmp_path))
    assert all(torch.equal(read[n], t) for n, t in entries.items())


def test_every_tensor_is_aligned_to_its_element_size(tmp_path: Path) -> None:
    write({"a": torch.zeros(3, dtype=torch.int8), "b": torch.ones(2)}, tmp_path)
    with safe_open(tmp_path / "t.safetensors", "pt") as f:
        assert f.get_tensor("b").data_ptr() % 4 == 0


def test_the_order_of_arrival_does_not_show(tmp_path: Path) -> None:
    entries = {"a": torch.ones(3), "c": torch.zeros(2, dtype=torch.int8), "b": torch.ones(1)}
    assert write(entries, tmp_path) == write(dict(reversed(entries.items())), tmp_path)


def test_a_view_is_written_as_what_it_shows(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(load(write({"t": whole.T[1:]}, tmp_path))["t"], whole.T[1:])


def test_one_element_of_a_wide_view_is_written(tmp_path: Path) -> None:
    one = torch.arange(12.0).reshape(3, 4).T[1:2, 2:3]
    assert torch.equal(load(write({"t": one}, tmp_path))["t"], one)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "given twice"),
        ([("a", torch.ones(1, dtype=torch.complex64))], "is not supported"),
    ],
)
def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, entries: list[tuple[str, Tensor]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        safetensors_stream.write(entries, tmp_path / "t.safetensors")
    assert not list(tmp_path.iterdir())


def test_what_is_known_beforehand_is_written_to_the_same_bytes(tmp_path: Path) -> None:
    known = {
        "b": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "a": torch.ones(5, dtype=torch.bfloat16),
        "none": torch.empty((0, 4), dtype=torch.int8),
    }
    safetensors_stream.write(known.items(), tmp_path / "one")
    specs = {n: (t.dtype, tuple(t.shape)) for n, t in known.items()}
    safetensors_stream.write_known(specs, known.__getitem__, tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    wrong = {**specs, "b": (torch.float32, (3, 2))}
    with pytest.raises(ValueError, match="'b' is"):
        safetensors_stream.write_known(wrong, known.__getitem__, tmp_path / "two")
    assert not (tmp_path / "two").exists()
