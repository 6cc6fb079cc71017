"""Options of `optimize deploy`, besides the bundle and the platform."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from optimizer.foundation.errors import RecipeError
from optimizer.harness import bounds
from optimizer.harness.server import options

REFUSED = (
    "host",
    "port",
    "grpc_port",
    "ask",
    "insecure",
    "token_file",
    "beside",
    "settings",
    "semantic_cache_mib",
    "semantic_encoder",
    "semantic_pairs",
)
"""Options of `serve` that a deployment sets itself or does not support."""


@dataclass(frozen=True)
class DeployOptions:
    """Options of `optimize deploy`; all except `arguments` are None if they were not given.

    arguments: options of `optimize serve` for the deployed server (after --).
    name: name of the deployed objects; None: the bundle's name.
    image: name of the container image.
    replicas: minimum number of servers.
    max_replicas: maximum number of servers.
    cpu_percent: scaling target, in percent of the requested processors.
    waiting: scaling target, in waiting requests per server.
    prometheus: address of the Prometheus that counts waiting requests.
    memory_mib: memory of one server in MiB.
    cpu: processors of one server.
    drain_seconds: maximum seconds from SIGTERM to a server's exit.
    endpoint_seconds: maximum seconds until the cluster stops routing requests to a server.
    """

    arguments: tuple[str, ...] = ()
    name: str | None = None
    image: str | None = None
    replicas: int | None = None
    max_replicas: int | None = None
    cpu_percent: int | None = None
    waiting: int | None = None
    prometheus: str | None = None
    memory_mib: int | None = None
    cpu: int | None = None
    drain_seconds: int | None = None
    endpoint_seconds: int | None = None

    @property
    def serve(self) -> argparse.Namespace:
        """The deployed server's parsed `arguments`, with the defaults of the options that were not
        given."""
        return parse_serve_options(self.arguments)


class _ServeOptionsParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RecipeError(
            message, where="command line, after --", fix="See `optimize serve BUNDLE --help`."
        )


def parse_serve_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `optimize serve` that a deployed server shall get. Raises RecipeError
    for unknown and REFUSED options."""
    parser = _ServeOptionsParser(add_help=False, allow_abbrev=False)
    options.add_options(parser)
    parser.add_argument("--runtime")
    parser.add_argument("--threads", type=bounds.whole(0, bounds.THREADS))
    serve = parser.parse_args(arguments)
    for name in REFUSED:
        if getattr(serve, name) != parser.get_default(name):
            raise RecipeError(
                f"--{name.replace('_', '-')} was given",
                where="command line, after --",
                accepted="other options of `optimize serve`",
            )
    return serve


def list_changed_options(arguments: Sequence[str], ignored: Sequence[str]) -> list[str]:
    """List, to check a deployment, the names ("max_wait") of options of `serve` with other than
    default values, except `ignored`."""
    serve, defaults = vars(parse_serve_options(arguments)), vars(parse_serve_options(()))
    return [n for n, v in serve.items() if n not in ignored and v != defaults[n]]


def check_scaling(settings: DeployOptions) -> None:
    """Check the options of autoscaling. Raises RecipeError where --max-replicas is below --replicas
    or has not exactly one signal (--cpu-percent, or --waiting with --prometheus), and for a signal
    without --max-replicas."""
    most, least = settings.max_replicas, settings.replicas or 1
    signals = {
        "--cpu-percent": settings.cpu_percent is not None,
        "--waiting and --prometheus": settings.waiting is not None,
    }
    problem = ""
    if (settings.waiting is None) != (settings.prometheus is None):
        problem = "--waiting and --prometheus need each other"
    elif sum(signals.values()) != (most is not None):
        problem = f"--max-replicas needs exactly one of {', '.join(signals)}"
    elif most is not None and most < least:
        problem = f"--max-replicas {most} is below --replicas {least}"
    if problem:
        raise RecipeError(
            problem,
            where="command line",
            accepted="--replicas N alone, or --max-replicas M and one signal",
        )
