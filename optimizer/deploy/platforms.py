"""What a bundle is deployed to: the platforms, one record each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optimizer.deploy import compose, kserve, kubernetes, ray, triton
from optimizer.deploy.settings import Settings
from optimizer.deploy.source import Source
from optimizer.deploy.written import Written
from optimizer.foundation.errors import RecipeError, closest

SERVER = "harness/commands/serve.py"
ALWAYS = ("arguments",)


@dataclass(frozen=True)
class Platform:
    """needs: the file of the bundle's harness that is started. takes: fields of Settings that may
    be given; required: those that must. write(source, settings, folder): its files."""

    name: str
    needs: str
    write: Callable[[Source, Settings, Path], Written]
    takes: tuple[str, ...] = ()
    required: tuple[str, ...] = ()


CONTAINER = ("image", "name", "memory_mib", "cpu", "drain_seconds", "endpoint_seconds")
SCALED = ("replicas", "max_replicas", "cpu_percent")
KEDA = ("waiting", "prometheus")
PLATFORMS = {
    p.name: p
    for p in (
        Platform("triton", "harness/server/embedded.py", triton.write),
        Platform(
            "kubernetes",
            SERVER,
            kubernetes.write,
            (*CONTAINER, *SCALED, *KEDA),
            ("image", "endpoint_seconds"),
        ),
        Platform(
            "kserve", SERVER, kserve.write, (*CONTAINER, *SCALED), ("image", "endpoint_seconds")
        ),
        Platform(
            "ray",
            "harness/commands/application.py",
            ray.write,
            ("name", "replicas", "memory_mib", "cpu", "drain_seconds"),
        ),
        Platform("compose", SERVER, compose.write, ("image", "memory_mib", "cpu", "drain_seconds")),
    )
}


def platform(name: str, settings: Settings) -> Platform:
    """The record. Raises RecipeError for a name that is none, and for settings that it does not
    take or lacks."""
    if name not in PLATFORMS:
        raise RecipeError(
            f"there is no platform {name!r}{closest(name, [*PLATFORMS])}",
            where="command line: --to",
            accepted=", ".join(PLATFORMS),
        )
    record = PLATFORMS[name]
    set_here = {n for n, v in vars(settings).items() if v is not None and n not in ALWAYS}
    for problem, names in (
        ("is not of", set_here - {*record.takes}),
        ("is needed by", {*record.required} - set_here),
    ):
        if names:
            raise RecipeError(
                f"{option(min(names))} {problem} --to {name}",
                where="command line",
                accepted=", ".join(map(option, record.takes)) or "none of these options",
            )
    return record


def option(field: str) -> str:
    """As the command line has it."""
    return f"--{field.replace('_', '-')}"
