"""Read and write a repository of a registry over HTTP, by the OCI distribution specification 1.1.

A HEAD request before each blob avoids sending blobs that the registry has. A download resumes at
the end of the file (Range). Referrers use the registry's API if its response has the header
OCI-Subject, else an index under the tag sha256-<hex>.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from optimizer.foundation.buckets.blob import Blob, digest_of
from optimizer.foundation.errors import MachineError
from optimizer.harness.errors import BundleError
from optimizer.publish.registries.place import (
    INDEX_TYPE,
    LARGEST_MANIFEST,
    MANIFEST_TYPE,
    Json,
    add_referrer,
    describe,
    encode,
    fallback_tag,
    is_fallback_tag,
    parse_document,
    parse_referrers,
)
from optimizer.publish.registries.transport import RegistryResponse, Sink, Transport

ROUNDS = 5
"""Maximum writes of an index of referrers when other writers replace it."""
MOST_PAGES = 1000
MOST_LISTED = 100_000
"""Maximum tags, or referrers, of all pages together."""
NEXT = re.compile(r'<([^<>]*)>\s*;(?:[^,]*;)?\s*rel="?next"?')
"""URL of the next page in a header Link (RFC 8288)."""


class Registry:
    """One repository of an OCI registry that answers over HTTP, in which bundles are published."""

    def __init__(self, transport: Transport, name: str) -> None:
        self.transport, self.name = transport, name
        self.root = f"/v2/{name}"

    def has(self, blob: Blob) -> bool:
        answer = self.transport.request("HEAD", f"{self.root}/blobs/{blob.digest}")
        return self._check_status(answer, 200, 404).status == 200

    def send(self, blob: Blob) -> None:
        upload = self.transport.request("POST", f"{self.root}/blobs/uploads/")
        self._check_status(upload, 202)
        url = self.transport.resolve_url(self.transport.base, upload.headers.get("location", ""))
        answer = self.transport.request(
            "PUT",
            f"{url}{'&' if '?' in url else '?'}{urlencode({'digest': blob.digest})}",
            headers={"Content-Type": "application/octet-stream"},
            body=blob.content,
        )
        self._check_status(answer, 201)

    def receive(self, digest: str, size: int, into: Path) -> None:
        with into.open("r+b" if into.exists() else "wb") as f:
            f.seek(0, 2)
            while (start := f.tell()) < size:
                headers = {"Range": f"bytes={start}-"} if start else {}
                answer = self.transport.request(
                    "GET", f"{self.root}/blobs/{digest}", headers=headers, into=Sink(f, size)
                )
                self._check_status(answer, 200, 206)
                if f.tell() <= start:
                    raise MachineError(
                        f"the registry sent {f.tell():,} of {size:,} bytes",
                        where=f"{self.transport.host}/{self.name}@{digest}",
                        fix="Run the same command again.",
                    )

    def read_manifest(self, reference: str) -> bytes | None:
        accept = {"Accept": f"{MANIFEST_TYPE}, {INDEX_TYPE}"}
        answer = self.transport.request("GET", f"{self.root}/manifests/{reference}", headers=accept)
        if self._check_status(answer, 200, 404).status == 404:
            return None
        if len(answer.data) > LARGEST_MANIFEST:
            raise BundleError(f"the manifest is above {LARGEST_MANIFEST:,} bytes", where=reference)
        if reference.startswith("sha256:") and digest_of(answer.data) != reference:
            raise BundleError(
                f"the registry sent another manifest, with the digest {digest_of(answer.data)}",
                where=f"{self.transport.host}/{self.name}@{reference}",
                fix="Do not use it; get the bundle elsewhere.",
            )
        return answer.data

    def write_manifest(self, data: bytes, tag: str = "") -> None:
        self._put(data, tag or digest_of(data))

    def write_referrer(self, data: bytes, subject: str) -> None:
        answer = self._put(data, digest_of(data))
        if "oci-subject" in answer.headers:
            return
        tag, added = fallback_tag(subject), describe(data)
        for _ in range(ROUNDS):
            index = add_referrer(self.read_manifest(tag), added)
            self._put(index, tag)
            listed = parse_referrers(self.read_manifest(tag))
            if any(entry["digest"] == added["digest"] for entry in listed):
                return
        raise MachineError(
            f"other writers replaced the index of referrers {ROUNDS} times",
            where=f"{self.transport.host}/{self.name}:{tag}",
            fix="Run the same command again.",
        )

    def referrers(self, subject: str) -> list[Json]:
        pages = self._pages(f"{self.root}/referrers/{subject}", "manifests", 405)
        if pages is not None:
            return parse_referrers(encode({"manifests": pages}))
        return parse_referrers(self.read_manifest(fallback_tag(subject)))

    def tags(self) -> list[str]:
        listed = self._pages(f"{self.root}/tags/list", "tags") or []
        tags = {tag for tag in listed if isinstance(tag, str)}
        return sorted(tag for tag in tags if not is_fallback_tag(tag))

    def _pages(self, url: str, key: str, *absent: int) -> list[Any] | None:
        """Collect the lists under `key` of all pages; None if the first one is missing (404 or a
        status in `absent`). Raises MachineError for pages that do not end."""
        listed: list[Any] = []
        seen: set[str] = set()
        while url not in seen and len(seen) < MOST_PAGES and len(listed) < MOST_LISTED:
            seen.add(url)
            answer = self.transport.request("GET", url)
            if self._check_status(answer, 200, 404, *absent).status != 200:
                return listed if len(seen) > 1 else None
            page = parse_document(answer.data, key).get(key) or []
            if not isinstance(page, list):
                raise BundleError(f"its {key} are not a list", where=self.transport.host)
            listed += page
            following = NEXT.search(answer.headers.get("link", ""))
            if following is None:
                return listed
            url = self.transport.resolve_url(self.transport.base + url, following[1])
            url = url.removeprefix(self.transport.base)
        raise MachineError(
            f"the list of {key} does not end ({len(seen):,} pages, {len(listed):,} entries)",
            where=f"{self.transport.host}/{self.name}",
            accepted=f"{MOST_PAGES:,} pages and {MOST_LISTED:,} entries",
        )

    def move(self, tags: Mapping[str, bytes], last: str, expected: str) -> bool:
        """Write the tags in order, each after comparing the tag `last` with `expected`.

        Not atomic: the distribution specification has no conditional write.
        """
        for tag, data in tags.items():
            named = self.read_manifest(last)
            if ("" if named is None else digest_of(named)) != expected:
                return False
            self.write_manifest(data, tag)
        return True

    def close(self) -> None:
        self.transport.close()

    def _put(self, data: bytes, reference: str) -> RegistryResponse:
        answer = self.transport.request(
            "PUT",
            f"{self.root}/manifests/{reference}",
            headers={"Content-Type": parse_document(data, reference)["mediaType"]},
            body=data,
        )
        return self._check_status(answer, 201)

    def _check_status(self, answer: RegistryResponse, *accepted: int) -> RegistryResponse:
        """Return the registry's response. Raises MachineError for a status that is not in
        `accepted`."""
        if answer.status in accepted:
            return answer
        fix = {403: f"docker login {self.transport.host}", 429: "Wait, and run the command again."}
        raise MachineError(
            answer.problem(),
            where=f"{self.transport.host}/{self.name}",
            fix=fix.get(answer.status, "Run the same command again; it resumes."),
        )
