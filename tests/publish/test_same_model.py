"""A repository and an environment hold one model, unless the user says otherwise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from optimizer.cli import main
from optimizer.foundation.buckets.blob import digest_of
from optimizer.foundation.errors import MachineError, RecipeError
from optimizer.harness.bundle.manifest import read_manifest
from optimizer.harness.errors import BundleError
from optimizer.publish.address import BundleAddress
from optimizer.publish.attachments import SIGNATURE, attachment_path
from optimizer.publish.documents.sign import sign
from optimizer.publish.pull import pull
from optimizer.publish.push import push
from optimizer.publish.registries import index as indexes
from optimizer.publish.registries.layout import OciLayout
from optimizer.publish.same_model import list_differences
from tests.package.bundles import small_bundle
from tests.publish.servers.keys import write_keys

Change = Callable[[dict[str, Any]], object]


def changed(bundle: Path, name: str, change: Change = lambda _: None) -> Path:
    """Return a copy of the bundle as version `name`, with its manifest changed."""
    copy = Path(shutil.copytree(bundle, bundle.with_name(f"changed-{name}")))
    return small_bundle.edited(copy, lambda m: (m.update(version=name), change(m)))


def another(manifest: dict[str, Any]) -> None:
    manifest["source"]["source"] = "org/another-model"


def optimize(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


OTHER: dict[str, Change] = {
    "task feature-extraction": lambda m: m["contract"].update(task="feature-extraction"),
    "source org/another-model": another,
    "architecture GPT2": lambda m: m["source"].update(architecture="GPT2"),
    "outputs last_hidden_state": lambda m: m["contract"]["outputs"][0]["axes"].append(7),
}


@pytest.mark.parametrize("what", OTHER)
def test_another_model_or_task_is_named_with_the_present_one(bundle: Path, what: str) -> None:
    old, new = read_manifest(bundle), read_manifest(bundle)
    old["source"]["architecture"] = new["source"]["architecture"] = "BertModel"
    OTHER[what](new)
    (told,) = list_differences(old, new)
    assert told.startswith(what)
    assert told.endswith(" there")


def test_a_checkpoint_that_was_trained_again_in_another_folder_is_the_same_model(
    bundle: Path,
) -> None:
    old, new = read_manifest(bundle), read_manifest(bundle)
    old["source"]["source"], new["source"]["source"] = "/runs/1", "/runs/2"
    assert list_differences(old, new) == []


def test_another_model_is_published_only_with_the_option(bundle: Path, tmp_path: Path) -> None:
    place, at = OciLayout(tmp_path / "layout"), f"oci-layout:{tmp_path / 'layout'}"
    push(bundle, place, "1")
    other = changed(bundle, "2", another)
    refused = optimize("publish", other, at)
    assert refused.exit_code == 2
    assert "source org/another-model, and made here there" in refused.stderr
    assert "--new-model" in refused.stderr
    assert place.tags() == ["1"]
    assert optimize("publish", other, at, "--new-model").exit_code == 0
    push(changed(bundle, "3"), place, "3")  # one of the two that are there
    assert place.tags() == ["1", "2", "3"]


def test_a_promotion_says_first_that_the_models_differ(bundle: Path, tmp_path: Path) -> None:
    place, at = OciLayout(tmp_path / "layout"), f"oci-layout:{tmp_path / 'layout'}"
    push(bundle, place, "1")
    push(changed(bundle, "2", another), place, "2", new_model=True)
    assert optimize("promote", f"{at}:1", "--to", "production").exit_code == 0
    unsigned = ("--require-signature", tmp_path / "absent.pem")
    refused = optimize("promote", f"{at}:2", "--to", "production", *unsigned)
    assert refused.exit_code == 2
    assert "another model than that of production" in refused.stderr
    meant = ("--new-model", "--without-comparison")
    assert optimize("promote", f"{at}:2", "--to", "production", *meant).exit_code == 0


def test_a_copy_without_what_was_attached_says_how_to_copy_it(bundle: Path, tmp_path: Path) -> None:
    private, public = write_keys(tmp_path)
    sign(bundle, private, attachment_path(bundle, SIGNATURE))
    folder = tmp_path / "copy"
    push(bundle, OciLayout(folder), "1")
    index = json.loads((folder / "index.json").read_bytes())
    fallback = [tag for tag in indexes.resolve_tags(index) if tag != "1"]
    (folder / "index.json").write_bytes(indexes.remove_tags(index, fallback))
    at = BundleAddress("1", "", folder=folder)
    with pytest.raises(BundleError, match="a copy that lost them") as refused:
        pull(OciLayout(folder), at, tmp_path / "pulled", public)
    assert f"oras cp -r ORIGINAL --to-oci-layout {folder}:1" in refused.value.fix
    assert not (tmp_path / "pulled").exists()


def test_a_signature_is_found_in_an_index_whose_types_another_client_dropped(
    bundle: Path, tmp_path: Path
) -> None:
    private, public = write_keys(tmp_path)
    sign(bundle, private, attachment_path(bundle, SIGNATURE))
    place = OciLayout(tmp_path / "layout")
    push(bundle, place, "1")
    listed = place.referrers
    bare = [{k: e[k] for k in ("mediaType", "digest", "size")} for e in listed(digest(place))]
    place.referrers = lambda _: bare  # type: ignore[method-assign]
    pulled = pull(
        place, BundleAddress("1", "", folder=tmp_path / "layout"), tmp_path / "to", public
    )
    assert pulled.key


def digest(place: OciLayout) -> str:
    data = place.read_manifest("1")
    assert data is not None
    return digest_of(data)


def test_a_place_that_does_not_list_is_published_to(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: OciLayout) -> list[str]:
        raise MachineError("listing is not allowed")

    place = OciLayout(tmp_path / "layout")
    push(bundle, place, "1")
    monkeypatch.setattr(OciLayout, "tags", refuse)
    push(changed(bundle, "2", another), place, "2")
    with pytest.raises(RecipeError, match="names another bundle"):
        push(bundle, place, "2")
