"""Promote a version to an environment, which is a tag, and roll it back.

The tag `production` names the bundle itself, so that any client pulls NAME:production. Beside it,
`production.history` names a manifest whose annotation HISTORY lists the digests that production
has had, oldest first. The list is written first, and may end in a digest that production never
got, where a promotion was killed between the two; the tag names the current one.

A layout writes both in one step, and only while the tag still names the bundle that was compared:
of simultaneous promotions one wins, and the others fail. A registry has no such step; there the
tag is compared just before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from optimizer.foundation.errors import GateError, InconclusiveError, RecipeError
from optimizer.harness.errors import BundleError
from optimizer.harness.trust import verify
from optimizer.publish.address import Address
from optimizer.publish.documents.signatures import find_signature
from optimizer.publish.environments.comparison import Comparison, compare
from optimizer.publish.environments.history import SUFFIX, digests_in, history_manifest
from optimizer.publish.hubs.folders import Folders
from optimizer.publish.model_pack import layers_of
from optimizer.publish.pull import resolve
from optimizer.publish.registries.place import EMPTY, Json, Releases, digest_of
from optimizer.publish.small import small

LONGEST = 1000
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,60}")
"""Of an environment: a tag without a dot, which leaves NAME.history to its list."""


@dataclass(frozen=True)
class Move:
    """Digests that an environment named before and names now, "" for none.

    comparisons: results of the paired tests of the two bundles.
    """

    environment: str
    before: str
    after: str
    comparisons: tuple[Comparison, ...] = ()


@dataclass(frozen=True)
class Release:
    """A published bundle, of which only small files were fetched."""

    digest: str
    data: bytes
    layers: dict[str, Json]
    manifest: Json
    reports: list[Json]


def promote(
    place: Releases,
    address: Address,
    environment: str,
    *,
    key: Path | None = None,
    compared: bool = True,
) -> Move:
    """Make the environment name the bundle at the address.

    key: the public key that must have signed it. compared: False leaves out the comparison with
    what is there. Raises GateError for a bundle whose gates did not pass or that is worse than what
    is there; InconclusiveError where that cannot be told; BundleError for a signature that is
    missing or another's; RecipeError for the name of a version, and when another promotion came
    first.
    """
    check_name(environment)
    candidate = release(place, resolve(place, address), str(address))
    if candidate.manifest.get("verdict") != "pass":
        raise GateError(
            f"its verdict is {candidate.manifest.get('verdict')!r:.50}", where=str(address)
        )
    if key is not None:
        find_signature(place, candidate.digest, candidate.layers, key, str(address))
    current = place.read_manifest(environment)
    before = "" if current is None else digest_of(current)
    _check_environment(place, environment, current, candidate)
    if before == candidate.digest:
        return Move(environment, before, before)
    comparisons: tuple[Comparison, ...] = ()
    if current is not None and compared:
        there = release(place, current, environment)
        comparisons = compare(there.manifest, there.reports, candidate.manifest, candidate.reports)
        _check_comparisons(comparisons, str(address), environment)
    move(place, environment, candidate.data, before)
    return Move(environment, before, candidate.digest, comparisons)


def rollback(place: Releases, environment: str, of: str = "") -> Move:
    """Make the environment name the bundle that it named before.

    of: a digest or a tag; nothing is done unless the environment names it, so that a rollback that
    is run again goes back once. Raises RecipeError where there is nothing to go back to.
    """
    check_name(environment)
    current = place.read_manifest(environment)
    if current is None:
        raise RecipeError("it names nothing", where=environment, fix="Promote a version first.")
    before = digest_of(current)
    if of:
        named = place.read_manifest(of)
        if named is None or digest_of(named) != before:
            return Move(environment, before, before)
    past = _until(history(place, environment), before)[:-1]
    data = place.read_manifest(past[-1]) if past else None
    if data is None:
        raise RecipeError(
            "there is nothing before it" if not past else f"{past[-1]} is there no more",
            where=environment,
            fix="Promote the version that is wanted.",
        )
    _moved(place.move({environment: data}, environment, before), environment)
    return Move(environment, before, digest_of(data))


def move(place: Releases, environment: str, data: bytes, expected: str) -> None:
    """Let the environment name a manifest, and note it in its history, if it names `expected`."""
    past = _until(history(place, environment), expected) if expected else []
    listed = [*past, digest_of(data)][-LONGEST:]
    place.send(EMPTY)
    tags = {f"{environment}{SUFFIX}": history_manifest(listed), environment: data}
    _moved(place.move(tags, environment, expected), environment)


def history(place: Releases, environment: str) -> list[str]:
    """Digests, oldest first."""
    data = place.read_manifest(f"{environment}{SUFFIX}")
    return [] if data is None else digests_in(data, f"{environment}{SUFFIX}")


def check_name(environment: str) -> None:
    """Raises RecipeError."""
    if not NAME.fullmatch(environment):
        raise RecipeError(
            f"{environment!r:.80} is not a name of an environment",
            accepted="letters, digits, _ and -, e.g. production",
        )


def release(place: Releases, data: bytes, where: str) -> Release:
    """Fetch the manifest.json and report.json that a manifest names, by digest."""
    layers = layers_of(data, where)
    for name in (verify.MANIFEST, "report.json"):
        if name not in layers:
            raise BundleError(f"it has no {name}", where=where)
    try:
        manifest = verify.parse(small(place, layers[verify.MANIFEST], where))
        reports = verify.parse(small(place, layers["report.json"], where), finite=False)
        if manifest["digest"] != verify.digest(manifest) or not isinstance(reports, list):
            raise ValueError("its digest is not its content's")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise BundleError(f"{verify.MANIFEST} or report.json: {e}", where=where) from None
    return Release(digest_of(data), data, layers, manifest, reports)


def _check_environment(
    place: Releases, environment: str, current: bytes | None, candidate: Release
) -> None:
    """Raises RecipeError for a tag that is a version: `publish` moves one only with --replace. The
    tag of an environment has a history tag, which is written first."""
    if isinstance(place, Folders):  # which knows its versions, and refuses to move one
        return
    own_version = str(candidate.manifest.get("version")) == environment
    if own_version or (current is not None and not history(place, environment)):
        raise RecipeError(
            "a published version has this name, and a promotion does not move it",
            where=f"--to {environment}",
            accepted="the name of an environment, e.g. production",
            fix="To let a version name another bundle: optimize publish --replace.",
        )


def _check_comparisons(comparisons: tuple[Comparison, ...], where: str, environment: str) -> None:
    skip = "To promote it all the same: --without-comparison."
    for comparison in comparisons:
        if comparison.verdict == "fail":
            raise GateError(
                f"worse than what {environment} names: {comparison.message}", where=where, fix=skip
            )
    undecided = [c.message for c in comparisons if c.verdict != "pass"]
    if undecided or not comparisons:
        raise InconclusiveError(
            f"whether it is worse than what {environment} names cannot be told: "
            + (undecided[0] if undecided else "no target and metric is in both"),
            where=where,
            fix=skip,
        )


def _moved(done: bool, environment: str) -> None:
    if not done:
        raise RecipeError(
            "another promotion or rollback came first",
            where=environment,
            fix="Look at what it names now (optimize versions), and run the command again.",
        )


def _until(digests: list[str], current: str) -> list[str]:
    """The list up to the last `current`; what follows was never reached, or was rolled back."""
    if current not in digests:
        return [current]
    return digests[: len(digests) - digests[::-1].index(current)]
