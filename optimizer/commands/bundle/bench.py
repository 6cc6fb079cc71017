"""Command `optimize bench`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from optimizer.commands.harness import HarnessCommand, harness
from optimizer.foundation.progress import show

NEW_TOKENS, PATIENCE = 64, 600.0  # seconds
SIZES, ROUNDS = (1, 8, 32), 5
"""Requests at once, and rounds, of a bundle that vLLM serves."""


@click.command(cls=HarnessCommand)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.pass_obj
def bench(obj: dict[str, bool], bundle: Path, arguments: tuple[str, ...]) -> None:
    """Time BUNDLE on this machine, end to end and per stage.

    \b
    Example:
      optimize bench artifacts/minilm-int8/1 --batch 1 8 --sequence 128
    """
    from optimizer.harness.commands.command_line import parse_arguments
    from optimizer.harness.commands.vllm_server import engine_of
    from optimizer.harness.errors import HarnessError

    try:
        options = parse_arguments(["bench", "--bundle", str(bundle), *arguments], "optimize")
        of_vllm = engine_of(bundle, options.runtime)
    except HarnessError:  # which the harness reports
        of_vllm = None
    if of_vllm is None:
        harness("bench", bundle, arguments, obj["json"])
    _bench_vllm(bundle, options, as_json=obj["json"] or options.json)


def _bench_vllm(bundle: Path, options: argparse.Namespace, *, as_json: bool) -> None:
    """Start, for `optimize bench`, vLLM with the bundle, and time its answers over HTTP."""
    from optimizer.commands.serve.load import read_lines
    from optimizer.foundation.errors import InputError
    from optimizer.harness.runtimes.machine import list_gpus
    from optimizer.load_test import measure, server
    from optimizer.load_test.http_client import HttpClient

    if options.sequence:
        raise InputError(
            "given for a bundle that vLLM serves",
            where="--sequence",
            fix="Give prompts of the lengths to time: --texts-file FILE.",
        )
    tokens = options.new_tokens or NEW_TOKENS
    with server.run_server(bundle) as running:
        client = HttpClient(running.url, "", tokens, PATIENCE)
        cells = measure.measure_together(
            client,
            read_lines(options.texts_file),
            options.batch or SIZES,
            options.iterations or ROUNDS,
        )
    document = {
        "exit_code": 0,
        "engine": "vllm",
        "new_tokens": tokens,
        "gpus": [vars(gpu) for gpu in list_gpus()],
        "cells": cells,
    }
    show(json.dumps(document, indent=1) if as_json else _text(document))


def _text(document: Mapping[str, Any]) -> str:
    on = ", ".join(gpu["name"] for gpu in document["gpus"]) or "no GPU"
    lines = [f"vLLM on {on}, up to {document['new_tokens']} new tokens, over HTTP"]
    for cell in document["cells"]:
        lines.append(f"{cell['requests_at_once']} requests at once, {cell['rounds']} rounds")
        for name in ("first token", "between tokens"):
            figures = cell[f"{name.replace(' ', '_')}_ms"] or {}
            each = "   ".join(f"{p} {ms:.2f}" for p, ms in figures.items()) or "one token only"
            lines.append(f"  {name}, ms: {each}")
        lines.append(f"  {cell['tokens_per_second']:.1f} tokens/s")
    return "\n".join(lines)
