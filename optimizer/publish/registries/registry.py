"""A registry, by the OCI distribution specification 1.1, over HTTP.

A HEAD request precedes each blob, so that blobs that two versions share, or that a killed run
finished, are not sent again. It is fetched from the byte where the file ends (Range).
Referrers go by the registry's own API where its answer shows that it has one (the header
OCI-Subject), and else by an index under the tag sha256-<hex>.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from optimizer.foundation.errors import MachineError
from optimizer.harness.errors import BundleError
from optimizer.publish.registries.place import (
    INDEX_TYPE,
    LARGEST_MANIFEST,
    MANIFEST_TYPE,
    Blob,
    Json,
    canonical,
    descriptor,
    digest_of,
    document,
    fallback_tag,
    index_with,
    is_fallback,
    listed_in,
)
from optimizer.publish.registries.transport import Answer, Sink, Transport

ROUNDS = 5
"""Maximum writes of an index of referrers while other writers replace it."""
MOST_PAGES = 1000
MOST_LISTED = 100_000
"""Tags, or referrers, of all pages."""
NEXT = re.compile(r'<([^<>]*)>\s*;(?:[^,]*;)?\s*rel="?next"?')
"""Of a header Link, as RFC 8288 has it."""


class Registry:
    """A Place: one repository of a registry."""

    def __init__(self, transport: Transport, name: str) -> None:
        self.transport, self.name = transport, name
        self.root = f"/v2/{name}"

    def has(self, blob: Blob) -> bool:
        answer = self.transport.request("HEAD", f"{self.root}/blobs/{blob.digest}")
        return self._checked(answer, 200, 404).status == 200

    def send(self, blob: Blob) -> None:
        begun = self.transport.request("POST", f"{self.root}/blobs/uploads/")
        self._checked(begun, 202)
        place = self.transport.joined(self.transport.base, begun.headers.get("location", ""))
        joint = "&" if "?" in place else "?"
        answer = self.transport.request(
            "PUT",
            f"{place}{joint}{urlencode({'digest': blob.digest})}",
            headers={"Content-Type": "application/octet-stream"},
            body=blob.content,
        )
        self._checked(answer, 201)

    def receive(self, digest: str, size: int, into: Path) -> None:
        with into.open("r+b" if into.exists() else "wb") as f:
            f.seek(0, 2)
            while (start := f.tell()) < size:
                headers = {"Range": f"bytes={start}-"} if start else {}
                answer = self.transport.request(
                    "GET", f"{self.root}/blobs/{digest}", headers=headers, into=Sink(f, size)
                )
                self._checked(answer, 200, 206)
                if f.tell() <= start:
                    raise MachineError(
                        f"it sent {f.tell():,} of {size:,} bytes",
                        where=f"{self.transport.host}/{self.name}@{digest}",
                        fix="Run the same command again.",
                    )

    def read_manifest(self, reference: str) -> bytes | None:
        accept = {"Accept": f"{MANIFEST_TYPE}, {INDEX_TYPE}"}
        answer = self.transport.request("GET", f"{self.root}/manifests/{reference}", headers=accept)
        if self._checked(answer, 200, 404).status == 404:
            return None
        if len(answer.data) > LARGEST_MANIFEST:
            raise BundleError(f"a manifest above {LARGEST_MANIFEST:,} bytes", where=reference)
        if reference.startswith("sha256:") and digest_of(answer.data) != reference:
            raise BundleError(
                f"it answers with a manifest of the digest {digest_of(answer.data)}",
                where=f"{self.transport.host}/{self.name}@{reference}",
                fix="Do not use it; another one stands in its place.",
            )
        return answer.data

    def write_manifest(self, data: bytes, tag: str = "") -> None:
        self._put(data, tag or digest_of(data))

    def write_referrer(self, data: bytes, subject: str) -> None:
        answer = self._put(data, digest_of(data))
        if "oci-subject" in answer.headers:
            return
        tag, added = fallback_tag(subject), descriptor(data)
        for _ in range(ROUNDS):
            index = index_with(self.read_manifest(tag), added)
            self._put(index, tag)
            listed = listed_in(self.read_manifest(tag))
            if any(entry["digest"] == added["digest"] for entry in listed):
                return
        raise MachineError(
            "another writer replaces the index of referrers all the time",
            where=f"{self.transport.host}/{self.name}:{tag}",
            fix="Run the same command again.",
        )

    def referrers(self, subject: str) -> list[Json]:
        pages = self._pages(f"{self.root}/referrers/{subject}", "manifests", 405)
        if pages is not None:
            return listed_in(canonical({"manifests": pages}))
        return listed_in(self.read_manifest(fallback_tag(subject)))

    def tags(self) -> list[str]:
        listed = self._pages(f"{self.root}/tags/list", "tags") or []
        tags = {tag for tag in listed if isinstance(tag, str)}
        return sorted(tag for tag in tags if not is_fallback(tag))

    def _pages(self, url: str, key: str, *absent: int) -> list[Any] | None:
        """Collect what all pages list under the key; None for a first page that is missing (404, or
        a status in `absent`). Raises MachineError for pages that do not end."""
        listed: list[Any] = []
        seen: set[str] = set()
        while url not in seen and len(seen) < MOST_PAGES and len(listed) < MOST_LISTED:
            seen.add(url)
            answer = self.transport.request("GET", url)
            if self._checked(answer, 200, 404, *absent).status != 200:
                return listed if len(seen) > 1 else None
            page = document(answer.data, key).get(key) or []
            if not isinstance(page, list):
                raise BundleError(f"its {key} are not a list", where=self.transport.host)
            listed += page
            following = NEXT.search(answer.headers.get("link", ""))
            if following is None:
                return listed
            url = self.transport.joined(self.transport.base + url, following[1])
            url = url.removeprefix(self.transport.base)
        raise MachineError(
            f"its pages of {key} do not end ({len(seen):,} of them, {len(listed):,} entries)",
            where=f"{self.transport.host}/{self.name}",
            accepted=f"{MOST_PAGES:,} pages and {MOST_LISTED:,} entries",
        )

    def move(self, tags: Mapping[str, bytes], last: str, expected: str) -> bool:
        """Compared just before and not in one step, which the specification does not have."""
        for tag, data in tags.items():
            named = self.read_manifest(last)
            if ("" if named is None else digest_of(named)) != expected:
                return False
            self.write_manifest(data, tag)
        return True

    def close(self) -> None:
        self.transport.close()

    def _put(self, data: bytes, reference: str) -> Answer:
        answer = self.transport.request(
            "PUT",
            f"{self.root}/manifests/{reference}",
            headers={"Content-Type": document(data, reference)["mediaType"]},
            body=data,
        )
        return self._checked(answer, 201)

    def _checked(self, answer: Answer, *accepted: int) -> Answer:
        """Raises MachineError for another status than the accepted ones."""
        if answer.status in accepted:
            return answer
        fix = {403: f"docker login {self.transport.host}", 429: "Wait, and run it again."}
        raise MachineError(
            answer.problem(),
            where=f"{self.transport.host}/{self.name}",
            fix=fix.get(answer.status, "The same command resumes."),
        )
