"""Every stage writes the bytes that it wrote before: see bundle.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden import bundle


@pytest.mark.parametrize("model", bundle.TASKS)
def test_stages_write_what_they_wrote_before(model: str, tmp_path: Path) -> None:
    bundle.write(model, tmp_path / "now", tmp_path / "work")
    expected = bundle.HERE / model / "expected"

    def files(folder: Path) -> dict[str, bytes]:
        return {
            str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()
        }

    now, before = files(tmp_path / "now"), files(expected)
    assert sorted(now) == sorted(before)
    assert [name for name in now if now[name] != before[name]] == []
