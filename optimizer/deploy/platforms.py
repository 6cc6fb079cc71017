"""Table of the platforms that a bundle can be deployed to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optimizer.deploy import compose, kserve, kubernetes, ray, triton, vllm
from optimizer.deploy.output import Output
from optimizer.deploy.settings import DeployOptions
from optimizer.deploy.source import BundleSource
from optimizer.foundation.errors import RecipeError, join, suggest

SERVER = "harness/commands/serve.py"
ALWAYS = ("arguments",)


@dataclass(frozen=True)
class Platform:
    """Platform that a bundle can be deployed to.

    needs: file of the bundle's harness that the platform starts
    write: (source, settings, folder) -> Output; writes the files
    write_vllm: the same for a bundle that vLLM serves; None: the platform does not start vLLM
    takes: fields of DeployOptions that may be given, besides `arguments`
    required: fields of DeployOptions that must be given
    """

    name: str
    needs: str
    write: Callable[[BundleSource, DeployOptions, Path], Output]
    takes: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    write_vllm: Callable[[BundleSource, DeployOptions, Path], Output] | None = None

    def writer(self, source: BundleSource) -> Callable[[BundleSource, DeployOptions, Path], Output]:
        """Return `write`, or `write_vllm` for a bundle that vLLM serves.

        Raises RecipeError for such a bundle if the platform does not start vLLM.
        """
        if source.for_vllm is None:
            return self.write
        if self.write_vllm is None:
            raise RecipeError(
                f"{self.name} was given for a bundle that vLLM serves",
                where="command line: --to",
                accepted=", ".join(p.name for p in PLATFORMS.values() if p.write_vllm),
            )
        return self.write_vllm


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
            vllm.kubernetes,
        ),
        Platform(
            "kserve", SERVER, kserve.write, (*CONTAINER, *SCALED), ("image", "endpoint_seconds")
        ),
        Platform(
            "ray",
            "harness/commands/application.py",
            ray.write,
            ("name", "replicas", "memory_mib", "cpu", "drain_seconds"),
            write_vllm=vllm.ray,
        ),
        Platform("compose", SERVER, compose.write, ("image", "memory_mib", "cpu", "drain_seconds")),
    )
}


def find_platform(name: str, settings: DeployOptions) -> Platform:
    """Return the platform called `name`. Raises RecipeError for an unknown name, for settings that
    the platform does not take, and for required settings that are None."""
    if name not in PLATFORMS:
        raise RecipeError(
            f"unknown platform {name!r}{suggest(name, [*PLATFORMS])}",
            where="command line: --to",
            accepted=", ".join(PLATFORMS),
        )
    record = PLATFORMS[name]
    set_here = {n for n, v in vars(settings).items() if v is not None and n not in ALWAYS}
    error = join(
        RecipeError(
            f"{name_option(named)} {problem} --to {name}",
            where="command line",
            accepted=", ".join(map(name_option, record.takes)) or "none of these options",
        )
        for problem, names in (
            ("does not apply to", set_here - {*record.takes}),
            ("is required by", {*record.required} - set_here),
        )
        for named in sorted(names)
    )
    if error is not None:
        raise error
    return record


def name_option(field: str) -> str:
    """Return the command-line option of a field of DeployOptions: "--cpu" for "cpu"."""
    return f"--{field.replace('_', '-')}"
