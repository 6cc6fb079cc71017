"""Promote a version to an environment, which is a tag, and roll it back.

The tag `production` names the bundle itself, so that any client pulls NAME:production. Beside it,
`production.history` names a manifest whose annotation HISTORY lists the digests that production
has named, oldest first. The list is written first: after a killed promotion it may end in a digest
that production never named.

A layout and an object store write both atomically, if the tag still names the bundle that was
compared: one of simultaneous promotions wins, the others fail. A registry has no conditional write;
there the tag is compared just before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from optimizer.foundation.buckets.blob import digest_of
from optimizer.foundation.errors import GateError, InconclusiveError, RecipeError
from optimizer.harness.errors import BundleError
from optimizer.harness.trust import verify
from optimizer.publish.address import BundleAddress
from optimizer.publish.documents.signatures import find_signature
from optimizer.publish.environments.comparison import MetricComparison, compare
from optimizer.publish.environments.history import SUFFIX, history_manifest, parse_digests
from optimizer.publish.hubs.folders import Folders
from optimizer.publish.model_pack import read_layers
from optimizer.publish.pull import resolve
from optimizer.publish.registries.place import EMPTY, Json, Releases
from optimizer.publish.same_model import list_differences
from optimizer.publish.small_files import fetch_small

LONGEST = 1000  # digests in a history
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,60}")
"""Name of an environment: a tag without a dot, so that NAME.history is free for its history."""


@dataclass(frozen=True)
class Move:
    """Result of a promotion or a rollback: the digest named before ("" for none), and now."""

    environment: str
    before: str
    after: str
    comparisons: tuple[MetricComparison, ...] = ()


@dataclass(frozen=True)
class Release:
    """Published bundle with its ModelPack manifest (digest, data, layers) and small files."""

    digest: str
    data: bytes
    layers: dict[str, Json]
    manifest: Json
    reports: list[Json]


def promote(
    place: Releases,
    address: BundleAddress,
    environment: str,
    *,
    key: Path | None = None,
    compared: bool = True,
    new_model: bool = False,
) -> Move:
    """Make the environment name the bundle at the address.

    key: public key whose signature is required.
    compared: False skips the comparison with the bundle that the environment names now.
    new_model: accept another model or task than that of the bundle named now.

    Raises RecipeError for another model, for the name of a version, and after a simultaneous
    promotion; GateError for a bundle whose gates did not pass or that is worse than the present
    one; InconclusiveError for an undecided comparison; BundleError without a signature by the key.
    """
    check_name(environment)
    candidate = fetch_release(place, resolve(place, address), str(address))
    current = place.read_manifest(environment)
    _check_environment(place, environment, current, candidate)
    there = None
    if current is not None and (compared or not new_model):
        there = fetch_release(place, current, environment)
        if not new_model:
            _check_model(there, candidate, str(address), environment)
    if candidate.manifest.get("verdict") != "pass":
        raise GateError(
            f"its gates ended in {candidate.manifest.get('verdict')!r:.50}", where=str(address)
        )
    if key is not None:
        find_signature(place, candidate.digest, candidate.layers, key, str(address))
    before = "" if current is None else digest_of(current)
    if before == candidate.digest:
        return Move(environment, before, before)
    comparisons: tuple[MetricComparison, ...] = ()
    if there is not None and compared:
        comparisons = compare(there.manifest, there.reports, candidate.manifest, candidate.reports)
        _check_comparisons(comparisons, str(address), environment)
    move(place, environment, candidate.data, before)
    return Move(environment, before, candidate.digest, comparisons)


def rollback(place: Releases, environment: str, of: str = "") -> Move:
    """Make the environment name the bundle that it named before.

    of: digest or tag; nothing is done unless the environment names it, so that repeating a rollback
        has no further effect.

    Raises RecipeError without an earlier bundle.
    """
    check_name(environment)
    current = place.read_manifest(environment)
    if current is None:
        raise RecipeError("it does not exist", where=environment, fix="Promote a version first.")
    before = digest_of(current)
    if of:
        named = place.read_manifest(of)
        if named is None or digest_of(named) != before:
            return Move(environment, before, before)
    past = cut_history(read_history(place, environment), before)[:-1]
    data = place.read_manifest(past[-1]) if past else None
    if data is None:
        raise RecipeError(
            f"{past[-1]} was removed" if past else "its history has no earlier bundle",
            where=environment,
            fix="Promote the version that you want.",
        )
    _check_moved(place.move({environment: data}, environment, before), environment)
    return Move(environment, before, digest_of(data))


def move(place: Releases, environment: str, data: bytes, expected: str) -> None:
    """Let an environment that names the digest `expected` name the manifest `data`, and extend its
    history. Raises RecipeError if it names another digest."""
    past = cut_history(read_history(place, environment), expected) if expected else []
    listed = [*past, digest_of(data)][-LONGEST:]
    place.send(EMPTY)
    tags = {f"{environment}{SUFFIX}": history_manifest(listed), environment: data}
    _check_moved(place.move(tags, environment, expected), environment)


def read_history(place: Releases, environment: str) -> list[str]:
    """Read the digests of the bundles that an environment, such as production, has named, oldest
    first."""
    data = place.read_manifest(f"{environment}{SUFFIX}")
    return [] if data is None else parse_digests(data, f"{environment}{SUFFIX}")


def check_name(environment: str) -> None:
    """Raise RecipeError for an invalid name of an environment."""
    if not NAME.fullmatch(environment):
        raise RecipeError(
            f"{environment!r:.80} is not valid as an environment's name",
            accepted="letters, digits, _ and -, e.g. production",
        )


def fetch_release(place: Releases, data: bytes, where: str) -> Release:
    """Fetch manifest.json and report.json of a bundle; data: bytes of its ModelPack manifest."""
    layers = read_layers(data, where)
    for name in (verify.MANIFEST, "report.json"):
        if name not in layers:
            raise BundleError(f"it has no {name}", where=where)
    try:
        manifest = verify.parse(fetch_small(place, layers[verify.MANIFEST], where))
        reports = verify.parse(fetch_small(place, layers["report.json"], where), finite=False)
        if manifest["digest"] != verify.digest(manifest) or not isinstance(reports, list):
            raise ValueError("the digest in it is not that of its content")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise BundleError(f"{verify.MANIFEST} or report.json: {e}", where=where) from None
    return Release(digest_of(data), data, layers, manifest, reports)


def _check_environment(
    place: Releases, environment: str, current: bytes | None, candidate: Release
) -> None:
    """Raises RecipeError for the tag of a version, which, unlike an environment, has no history."""
    if isinstance(place, Folders):  # its `move` refuses the tag of a version
        return
    own_version = str(candidate.manifest.get("version")) == environment
    if own_version or (current is not None and not read_history(place, environment)):
        raise RecipeError(
            "this is the name of a published version, which a promotion does not change",
            where=f"--to {environment}",
            accepted="the name of an environment, e.g. production",
            fix="To publish another bundle under a version: optimize publish --replace.",
        )


def _check_model(there: Release, candidate: Release, where: str, environment: str) -> None:
    """Raise RecipeError for a bundle whose model or task is not that of the bundles in the
    environment."""
    differ = list_differences(there.manifest, candidate.manifest)
    if differ:
        raise RecipeError(
            f"another model than that of {environment}: {'; '.join(differ)}",
            where=where,
            fix="If that is meant: --new-model. Where the two were judged on different rows or "
            "metrics, they cannot be compared either: --without-comparison.",
        )


def _check_comparisons(
    comparisons: tuple[MetricComparison, ...], where: str, environment: str
) -> None:
    skip = "To promote it without this comparison: --without-comparison."
    for comparison in comparisons:
        if comparison.verdict == "fail":
            raise GateError(
                f"worse than {environment}'s bundle: {comparison.message}", where=where, fix=skip
            )
    undecided = [c.message for c in comparisons if c.verdict != "pass"]
    if undecided or not comparisons:
        raise InconclusiveError(
            f"the comparison with {environment}'s bundle is undecided: "
            + (undecided[0] if undecided else "the two have no target and metric in common"),
            where=where,
            fix=skip,
        )


def _check_moved(done: bool, environment: str) -> None:
    if not done:
        raise RecipeError(
            "another promotion or rollback came first",
            where=environment,
            fix="See the bundle that it names now (optimize versions); run the command again.",
        )


def cut_history(digests: list[str], current: str) -> list[str]:
    """Return an environment's history, `digests`, up to the last `current`, without undone
    promotions; at least [current]."""
    if current not in digests:
        return [current]
    return digests[: len(digests) - digests[::-1].index(current)]
