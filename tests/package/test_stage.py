"""The bundle: complete, the same bytes every time, and published whole."""

import errno
import json
import shutil
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest

from optimizer import harness
from optimizer.commands.bundle import look
from optimizer.foundation.errors import GateError, MachineError, RecipeError
from optimizer.harness.bundle.manifest import digest_content
from optimizer.harness.errors import BundleError
from optimizer.harness.trust.archive import unpack
from optimizer.package import manifest as manifests
from optimizer.package import stage
from optimizer.publish.folder import publish
from optimizer.store import digest_file
from tests.package.bundles import small_bundle

TWICE = (small_bundle.ORT, small_bundle.ORT.replace("threads: 1", "threads: 2"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_bundle.make(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def manifest(made: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((made / "bundle" / "manifest.json").read_text())
    return document


def test_every_file_is_listed_with_its_digest(made: Path, manifest: dict[str, Any]) -> None:
    bundle = made / "bundle"
    there = {p.relative_to(bundle).as_posix() for p in bundle.rglob("*") if p.is_file()}
    assert there == {*manifest["files"], "manifest.json"}
    for name, entry in manifest["files"].items():
        assert entry["sha256"] == digest_file(bundle / name)


def test_the_manifest_says_where_it_came_from_and_what_it_needs(manifest: dict[str, Any]) -> None:
    assert manifest["manifest_version"] == 2
    assert manifest["source"]["source"] == "made here"
    assert manifest["recipe"]["calibrate"]["batch_size"] == 8  # a default, resolved
    assert set(manifest["calibration"]) == {"calibrate", "validate", "latency"}
    assert len(set(manifest["calibration"].values())) == 3
    assert manifest["verdicts"] == {"onnxruntime-cpu": "pass"}
    assert manifest["packages"]["onnxruntime"]
    assert manifest["contract"]["task"] == "sentence-embedding"
    assert manifest["licence"] == "apache-2.0"


def test_the_models_licence_travels_with_it(made: Path, manifest: dict[str, Any]) -> None:
    assert manifest["licence_files"] == ["LICENSE"]
    assert (made / "bundle" / "LICENSE").read_text() == "Do what you like.\n"


def test_two_runs_give_the_same_bytes(made: Path, tmp_path: Path) -> None:
    again = small_bundle.make(tmp_path / "again")
    a, b = (json.loads((p / "bundle" / "manifest.json").read_text()) for p in (made, again))
    assert a["content_digest"] == b["content_digest"]
    plain = [{n: f for n, f in m["files"].items() if not f["measured"]} for m in (a, b)]
    assert plain[0] == plain[1]  # the reports name the recipe's folder, which differs here


def test_the_content_digest_is_of_everything_but_what_was_measured(tmp_path: Path) -> None:
    def digest(contract: object = None, **files: str) -> str:
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        everything = {"model/a": "1", "report.html": "2", "engines/x/model.engine": "3", **files}
        for name, text in everything.items():
            path = tmp_path / "b" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return digest_content(contract, manifests.digest_files(tmp_path / "b"))

    plain = digest()
    assert plain == digest(**{"report.html": "other"})
    assert plain == digest(**{"engines/x/model.engine": "other"})
    assert plain != digest(**{"model/a": "other"})
    assert plain != digest(**{"model/b": "new"})
    assert plain != digest({"pooling": "cls"})


def test_targets_with_one_model_share_its_file(tmp_path: Path) -> None:
    made = small_bundle.make(tmp_path, TWICE)
    engines = json.loads((made / "bundle" / "manifest.json").read_text())["engines"]
    assert [e["target"] for e in engines] == ["onnxruntime-cpu", "onnxruntime-cpu-2"]
    assert engines[0]["model_files"] == engines[1]["model_files"]
    assert [e["threads"] for e in engines] == [1, 2]
    assert len(list((made / "bundle").rglob("*.onnx"))) == 1


def test_weights_beside_the_model_are_shipped_and_listed(tmp_path: Path) -> None:
    import onnx

    asked = small_bundle.recipe(tmp_path / "recipe")
    steps = small_bundle.steps(tmp_path / "steps", asked)
    model = onnx.load(steps[2] / "model.onnx")
    beside = {"save_as_external_data": True, "location": "model.onnx.data", "size_threshold": 256}
    onnx.save(model, steps[2] / "model.onnx", **beside)
    small_bundle.judge(asked, steps)
    out = tmp_path / "out"
    out.mkdir()
    stage.run(asked.packaging, *small_bundle.inputs(asked, steps), out=out)
    engine = json.loads((out / "bundle" / "manifest.json").read_text())["engines"][0]
    folder = "model/onnxruntime-cpu"
    assert engine["model_files"] == [f"{folder}/model.onnx", f"{folder}/model.onnx.data"]
    from optimizer.harness.bundle.bundle import Bundle

    with Bundle(out / "bundle") as opened:
        assert opened.predict(["good"])


def test_a_tokenizer_that_the_model_was_not_judged_with_is_not_shipped(tmp_path: Path) -> None:
    asked = small_bundle.recipe(tmp_path / "recipe")
    steps = small_bundle.steps(tmp_path / "steps", asked)
    report = json.loads((steps[-1] / "report.json").read_text())
    report["judged"]["tokenizer"] = {"tokenizer.json": "0"}
    (steps[-1] / "report.json").write_text(json.dumps(report))
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(GateError, match=r"tokenizer/tokenizer.json has sha256 \w{64}, and the one"):
        stage.run(asked.packaging, *small_bundle.inputs(asked, steps), out=out)


def test_the_harness_in_the_bundle_is_the_one_that_was_measured(made: Path) -> None:
    ours = Path(str(harness.__file__)).parent
    files = {p.relative_to(ours): p.read_bytes() for p in ours.rglob("*.py")}
    theirs = made / "bundle" / "harness"
    assert {p.relative_to(theirs): p.read_bytes() for p in theirs.rglob("*.py")} == files


def test_a_changed_harness_is_another_key(tmp_path: Path) -> None:
    section = small_bundle.recipe(tmp_path).packaging
    copy = tmp_path / "harness"
    shutil.copytree(stage.HARNESS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = stage.digest_sources(section, copy)
    assert stage.STAGE.files is not None
    assert stage.STAGE.files(section) == before
    with (copy / "inputs" / "text.py").open("a") as f:
        f.write("\n")
    after = stage.digest_sources(section, copy)
    assert [name for name in before if before[name] != after[name]] == ["harness/inputs/text.py"]


def test_a_changed_template_of_the_report_is_another_key(tmp_path: Path) -> None:
    section = small_bundle.recipe(tmp_path).packaging
    copy = tmp_path / "templates"
    shutil.copytree(stage.TEMPLATES, copy)
    before = stage.digest_sources(section, templates=copy)
    assert stage.STAGE.files is not None
    assert stage.STAGE.files(section) == before
    with (copy / "card.html").open("a") as f:
        f.write("\n")
    after = stage.digest_sources(section, templates=copy)
    assert [name for name in before if before[name] != after[name]] == ["report/card.html"]


def test_a_built_wheel_has_every_file_that_is_not_python() -> None:
    root = stage.TEMPLATES.parents[3]
    tools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    data = {
        path
        for package, globs in tools["package-data"].items()
        for glob in globs
        for path in (root / package.replace(".", "/")).glob(glob)
    }
    sources = (p for p in (root / "optimizer").rglob("*") if p.is_file())
    assert data == {p for p in sources if p.suffix not in (".py", ".pyc")}


def test_requirements_pin_the_versions_used(made: Path) -> None:
    import onnxruntime
    import tokenizers

    lines = (made / "bundle" / "requirements.txt").read_text().splitlines()
    assert f"onnxruntime=={onnxruntime.__version__}" in lines
    assert f"tokenizers=={tokenizers.__version__}" in lines
    assert len(lines) == 3


@pytest.mark.parametrize("missing", ["", "uvicorn"])
def test_what_serve_needs_is_pinned_where_all_of_it_is_here(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "package_version", lambda n: None if n == missing else "1.2")
    lines = stage.serve_requirements().splitlines()
    names = (*stage.SERVE, *stage.TRACES)
    assert lines == ([] if missing else [f"{name}==1.2" for name in names])


def test_what_sends_traces_is_pinned_where_it_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "package_version", lambda n: None if n in stage.TRACES else "1.2")
    lines = stage.serve_requirements().splitlines()
    assert lines == [f"{name}==1.2" for name in stage.SERVE]


def test_a_runtime_that_is_not_installed_is_pinned_to_the_tested_release(tmp_path: Path) -> None:
    import onnxruntime

    cuda = small_bundle.recipe(
        tmp_path, ("{runtime: onnxruntime, device: cuda, on_missing: defer}",), activations=False
    )
    lines = stage.write_requirements(cuda.targets, cuda.model.task).splitlines()
    release = ".".join(onnxruntime.__version__.split(".")[:2])
    gpu = next(line for line in lines if line.startswith("onnxruntime-gpu"))
    assert gpu.startswith(f"onnxruntime-gpu=={release}.")


def test_a_bundle_says_whether_its_harness_runs_any_of_it() -> None:
    ort, other = ({"engines": [{"runtime": r}]} for r in ("onnxruntime", "another"))
    both = {"engines": [*other["engines"], *ort["engines"]]}
    assert [look.is_runnable(m) for m in (ort, other, both)] == [True, False, True]
    assert not look.is_runnable({**ort, "runnable": False})  # what was recorded counts


def test_an_engine_the_harness_cannot_run_is_not_promised(
    made: Path, manifest: dict[str, Any]
) -> None:
    assert manifest["runnable"] is True
    inspected = look.inspect(made / "bundle")
    plain = look.inspect_text(inspected)
    assert "does not run" not in plain
    engine = {**manifest["engines"][0], "runtime": "another"}
    for change in (
        {"engine": "engines/x/model.engine"},
        {"deferred": True, "why": "no builder here"},
    ):
        document = {**inspected, "engines": [{**engine, **change}], "runnable": False}
        text = look.inspect_text(document)
        assert "this version's harness does not run it yet" in text
        assert "predict and bench will refuse" in text


def test_the_tar_holds_the_bundle_and_nothing_of_this_machine(made: Path, tmp_path: Path) -> None:
    tar = made / "tiny-1.tar"
    with tarfile.open(tar) as archive:
        members = archive.getmembers()
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in members} == {(0, 0, 0, "", "")}
    assert [m.name for m in members] == sorted((m.name for m in members), key=Path)
    unpacked = unpack(tar, tmp_path / "x")
    for path in (made / "bundle").rglob("*"):
        if path.is_file():
            copy = unpacked / path.relative_to(made / "bundle")
            assert copy.read_bytes() == path.read_bytes()


def test_publishing_replaces_the_old_version_whole(made: Path, tmp_path: Path) -> None:
    old = tmp_path / "artifacts" / "tiny" / "1"
    old.mkdir(parents=True)
    (old / "stale").write_text("x")
    (old / "manifest.json").write_text("{}")
    final = publish(made / "bundle", tmp_path / "artifacts", "tiny", "1")
    assert final == old
    assert not (final / "stale").exists()
    assert (final / "manifest.json").read_bytes() == (
        made / "bundle" / "manifest.json"
    ).read_bytes()
    assert sorted(p.name for p in final.parent.iterdir()) == ["1", "tiny-1.tar"]


def test_publishing_does_not_replace_what_is_no_bundle(made: Path, tmp_path: Path) -> None:
    own = tmp_path / "tiny" / "1" / "my_notes.txt"
    own.parent.mkdir(parents=True)
    own.write_text("x")
    with pytest.raises(RecipeError, match="is not a bundle"):
        publish(made / "bundle", tmp_path, "tiny", "1")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [own]


def publish_earlier(made: Path, artifacts: Path) -> Path:
    """A bundle of the same name and version, with another report, which is in the tar too."""
    final = publish(made / "bundle", artifacts, "tiny", "1")
    for file in (final / "report.html", final.parent / "tiny-1.tar"):
        file.write_bytes(file.read_bytes() + b"of an earlier run")
    return final


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("place", ["report.html", "tiny-1.tar"])
def test_a_disk_that_cannot_be_written_keeps_the_old_version_and_no_half_of_the_new(
    place: str, number: int, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = publish_earlier(made, tmp_path) / "manifest.json"
    before = (old.stat().st_ino, sorted(tmp_path.rglob("*")))
    real = shutil.copyfile

    def full(source: Path, target: Path) -> None:
        real(source, target)
        if source.name == place:
            raise OSError(number, "no", str(target))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(MachineError, match="--artifacts") as caught:
        publish(made / "bundle", tmp_path, "tiny", "1")
    assert caught.value.exit_code == 5
    assert (old.stat().st_ino, sorted(tmp_path.rglob("*"))) == before


def test_publishing_removes_what_an_earlier_run_left_of_the_version(
    made: Path, tmp_path: Path
) -> None:
    home = tmp_path / "tiny"
    publish(made / "bundle", tmp_path, "tiny", "1")
    (home / "1.failed").mkdir()
    (home / "1.failed" / "report.html").write_text("x")
    without_tar = Path(shutil.copytree(made / "bundle", tmp_path / "store" / "bundle"))
    publish(without_tar, tmp_path, "tiny", "1")
    assert [p.name for p in home.iterdir()] == ["1"]


def test_a_file_where_the_artifacts_folder_should_be_is_said(made: Path, tmp_path: Path) -> None:
    (tmp_path / "artifacts").write_text("x")
    with pytest.raises(RecipeError, match="a file exists where"):
        publish(made / "bundle", tmp_path / "artifacts", "tiny", "1")


def test_publishing_that_was_killed_is_completed_by_the_next(made: Path, tmp_path: Path) -> None:
    home = tmp_path / "artifacts" / "tiny"
    for leftover in (".1.partial", ".1.old"):
        (home / leftover).mkdir(parents=True)
        (home / leftover / "half").write_text("x")
    (home / ".tiny-1.tar.partial").write_text("x")
    without_tar = Path(shutil.copytree(made / "bundle", tmp_path / "store" / "bundle"))
    final = publish(without_tar, tmp_path / "artifacts", "tiny", "1")
    assert not (final / "half").exists()
    assert [p.name for p in home.iterdir()] == ["1"]


def test_a_new_version_that_fails_after_a_kill_leaves_the_old_one(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = publish_earlier(made, tmp_path)
    final.rename(final.with_name(".1.old"))  # killed between the two renames

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "no", str(target))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(MachineError):
        publish(made / "bundle", tmp_path, "tiny", "1")
    assert (final / "manifest.json").is_file()


def test_a_bundle_that_its_harness_would_not_read_is_not_made(tmp_path: Path) -> None:
    recipe = small_bundle.recipe(tmp_path / "recipe")
    source, *rest = small_bundle.steps(tmp_path / "steps", recipe)
    (source / "source.json").write_text('{"source": "made here", "revision": 7, "files": {}}')
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(BundleError, match=r"source\.revision: 7 was found"):
        stage.run(recipe.packaging, *small_bundle.inputs(recipe, (source, *rest)), out=out)
