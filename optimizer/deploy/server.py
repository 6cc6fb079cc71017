"""One server of a bundle in a container: what it is started with, what it takes, how it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from optimizer.deploy.measured import Measured, measure
from optimizer.deploy.settings import Settings, parsed
from optimizer.deploy.source import Source
from optimizer.foundation.errors import RecipeError
from optimizer.harness.runtimes import table
from optimizer.harness.server.options import choose_settings

PORT: int = parsed(()).port
ANY = "0.0.0.0"  # a container's own addresses, which its platform publishes or not
LIVE, READY, METRICS = "/healthz", "/readyz", "/metrics"


@dataclass(frozen=True)
class Server:
    """options: of `serve`, but for where it listens. memory: MiB. cpu: processors, which its
    threads are. gpus: NVIDIA's. drain: seconds from SIGTERM to its end, at most, for clients that
    do not ask for more time than it gives by itself. measured: what these follow from, where it
    was."""

    options: tuple[str, ...]
    memory: int
    cpu: int
    gpus: int
    drain: int
    measured: Measured | None

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of a container's entrypoint. The model gives way to the event loop, so that what is not
        accepted is refused while it computes: in a container nothing else wants the processors, and
        the loop takes one of them at most. Of an option that is given twice the last one holds."""
        nice = "idle" if self.cpu > 1 else "10"
        # who reaches a container its platform decides; a token is a file, of which it has none
        where = ("--host", ANY, "--insecure", "--port", str(PORT))
        return ("serve", *where, "--model-nice", nice, *self.options)

    @property
    def document(self) -> dict[str, Any]:
        """For a reader of deploy.json."""
        figures: dict[str, Any] = {"measured": None}
        if self.measured is not None:
            figures["measured"] = vars(self.measured)
        shown = {"memory_mib": self.memory, "cpu": self.cpu, "gpus": self.gpus}
        return {**figures, **shown, "drain_seconds": self.drain}


def server(source: Source, settings: Settings) -> Server:
    """What the settings say, and the rest measured: the server is started here where memory, or
    how long the texts of a decoder take, was not given.

    Raises RecipeError where neither the engine nor the user says how many threads there are.
    """
    serve = settings.serve
    measured = None
    if settings.memory_mib is None or (source.generates and settings.drain_seconds is None):
        measured = measure(source.folder, settings.arguments)
    engine = _engine(source, measured)
    parallel = table.reentrant(engine) and not source.generates
    workers = choose_settings(source.manifest, serve).workers if parallel else 1
    threads = engine["threads"] if serve.threads is None else serve.threads * workers
    cpu = settings.cpu or threads
    if not cpu:
        raise RecipeError(
            f"engine {engine['target']} takes one thread per processor that it sees, which in a "
            f"container are all of the machine",
            where="command line",
            fix="Give --cpu N: processors that are requested, and threads of the server.",
        )
    own = () if threads else ("--threads", str(max(1, cpu // workers)))
    options = (*settings.arguments, *own)
    memory = settings.memory_mib
    if memory is None:
        assert measured is not None
        memory = ceil(measured.memory / (1 << 20))
    drain = settings.drain_seconds
    if drain is None:
        longest = 0.0 if measured is None else measured.longest
        drain = ceil(serve.timeout + longest + serve.client_seconds)
    gpus = 0 if engine["device"] == "cpu" else 1
    return Server(options, memory, cpu, gpus, drain, measured)


def _engine(source: Source, measured: Measured | None) -> Mapping[str, Any]:
    """The one that answered here, else the first, which is tried first."""
    engines: list[dict[str, Any]] = source.manifest["engines"]
    names = [measured.engine] if measured else [engines[0]["target"]]
    return next(e for e in engines if e["target"] in names)
