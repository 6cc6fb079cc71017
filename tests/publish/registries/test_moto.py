"""Tests with moto's S3 server: conditional writes, checksums, uploads in parts.

They need moto_server on the PATH (pip install 'moto[server]' in another environment).
"""

from __future__ import annotations

import random
import shutil
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from optimizer.foundation.buckets.blob import Blob, digest_of
from optimizer.foundation.buckets.objects import BucketObjects
from optimizer.harness.errors import BundleError
from optimizer.publish.attachments import SIGNATURE, attachment_path
from optimizer.publish.documents.sign import sign
from optimizer.publish.environments import environments
from optimizer.publish.environments.environments import promote, rollback
from optimizer.publish.environments.prune import prune
from optimizer.publish.pull import pull
from optimizer.publish.push import push
from optimizer.publish.registries.object_store import ObjectStore
from tests import killing
from tests.publish.environments.test_environments import named, version
from tests.publish.registries.test_object_store import at
from tests.publish.registries.test_registry import contents
from tests.publish.servers import s3_server
from tests.publish.servers.keys import write_keys
from tests.publish.servers.loopback import free_port, program

MOTO = shutil.which("moto_server")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MOTO is None, reason="moto_server is not on the PATH"),
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    port = free_port()
    assert MOTO is not None
    endpoint = f"http://127.0.0.1:{port}"
    with program([MOTO, "-H", "127.0.0.1", "-p", port], port, tmp_path / "log"):
        bucket = urllib.request.Request(f"{endpoint}/{s3_server.BUCKET}", method="PUT")
        urllib.request.urlopen(bucket).close()
        with s3_server.environment(endpoint):
            place = ObjectStore(
                BucketObjects("s3", s3_server.BUCKET, "models/tiny", part_size=5 << 20)
            )
            yield place
            place.close()


def test_published_pulled_promoted_rolled_back_and_pruned(
    bundle: Path, tmp_path: Path, store: ObjectStore
) -> None:
    private, public = write_keys(tmp_path)
    folders = [version(bundle, tag, None) for tag in "123"]
    for tag, folder in zip("123", folders, strict=True):
        sign(folder, private, attachment_path(folder, SIGNATURE))
        push(folder, store, tag)
    assert push(folders[0], store, "1").sent == 0
    pulled = pull(store, at("1"), tmp_path / "pulled", public)
    assert contents(pulled.folder) == contents(folders[0])
    promote(store, at("1"), "production", key=public)
    promote(store, at("2"), "production", compared=False)
    assert rollback(store, "production").after == pulled.digest
    assert prune(store, 1) == prune(store, 1, delete=True)
    assert store.tags() == ["1", "3", "production", "production.history"]
    pull(store, at("3"), tmp_path / "3", public)


def _move(store: ObjectStore, tag: str, before: str) -> None:
    environments.move(store, "production", store.read_manifest(tag) or b"", before)


def test_of_eight_promotions_at_once_one_wins(bundle: Path, store: ObjectStore) -> None:
    for tag in "012345678":
        push(version(bundle, tag, None), store, tag)
    promote(store, at("0"), "production")
    before = named(store, "production")
    children = [
        killing.start_clean(s3_server.with_store, partial(_move, tag=tag, before=before))
        for tag in "12345678"
    ]
    for child in children:
        child.join()
    assert sorted(child.exitcode or 0 for child in children) == [0] + [1] * 7
    assert environments.read_history(store, "production") == [before, named(store, "production")]


def test_a_large_file_goes_in_parts_and_one_that_changed_does_not_appear(
    tmp_path: Path, store: ObjectStore
) -> None:
    content = random.Random(0).randbytes(12 << 20)
    file, back = tmp_path / "file", tmp_path / "back"
    file.write_bytes(content)
    blob = Blob(digest_of(content), len(content), file)
    store.send(blob)
    store.receive(blob.digest, blob.size, back)
    assert (store.has(blob), back.read_bytes() == content) == (True, True)
    other = Blob(digest_of(b"what it was"), len(content), file)
    with pytest.raises(BundleError, match="the file changed while it was published"):
        store.send(other)
    assert list(store.blobs()) == [blob.digest]
