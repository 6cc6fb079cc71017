"""Remove old versions from a layout or a store, and the blobs that nothing names any more.

Kept: the versions that were tagged last; what an environment names, and what it goes back to;
everything that these name, and what belongs to them. The index goes first and the blobs after it,
so that whenever this is killed nothing that is named is missing, and the next run removes the rest.
Registries have retention and garbage collection of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from optimizer.publish.environments.environments import history
from optimizer.publish.registries.index import named_blobs
from optimizer.publish.registries.place import Place, document, fallback_tag, is_fallback

HISTORY = ".history"


class Prunable(Place, Protocol):
    """A place that has no garbage collection of its own."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep other writers out until the block ends."""

    def tagged(self) -> dict[str, str]:
        """{tag: digest}, the last tagged last."""

    def blobs(self) -> dict[str, int]:
        """{digest: bytes} of everything that is there."""

    def drop_tags(self, tags: Collection[str]) -> None:
        """Remove them; the caller holds the lock."""

    def drop_blobs(self, digests: Collection[str]) -> None:
        """Remove them; the caller holds the lock."""


@dataclass(frozen=True)
class Pruned:
    """Tags of versions that go and that stay; blobs that go, and their bytes."""

    versions: tuple[str, ...]
    kept: tuple[str, ...]
    blobs: int
    size: int


def prune(place: Prunable, keep: int, *, delete: bool = False) -> Pruned:
    """Keep the `keep` versions that were tagged last. delete: False only says what would go."""
    if not delete:
        return _choose(place, keep)[0]
    with place.locked():
        pruned, tags, blobs = _choose(place, keep)
        place.drop_tags(tags)
        place.drop_blobs(blobs)
    return pruned


def _choose(place: Prunable, keep: int) -> tuple[Pruned, set[str], list[str]]:
    """Collect all tags to remove, those of referrers too, and the blobs."""
    tagged = place.tagged()
    versions, environments = _kinds(tagged)
    safe = {tagged[e] for e in environments}
    safe |= {digest for e in environments for digest in _way_back(place, e, tagged[e])}
    newest = versions[max(0, len(versions) - keep) :]
    kept = [v for v in versions if v in newest or tagged[v] in safe]
    named = safe | {tagged[v] for v in kept}
    fallbacks = {fallback_tag(digest) for digest in named}
    stays = {*kept, *environments, *(f"{e}{HISTORY}" for e in environments), *fallbacks}
    reachable = _reachable(place, {*named, *(d for t, d in tagged.items() if t in stays)})
    blobs = {digest: size for digest, size in place.blobs().items() if digest not in reachable}
    gone = tuple(v for v in versions if v not in kept)
    pruned = Pruned(gone, tuple(kept), len(blobs), sum(blobs.values()))
    return pruned, {t for t in tagged if t not in stays}, sorted(blobs)


def _kinds(tagged: Iterable[str]) -> tuple[list[str], list[str]]:
    """Tags of versions, the last tagged last, and of environments, which have a history."""
    names = list(tagged)
    environments = [n for n in names if f"{n}{HISTORY}" in names]
    others = (*environments, *(f"{e}{HISTORY}" for e in environments))
    return [n for n in names if n not in others and not is_fallback(n)], environments


def _way_back(place: Place, environment: str, current: str) -> list[str]:
    """Return the digest that a rollback would name."""
    past = history(place, environment)
    if current not in past:
        return []
    at = len(past) - 1 - past[::-1].index(current)
    return past[max(0, at - 1) : at]


def _reachable(place: Place, digests: Iterable[str]) -> set[str]:
    """The manifests and everything that they name, in turn."""
    reachable: set[str] = set()
    waiting = list(digests)
    while waiting:
        digest = waiting.pop()
        if digest in reachable:
            continue
        reachable.add(digest)
        data = place.read_manifest(digest)
        if data is None:
            continue
        manifest = document(data, digest)
        named = named_blobs(manifest)
        reachable |= set() if manifest.get("manifests") else set(named)
        waiting += named if manifest.get("manifests") else []
    return reachable
