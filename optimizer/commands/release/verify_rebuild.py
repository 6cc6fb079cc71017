"""Command `optimize verify-rebuild`."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import click

from optimizer.commands.options import with_debug_and_json
from optimizer.foundation.progress import show

UNTIMED = ("validate.latency.must_beat_float=false", "validate.latency.p99_ms=null")
"""Overrides without speed gates: outputs do not depend on the speed of this machine."""


@click.command("verify-rebuild")
@with_debug_and_json
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    help="New folder for the store and the bundle, kept.  [default: a temporary one]",
)
@click.pass_obj
def verify_rebuild(obj: dict[str, bool], bundle: Path, recipe: Path, work: Path | None) -> None:
    """Make BUNDLE again from RECIPE and compare.

    Steps of earlier runs are not reused. Exit 0: equal bit for bit, or except engines and reports,
    which differ in every build. Exit 3: not equal; lists the files and the inputs that differ.

    \b
    Example:
      optimize verify-rebuild artifacts/minilm-int8/1 recipes/minilm-int8.yaml
    """
    from optimizer.commands.build.request import RunRequest, carry_out
    from optimizer.foundation.errors import GateError, RecipeError
    from optimizer.harness.bundle.manifest import read_manifest, refuse_damage
    from optimizer.harness.process.temporary import make_temporary_folder
    from optimizer.package.rebuilt import compare

    manifest = read_manifest(bundle)
    refuse_damage(bundle, manifest)
    deterministic = bool((manifest["recipe"].get("compress") or {}).get("deterministic"))
    overrides = (
        *UNTIMED,
        f"package.version={json.dumps(manifest['version'])}",
        f"compress.deterministic={json.dumps(deterministic)}",  # as it was made
    )
    with ExitStack() as stack:
        folder = work or stack.enter_context(make_temporary_folder("rebuild"))
        if (folder / "store").exists():
            raise RecipeError(
                "the folder has the store of an earlier run, whose steps would be reused",
                where=str(folder),
                fix="Give a new folder: --work FOLDER.",
            )
        places = folder / "store", folder / "artifacts"
        result = carry_out(RunRequest(recipe, overrides, *places, ignore_estimate=True))
        if result.bundle is None:
            raise GateError(
                f"the bundle was not made: {result.verdict}. {result.text}", where=str(recipe)
            )
        rebuilt = compare(manifest, read_manifest(result.bundle))
    code = GateError.exit_code if rebuilt.equal == "no" else 0
    text = [f"equal {rebuilt.equal}" if rebuilt.equal != "no" else "not equal"]
    text += [f"  {line}" for line in rebuilt.files]
    text += [f"  measured: {name}" for name in rebuilt.measured]
    text += [f"  {line}" for line in rebuilt.inputs]
    document = {"exit_code": code, **vars(rebuilt)}
    show(json.dumps(document) if obj["json"] else "\n".join(text))
    raise SystemExit(code)
