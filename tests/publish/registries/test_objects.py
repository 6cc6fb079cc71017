"""Tests of the objects that a layout needs, in S3, Google's and Azure's stores.

Azure is azurite (npm install azurite; its azurite-blob on the PATH), Microsoft's own emulator.
"""

from __future__ import annotations

import base64
import hmac
import random
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from importlib.util import find_spec
from pathlib import Path

import pytest

from optimizer.foundation.buckets.blob import Blob, digest_of
from optimizer.foundation.buckets.objects import NO_VERSION, BucketObjects
from optimizer.foundation.errors import MachineError
from optimizer.harness.errors import BundleError
from optimizer.publish.address import parse
from optimizer.publish.environments.environments import promote, rollback
from optimizer.publish.environments.prune import prune
from optimizer.publish.pull import pull
from optimizer.publish.push import push
from optimizer.publish.registries.object_store import ObjectStore
from tests.publish.environments.test_environments import version
from tests.publish.registries.test_registry import contents
from tests.publish.servers import gs_server, s3_server
from tests.publish.servers.loopback import free_port, program

AZURITE = shutil.which("azurite-blob")
ACCOUNT = "devstoreaccount1"  # azurite's, with the key that its documentation prints
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
PREFIX = "models/tiny"
PART = 1 << 18


@contextmanager
def azurite(folder: Path) -> Iterator[None]:
    port = free_port()
    assert AZURITE is not None
    words = [AZURITE, "--silent", "--skipApiVersionCheck", "--location", str(folder / "azurite")]
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    with program([*words, "--blobPort", port], port, folder / "azurite.log"):
        create_container(endpoint, "releases")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
            patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
            patch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
            yield


def create_container(endpoint: str, name: str) -> None:
    """Create the container by a signed request (Azure's "Authorize with Shared Key"): obstore
    cannot."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    signed = ["PUT", *[""] * 11, *(f"{k}:{v}" for k, v in headers.items())]
    signed += [f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"]
    digest = hmac.digest(base64.b64decode(KEY), "\n".join(signed).encode(), "sha256")
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    address = f"{endpoint}/{name}?restype=container"
    request = urllib.request.Request(address, method="PUT", headers=headers)
    urllib.request.urlopen(request).close()


SERVERS = {
    "s3": lambda folder: s3_server.serving(),
    "gs": lambda folder: gs_server.serving(),
    "az": azurite,
}


@contextmanager
def opened(kind: str, folder: Path) -> Iterator[BucketObjects]:
    with SERVERS[kind](folder):
        yield BucketObjects(kind, "releases", PREFIX, PART)


def without(reason: str, missing: bool) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow, pytest.mark.skipif(missing, reason=reason)]


KINDS = [
    s3_server.KIND,
    pytest.param("gs", marks=without("obstore is not installed", find_spec("obstore") is None)),
    pytest.param(
        "az",
        marks=without("obstore, azurite-blob: not here", not (AZURITE and find_spec("obstore"))),
    ),
]


@pytest.fixture(params=KINDS)
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BucketObjects]:
    with opened(request.param, tmp_path) as store:
        yield store


def test_a_write_happens_only_while_the_object_is_what_was_read(objects: BucketObjects) -> None:
    assert objects.read("index.json") is None
    assert not objects.write("index.json", b"no", NO_VERSION)
    assert objects.write("index.json", b"one", None)
    assert not objects.write("index.json", b"two", None)
    assert not objects.write("index.json", b"two", NO_VERSION)
    one = objects.read("index.json")
    assert one is not None
    assert objects.write("index.json", b"two", one.version)
    assert not objects.write("index.json", b"three", one.version)
    two = objects.read("index.json")
    assert two is not None
    assert (one.data, two.data) == (b"one", b"two")
    assert objects.write("large.json", bytes(900_000), None)
    assert len(getattr(objects.read("large.json"), "data", b"")) == 900_000
    objects.remove(["index.json"])
    assert not objects.write("index.json", b"three", two.version)
    assert objects.read("index.json") is None


@pytest.mark.parametrize("size", [0, 1000, 3 * PART, 3 * PART + 1])
def test_what_is_put_comes_back_from_any_byte_on(
    objects: BucketObjects, tmp_path: Path, size: int
) -> None:
    content = random.Random(size).randbytes(size)
    file = tmp_path / "file"
    file.write_bytes(content)
    blob = Blob(digest_of(content), size, file)
    assert not objects.has("blobs/x", blob)
    objects.put("blobs/x", blob)
    assert objects.has("blobs/x", blob)
    assert objects.sizes("blobs") == {"blobs/x": size}
    for start in {0, size // 2} if size else ():
        assert objects.part("blobs/x", start, size) == content[start:]
    assert objects.part("blobs/y", 0, 10) is None
    objects.remove(["blobs/x"])
    objects.remove(["blobs/x"])
    assert objects.sizes("blobs") == {}


@pytest.mark.parametrize("size", [1000, 2 * PART + 1])
def test_a_file_that_is_not_what_its_digest_says_does_not_appear(
    objects: BucketObjects, tmp_path: Path, size: int
) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(size))
    with pytest.raises(BundleError, match="the file changed while it was published"):
        objects.put("blobs/x", Blob(digest_of(b"what it was"), size, file))
    assert objects.sizes("blobs") == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_published_promoted_rolled_back_and_pruned(bundle: Path, tmp_path: Path, kind: str) -> None:
    with opened(kind, tmp_path) as objects:
        place = ObjectStore(objects)
        folders = [version(bundle, tag, None) for tag in "12"]
        digests = [push(f, place, t).digest for f, t in zip(folders, "12", strict=True)]
        assert push(folders[0], place, "1").sent == 0
        for tag in "12":
            promote(place, parse(f"{kind}://releases/{PREFIX}:{tag}"), "production", compared=False)
        assert rollback(place, "production").after == digests[0]
        assert prune(place, 1, delete=True).kept == ("1", "2")
        at = parse(f"{kind}://releases/{PREFIX}:production")
        assert contents(pull(place, at, tmp_path / "pulled").folder) == contents(folders[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_bucket_is_reported(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path):
        objects = BucketObjects(kind, "nowhere", PREFIX)
        with pytest.raises(MachineError, match="there is no such"):
            objects.write("index.json", b"", None)
