"""Options, resources and drain time of one server of a bundle in a container."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from optimizer.deploy.measured import MeasuredServer, measure
from optimizer.deploy.settings import DeployOptions, parse_serve_options
from optimizer.deploy.source import BundleSource
from optimizer.foundation.errors import RecipeError
from optimizer.harness.runtimes import table
from optimizer.harness.server.options import choose_settings

PORT: int = parse_serve_options(()).port
ANY = "0.0.0.0"  # all addresses of the container; the platform decides what it publishes
LIVE, READY, METRICS = "/healthz", "/readyz", "/metrics"


@dataclass(frozen=True)
class DeployedServer:
    """Options and resources of one server of the bundle.

    options: options of `serve`, without --host and --port
    memory: requested memory in MiB
    cpu: requested processors, equal to the server's threads
    gpus: number of NVIDIA GPUs
    drain: maximum seconds from SIGTERM to exit, for clients that keep the default timeout
    measured: the measurements behind these numbers; None if all were given
    """

    options: tuple[str, ...]
    memory: int
    cpu: int
    gpus: int
    drain: int
    measured: MeasuredServer | None

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of the deployed container's entrypoint. An option given twice has its last
        value.

        --model-nice lets the event loop refuse requests while the model computes. It costs little
        in a container: no other process competes, and the loop uses at most one processor.
        """
        nice = "idle" if self.cpu > 1 else "10"
        # --insecure: the platform controls access, and the container has no token file
        where = ("--host", ANY, "--insecure", "--port", str(PORT))
        return ("serve", *where, "--model-nice", nice, *self.options)

    @property
    def document(self) -> dict[str, Any]:
        """Entry `server` of deploy.json: the measurements, memory, cpu, gpus and drain time."""
        figures: dict[str, Any] = {"measured": None}
        if self.measured is not None:
            figures["measured"] = vars(self.measured)
        shown = {"memory_mib": self.memory, "cpu": self.cpu, "gpus": self.gpus}
        return {**figures, **shown, "drain_seconds": self.drain}


def describe_server(source: BundleSource, settings: DeployOptions) -> DeployedServer:
    """Return the server to deploy. It is started and measured on this machine if --memory-mib, or
    for text generation --drain-seconds, was not given.

    Raises RecipeError if neither the engine, --cpu nor --threads gives the number of threads.
    """
    serve = settings.serve
    measured = None
    if settings.memory_mib is None or (source.generates and settings.drain_seconds is None):
        measured = measure(source.folder, settings.arguments)
    engine = _engine(source, measured)
    parallel = table.is_reentrant(engine) and not source.generates
    workers = choose_settings(source.manifest, serve).workers if parallel else 1
    threads = engine["threads"] if serve.threads is None else serve.threads * workers
    cpu = settings.cpu or threads
    if not cpu:
        raise RecipeError(
            f"engine {engine['target']} uses one thread per visible processor, and a container "
            "sees all processors of the machine",
            where="command line",
            fix="Give --cpu N, the processors to request and the threads of the server.",
        )
    more = () if threads else ("--threads", str(max(1, cpu // workers)))
    options = (*settings.arguments, *more)
    memory = settings.memory_mib
    if memory is None:
        assert measured is not None
        memory = ceil(measured.memory / (1 << 20))
    drain = settings.drain_seconds
    if drain is None:
        longest = 0.0 if measured is None else measured.longest
        drain = ceil(serve.timeout + longest + serve.client_seconds)
    gpus = 0 if engine["device"] == "cpu" else 1
    return DeployedServer(options, memory, cpu, gpus, drain, measured)


def _engine(source: BundleSource, measured: MeasuredServer | None) -> Mapping[str, Any]:
    """Return the manifest's entry of the engine to deploy: the measured one, or of the first
    engine."""
    engines: list[dict[str, Any]] = source.manifest["engines"]
    names = [measured.engine] if measured else [engines[0]["target"]]
    return next(e for e in engines if e["target"] in names)
