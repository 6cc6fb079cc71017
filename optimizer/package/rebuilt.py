"""Compare two bundles of one recipe: equal bit for bit, equal except engines and reports, or not.

Compared are the contract and every file that is not measured, as covered by the manifest's
content_digest. Engines do not build to the same bytes, and reports contain times; of an engine the
source network and its settings are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Equal = Literal["to the bit", "but for what is measured", "no"]
ENGINE = ("model", "model_files", "runtime", "device", "provider", "threads")


@dataclass(frozen=True)
class Rebuilt:
    """Result of comparing a rebuilt bundle with the earlier one; `equal` is "no" exactly where
    `files` is not empty.

    files: differences of compared files, contract and engine settings, one sentence each
    measured: names of measured files (engines, reports) that differ
    inputs: differing inputs that may explain the differences, one sentence each
    """

    equal: Equal
    files: tuple[str, ...]
    measured: tuple[str, ...]
    inputs: tuple[str, ...]


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> Rebuilt:
    """Compare a rebuilt bundle with the earlier one by their checked manifests; `first` is the
    earlier bundle's."""
    a, b = first["files"], second["files"]
    differing = [n for n in sorted({*a, *b}) if _sha256(a, n) != _sha256(b, n)]
    measured = [n for n in differing if (a.get(n) or b[n])["measured"]]
    files = [_line(n, a, b) for n in differing if n not in measured]
    if first["contract"] != second["contract"]:
        files.append("the contracts differ")
    files += _engines(first["engines"], second["engines"])
    equal: Equal = "no" if files else "but for what is measured" if measured else "to the bit"
    return Rebuilt(equal, tuple(files), tuple(measured), tuple(compare_inputs(first, second)))


def compare_inputs(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return a sentence per difference in recipe, checkpoint, data and packages of two manifests or
    locks, without validate.latency, which affects no compared file."""
    lines = []
    for title, a, b in (
        ("recipe", _flat(first["recipe"]), _flat(second["recipe"])),
        ("checkpoint", _files(first), _files(second)),
        ("data", first.get("calibration") or {}, second.get("calibration") or {}),
        ("package", first.get("packages") or {}, second.get("packages") or {}),
    ):
        lines += [
            f"{title} {key}: {_short(a.get(key))} before, {_short(b.get(key))} now"
            for key in sorted({*a, *b})
            if a.get(key) != b.get(key) and not key.startswith("validate.latency")
        ]
    return lines


def _engines(first: list[Any], second: list[Any]) -> list[str]:
    """Return a sentence per engine that only one of two bundles has, and per field of ENGINE that
    differs."""
    a, b = ({e["target"]: e for e in engines} for engines in (first, second))
    lines = [f"engine {t}: in only one of the two bundles" for t in sorted({*a} ^ {*b})]
    lines += [
        f"engine {target}: {key} is {b[target].get(key)!r:.80}, and was {a[target].get(key)!r:.80}"
        for target in sorted({*a} & {*b})
        for key in ENGINE
        if a[target].get(key) != b[target].get(key)
    ]
    return lines


def _line(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    if name not in b:
        return f"{name} is missing now"
    if name not in a:
        return f"{name} is new"
    return f"{name} differs ({a[name]['size']:,} before, {b[name]['size']:,} now)"


def _sha256(files: Mapping[str, Any], name: str) -> str | None:
    return files[name]["sha256"] if name in files else None


def _files(manifest: Mapping[str, Any]) -> dict[str, str]:
    files = manifest["source"].get("files") or {}
    return {name: entry["sha256"] for name, entry in files.items()}


def _short(value: object) -> str:
    return f"{value!r:.40}"


def _flat(value: Any, at: str = "") -> dict[str, Any]:
    """Flatten nested objects and lists of a manifest to {path such as "a.b.0": value}, to be
    compared."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = [(str(i), v) for i, v in enumerate(value)]
    else:
        return {at: value}
    return {
        k: v for key, inner in items for k, v in _flat(inner, f"{at}.{key}".lstrip(".")).items()
    }
