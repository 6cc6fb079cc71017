"""What a run says at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.harness.errors import BundleError
from optimizer.outcome import Result
from optimizer.package import look


def test_a_failed_run_says_that_the_bundle_beside_it_is_not_its_own(tmp_path: Path) -> None:
    report = tmp_path / "1.failed" / "report.html"
    failed = Result(3, "fail", None, report, (), {}, "")
    assert "earlier" not in failed.text
    (tmp_path / "1").mkdir()
    assert f"{tmp_path / '1'} is an earlier run's bundle" in failed.text


def test_inspect_opens_no_file_outside_the_bundle(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(
        '{"manifest_version": 1, "engines": [], "files": {"../secret": {"size": 1, "sha256": ""}}}'
    )
    with pytest.raises(BundleError, match="secret"):
        look.inspect(tmp_path)
