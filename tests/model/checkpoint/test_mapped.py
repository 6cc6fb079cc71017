"""Tests of tensors in mapped files."""

from __future__ import annotations

from pathlib import Path

import torch

from optimizer.model.checkpoint.mapped import SMALLEST, map_tensor


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
