"""Tests of a recipe's `publish:` list: early checks, independent places, reruns."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from optimizer import pipeline
from optimizer.checks import ordered
from optimizer.checks.context import Context
from optimizer.cli import main
from optimizer.commands.build import outcome
from optimizer.commands.release.publish import Access, open_place
from optimizer.foundation.buckets import objects
from optimizer.foundation.buckets.blob import digest_of
from optimizer.foundation.errors import MachineError, RecipeError
from optimizer.publish import stage
from optimizer.publish.attachments import SIGNATURE, attachment_path
from optimizer.publish.documents.sign import sign
from optimizer.publish.registries.layout import OciLayout
from optimizer.recipe import file as recipe_file
from optimizer.recipe.schema import Recipe
from optimizer.store import Built, Step, Store
from tests.conftest import write_tiny_recipe
from tests.package.bundles import small_bundle
from tests.publish.servers.keys import write_keys

NOWHERE = "oci://127.0.0.1:9/models/tiny"
OPENED = partial(open_place, access=Access(Path("/nonexistent"), False, None))


@pytest.fixture
def run(
    packaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., outcome.RunResult]:
    """Publish to this list at the end of a run with a packaged bundle that passed."""
    recipe = small_bundle.recipe(tmp_path / "recipe", (small_bundle.ORT,))
    bundle = json.loads((packaged / "bundle/manifest.json").read_bytes())
    reports = json.loads((packaged / "bundle/report.json").read_bytes())
    report = tmp_path / "report"
    report.mkdir()
    (report / "report.json").write_text(json.dumps(reports[0]))
    (report / "made_from.json").write_text('{"files": {}}')
    (report / "source.json").write_text(json.dumps(bundle["source"]))

    def packaged_run(recipe: Recipe, store: Store) -> pipeline.Outcome:
        store.log.append({"stage": "load", "path": str(report)})
        step = Step("validate", "key", report)
        built = (Built(recipe.targets[0], step, step, step),)
        return pipeline.Outcome(recipe, built, Step("package", "key", packaged))

    monkeypatch.setattr(pipeline, "run", packaged_run)

    def ended(*addresses: str, until: str = "publish") -> outcome.RunResult:
        listed = recipe.model_copy(update={"publish": addresses})
        work = tmp_path / "store", tmp_path / "artifacts"
        return outcome.finish(listed, *work, until=until, remeasure=False, open_place=OPENED)

    return ended


def test_a_bundle_that_passed_is_published_with_its_signature_and_noted(
    run: Callable[..., outcome.RunResult], tmp_path: Path
) -> None:
    one, two = (f"oci-layout:{tmp_path / name}" for name in ("one", "two"))
    made = run(one, f"{two}:stable")
    assert (made.exit_code, made.bundle) == (0, tmp_path / "artifacts" / "tiny" / "1")
    digest = digest_of(OciLayout(tmp_path / "one").read_manifest("1") or b"")
    assert digest_of(OciLayout(tmp_path / "two").read_manifest("stable") or b"") == digest
    published = made.as_dict()["published"]
    assert [p["address"] for p in published] == [f"{one}:1@{digest}", f"{two}:stable@{digest}"]
    note = json.loads((tmp_path / "artifacts/tiny/1.published.json").read_bytes())
    assert note == {"version": "1", "published": published}
    private, _ = write_keys(tmp_path)
    signature = attachment_path(made.bundle, SIGNATURE)
    sign(made.bundle, private, signature)
    (again,) = run(one).published
    assert again.receipt is not None
    assert ".sig" in again.receipt.attached
    assert again.receipt.sent == signature.stat().st_size


def test_every_run_asks_what_is_there(
    run: Callable[..., outcome.RunResult], tmp_path: Path
) -> None:
    at = f"oci-layout:{tmp_path / 'layout'}"
    first = run(at).published[0].receipt
    second = run(at).published[0].receipt
    shutil.rmtree(tmp_path / "layout")
    third = run(at).published[0].receipt
    assert first is not None
    assert second is not None
    assert (second.sent, second.shared, first) == (0, first.sent + first.shared, third)


def test_nothing_is_published_before_that_stage(
    run: Callable[..., outcome.RunResult], tmp_path: Path
) -> None:
    made = run(f"oci-layout:{tmp_path / 'layout'}", until="package")
    assert (made.exit_code, made.published) == (0, ())
    assert not (tmp_path / "layout").exists()


def test_a_place_that_does_not_answer_is_exit_5_and_the_others_are_served(
    run: Callable[..., outcome.RunResult], tmp_path: Path
) -> None:
    made = run(NOWHERE, f"oci-layout:{tmp_path / 'layout'}")
    assert (made.exit_code, made.verdict) == (5, "pass")
    failed, served = made.as_dict()["published"]
    assert (failed["exit_code"], failed["error"]) == (5, "MachineError")
    assert f"optimize publish {made.bundle} {NOWHERE}:1" in failed["fix"]
    assert f"optimize publish {made.bundle} {NOWHERE}:1" in made.text
    assert served["tag"] == "1"


def test_another_bundle_under_the_tag_is_left_there(
    run: Callable[..., outcome.RunResult], bundle: Path, tmp_path: Path
) -> None:
    at = f"oci-layout:{tmp_path / 'layout'}"
    small_bundle.edited(bundle, lambda m: m.update(licence="mit"))
    assert optimize("publish", bundle, f"{at}:1").exit_code == 0
    before = OciLayout(tmp_path / "layout").read_manifest("1")
    made = run(at)
    assert (made.exit_code, "names another bundle" in made.text) == (2, True)
    assert OciLayout(tmp_path / "layout").read_manifest("1") == before


REFUSED: dict[str, tuple[list[str], type[Exception], str]] = {
    "no address": (["minilm"], RecipeError, "publish.0: 'minilm' is not an address"),
    "a password": (
        ["oci://user:secret@host/name"],
        RecipeError,
        "publish.0: the address has a user",
    ),
    "a digest": ([f"oci://host/name@sha256:{'0' * 64}"], RecipeError, "names a digest"),
    "twice": (["oci://host/name:1", "oci://host/name:1"], RecipeError, "publish.1: .* twice"),
    "a package": (["s3://bucket/prefix"], MachineError, r"publish.0: .*not installed.*\[s3\]"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_published_to_is_known_before_any_work(
    why: str, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "find_spec", lambda name: None)
    listed, error, message = REFUSED[why]
    recipe = recipe_file.read(write_tiny_recipe(tmp_path, tiny_bert))
    listing = recipe.model_copy(update={"publish": tuple(listed)})
    with pytest.raises(error, match=message) as refused:
        ordered.check(listing, Context())
    assert "secret" not in str(refused.value)
    ordered.check(listing, Context(until="package"))  # raises nothing


def test_a_folder_of_something_else_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RecipeError, match=r"publish\.0: .*not an OCI layout"):
        stage.check([f"oci-layout:{tmp_path}"])


def optimize(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_check_and_plan_name_the_places_and_plan_asks_them(
    bundle: Path, tmp_path: Path, tiny_bert: Path
) -> None:
    at = f"oci-layout:{tmp_path / 'layout'}"
    recipe = write_tiny_recipe(tmp_path / "recipe", tiny_bert)
    listed: Any = ("--set", f"publish=[{at}, {NOWHERE}]")
    checked = optimize("check", recipe, *listed)
    assert (checked.exit_code, f"Publishes to: {at}, {NOWHERE}." in checked.stdout) == (0, True)
    assert optimize("publish", bundle, at).exit_code == 0
    planned = optimize("--json", "plan", recipe, *listed, "--store", tmp_path / "store")
    *_, there, nowhere = json.loads(planned.stdout)
    assert (there["stage"], there["address"]) == ("publish", at)
    assert "the tag 1 names sha256:" in there["why"]
    assert "does not answer" in nowhere["why"]
    wrong = optimize("check", recipe, "--set", "publish=[minilm]")
    assert (wrong.exit_code, "publish.0" in wrong.stderr) == (2, True)
