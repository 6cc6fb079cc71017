"""The command `optimize deploy`."""

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
    help="triton, kubernetes, kserve, ray or compose.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="The new folder; an earlier one that this command wrote is replaced.",
)
@click.option("--image", help="Name of the container's image, which OUT/Dockerfile builds.")
@click.option("--name", help="Of what is deployed.  [default: the bundle's]")
@click.option("--replicas", type=MANY, help="Servers, at least.  [default: 1]")
@click.option("--max-replicas", type=MANY, help="Servers, at most, by one of the next two.")
@click.option("--cpu-percent", type=MANY, help="Add servers above this share of --cpu.")
@click.option("--waiting", type=MANY, help="Add servers above so many waiting texts for each.")
@click.option("--prometheus", metavar="URL", help="Where KEDA asks how many wait.")
@click.option(
    "--memory-mib", type=MANY, help="Of a server.  [default: it is started here, and measured]"
)
@click.option("--cpu", type=MANY, help="Processors of a server.  [default: its engine's threads]")
@click.option(
    "--drain-seconds",
    type=SECONDS,
    help="For a server that ends.  [default: the longest that it may take]",
)
@click.option(
    "--endpoint-seconds",
    type=SECONDS,
    help="That the cluster takes to send nothing more to a server that ends.",
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
    """Write the files with which PLATFORM serves BUNDLE, and BUNDLE, into one folder that appears
    whole. Nothing is built, sent or started elsewhere.

    What stands after -- are options of `optimize serve`, for the server that is started.

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
    from optimizer.deploy.platforms import platform as record_of
    from optimizer.deploy.settings import DeployOptions

    settings = DeployOptions(serve_options, **options)
    record = record_of(platform, settings)
    deployed = source.read(bundle, record.needs)

    def fill(folder: Path) -> dict[str, Any]:
        made = record.write(deployed, settings, folder)
        names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
        return {
            "platform": record.name,
            "bundle": deployed.name,
            "version": deployed.version,
            "digest": deployed.manifest["digest"],
            "files": sorted(n for n in names if "/bundle/" not in f"/{n}"),
            "server": made.server,
            "start": [line.replace("OUT", shlex.quote(str(out))) for line in made.start],
        }

    document = {"exit_code": 0, "out": str(out), **output.write_folder(out, fill)}
    text = "\n".join([f"{out}", "Next:", *(f"  {line}" for line in document["start"])])
    show(json.dumps(document, indent=1) if obj["json"] else text)
