"""Tests of a hostile registry: any answer ends in one message, in time, without effect."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from optimizer.cli import main
from optimizer.foundation.buckets.blob import Blob, digest_of
from optimizer.foundation.errors import MachineError
from optimizer.harness.errors import BundleError
from optimizer.publish.address import BundleAddress
from optimizer.publish.attachments import SIGNATURE, attachment_path
from optimizer.publish.documents.sign import sign
from optimizer.publish.environments.environments import promote
from optimizer.publish.model_pack import build_referrer
from optimizer.publish.pull import pull
from optimizer.publish.push import push
from optimizer.publish.registries.place import describe
from optimizer.publish.registries.registry import MOST_PAGES
from tests.hostile.cases import VALUES
from tests.publish.servers import oci_server
from tests.publish.servers.keys import write_keys

NASTY = "x\x1b[31m\nerror: forged\n::error::forged\u202e"
SHARE = 25
"""Number of mutated manifests that are pulled per run, drawn with a seed."""


@pytest.fixture
def server() -> Iterator[oci_server.Server]:
    with oci_server.serving() as server:
        yield server


def optimize(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def complaint(result: Result) -> str:
    """Return the fault in a command's result; "" for none."""
    lines = result.output.splitlines()
    if result.exit_code not in (0, 2, 5):
        return f"exit {result.exit_code}: {result.output[-300:]} {result.exception!r:.200}"
    if "bug here" in result.output or "Traceback" in result.output:
        return result.output[-300:]
    if not all(line.isprintable() for line in lines):
        return f"raw: {result.output[-300:]!a}"
    if sum(line.lstrip().startswith(("error:", "::")) for line in lines) > 1:
        return f"forged: {result.output[-300:]}"
    return ""


def nodes(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(document, dict | list):
        keys = document if isinstance(document, dict) else range(len(document))
        for key in keys:
            yield from nodes(document[key], (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    document = copy.deepcopy(document)
    part = document
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return document


def mutations(document: Any, draw: random.Random) -> list[Any]:
    """Yield the document with one value, anywhere, of another type."""
    short = copy.deepcopy(document)
    for key in ("layers", "manifests"):
        if key in short:
            del short[key][2:]
    values = [*VALUES.values(), ".", "./", "//", NASTY, [1, 2], {"a": [1]}]
    every = [(path, value) for path in nodes(short) for value in values]
    return [changed(short, path, value) for path, value in draw.sample(every, SHARE)]


@pytest.mark.parametrize("what", ["1", "referrers", "production", "production.history"])
def test_a_document_of_another_shape_is_refused_in_a_sentence(
    bundle: Path, tmp_path: Path, server: oci_server.Server, what: str
) -> None:
    private, public = write_keys(tmp_path)
    sign(bundle, private, attachment_path(bundle, SIGNATURE))
    receipt = push(bundle, server.client(), "1")
    at = BundleAddress("1", "", host=server.host, name="models/tiny")
    promote(server.client(), at, "production", compared=False)
    what = receipt.digest.replace(":", "-") if what == "referrers" else what
    kind, data = server.manifests[what]
    here = f"oci://{server.host}/models/tiny"
    commands: dict[str, tuple[object, ...]] = {
        "1": ("pull", f"{here}:1", "--require-signature", public),
        "production": ("promote", f"{here}:1", "--to", "production"),
        "production.history": ("rollback", here, "--from", "production"),
    }
    signed = ("promote", f"{here}:1", "--to", "b", "--require-signature", public)
    command = commands.get(what, signed)
    bad = []
    for mutation in mutations(json.loads(data), random.Random(what)):
        server.manifests[what] = (kind, json.dumps(mutation).encode())
        to = ("--to", tmp_path / "pulled") if what == "1" else ()
        if found := complaint(optimize(*command, *to)):
            bad.append((json.dumps(mutation)[:200], found))
        server.manifests.pop("b", None)
    assert bad == []
    assert not (tmp_path / "pulled").exists()


def test_what_a_registry_says_is_shown_on_one_line(server: oci_server.Server) -> None:
    server.manifests[NASTY] = ("x", b"{}")
    assert complaint(optimize("versions", f"oci://{server.host}/x")) == ""
    assert complaint(optimize("pull", f"oci://{server.host}/x:1")) == ""


NEXT = '; rel="next"'
LINKS = [
    *('rel="next"', f"<>{NEXT}", f"<http://[::1>{NEXT}", f">{NEXT} <", "<a>;rel=next"),
    *(f"<http://127.0.0.1:1/x>{NEXT}", f"{'<' * 1000}>{NEXT}"),
]


@pytest.mark.parametrize("link", LINKS)
def test_a_next_page_that_cannot_be_is_refused(server: oci_server.Server, link: str) -> None:
    server.link = link
    assert complaint(optimize("versions", f"oci://{server.host}/x")) == ""


@pytest.mark.parametrize("page", ["?n=1", "?n={}"])
def test_pages_without_an_end_come_to_one(server: oci_server.Server, page: str) -> None:
    """Pages without end: one links to itself, the other always to a new one."""
    server.link = f"</v2/x/tags/list{page}>{NEXT}"
    with pytest.raises(MachineError, match="does not end"):
        server.client().tags()
    assert len(server.log) <= MOST_PAGES + 1


NOWHERE = ["http://[::1", "http://127.0.0.1:x/", "ftp://a/b", "http://a b/"]


@pytest.mark.parametrize("location", NOWHERE)
def test_an_upload_to_nowhere_is_the_registrys_fault(
    bundle: Path, server: oci_server.Server, location: str
) -> None:
    server.location = location
    with pytest.raises(MachineError, match="not a URL that can be requested"):
        push(bundle, server.client(), "1")


def test_half_a_blob_and_then_a_byte_now_and_then_is_not_waited_for(
    tmp_path: Path, server: oci_server.Server
) -> None:
    """Ten bytes a second: a timeout of each read would wait for all of them."""
    blob = Blob.describe(bytes(20_000))
    client = server.client()
    client.send(blob)
    server.drip, client.transport.body_seconds = 0.1, 0.5
    with pytest.raises(MachineError, match="too slow"):
        client.receive(blob.digest, blob.size, tmp_path / "blob")
    half = (tmp_path / "blob").stat().st_size
    assert half >= 10_000
    server.drip = 0.0
    client.receive(blob.digest, blob.size, tmp_path / "blob")
    assert (tmp_path / "blob").read_bytes() == bytes(20_000)


JUNK = 101


def attach(
    server: oci_server.Server, subject: dict[str, Any], blob: bytes, layers: int = 1
) -> None:
    content = Blob.describe(blob)
    server.blobs[content.digest] = blob
    document = json.loads(build_referrer(content, SIGNATURE.media_type, "x.sig", subject))
    if layers > 1:
        document["layers"] += [changed(document["layers"][0], ("annotations",), {})] * (layers - 1)
    data = json.dumps(document).encode()
    server.manifests[digest_of(data)] = (document["mediaType"], data)


@pytest.mark.parametrize("first", [True, False])
def test_junk_does_not_hide_a_signature(
    bundle: Path, tmp_path: Path, server: oci_server.Server, first: bool
) -> None:
    """Noise before and after the signature: garbage, a large file, two layers, another key, and the
    key's signature of other files."""
    private, public = write_keys(tmp_path)
    other, _ = write_keys(tmp_path, "other")
    server.has_referrers = True
    push(bundle, server.client(), "1")
    subject = describe(server.manifests["1"][1])
    sign(bundle, other, attachment_path(bundle, SIGNATURE))
    foreign = attachment_path(bundle, SIGNATURE).read_bytes()
    sign(bundle, private, attachment_path(bundle, SIGNATURE))
    right = attachment_path(bundle, SIGNATURE).read_bytes()
    if first:
        attach(server, subject, right)
    for i in range(JUNK):
        attach(server, subject, b"junk %d" % i)
    attach(server, subject, foreign)
    attach(server, subject, bytes(2 << 20))
    attach(server, subject, b"{}", layers=2)
    with pytest.raises(BundleError) if not first else _nothing():
        pulled = pull(server.client(), _at(server), tmp_path / "one", public)
        assert attachment_path(pulled.folder, SIGNATURE).read_bytes() == right
    if not first:
        attach(server, subject, right)
        pull(server.client(), _at(server), tmp_path / "two", public)
    promote(server.client(), _at(server), "production", key=public, compared=False)
    large = sum(path.endswith(digest_of(bytes(2 << 20))) for _, path, *_ in server.log)
    assert large == 0


def _at(server: oci_server.Server) -> BundleAddress:
    return BundleAddress("1", "", host=server.host, name="models/tiny")


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()
