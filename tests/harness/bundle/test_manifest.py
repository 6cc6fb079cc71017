"""manifest.json: any value that changes is found before anything is answered."""

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from optimizer.cli import main as cli
from optimizer.harness.__main__ import main
from optimizer.harness.bundle.manifest import (
    digest,
    digest_content,
    encode_canonical,
    list_damaged_files,
    read_manifest,
)
from optimizer.harness.errors import BundleError
from tests.harness import small_model
from tests.package.bundles import small_bundle


@pytest.fixture(scope="module")
def made(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle with few sources of the harness: none of these tests runs them."""
    return small_bundle.lean(made, tmp_path_factory.mktemp("lean") / "bundle")


GOLDEN = {
    "manifest_version": 2,
    "contract": {"pooling": "mean", "labels": ["schön", "slecht\u2028"], "max": 1.5, "low": None},
    "files": {
        "report.json": {"sha256": "bb", "size": 2, "measured": True},
        "model/a": {"sha256": "aa", "size": 1, "measured": False},
    },
    "digest": "not part of it",
}
BYTES = (
    b'{"contract":{"labels":["sch\\u00f6n","slecht\\u2028"],"low":null,"max":1.5,"pooling":"mean"},'
    b'"files":{"model/a":{"measured":false,"sha256":"aa","size":1},'
    b'"report.json":{"measured":true,"sha256":"bb","size":2}},"manifest_version":2}'
)


def test_the_digest_is_of_these_bytes() -> None:
    assert encode_canonical({k: v for k, v in GOLDEN.items() if k != "digest"}) == BYTES
    assert digest(GOLDEN) == hashlib.sha256(BYTES).hexdigest()
    assert digest(GOLDEN) == "5a33961d932e0012c39c9473bb864126e83ecd71febdd321f68a09998b106d0e"


def test_the_content_digest_is_of_these_lines() -> None:
    contract = hashlib.sha256(encode_canonical(GOLDEN["contract"])).hexdigest()
    lines = f"{contract}  contract\naa  model/a\n".encode()
    got = digest_content(GOLDEN["contract"], GOLDEN["files"])  # type: ignore[arg-type]
    assert got == hashlib.sha256(lines).hexdigest()
    assert got == "cfd0a58d6b0019dd85052119b5cf52fcceeca29876193dcf2a821faded4d3041"


def changed(value: Any) -> Any:
    """A value of the same type that is not this one."""
    if isinstance(value, bool) or value is None:
        return not value
    return value + 1 if isinstance(value, int | float) else f"{value}?"


def leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Path of every value in a document except lists and objects."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from leaves(inner, (*at, key))
    else:
        yield at


def test_every_value_of_the_manifest_is_under_its_digest(made: Path) -> None:
    manifest = json.loads((made / "manifest.json").read_text())
    places = [p for p in leaves(manifest) if p != ("digest",)]
    assert ("contract", "pooling") in places
    for place in places:
        other = copy.deepcopy(manifest)
        holder = other
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = changed(holder[place[-1]])
        assert digest(other) != manifest["digest"], place


def put(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest as a careless hand does: its digest stays."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(manifest)
    (bundle / "manifest.json").write_text(json.dumps(manifest))


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "pooling": lambda m: m["contract"].update(pooling="cls"),
    "length": lambda m: m["contract"]["tokenizer"].update(max_length=16),
    "recipe": lambda m: m["recipe"].update(name="other"),
    "fit": lambda m: m["engines"][0]["fit"].update(runtime_minimum="0.1"),
    "measured": lambda m: m["files"]["tokenizer/tokenizer.json"].update(measured=True),
    "engines": lambda m: m["engines"].append(m["engines"][0]),
    "new key": lambda m: m.update(note=1),
    "digest": lambda m: m.update(digest="0" * 64),
    "no digest": lambda m: m.pop("digest"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_manifest_is_refused_by_every_command(
    name: str, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(bundle, CHANGES[name])
    for command in (["check"], ["bench"], ["predict", "good"]):
        assert main([command[0], "--bundle", str(bundle), *command[1:]]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "manifest.json: damaged" in err


COMMANDS = (
    ["check", "B"],
    ["predict", "B", "good"],
    ["bench", "B"],
    ["doctor", "B"],
    ["inspect", "B"],
    ["compare", "B", "B"],
)


@pytest.mark.parametrize("name", ["pooling", "digest", "no digest"])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])
def test_the_installed_commands_refuse_it_alike(
    command: list[str], name: str, bundle: Path
) -> None:
    put(bundle, CHANGES[name])
    done = CliRunner().invoke(cli, [str(bundle) if a == "B" else a for a in command])
    assert done.exit_code == 2
    assert "manifest.json: damaged" in done.stderr


def drop_harness(manifest: dict[str, Any]) -> None:
    for name in [n for n in manifest["files"] if n.startswith("harness/")]:
        del manifest["files"][name]


WRITTEN_ANEW: dict[str, Callable[[dict[str, Any]], object]] = {
    r"files\['tokenizer/tokenizer.json'\].measured": CHANGES["measured"],
    "'harness/__init__.py' is used and is not among": drop_harness,
    "'requirements.txt' is used and": lambda m: m["files"].pop("requirements.txt"),
    "'tokenizer/tokenizer.json' is used": lambda m: m["files"].pop("tokenizer/tokenizer.json"),
    "is used and is not among": lambda m: m["files"].pop(m["engines"][0]["model"]),
    "engines: .* a list of 1 to": lambda m: m.update(engines=[]),
    r"engines\[1\].target": lambda m: m["engines"].append(m["engines"][0]),
}


@pytest.mark.parametrize("message", WRITTEN_ANEW)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])
def test_a_manifest_does_not_decide_what_is_checked(
    command: list[str], message: str, bundle: Path
) -> None:
    """Its digest is right: it was written anew by whoever changed the file."""
    small_bundle.edited(bundle, WRITTEN_ANEW[message])
    done = CliRunner().invoke(cli, [str(bundle) if a == "B" else a for a in command])
    assert done.exit_code == 2
    assert re.search(message, done.stderr), done.stderr


def test_check_reads_no_model_that_another_program_runs_as_onnx(bundle: Path) -> None:
    def served_by_llama_cpp(manifest: dict[str, Any]) -> None:
        engine = manifest["engines"][0]
        files = manifest["files"]
        path = (bundle / engine["model"]).with_suffix(".gguf")
        path.write_bytes(b"GGUF\xff\xff")
        (bundle / engine["model"]).unlink()
        del files[engine["model"]]
        name = path.relative_to(bundle).as_posix()
        files[name] = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        files[name] |= {"size": 6, "measured": False}
        engine |= {"runtime": "gguf", "model": name, "model_files": [name]}
        (bundle / "report.json").unlink()  # it says that another model was judged
        del files["report.json"]

    small_bundle.edited(bundle, served_by_llama_cpp)
    done = CliRunner().invoke(cli, ["check", str(bundle)])
    assert done.exit_code == 5
    assert "0 damaged, 0 unlisted" in done.stdout
    assert "gguf models are run by llama.cpp" in done.stdout


@pytest.mark.parametrize("stray", ["harness/tasks/extra.py", "model/x.data", "numpy.py"])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])
def test_a_file_that_something_would_read_is_refused_when_it_is_not_listed(
    command: list[str], stray: str, bundle: Path
) -> None:
    (bundle / stray).write_text("")
    done = CliRunner().invoke(cli, [str(bundle) if a == "B" else a for a in command])
    assert done.exit_code == 2
    assert stray in done.output


def test_notes_beside_a_bundle_do_not_stop_it_and_are_reported(bundle: Path) -> None:
    (bundle / "answers.txt").write_text("")
    assert CliRunner().invoke(cli, ["predict", str(bundle), "good film"]).exit_code == 0
    for command in ("check", "inspect"):
        done = CliRunner().invoke(cli, [command, str(bundle)])
        assert (done.exit_code, "answers.txt" in done.output) == (2, True)


def test_a_damaged_file_is_shown_by_inspect_with_exit_2(bundle: Path) -> None:
    (bundle / "report.html").write_text("")
    done = CliRunner().invoke(cli, ["inspect", str(bundle)])
    assert done.exit_code == 2
    assert "DAMAGED: report.html" in done.output
    assert CliRunner().invoke(cli, ["--json", "inspect", str(bundle)]).exit_code == 2


def test_two_labels_exchanged_are_found(bundle: Path) -> None:
    contract = small_model.contract("text-classification", labels=["bad", "good"])
    small_bundle.edited(bundle, lambda m: m.update(contract=contract))
    read_manifest(bundle)
    put(bundle, lambda m: m["contract"]["labels"].reverse())
    with pytest.raises(BundleError, match="damaged"):
        read_manifest(bundle)


def test_white_space_and_the_order_of_keys_change_nothing(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    (bundle / "manifest.json").write_text(json.dumps(dict(reversed(manifest.items())), indent=7))
    assert read_manifest(bundle) == manifest


def test_a_key_that_comes_twice_is_refused(bundle: Path) -> None:
    path = bundle / "manifest.json"
    path.write_text('{"name": "other",' + path.read_text()[1:])
    with pytest.raises(BundleError, match="a key comes twice"):
        read_manifest(bundle)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"a": NaN}'])
def test_what_is_no_manifest_is_said_in_a_sentence(data: bytes, bundle: Path) -> None:
    (bundle / "manifest.json").write_bytes(data)
    with pytest.raises(BundleError):
        read_manifest(bundle)


def test_a_bundle_of_version_1_says_that_it_must_be_packaged_again(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(bundle, lambda m: m.update(manifest_version=1))
    assert main(["check", "--bundle", str(bundle)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "Accepted: 2. Package the model again: optimize RECIPE." in err


def test_compare_reads_no_damaged_report(bundle: Path, made: Path) -> None:
    from optimizer.commands.bundle import look

    look.compare(*map(look.describe, (made, bundle)))
    (bundle / "report.json").write_text("[]")
    with pytest.raises(BundleError, match=r"report\.json"):
        look.compare(*map(look.describe, (made, bundle)))


def test_an_engine_of_another_version_or_gpu_is_no_part_of_the_bundle(tmp_path: Path) -> None:
    """Although its digest is right, and its name."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    targets = (small_bundle.RTX, small_bundle.ORT)
    made = small_bundle.make(tmp_path, targets) / "bundle"
    manifest = read_manifest(made)
    name = manifest["engines"][0]["engine"]
    assert name is not None
    assert list_damaged_files(made, manifest) == frozenset()
    good = (made / name).read_bytes()
    for at, other in ((24, 9), (32, 0x01), (0, 0)):
        data = good[:at] + bytes([other]) + good[at + 1 :]
        (made / name).write_bytes(data)
        entry = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        small_bundle.edited(made, lambda m, e=entry: m["files"][name].update(e))
        assert list_damaged_files(made, read_manifest(made)) == {name}
        assert main(["check", "--bundle", str(made)]) == 2
