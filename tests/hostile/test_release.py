"""Secrets are neither shown nor written, names do not act on a terminal, and a file of the wrong
kind is refused in a sentence."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from optimizer import cli
from optimizer.foundation.errors import MachineError, RecipeError, explain_system_error
from optimizer.harness.errors import BundleError
from optimizer.publish.address import BundleAddress
from optimizer.publish.environments.environments import promote
from optimizer.publish.push import push
from optimizer.publish.registries.layout import OciLayout
from tests.conftest import write_tiny_recipe
from tests.package.bundles import small_bundle
from tests.publish.servers.keys import write_keys

SECRET = "TOK0123456789abcdef"
ADDRESSES = [
    f"{scheme}{user}{SECRET}@host/{path}"
    for scheme in (
        "oci://",
        "s3://",
        "gs://",
        "az://",
        "hf://",
        "mlflow:http://",
        "file://",
        "ftp://",
    )
    for user, path in (("", "x"), ("u:", "x:1"), (":", "a/b"), ("u:p/", "x"), ("u:a@", "x?y=1"))
] + [f"oci-layout:http://u:{SECRET}@host/x", f"http://u:{SECRET}@127.0.0.1:9"]
FORGED = "x\x1b[2J\n::error::forged\r\nerror: forged\u202e"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_bundle.make(tmp_path_factory.mktemp("release")) / "bundle"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_tiny_recipe(tmp_path / "recipe", tmp_path / "no model")


@pytest.fixture(autouse=True)
def mask() -> Iterator[None]:
    """Commands forbid in this process that others write: see cli.FORBIDDEN."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)


def optimize(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, [str(a) for a in arguments])


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_password_in_an_address_is_refused_and_neither_shown_nor_written(
    address: str, bundle: Path, recipe: Path, tmp_path: Path
) -> None:
    listed = f"publish={json.dumps([address])}"
    outputs = tmp_path / "outputs"
    for command in (
        ("publish", bundle, address),
        ("--json", "pull", address),
        ("promote", address, "--to", "production"),
        ("load", address, "--rate", "1"),
        ("check", recipe, "--set", listed),
        ("step", recipe, "--set", listed, "--outputs", outputs, "--store", tmp_path / "store"),
    ):
        result = optimize(*command)
        assert (result.exit_code, SECRET in result.output) == (2, False), (command, result.output)
    written = [p for p in outputs.rglob("*") if p.is_file()]
    assert {"result.json", "junit.xml", "summary.md"} <= {p.name for p in written}
    assert [p.name for p in written if SECRET in p.read_text()] == []


def test_a_message_says_where_credentials_belong() -> None:
    assert "docker login" in optimize("pull", f"oci://u:{SECRET}@host/x").stderr
    assert "--token-file" in optimize("load", f"http://u:{SECRET}@host", "--rate", "1").stderr


@pytest.mark.parametrize("option", ["--recipient", "--identity"])
def test_a_secret_key_in_place_of_another_is_not_repeated(
    option: str, bundle: Path, tmp_path: Path
) -> None:
    pyrage = pytest.importorskip("pyrage")
    secret = str(pyrage.x25519.Identity.generate())
    (tmp_path / "keys").write_text(f"{secret}\n")
    given: list[object] = [secret, secret.lower()]
    given += [tmp_path / "keys"] if option == "--recipient" else []
    for key in given:
        command = ("seal", bundle) if option == "--recipient" else ("open", bundle, "--to", "x")
        result = optimize(*command, option, key)
        assert result.exit_code == 2, result.output
        assert secret[20:].lower() not in result.output.lower()


def test_names_that_were_typed_act_on_nothing(recipe: Path, tmp_path: Path) -> None:
    named = recipe.rename(recipe.with_name(f"{FORGED.replace('/', '')}.yaml"))
    for command in (
        ("check", named),
        ("check", f"{FORGED}.yaml"),
        ("check", recipe, f"--{FORGED}"),
        ("check", named, "--set", f"model.{FORGED}=1"),
        (FORGED,),
        ("sign", FORGED, "--key", FORGED),
        ("publish", FORGED, f"oci-layout:{tmp_path}/{FORGED}"),
        ("pull", f"oci-layout:{tmp_path}/{FORGED}:1"),
        ("inspect", FORGED),
        ("predict", FORGED, "x"),
        ("--debug", "check", f"{FORGED}.yaml"),
    ):
        result = optimize(*command)
        lines = result.output.split("\n")
        assert all(line.replace("\t", "").isprintable() for line in lines), ascii(result.output)
        forged = [line for line in lines if line.lstrip().startswith(("::", "error: forged"))]
        assert forged == [], command
        assert result.exit_code in (0, 2), result.output


@pytest.mark.parametrize("kind", ["FIFO", "device", "folder", "absent"])
def test_a_file_that_may_never_end_is_not_waited_for(
    kind: str, bundle: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    if kind == "FIFO":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "device":
        file = Path("/dev/zero")
    for command in (
        ("sign", bundle, "--key", file),
        ("attest", bundle, "--key", file),
        ("check", bundle, "--require-signature", file),
        ("seal", bundle, "--recipient", file, "--to", tmp_path / "sealed"),
        ("open", file, "--identity", file, "--to", tmp_path / "opened"),
        ("load", "http://127.0.0.1:9", "--rate", "1", "--token-file", file),
        ("serve", bundle, "--token-file", file),
    ):
        result = optimize(*command)
        assert result.exit_code == 2, (command, result.output)
        assert str(file) in result.output


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o666, 0o604])
def test_a_secret_key_that_others_may_read_is_told_of(
    mode: int, bundle: Path, tmp_path: Path
) -> None:
    private, _ = write_keys(tmp_path)
    for allowed in (mode, 0o600, 0o400):
        private.chmod(allowed)
        result = optimize("sign", bundle, "--key", private, "--signature", tmp_path / "s.sig")
        assert result.exit_code == 0, result.output
        assert (f"mode {mode:04o}" in result.stderr) == (allowed == mode)


def test_nothing_is_overwritten_that_was_not_asked_for(bundle: Path, tmp_path: Path) -> None:
    pyrage = pytest.importorskip("pyrage")
    public = str(pyrage.x25519.Identity.generate().to_public())
    private, _ = write_keys(tmp_path)
    precious = tmp_path / "precious"
    precious.write_text("mine")
    sealing = ("seal", bundle, "--recipient", public, "--to", precious)
    for command in (sealing, ("sign", bundle, "--key", private, "--signature", private)):
        assert optimize(*command).exit_code == 2
    assert precious.read_text() == "mine"
    assert "PRIVATE KEY" in private.read_text()
    assert optimize(*sealing, "--replace").exit_code == 0
    assert optimize(*sealing).exit_code == 2
    assert precious.read_bytes().startswith(b"age-encryption")


def test_a_promotion_moves_no_version_and_a_publish_no_environment(
    bundle: Path, tmp_path: Path
) -> None:
    place = OciLayout(tmp_path / "layout")
    first = push(bundle, place, "1")
    other = small_bundle.make(tmp_path / "other") / "bundle"
    small_bundle.edited(other, lambda m: m.update(version="2", licence="mit"))
    second = push(other, place, "2")
    at = BundleAddress("1", "", folder=tmp_path / "layout")
    for version in ("2", "1", "7"):
        with pytest.raises(RecipeError, match="version") if version != "7" else _allowed():
            promote(place, at, version, compared=False)
    promote(place, at, "production", compared=False)
    for tag in ("production", "production.history"):
        with pytest.raises(RecipeError, match="environment"):
            push(other, place, tag, replace=True)
    tags = place.resolve_tags()
    assert (tags["1"], tags["2"], tags["production"]) == (first.digest, second.digest, first.digest)
    promote(place, BundleAddress("2", "", folder=tmp_path / "layout"), "production", compared=False)


def _allowed() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def test_a_mask_of_nothing_leaves_nothing_that_others_may_write(
    bundle: Path, tmp_path: Path
) -> None:
    os.umask(0)
    assert optimize("publish", bundle, f"oci-layout:{tmp_path}/layout").exit_code == 0
    assert (
        optimize("pull", f"oci-layout:{tmp_path}/layout:1", "--to", tmp_path / "p").exit_code == 0
    )
    modes = {p: p.stat().st_mode for p in tmp_path.rglob("*")}
    assert len(modes) > 50
    assert [p for p, mode in modes.items() if mode & stat.S_IWOTH] == []


def test_an_index_is_measured_before_it_is_read(tmp_path: Path) -> None:
    place = OciLayout(tmp_path)
    with place.lock(), (tmp_path / "index.json").open("wb") as f:
        f.truncate(3 << 30)
    with pytest.raises(BundleError, match="3,221,225,472 bytes"):
        place.tags()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
def test_what_the_system_refuses_is_not_called_a_bug(
    number: int, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optimizer import checks

    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "/somewhere")

    monkeypatch.setattr(checks, "read", refused)
    result = optimize("check", recipe)
    assert result.exit_code == MachineError.exit_code
    assert "/somewhere" in result.stderr


def test_paths_that_cannot_be_are_the_command_lines_fault(recipe: Path, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for store in (loop / "x", "a\0b"):
        result = optimize("plan", recipe, "--store", store)
        assert (result.exit_code, "bug" in result.output) == (2, False), result.output
    assert optimize("init", "").exit_code == 2
    assert explain_system_error(FileNotFoundError(errno.ENOENT, "no", "a")) is None
    assert explain_system_error(KeyError("getpwuid(): uid not found: 5")) is not None


def test_nothing_is_kept_in_proc(bundle: Path) -> None:
    for command in (
        ("publish", bundle, "oci-layout:/proc/x:1"),
        ("publish", bundle, "file:///proc/self/x:1"),
    ):
        result = optimize(*command)
        assert result.exit_code == MachineError.exit_code, result.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("command", [("schema",), ("--help",), ("--json", "check", "nope.yaml")])
def test_a_full_standard_output_is_the_machines_fault(command: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "optimizer.cli", *command]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == (2 if "--json" in command else 5), done.stderr
    assert "bug" not in done.stderr
