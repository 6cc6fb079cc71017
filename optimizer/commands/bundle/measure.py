"""Command `optimize measure`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from optimizer.commands.options import with_debug_and_json, with_price, with_store
from optimizer.foundation.progress import say, show
from optimizer.harness.bounds import BATCH, SEQUENCE
from optimizer.shared_store import Root


@click.command()
@with_debug_and_json
@click.argument("bundle", type=click.Path(path_type=Path), metavar="BUNDLE|RECIPE")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="File of the table, such as table.json.",
)
@click.option(
    "--batch",
    type=click.IntRange(1, BATCH),
    multiple=True,
    help="Rows of a batch; repeatable.  [default: validate.latency of the bundle's recipe]",
)
@click.option(
    "--sequence",
    type=click.IntRange(1, SEQUENCE),
    multiple=True,
    help="Tokens of a row; repeatable.  [default: 8, 16, 32 ... to the model's longest or 512]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 86_400),
    default=60.0,
    show_default=True,
    help="Seconds of timing, about.",
)
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads of a run.")
@with_price("Price of this machine, for the cost of a million answers and tokens.")
@click.option(
    "--key", type=click.Path(path_type=Path), help="Private key (PEM) that signs the table."
)
@with_store("Folder of finished steps, for RECIPE")
@click.pass_obj
def measure(
    obj: dict[str, bool],
    bundle: Path,
    out: Path,
    batch: tuple[int, ...],
    sequence: tuple[int, ...],
    seconds: float,
    threads: int | None,
    price: float | None,
    key: Path | None,
    store: Root,
) -> None:
    """Measure BUNDLE, or RECIPE's model, on this machine, the one that it is for; write a table.

    The table has times end to end for several shapes, the time by module (ONNX Runtime), energy
    where the processor's counter can be read, cost from --price-per-hour, the machine, and the
    digest of the bundle. `optimize shapes --times` reads it. With --key, OUT.sig is its signature.

    Of RECIPE, which has a section search, the recipe's own model is built and timed in the first
    cell of validate.latency, and its modules are timed in float too: `optimize search --times`.

    \b
    Examples:
      optimize measure artifacts/minilm-int8/1 --out table.json
      optimize measure artifacts/minilm-int8/1 --out table.json --batch 8 --key private.pem
    """
    from optimizer.foundation import atomic
    from optimizer.harness.bundle.bundle import Bundle
    from optimizer.harness.bundle.recorded import bench_grid
    from optimizer.measure import table

    atomic.check_writable(out.parent, "--out")  # before minutes of timing, not after them
    if bundle.suffix in (".yaml", ".yml"):
        from optimizer import checks
        from optimizer.search import kernel_times

        if batch or sequence or threads:
            raise click.UsageError("--batch, --sequence and --threads of a RECIPE stand in it.")
        recipe, _ = checks.read(bundle, (), fetch=True, until="build")
        document = kernel_times.measure(recipe, store, seconds, price)
    else:
        with Bundle(bundle, threads=threads, say=say) as opened:
            batches = batch or bench_grid(opened.manifest, None, sequence or (1,), 1).batch
            document = table.measure(opened, batches, sequence, seconds, price)
    table.write(document, out, key)
    show(json.dumps(document, indent=1) if obj["json"] else table.format_table(document))
