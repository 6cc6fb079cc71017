"""Remove old versions from a layout or an object store, and the blobs that nothing refers to.

The versions tagged last stay, and those that an environment names or a rollback would name, with
their attachments. The index is written before blobs are removed: a killed prune breaks no version,
and the next one removes the remaining blobs. Registries collect garbage themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from optimizer.publish.environments.environments import cut_history, read_history
from optimizer.publish.environments.history import SUFFIX
from optimizer.publish.registries.index import list_referenced_digests
from optimizer.publish.registries.place import Place, fallback_tag, is_fallback_tag, parse_document


class PrunablePlace(Place, Protocol):
    """Place without garbage collection of its own: a layout or an object store."""

    def lock(self) -> AbstractContextManager[None]:
        """Inside, keep other writers from changing the registry, which is being pruned."""

    def resolve_tags(self) -> dict[str, str]:
        """Return {tag: digest of its bundle} of the registry, the last tagged last."""

    def blobs(self) -> dict[str, int]:
        """Return {digest: bytes} of all blobs in the registry."""

    def drop_tags(self, tags: Collection[str]) -> None:
        """Remove tags of pruned bundles; the caller holds the lock."""

    def drop_blobs(self, digests: Collection[str]) -> None:
        """Remove blobs that no bundle needs any more; the caller holds the lock."""


@dataclass(frozen=True)
class PruneResult:
    """Result of removing a bundle's old versions from a registry.

    versions, kept: tags of the versions that were removed and that stay.
    blobs, size: number of removed blobs, and their bytes.
    """

    versions: tuple[str, ...]
    kept: tuple[str, ...]
    blobs: int
    size: int


def prune(place: PrunablePlace, keep: int, *, delete: bool = False) -> PruneResult:
    """Return the versions to remove from a registry, and remove them if `delete`.

    The last `keep` versions stay, and those that an environment (such as production) serves or may
    be rolled back to.
    """
    if not delete:
        return _choose(place, keep)[0]
    with place.lock():
        pruned, tags, blobs = _choose(place, keep)
        place.drop_tags(tags)
        place.drop_blobs(blobs)
    return pruned


def _choose(place: PrunablePlace, keep: int) -> tuple[PruneResult, set[str], list[str]]:
    """Choose what to prune from a registry: return the result, and the tags and blobs to remove,
    referrers' included."""
    tagged = place.resolve_tags()
    versions, environments = _split_tags(tagged)
    safe = {tagged[e] for e in environments}
    # a rollback names the digest before the present one
    safe |= {d for e in environments for d in cut_history(read_history(place, e), tagged[e])[-2:-1]}
    newest = versions[max(0, len(versions) - keep) :]
    kept = [v for v in versions if v in newest or tagged[v] in safe]
    named = safe | {tagged[v] for v in kept}
    fallbacks = {fallback_tag(digest) for digest in named}
    stays = {*kept, *environments, *(f"{e}{SUFFIX}" for e in environments), *fallbacks}
    reachable = _reachable(place, {*named, *(d for t, d in tagged.items() if t in stays)})
    blobs = {digest: size for digest, size in place.blobs().items() if digest not in reachable}
    gone = tuple(v for v in versions if v not in kept)
    pruned = PruneResult(gone, tuple(kept), len(blobs), sum(blobs.values()))
    return pruned, {t for t in tagged if t not in stays}, sorted(blobs)


def _split_tags(tagged: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split a registry's tags into versions, the last tagged last, and environments, which have a
    history."""
    names = list(tagged)
    environments = [n for n in names if f"{n}{SUFFIX}" in names]
    others = (*environments, *(f"{e}{SUFFIX}" for e in environments))
    return [n for n in names if n not in others and not is_fallback_tag(n)], environments


def _reachable(place: Place, digests: Iterable[str]) -> set[str]:
    """Return `digests` and all digests that these manifests of the registry refer to, directly or
    indirectly."""
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
        manifest = parse_document(data, digest)
        named = list_referenced_digests(manifest)
        reachable |= set() if manifest.get("manifests") else set(named)
        waiting += named if manifest.get("manifests") else []
    return reachable
