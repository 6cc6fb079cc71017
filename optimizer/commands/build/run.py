"""Command `optimize run`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from optimizer.commands.options import with_artifacts, with_lock, with_recipe
from optimizer.commands.release.publish import Access, with_registry
from optimizer.foundation.progress import show
from optimizer.shared_store import Root


@click.command()
@with_recipe
@click.option(
    "--until",
    type=click.Choice(
        [
            *("load", "latencies", "reduce", "recover", "compress", "qat", "export", "lower"),
            *("build", "validate", "package", "slo", "publish"),
        ]
    ),
    default="publish",
    show_default=True,
    help="Last stage to run.",
)
@with_artifacts
@with_lock
@click.option(
    "--ignore-estimate",
    is_flag=True,
    help="Run even where `optimize plan` predicts more memory or disk than this machine has.",
)
@click.option("--remeasure", is_flag=True, help="Repeat the measurements: stages validate and slo.")
@with_registry
@click.pass_obj
def run(
    obj: dict[str, bool],
    recipe: Path,
    overrides: tuple[str, ...],
    store: Root,
    until: str,
    artifacts: Path,
    lock: Path | None,
    ignore_estimate: bool,
    remeasure: bool,
    access: Access,
) -> None:
    """Run RECIPE from checkpoint to published bundle.

    Finished steps are reused, and an interrupted run resumes. The bundle is made only if every gate
    passes; a target with on_fail: drop whose gates do not pass is left out.

    \b
    Examples:
      optimize recipes/minilm-int8.yaml
      optimize run recipes/minilm-int8.yaml --until compress
      optimize run recipes/minilm-int8.yaml --locked
      optimize run recipes/minilm-int8.yaml --set quantize.activations.range=mse
    """
    from optimizer.commands.build.request import RunRequest, carry_out

    document = carry_out(
        RunRequest(
            *(recipe, overrides, store, artifacts, lock, until, ignore_estimate, remeasure),
            portable_kernels=obj["portable_kernels"],
            access=access,
        )
    )
    if obj["json"]:
        show(json.dumps(document.as_dict(), indent=1))
    else:
        show(document.text)
    raise SystemExit(document.exit_code)
