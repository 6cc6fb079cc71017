"""What the user of `optimize deploy` decides, besides the bundle and the platform."""

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
)  # the files decide, or do not have it


@dataclass(frozen=True)
class Settings:
    """arguments: options of `optimize serve`, which the server of the files is started with. The
    others are the command's own, None where they were not given.

    image: the container's. replicas: at least; max_replicas: at most, by cpu_percent of the
    requested processors, or by so many waiting texts for each, as Prometheus at the address says.
    drain_seconds: that a server which ends may take; endpoint_seconds: that the cluster may take
    to send it nothing more. memory_mib, cpu: of one server.
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
        """The arguments, parsed; what is not given has its default."""
        return parsed(self.arguments)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RecipeError(
            message, where="command line, after --", fix="See `optimize serve BUNDLE --help`."
        )


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of `optimize serve`. Raises RecipeError for one that is none, and for REFUSED."""
    parser = _Parser(add_help=False, allow_abbrev=False)
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


def differing(arguments: Sequence[str], but: Sequence[str]) -> list[str]:
    """The names of options that are not at their defaults, without those of `but`."""
    serve, defaults = vars(parsed(arguments)), vars(parsed(()))
    return [n for n, v in serve.items() if n not in but and v != defaults[n]]


def check_scaling(settings: Settings) -> None:
    """Raises RecipeError for replicas that nothing says when to add, or that are fewer than few."""
    most, least = settings.max_replicas, settings.replicas or 1
    signals = {
        "--cpu-percent": settings.cpu_percent is not None,
        "--waiting and --prometheus": settings.waiting is not None,
    }
    problem = ""
    if (settings.waiting is None) != (settings.prometheus is None):
        problem = "--waiting and --prometheus belong together"
    elif sum(signals.values()) != (most is not None):
        problem = f"--max-replicas belongs to one of {', '.join(signals)}"
    elif most is not None and most < least:
        problem = f"--max-replicas {most} is below --replicas {least}"
    if problem:
        raise RecipeError(
            problem,
            where="command line",
            accepted="--replicas N alone, or --max-replicas M and one signal",
        )
