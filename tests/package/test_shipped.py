"""A bundle with other files or settings than validate judged is refused at every step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optimizer.foundation.errors import GateError
from optimizer.harness.errors import BundleError
from optimizer.harness.trust import verify
from optimizer.package import manifest as manifests
from optimizer.package import stage
from optimizer.publish.address import parse
from optimizer.publish.pull import pull
from optimizer.publish.push import push
from optimizer.publish.registries.layout import OciLayout
from optimizer.recipe.schema import Recipe
from tests.harness import small_model
from tests.package.bundles import small_bundle, web_bundle
from tests.package.bundles.small_bundle import python


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, list[Path]]:
    """A recipe and the folders that package takes, with judged rows to answer again."""
    folder = tmp_path_factory.mktemp("judged")
    asked = small_bundle.recipe(folder / "recipe")
    steps = small_bundle.steps(folder / "steps", asked)
    small_bundle.judge(asked, steps, answered=True)
    return asked, steps


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, list[Path]]:
    """The same of a model with two labels."""
    folder = tmp_path_factory.mktemp("classifier")
    asked = small_bundle.recipe(folder / "recipe")
    steps = small_bundle.steps(folder / "steps", asked)
    contract = small_model.contract("text-classification", labels=["negative", "positive"])
    contract["outputs"][0]["axes"] = ["batch", 2]
    (steps[0] / "contract.json").write_text(json.dumps(contract))
    web_bundle.classify(steps[2] / "model.onnx", contract["labels"])
    small_bundle.judge(asked, steps, answered=True)
    return asked, steps


def package(judged: tuple[Recipe, list[Path]], out: Path) -> Path:
    asked, steps = judged
    out.mkdir()
    stage.run(asked.packaging, *small_bundle.inputs(asked, steps), out=out)
    return out / "bundle"


def rewritten(bundle: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The bundle with its manifest changed, and written over what is in the folder now."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    change(manifest)
    manifests.write(bundle, manifest)
    return bundle


def damage(file: Path) -> None:
    """Zero 64 bytes of a weight."""
    import onnx

    model = onnx.load(file)
    largest = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    largest.raw_data = bytes(64) + largest.raw_data[64:]
    onnx.save(model, file)


def test_a_bundle_that_answers_as_it_was_judged_is_made(
    judged: tuple[Recipe, list[Path]], tmp_path: Path
) -> None:
    bundle = package(judged, tmp_path / "out")
    assert verify.list_problems(bundle)[1] == []
    assert python(bundle, "-m", "harness", "check").returncode == 0


def test_packaging_that_zeroes_bytes_of_the_model_it_copies_is_caught(
    judged: tuple[Recipe, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.copyfile

    def damaging(source: Path, target: Path) -> None:
        real(source, target)
        if Path(target).name == "model.onnx":
            damage(Path(target))

    monkeypatch.setattr(shutil, "copyfile", damaging)
    with pytest.raises(GateError, match=r"model\.onnx has sha256 \w{64}, and the one judged has "):
        package(judged, tmp_path / "out")


def test_packaging_that_writes_the_labels_the_other_way_round_is_caught(
    classifier: tuple[Recipe, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(classifier, tmp_path / "right")
    real = manifests.write

    def turning(bundle: Path, document: dict[str, Any]) -> dict[str, Any]:
        contract = {**document["contract"], "labels": document["contract"]["labels"][::-1]}
        return real(bundle, {**document, "contract": contract})

    monkeypatch.setattr(manifests, "write", turning)
    with pytest.raises(GateError, match=r"contract has sha256 \w{64}, and the one judged has "):
        package(classifier, tmp_path / "out")


def test_a_bundle_whose_own_harness_answers_otherwise_is_caught(
    judged: tuple[Recipe, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every digest is right: the harness's sources were not judged."""
    real = stage._add_harness

    def turning(bundle: Path, task: str) -> None:
        real(bundle, task)
        file = bundle / "harness/tasks/embeddings/sentence_embedding.py"
        source = file.read_text()
        assert "TASK = Task(" in source
        turned = "decode=lambda *a: -decode(*a)"
        file.write_text(source.replace("decode=decode", turned))

    monkeypatch.setattr(stage, "_add_harness", turning)
    with pytest.raises(GateError, match=r"row 1 .* gives .* and gave .* when it was judged"):
        package(judged, tmp_path / "out")


def test_a_report_without_what_was_judged_is_not_packaged(
    judged: tuple[Recipe, list[Path]], tmp_path: Path
) -> None:
    asked, steps = judged
    report = Path(shutil.copytree(steps[-1], tmp_path / "report"))
    document = json.loads((report / "report.json").read_text())
    del document["judged"]
    (report / "report.json").write_text(json.dumps(document))
    with pytest.raises(GateError, match="does not record what was judged for onnxruntime-cpu"):
        package((asked, [*steps[:-1], report]), tmp_path / "out")


@pytest.fixture(scope="module")
def bundle(judged: tuple[Recipe, list[Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(judged, tmp_path_factory.mktemp("whole") / "out")


def other_model(bundle: Path) -> None:
    damage(next(bundle.glob("model/*/model.onnx")))
    rewritten(bundle, lambda _: None)


def other_pooling(bundle: Path) -> None:
    rewritten(bundle, lambda m: m["contract"].update(pooling="cls"))


def other_tokenizer(bundle: Path) -> None:
    file = bundle / "tokenizer/tokenizer.json"
    file.write_text(file.read_text() + " ")
    rewritten(bundle, lambda _: None)


def other_tokenizer_of_genai(bundle: Path) -> None:
    copy = next(bundle.glob("model/*")) / "tokenizer.json"
    copy.write_text((bundle / "tokenizer/tokenizer.json").read_text() + " ")
    rewritten(bundle, lambda _: None)


def other_threads(bundle: Path) -> None:
    rewritten(bundle, lambda m: m["engines"][0].update(threads=7))


FAULTS = (other_model, other_pooling, other_tokenizer, other_tokenizer_of_genai, other_threads)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_what_was_not_judged_is_refused_by_check_and_publish_though_the_manifest_vouches_for_it(
    fault: Callable[[Path], None], bundle: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    fault(copy)
    (line,) = verify.list_problems(copy)[1]
    assert "the one judged has" in line
    done = python(copy, "-I", "-S", "verify.py")
    assert (done.returncode, line in done.stdout) == (2, True)
    done = python(copy, "-m", "harness", "check")
    assert (done.returncode, line in done.stdout) == (2, True)
    with pytest.raises(BundleError, match="the one judged has"):
        push(copy, OciLayout(tmp_path / "layout"), "1")


def test_a_bundle_that_was_published_with_what_was_not_judged_is_not_pulled(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    other_pooling(copy)
    layout = OciLayout(tmp_path / "layout")
    with monkeypatch.context() as published_unseen:
        published_unseen.setattr(verify, "list_unjudged", lambda *_: [])
        push(copy, layout, "1")
    with pytest.raises(BundleError, match="the one judged has"):
        pull(layout, parse(f"oci-layout:{tmp_path / 'layout'}:1"), tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()


def test_a_bundle_of_an_older_toolchain_is_taken_as_its_manifest_has_it(
    bundle: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    reports = json.loads((copy / "report.json").read_text())
    del reports[0]["judged"]
    (copy / "report.json").write_text(json.dumps(reports))
    rewritten(copy, lambda _: None)
    assert verify.list_problems(copy)[1] == []
