"""Names from a bundle or a command line cannot inject paths, configuration or commands."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from optimizer.harness.bundle.manifest import digest
from tests.deploy.conftest import deployed, run

NAMES = (
    "../../escaped",
    "a/b",
    'x"\nbackend: "other',
    "x\nRUN touch /INJECTED",
    "$(touch INJECTED)",
    "-x",
    "\u2028a",
    "A",
)


@pytest.mark.parametrize("key", ["name", "version"])
@pytest.mark.parametrize("name", NAMES)
def test_a_bundle_whose_name_is_no_recipes_is_refused(
    name: str, key: str, bundle: Path, tmp_path: Path
) -> None:
    """Refuse it even if the digest matches, which anybody can compute."""
    shutil.copytree(bundle, tmp_path / "bundle")
    file = tmp_path / "bundle" / "manifest.json"
    manifest = {**json.loads(file.read_text()), key: name}
    file.write_text(json.dumps({**manifest, "digest": digest(manifest)}))
    result = run(tmp_path / "bundle", "--to", "triton", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert f"manifest.json: {key}" in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_commands_that_are_shown_take_any_folder_and_image_for_names(
    bundle: Path, tmp_path: Path
) -> None:
    image, out = "a;touch INJECTED", tmp_path / "o $(touch INJECTED)"
    given = ("--memory-mib", "300", "--cpu", "1", "--endpoint-seconds", "0", "--name", "a")
    document = deployed(bundle, "--to", "kubernetes", "--image", image, "--out", out, *given)
    words = [shlex.split(line) for line in document["start"]]
    assert words[0] == ["docker", "build", "-t", image, str(out)]
    assert words[1] == ["docker", "push", image]
    assert words[2][-1] == f"{out}/kubernetes.yaml"
