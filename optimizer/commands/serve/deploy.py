"""Command `optimize deploy`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import click

from optimizer.commands.options import with_debug_and_json
from optimizer.foundation.progress import show

MANY = click.IntRange(1, 100_000)
SECONDS = click.IntRange(0, 86_400)


@click.command()
@with_debug_and_json
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("serve_options", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--to",
    "platform",
    required=True,
    metavar="PLATFORM",
    help="Platform to write files for: triton, kubernetes, kserve, ray or compose.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder to create; one that an earlier run of this command wrote is replaced.",
)
@click.option("--image", help="Name of the container image, built from OUT/Dockerfile.")
@click.option("--name", help="Name of the deployment.  [default: the bundle's]")
@click.option("--replicas", type=MANY, help="Minimum number of servers.  [default: 1]")
@click.option(
    "--max-replicas",
    type=MANY,
    help="Maximum number of servers, scaled by --cpu-percent or --waiting.",
)
@click.option(
    "--cpu-percent", type=MANY, help="Add servers when they use more than this percentage of --cpu."
)
@click.option(
    "--waiting", type=MANY, help="Add servers when more than this number of inputs per server wait."
)
@click.option(
    "--prometheus",
    metavar="URL",
    help="Prometheus server from which KEDA reads the number of waiting inputs.",
)
@click.option(
    "--memory-mib",
    type=MANY,
    help="Memory of a server in MiB.  [default: measured by starting one here]",
)
@click.option("--cpu", type=MANY, help="CPUs of a server.  [default: threads of its engine]")
@click.option(
    "--drain-seconds",
    type=SECONDS,
    help="Seconds that a stopping server may take to answer its requests.  [default: the "
    "longest possible]",
)
@click.option(
    "--endpoint-seconds",
    type=SECONDS,
    help="Seconds until the cluster sends no more requests to a stopping server.",
)
@click.pass_obj
def deploy(
    obj: dict[str, bool],
    /,
    bundle: Path,
    serve_options: tuple[str, ...],
    platform: str,
    out: Path,
    **options: Any,
) -> None:
    """Write files with which PLATFORM serves BUNDLE.

    The folder OUT includes BUNDLE, and appears complete or not at all. Nothing is built, sent or
    started elsewhere.

    Arguments after -- are options of `optimize serve` for the deployed servers.

    \b
    Examples:
      optimize deploy artifacts/minilm-int8/1 --to triton --out deploy/triton
      optimize deploy artifacts/minilm-int8/1 --to triton --out deploy/triton -- --rows 16
      optimize deploy artifacts/minilm-int8/1 --to kubernetes --out deploy/kubernetes \\
          --image registry.example.com/minilm:1 --endpoint-seconds 5 --cpu 2 \\
          --replicas 2 --max-replicas 8 --cpu-percent 70
      optimize deploy artifacts/minilm-int8/1 --to ray --out deploy/ray --cpu 2 --replicas 4
      optimize deploy artifacts/minilm-int8/1 --to compose --out deploy/compose --cpu 2
    """
    from optimizer.deploy import output, source
    from optimizer.deploy.platforms import find_platform as record_of
    from optimizer.deploy.settings import DeployOptions

    settings = DeployOptions(serve_options, **options)
    record = record_of(platform, settings)
    deployed = source.read(bundle, record.needs)
    write = record.writer(deployed)

    def fill(folder: Path) -> dict[str, Any]:
        result = write(deployed, settings, folder)
        names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
        return {
            "platform": record.name,
            "bundle": deployed.name,
            "version": deployed.version,
            "digest": deployed.manifest["digest"],
            "files": sorted(n for n in names if "/bundle/" not in f"/{n}"),
            "server": result.server,
            "start": [line.replace("OUT", shlex.quote(str(out))) for line in result.start],
        }

    document = {"exit_code": 0, "out": str(out), **output.write_folder(out, fill)}
    text = "\n".join([f"{out}", "Next:", *(f"  {line}" for line in document["start"])])
    show(json.dumps(document, indent=1) if obj["json"] else text)
