"""The command `optimize run`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from optimizer.commands.options import with_artifacts, with_recipe
from optimizer.progress import show


@click.command()
@with_recipe
@click.option(
    "--until",
    type=click.Choice(
        [
            *("load", "latencies", "reduce", "recover", "compress", "qat", "export", "lower"),
            *("build", "validate", "package"),
        ]
    ),
    default="package",
    show_default=True,
    help="Stop after this stage.",
)
@with_artifacts
@click.option(
    "--ignore-estimate",
    is_flag=True,
    help="Try it even if `optimize plan` predicts more memory or disk than this machine has.",
)
@click.option("--remeasure", is_flag=True, help="Validate again, even if it was done before.")
@click.pass_obj
def run(
    obj: dict[str, bool],
    recipe: Path,
    overrides: tuple[str, ...],
    store: Path,
    until: str,
    artifacts: Path,
    ignore_estimate: bool,
    remeasure: bool,
) -> None:
    """Take RECIPE from checkpoint to bundle. Finished steps are found again, not redone.

    \b
    Examples:
      optimize recipes/minilm-int8.yaml
      optimize run recipes/minilm-int8.yaml --until compress
      optimize run recipes/minilm-int8.yaml --set quantize.activations.range=mse
    """
    from optimizer import pipeline
    from optimizer.commands import checked, predictions, room
    from optimizer.commands.outcome import finish
    from optimizer.recipe import file as recipe_file
    from optimizer.store import Store

    resolved, lines = checked.read(recipe, overrides, fetch=True)
    with recipe_file.located(lines):
        if not ignore_estimate:
            dry = Store(store, dry=True, until=until)
            pipeline.run(resolved, dry)
            steps = predictions.document(dry)
            room.check(steps, store, room.memory_of_this_machine())
        document = finish(resolved, store, artifacts, until=until, remeasure=remeasure)
    if obj["json"]:
        show(json.dumps(document.as_dict(), indent=1))
    else:
        show(document.text)
    raise SystemExit(document.exit_code)
