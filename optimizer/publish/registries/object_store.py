"""A place in an object store: the OCI image layout (layout.py) below a prefix of a bucket.

    oci-layout            {"imageLayoutVersion": "1.0.0"}
    index.json            a descriptor per tag; the one object that ever changes
    blobs/sha256/<hex>    everything else

Everything is written before the index, and the index only if it still is what was read (If-Match,
or If-None-Match for the first): of two writers at once the second reads it again and adds to what
the first wrote, and whenever a writer is killed a reader sees the old index or the new one. What
was copied to a disk with the store's own tools is a layout. A store that accepts writes whose
condition does not hold is refused before anything depends on it.

A prune marks the index first. While the mark stands nobody else writes; it lapses by itself, and
the prune stops long before.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from optimizer.foundation.errors import MachineError
from optimizer.harness.errors import BundleError
from optimizer.publish.registries import index as indexes
from optimizer.publish.registries.objects import NO_VERSION, Objects
from optimizer.publish.registries.place import (
    LARGEST_MANIFEST,
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

BLOBS = "blobs/sha256"
PIECE = 64 << 20  # bytes fetched at a time
ROUNDS = 60
"""Maximum attempts at a change of an index that others change meanwhile."""
WAIT = 0.05  # seconds before the second try, at most so long; longer before each further one
LONGEST_WAIT = 2.0
PRUNING = "io.optimize-toolchain.pruning"
"""The annotation of the index that marks it: when the prune began, in UTC."""
PRUNE_ENDS = 300.0  # seconds after which a prune removes nothing more
MARK_LAPSES = timedelta(minutes=15)
"""Longer than a prune takes, by more than clocks differ."""


class ObjectStore:
    """A Place, and Prunable."""

    def __init__(
        self,
        objects: Objects,
        sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.objects, self._sleep, self._now = objects, sleep, now
        self._conditions_hold = False
        self._mark = ""
        self._pruning_since = 0.0

    def has(self, blob: Blob) -> bool:
        return self.objects.has(self._blob(blob.digest), blob)

    def send(self, blob: Blob) -> None:
        self.objects.put(self._blob(blob.digest), blob)

    def receive(self, digest: str, size: int, into: Path) -> None:
        with into.open("ab") as f:
            while (start := f.tell()) < size:
                data = self.objects.part(self._blob(digest), start, min(start + PIECE, size))
                if not data:
                    raise BundleError(
                        f"the store has no blob {digest} of {size:,} bytes",
                        where=self.objects.where,
                    )
                f.write(data[: size - start])

    def read_manifest(self, reference: str) -> bytes | None:
        digest = reference if reference.startswith("sha256:") else self.tagged().get(reference)
        stored = None if digest is None else self.objects.read(self._blob(digest))
        if stored is None:
            return None
        if len(stored.data) > LARGEST_MANIFEST:
            raise BundleError("a manifest above 4 MiB", where=f"{self.objects.where}: {digest}")
        if digest_of(stored.data) != digest:
            raise BundleError("its digest is not its name", where=f"{self.objects.where}: {digest}")
        return stored.data

    def write_manifest(self, data: bytes, tag: str = "") -> None:
        self._send_missing(Blob.of(data))
        if tag:
            self._change(lambda index: indexes.with_tags(index, {tag: data}), (data,))
        else:
            self._check_blobs((data,))

    def write_referrer(self, data: bytes, subject: str) -> None:
        tag, added = fallback_tag(subject), descriptor(data)
        self._send_missing(Blob.of(data))

        def with_referrer(index: Json) -> bytes:
            digest = indexes.tagged(index).get(tag)
            listed = index_with(self.read_manifest(digest) if digest else None, added)
            self._send_missing(Blob.of(listed))
            return indexes.with_tags(index, {tag: listed})

        self._change(with_referrer, (data,))

    def referrers(self, subject: str) -> list[Json]:
        return listed_in(self.read_manifest(fallback_tag(subject)))

    def tags(self) -> list[str]:
        return sorted(tag for tag in self.tagged() if not is_fallback(tag))

    def tagged(self) -> dict[str, str]:
        return indexes.tagged(self._index()[0])

    def move(self, tags: Mapping[str, bytes], last: str, expected: str) -> bool:
        """In one step: whoever reads the index sees all of it or nothing."""
        for data in tags.values():
            self._send_missing(Blob.of(data))
        moved = {tag: digest_of(data) for tag, data in tags.items()}
        tried = [False]

        def moving(index: Json) -> bytes | None:
            if indexes.tagged(index).get(last, "") != expected:
                return None
            tried[0] = True
            return indexes.with_tags(index, tags)

        if self._change(moving, tags.values()):
            return True
        # A client tries a write whose answer was lost again, and is then told that it comes second.
        return tried[0] and moved.items() <= self.tagged().items()

    def close(self) -> None:
        self.objects.close()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Mark the index, so that nobody else writes. Raises MachineError while another prune's
        mark stands."""
        self._pruning_since = time.monotonic()
        mark = f"{self._now().isoformat(timespec='microseconds')} {os.urandom(8).hex()}"
        self._change(lambda index: canonical(indexes.annotated(index, PRUNING, mark)), ())
        self._mark = mark
        try:
            yield
        finally:
            self._change(lambda index: canonical(indexes.annotated(index, PRUNING, "")), ())
            self._mark = ""

    def blobs(self) -> dict[str, int]:
        sizes = self.objects.sizes(BLOBS)
        return {f"sha256:{name.rpartition('/')[2]}": size for name, size in sizes.items()}

    def drop_tags(self, tags: Collection[str]) -> None:
        """The caller holds the lock."""
        self._check_time("the prune has changed nothing")
        self._change(lambda index: indexes.without_tags(index, tags), ())

    def drop_blobs(self, digests: Collection[str]) -> None:
        """The caller holds the lock."""
        names = sorted(self._blob(digest) for digest in digests)
        for start in range(0, len(names), 1000):
            self._check_time(f"the prune has left {len(names) - start} blobs")
            self.objects.remove(names[start : start + 1000])

    def _check_time(self, state: str) -> None:
        if time.monotonic() - self._pruning_since > PRUNE_ENDS:
            raise self._too_long(state)

    def _too_long(self, state: str) -> MachineError:
        return MachineError(
            f"{state} in {PRUNE_ENDS:.0f} seconds, and others may write again",
            where=self.objects.where,
            fix="Run the same command again; it resumes.",
        )

    def _index(self) -> tuple[Json, dict[str, str] | None]:
        """The index, and the version that a change of it expects."""
        stored = self.objects.read(indexes.FILE)
        where = f"{self.objects.where}/{indexes.FILE}"
        if stored is None:
            return indexes.read(None, where), None
        return indexes.read(stored.data, where), stored.version

    def _change(
        self, changed: Callable[[Json], bytes | None], manifests: Collection[bytes]
    ) -> bool:
        """Write what `changed` makes of the index, anew as often as another writer came first.

        manifests: manifests whose blobs must be there when the index is written.
        Returns False where changed(index) is None.
        """
        self._check_conditions()
        for round in range(ROUNDS):
            if round:
                longest = min(LONGEST_WAIT, WAIT * 2 ** min(round, 10))
                self._sleep(random.uniform(0, longest))
            index, version = self._index()
            data = changed(self._unmarked(index))
            if data is None:
                return False
            self._check_blobs(manifests)
            if self.objects.write(indexes.FILE, data, version):
                return True
        raise MachineError(
            f"{ROUNDS} times another writer came first",
            where=f"{self.objects.where}/{indexes.FILE}",
            fix="Run the same command again.",
        )

    def _unmarked(self, index: Json) -> Json:
        """The index, without a mark that lapsed. Raises MachineError while another's prune removes
        blobs, and where one of ours took so long that others write again."""
        mark = indexes.annotation(index, PRUNING)
        if mark == self._mark:
            return index
        if self._mark:
            raise self._too_long("the prune has not ended")
        try:
            left = datetime.fromisoformat(mark.partition(" ")[0]) + MARK_LAPSES - self._now()
        except (TypeError, ValueError):
            left = timedelta()
        if left > timedelta():
            raise MachineError(
                f"a prune, begun at {mark.partition(' ')[0]}, removes blobs here",
                where=self.objects.where,
                fix="Run the same command again when it has ended; if it was killed, in "
                f"{left.total_seconds() / 60:.0f} minutes.",
            )
        return indexes.annotated(index, PRUNING, "")

    def _check_blobs(self, manifests: Collection[bytes]) -> None:
        """A prune may have taken a blob that was found here."""
        named = {d for data in manifests for d in _named(data)}
        if not named:
            return
        missing = sorted(named - set(self.blobs()))
        if missing:
            raise MachineError(
                f"{missing[0]} was removed meanwhile",
                where=self.objects.where,
                fix="Run the same command again.",
            )

    def _check_conditions(self) -> None:
        """Try conditional writes on the object whose bytes never change.

        Raises MachineError for a store that ignores conditions, where a write would be lost.
        """
        if self._conditions_hold:
            return
        name, data = indexes.MARK, indexes.MARK_CONTENT
        self.objects.write(name, data, None)
        if self.objects.write(name, data, None) or self.objects.write(name, data, NO_VERSION):
            raise MachineError(
                "it writes also where the condition of a write (If-None-Match, If-Match) does not "
                "hold, so that of two writers at once one would be lost",
                where=self.objects.where,
                accepted="Amazon S3, or a store that has conditional writes",
                fix="Publish to a registry (oci://) or to a disk (file://).",
            )
        self._conditions_hold = True

    def _send_missing(self, blob: Blob) -> None:
        if not self.has(blob):
            self.send(blob)

    def _blob(self, digest: str) -> str:
        algorithm, _, hexadecimal = digest.partition(":")
        if algorithm != "sha256" or not hexadecimal.isalnum():
            raise BundleError(f"digest {digest!r:.100}", where=self.objects.where)
        return f"{BLOBS}/{hexadecimal}"


def _named(data: bytes) -> list[str]:
    return [*indexes.named_blobs(document(data, "manifest")), digest_of(data)]
