"""Remove old versions from a layout, and the blobs that nothing names any more.

Kept: the versions that were tagged last; what an environment names, and what it goes back to;
everything that these name, and what belongs to them. The index goes first and the blobs after it,
so that whenever this is killed nothing that is named is missing, and the next run removes the rest.
Registries have retention and garbage collection of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from optimizer.publish.environments import history
from optimizer.publish.layout import Layout, named_blobs
from optimizer.publish.place import document, fallback_tag, is_fallback

HISTORY = ".history"


@dataclass(frozen=True)
class Pruned:
    """Tags of versions that go and that stay; blobs that go, and their bytes."""

    versions: tuple[str, ...]
    kept: tuple[str, ...]
    blobs: int
    size: int


def prune(layout: Layout, keep: int, *, delete: bool = False) -> Pruned:
    """Keep the `keep` versions that were tagged last. delete: False only says what would go."""
    with layout.locked():
        tagged = layout.tagged()
        versions, environments = _kinds(tagged)
        safe = {tagged[e] for e in environments}
        safe |= {digest for e in environments for digest in _way_back(layout, e, tagged[e])}
        newest = versions[max(0, len(versions) - keep) :]
        kept = [v for v in versions if v in newest or tagged[v] in safe]
        named = safe | {tagged[v] for v in kept}
        fallbacks = {fallback_tag(digest) for digest in named}
        stays = {*kept, *environments, *(f"{e}{HISTORY}" for e in environments), *fallbacks}
        reachable = _reachable(layout, {*named, *(d for t, d in tagged.items() if t in stays)})
        folder = layout.folder / "blobs" / "sha256"
        blobs = [p for p in sorted(folder.iterdir()) if f"sha256:{p.name}" not in reachable]
        pruned = Pruned(
            tuple(v for v in versions if v not in kept),
            tuple(kept),
            len(blobs),
            sum(p.stat().st_size for p in blobs),
        )
        if delete:
            layout.drop_tags({t for t in tagged if t not in stays})
            for path in blobs:
                path.unlink()
    return pruned


def _kinds(tagged: Iterable[str]) -> tuple[list[str], list[str]]:
    """Tags of versions, the last tagged last, and of environments, which have a history."""
    names = list(tagged)
    environments = [n for n in names if f"{n}{HISTORY}" in names]
    others = (*environments, *(f"{e}{HISTORY}" for e in environments))
    return [n for n in names if n not in others and not is_fallback(n)], environments


def _way_back(layout: Layout, environment: str, current: str) -> list[str]:
    """What a rollback would name."""
    past = history(layout, environment)
    if current not in past:
        return []
    at = len(past) - 1 - past[::-1].index(current)
    return past[max(0, at - 1) : at]


def _reachable(layout: Layout, digests: Iterable[str]) -> set[str]:
    """The manifests and everything that they name, in turn."""
    reachable: set[str] = set()
    waiting = list(digests)
    while waiting:
        digest = waiting.pop()
        if digest in reachable:
            continue
        reachable.add(digest)
        data = layout.read_manifest(digest)
        if data is None:
            continue
        manifest = document(data, digest)
        named = named_blobs(manifest)
        reachable |= set() if manifest.get("manifests") else set(named)
        waiting += named if manifest.get("manifests") else []
    return reachable
