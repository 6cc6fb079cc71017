"""Command `optimize import-profile`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from optimizer.commands.options import with_debug_and_json
from optimizer.foundation.progress import show


@click.command("import-profile")
@with_debug_and_json
@click.argument("file", type=click.Path(path_type=Path))
@click.pass_obj
def import_profile(obj: dict[str, bool], file: Path) -> None:
    """Show the time of the kernels in a profile of another tool, by module of the checkpoint.

    FILE is a SQLite export of Nsight Systems, a trace of torch.profiler, or a profile of ONNX
    Runtime. Kernels belong to the modules by the names of ranges (NVTX, record_function) or nodes.

    \b
    Examples:
      nsys export --type sqlite report.nsys-rep && optimize import-profile report.sqlite
      optimize import-profile trace.json --json
    """
    from optimizer.measure import imported

    document = imported.read(file)
    show(json.dumps(document, indent=1) if obj["json"] else imported.format_document(document))
