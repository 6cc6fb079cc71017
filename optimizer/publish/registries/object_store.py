"""Read and write an OCI image layout (layout.py) below a prefix of a bucket in an object store.

    oci-layout            {"imageLayoutVersion": "1.0.0"}
    index.json            a descriptor per tag; the only object that changes
    blobs/sha256/<hex>    everything else

The index is written last, and only if it is unchanged since it was read (If-Match, or
If-None-Match for a new one): the second of two simultaneous writers reads it again and adds to it,
and after a kill a reader sees the old index or the new one. A store that ignores these conditions
is refused. A copy of the prefix on a disk is a layout.

A prune first marks the index, which blocks other writers. The mark lapses after MARK_LAPSES; the
prune stops after PRUNE_ENDS, long before.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from optimizer.foundation.buckets.blob import Blob, digest_of
from optimizer.foundation.buckets.objects import BucketObjects
from optimizer.foundation.errors import MachineError
from optimizer.harness.errors import BundleError
from optimizer.publish.registries import index as indexes
from optimizer.publish.registries.place import (
    LARGEST_MANIFEST,
    Json,
    add_referrer,
    describe,
    encode,
    fallback_tag,
    is_fallback_tag,
    parse_document,
    parse_referrers,
)

BLOBS = "blobs/sha256"
ROUNDS = 60
"""Maximum attempts at a change of an index that other writers change too."""
WAIT = 0.05  # seconds; upper bound of the wait before the second attempt, doubled for each further
LONGEST_WAIT = 2.0
PRUNING = "io.optimize-toolchain.pruning"
"""Annotation that marks the index; its value begins with the start of the prune in UTC."""
PRUNE_ENDS = 300.0  # seconds after which a prune removes nothing more
MARK_LAPSES = timedelta(minutes=15)
"""Longest age of a mark: more than PRUNE_ENDS plus the difference of two clocks."""


class ObjectStore:
    """Registry in a bucket of an object store, from which old bundles can be pruned."""

    def __init__(
        self,
        objects: BucketObjects,
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
        self.objects.receive(self._blob(digest), size, into)

    def read_manifest(self, reference: str) -> bytes | None:
        is_digest = reference.startswith("sha256:")
        digest = reference if is_digest else self.resolve_tags().get(reference)
        stored = None if digest is None else self.objects.read(self._blob(digest))
        if stored is None:
            return None
        if len(stored.data) > LARGEST_MANIFEST:
            raise BundleError("a manifest above 4 MiB", where=f"{self.objects.where}: {digest}")
        if digest_of(stored.data) != digest:
            raise BundleError("its digest is not its name", where=f"{self.objects.where}: {digest}")
        return stored.data

    def write_manifest(self, data: bytes, tag: str = "") -> None:
        self._send_missing(Blob.describe(data))
        if tag:
            self._change(lambda index: indexes.add_tags(index, {tag: data}), (data,))
        else:
            self._check_blobs((data,))

    def write_referrer(self, data: bytes, subject: str) -> None:
        tag, added = fallback_tag(subject), describe(data)
        self._send_missing(Blob.describe(data))

        def with_referrer(index: Json) -> bytes:
            digest = indexes.resolve_tags(index).get(tag)
            listed = add_referrer(self.read_manifest(digest) if digest else None, added)
            self._send_missing(Blob.describe(listed))
            return indexes.add_tags(index, {tag: listed})

        self._change(with_referrer, (data,))

    def referrers(self, subject: str) -> list[Json]:
        return parse_referrers(self.read_manifest(fallback_tag(subject)))

    def tags(self) -> list[str]:
        return sorted(tag for tag in self.resolve_tags() if not is_fallback_tag(tag))

    def resolve_tags(self) -> dict[str, str]:
        return indexes.resolve_tags(self._index()[0])

    def move(self, tags: Mapping[str, bytes], last: str, expected: str) -> bool:
        """Write all tags in one change of the index: a reader sees all of them moved, or none."""
        for data in tags.values():
            self._send_missing(Blob.describe(data))
        moved = {tag: digest_of(data) for tag, data in tags.items()}
        tried = [False]

        def moving(index: Json) -> bytes | None:
            if indexes.resolve_tags(index).get(last, "") != expected:
                return None
            tried[0] = True
            return indexes.add_tags(index, tags)

        if self._change(moving, tags.values()):
            return True
        # obstore retries a write whose response was lost, and the retry fails its condition.
        return tried[0] and moved.items() <= self.resolve_tags().items()

    def close(self) -> None:
        self.objects.close()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Mark the index, which blocks other writers. Raises MachineError during another prune."""
        self._pruning_since = time.monotonic()
        mark = f"{self._now().isoformat(timespec='microseconds')} {os.urandom(8).hex()}"
        self._write_mark(mark)
        self._mark = mark
        try:
            yield
        finally:
            self._write_mark("")
            self._mark = ""

    def _write_mark(self, mark: str) -> None:
        self._change(lambda index: encode(indexes.annotate(index, PRUNING, mark)), ())

    def blobs(self) -> dict[str, int]:
        sizes = self.objects.sizes(BLOBS)
        return {f"sha256:{name.rpartition('/')[2]}": size for name, size in sizes.items()}

    def drop_tags(self, tags: Collection[str]) -> None:
        """Remove tags from the registry's index; the caller holds the lock."""
        self._check_time("the prune has changed nothing")
        self._change(lambda index: indexes.remove_tags(index, tags), ())

    def drop_blobs(self, digests: Collection[str]) -> None:
        """Delete the objects of these blobs; the caller holds the lock."""
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
        """Return the registry's index in the bucket, and its version for a conditional write; None
        for no index.json."""
        stored = self.objects.read(indexes.FILE)
        where = f"{self.objects.where}/{indexes.FILE}"
        if stored is None:
            return indexes.read(None, where), None
        return indexes.read(stored.data, where), stored.version

    def _change(
        self, changed: Callable[[Json], bytes | None], manifests: Collection[bytes]
    ) -> bool:
        """Replace the bucket's index.json by changed(index), again if another writer wrote first;
        False if it is None.

        manifests: manifests whose blobs must exist when the index is written.
        """
        self._check_conditions()
        for round in range(ROUNDS):
            if round:
                longest = min(LONGEST_WAIT, WAIT * 2 ** min(round, 10))
                self._sleep(random.uniform(0, longest))
            index, version = self._index()
            data = changed(self._without_lapsed_mark(index))
            if data is None:
                return False
            self._check_blobs(manifests)
            if self.objects.write(indexes.FILE, data, version):
                return True
        raise MachineError(
            f"another writer wrote first, {ROUNDS} times",
            where=f"{self.objects.where}/{indexes.FILE}",
            fix="Run the same command again.",
        )

    def _without_lapsed_mark(self, index: Json) -> Json:
        """Return the index without the lapsed mark of a prune. Raises MachineError during another
        prune, and when our own took too long."""
        mark = indexes.annotation(index, PRUNING)
        if mark == self._mark:
            return index
        if self._mark:
            raise self._too_long("the prune did not end")
        try:
            left = datetime.fromisoformat(mark.partition(" ")[0]) + MARK_LAPSES - self._now()
        except (TypeError, ValueError):
            left = timedelta()
        if left > timedelta():
            raise MachineError(
                f"another prune, begun at {mark.partition(' ')[0]}, is removing blobs",
                where=self.objects.where,
                fix="Run the same command again when it has ended; if it was killed, in "
                f"{left.total_seconds() / 60:.0f} minutes.",
            )
        return indexes.annotate(index, PRUNING, "")

    def _check_blobs(self, manifests: Collection[bytes]) -> None:
        """Raise MachineError where a prune has meanwhile removed a blob that a manifest needs."""
        named = {d for data in manifests for d in _list_referenced(data)}
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
        if not self._conditions_hold:
            fix = "Publish to a registry (oci://) or to a disk (file://)."
            self.objects.check_conditions(indexes.MARK, indexes.MARK_CONTENT, fix)
            self._conditions_hold = True

    def _send_missing(self, blob: Blob) -> None:
        if not self.has(blob):
            self.send(blob)

    def _blob(self, digest: str) -> str:
        algorithm, _, hexadecimal = digest.partition(":")
        if algorithm != "sha256" or not hexadecimal.isalnum():
            raise BundleError(f"{digest!r:.100} is not a SHA-256 digest", where=self.objects.where)
        return f"{BLOBS}/{hexadecimal}"


def _list_referenced(data: bytes) -> list[str]:
    return [*indexes.list_referenced_digests(parse_document(data, "manifest")), digest_of(data)]
