"""Command `optimize search`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from optimizer.commands.options import (
    TableFile,
    with_artifacts,
    with_price,
    with_recipe,
    with_times,
)
from optimizer.foundation.progress import say, show
from optimizer.shared_store import Root


@click.command()
@with_recipe
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the recipe that is found, in the recipe's folder.  [default: NAME.found.yaml]",
)
@with_times(
    "Table that `optimize measure RECIPE` wrote on the machine that the model is for, in place of "
    "this machine's times."
)
@click.option(
    "--on",
    type=click.Choice(["ray"]),
    help="Search as one task of the Ray cluster of RAY_ADDRESS or of this machine; its nodes share "
    "--store, a folder or an address in a bucket, and the files of the recipe.",
)
@click.option(
    "--ray-resource",
    "resources",
    multiple=True,
    metavar="NAME",
    help="Resource of Ray that the node must have which makes and times the candidates, such as "
    "accelerator_type:H100; repeatable.  [default: CPU]",
)
@click.option(
    "--ray-ahead",
    "ahead",
    multiple=True,
    metavar="NAME",
    help="Resource of Ray of further nodes, which make candidates ahead of the search: it then "
    "finds them in the store; repeatable.  [default: no node does]",
)
@with_price(
    "Price of the machine that answers, for the cost of a million answers, or tokens, of each "
    "candidate."
)
@with_artifacts
@click.pass_obj
def search(
    obj: dict[str, bool],
    recipe: Path,
    overrides: tuple[str, ...],
    store: Root,
    out: Path | None,
    times: TableFile | None,
    on: str | None,
    resources: tuple[str, ...],
    ahead: tuple[str, ...],
    price: float | None,
    artifacts: Path,
) -> None:
    """Search for the fastest, smallest or best variant of RECIPE's model that keeps its margin.

    Tries the choices of section `search`: methods, precision per module, targets. Every candidate
    is made, judged and timed on this machine; the one found is judged again on rows that the search
    never read, and run through all gates. Writes its recipe, and report.html to ARTIFACTS/<recipe
    name>.search/. After a kill, the same command resumes: finished trials are reused.

    \b
    Examples:
      optimize search recipes/minilm-int8.yaml --set search={}
      optimize search my.yaml --out my.fast.yaml --set search.budget.hours=0.5
      optimize search my.yaml --on ray --ray-resource jetson --store /nfs/store
      optimize search my.yaml --on ray --ray-resource target --ray-ahead worker --store s3://b/p

    \b
    Exit code: 0 a candidate was found, perhaps the recipe itself; 3 nothing keeps the margin;
    4 inconclusive: says how many more rows would decide.
    """
    from optimizer import checks
    from optimizer.foundation import atomic
    from optimizer.recipe import file as recipe_file
    from optimizer.search import chosen_recipe, on_ray, report
    from optimizer.search import search as searching

    if (resources or ahead) and on is None:
        option = on_ray.OPTION if resources else on_ray.AHEAD
        raise click.UsageError(f"{option} is for --on ray.")
    out = out or recipe.with_name(f"{recipe.stem}.found.yaml")
    chosen_recipe.check_place(recipe, out)
    resolved, lines = checks.read(recipe, overrides, fetch=True, until="validate")
    by = None if resolved.search is None else resolved.search.objective
    if price is None and by == "cost_per_million":
        raise click.UsageError(
            "search.objective: cost_per_million needs --price-per-hour, the price of the machine "
            "that answers; or set search.objective: throughput, which has the same order."
        )
    if price is not None and resolved.search is not None and not resolved.search.timed:
        raise click.UsageError(
            f"--price-per-hour needs times, and the search minimises {by} without a limit on p99; "
            "omit it, or set search.objective: cost_per_million."
        )
    home = artifacts / f"{resolved.name}.search"
    for folder, option in ((home, "--artifacts"), (out.parent, "--out")):
        atomic.check_writable(folder, option)  # before hours of work, not after them
    with recipe_file.locate_errors(lines):
        result = (
            searching.run(resolved, store, times=times)
            if on is None
            else on_ray.run(resolved, store, times, resources, ahead)
        )
    result = replace(result, price=price)
    document = report.build_document(result, out if result.chosen else None, home / "report.html")
    with atomic.explain_disk_errors(home, "--artifacts"):
        atomic.write(home / "search.json", json.dumps(document, indent=1).encode() + b"\n")
        atomic.write(home / "report.html", report.write_page(result, document).encode())
    if result.chosen is not None and result.winner is not None:
        target = result.winner.candidate.target
        with atomic.explain_disk_errors(out, "--out"):
            comment = report.describe_objective(result)
            chosen_recipe.write(recipe, overrides, target, result.chosen, out, comment)
    elif chosen_recipe.remove_earlier(recipe, out):
        say(f"search: {out}, which an earlier search had found, was removed")
    show(json.dumps(document, indent=1) if obj["json"] else report.write_text(result, document))
    raise SystemExit(result.exit_code)
