"""Command `optimize explain`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from optimizer.commands.options import with_debug_and_json
from optimizer.foundation.progress import show


@click.command()
@click.argument("report", type=click.Path(path_type=Path))
@click.argument("module", required=False)
@click.option("--nodes", is_flag=True, help="List all nodes of a model that is an ONNX file.")
@with_debug_and_json
@click.pass_obj
def explain(obj: dict[str, bool], report: Path, module: str | None, nodes: bool) -> None:
    """Explain the ledger of REPORT.

    Shows each hop with its limit and the origin of the limit; for the hop that failed, or for
    MODULE, also every piece with its worst elements and their bounds, and whether the difference is
    a fault or rounding. Of an ONNX file it names the first node that matters.

    REPORT: report.json of a validate step, a failed run or a bundle, or its folder.

    MODULE: a module of the report, or a node of the ONNX file.

    \b
    Examples:
      optimize explain artifacts/minilm-int8/1
      optimize explain artifacts/minilm-int8/1/report.json encoder.layer.3.output.dense
    """
    from optimizer.harness.errors import InputError
    from optimizer.validate.ledger import explain

    try:
        document = explain.explain(report, module)
        text = (
            json.dumps(document, indent=1) if obj["json"] else explain.render_text(document, nodes)
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:
        raise InputError(
            f"a field cannot be read ({type(e).__name__}: {e})",
            where=str(report),
            accepted="report.json as written by the validate stage",
        ) from e
    show(text)
