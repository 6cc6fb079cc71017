"""Command line `optimize`. Only this module reads the environment.

Exit code: 0 all gates passed; 1 our bug or an unexpected failure; 2 the recipe, command line, data
or bundle is wrong; 3 a gate failed; 4 inconclusive; 5 this machine cannot do it.

Commands import heavy packages when they run, so that `optimize --help` answers at once.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
from contextlib import suppress
from typing import Any

import click

from optimizer import __version__
from optimizer.commands.build.check import check
from optimizer.commands.build.initial.init import init
from optimizer.commands.build.plan import plan
from optimizer.commands.build.run import run
from optimizer.commands.build.schema import schema
from optimizer.commands.build.search import search
from optimizer.commands.build.step import step
from optimizer.commands.bundle.bench import bench
from optimizer.commands.bundle.compare import compare
from optimizer.commands.bundle.doctor import doctor
from optimizer.commands.bundle.drift import drift
from optimizer.commands.bundle.explain import explain
from optimizer.commands.bundle.import_profile import import_profile
from optimizer.commands.bundle.inspect import inspect
from optimizer.commands.bundle.measure import measure
from optimizer.commands.bundle.predict import predict
from optimizer.commands.release.attest import attest
from optimizer.commands.release.lock import lock
from optimizer.commands.release.promote import promote, prune, rollback
from optimizer.commands.release.publish import publish, pull, versions
from optimizer.commands.release.seal import seal, unseal
from optimizer.commands.release.sign import sign
from optimizer.commands.release.verify_rebuild import verify_rebuild
from optimizer.commands.serve.deploy import deploy
from optimizer.commands.serve.load import load
from optimizer.commands.serve.serve import serve
from optimizer.commands.serve.shapes import shapes
from optimizer.commands.serve.tune_serving import tune_serving
from optimizer.commands.serve.web import web
from optimizer.foundation.errors import (
    MachineError,
    OptimizeError,
    RecipeError,
    error_document,
    explain_system_error,
    split,
)
from optimizer.foundation.process import library_settings
from optimizer.foundation.process.portable_kernels import ENVIRONMENT
from optimizer.foundation.progress import leave, say, show
from optimizer.harness.errors import ExplainedError
from optimizer.harness.shown import escape_line, scrub, scrub_document

FORBIDDEN = 0o002
"""Mode bits removed from written files: write access for others. Bits of the group follow umask."""


class Commands(click.Group):
    """Group of all commands. `optimize recipe.yaml` is short for `optimize run recipe.yaml`. Errors
    are printed and set the exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except BrokenPipeError:  # stderr was closed
            leave(sys.stderr)
            raise SystemExit(click.UsageError.exit_code) from None

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.ClickException as e:
            raise _escape_message(e) from None
        except BrokenPipeError:  # stdout was closed
            leave(sys.stdout)
            raise SystemExit(0) from None
        except OSError as e:  # the help goes to a file on a full disk
            leave(sys.stdout)
            _report_error(explain_system_error(e) or OptimizeError(str(e)), as_json=False)
            raise SystemExit(MachineError.exit_code) from None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for argument in args:
            _check_text(argument)
        if args and args[0] not in self.commands and args[0].endswith((".yaml", ".yml")):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as e:
            from optimizer.foundation.errors import suggest

            raise click.UsageError(
                f"{e.message.rstrip('.')}{suggest(args[0], list(self.commands))}. "
                f"A recipe's name ends in .yaml; commands: {', '.join(self.commands)}."
            ) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort):
            raise
        except click.ClickException as e:
            if ctx.params["json_output"]:
                _show_document(RecipeError(e.format_message(), where="command line"))
            raise _escape_message(e) from None
        except BrokenPipeError:  # stdout was closed
            leave(sys.stdout)
            raise SystemExit(0) from None
        except KeyboardInterrupt:
            say("interrupted; finished steps are kept: run the same command to resume")
            raise SystemExit(130) from None
        except Exception as e:
            error = _explain(e)
            if ctx.params["debug"]:
                _show_traceback(e)
            _report_error(
                error,
                ctx.params["json_output"],
                aloud=not ctx.params["portable_kernels"] or not isinstance(error, OptimizeError),
            )
            raise SystemExit(error.exit_code) from None


def _explain(error: Exception) -> ExplainedError:
    """Explain an error for the user of the command line: one of this project as it is, an error of
    the system in plain words, and any other as a bug."""
    if isinstance(error, ExplainedError):
        return error
    return explain_system_error(error) or OptimizeError(
        f"unexpected {type(error).__name__}: {error}",
        fix="This is a bug in optimize, not in your recipe. Run again with --debug for the "
        "traceback; finished steps are kept.",
    )


def _show_traceback(error: Exception) -> None:
    import traceback

    for part in traceback.format_exception(error):
        text = part.strip("\n")
        for line in text.split("\n") if part.startswith("  File ") else [text]:
            say(line)  # `say` escapes line ends within a message


def _escape_message(error: click.ClickException) -> click.ClickException:
    """Return the error with control characters and secrets removed from its message, which repeats
    words of the command line. The help text that click 8.2 raises for an empty command line stays
    as it is."""
    if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):
        return error
    text = escape_line(scrub(error.format_message()))
    if isinstance(error, click.UsageError):
        return click.UsageError(text, error.ctx)
    return click.ClickException(text)


def _check_text(argument: str) -> None:
    """Refuse an argument of the command line that is not UTF-8 or contains a NUL byte, which
    libraries and the system do not accept."""
    if "\0" in argument:
        raise click.UsageError(f"{argument!a:.200} contains a NUL character; remove it.")
    try:
        argument.encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        raise click.UsageError(
            f"{argument!a} is not UTF-8"
            + ("." if encoding == "utf-8" else f", or was read as {encoding}.")
            + " Give names and texts in UTF-8, or set PYTHONUTF8=1."
        ) from None


def _report_error(error: ExplainedError, as_json: bool, *, aloud: bool = True) -> None:
    """Print an error.

    as_json: True for one JSON document on stdout
    aloud: False in a child process, whose parent prints the error
    """
    if aloud:
        with suppress(SystemExit):  # stderr was closed: the exit code remains
            for one in split(error):
                say(f"error: {one}")
    if as_json:
        _show_document(error)


def _show_document(error: ExplainedError) -> None:
    with suppress(OptimizeError):  # stdout is full: the exit code remains
        show(json.dumps(scrub_document(error_document(error))))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("--json", "json_output", is_flag=True, help="Print one JSON document on stdout.")
@click.option("--portable-kernels", is_flag=True, hidden=True)
@click.version_option(__version__, prog_name="optimize")
@click.pass_context
def main(ctx: click.Context, debug: bool, json_output: bool, portable_kernels: bool) -> None:
    """Compress a Hugging Face checkpoint, prove it is still the same model, ship one bundle.

    \b
    Examples:
      optimize recipes/minilm-int8.yaml            run all steps; finished ones are reused
      optimize plan recipes/minilm-int8.yaml       steps to run, memory, disk and time
      optimize --json run recipes/minilm-int8.yaml one JSON document on stdout
      optimize init sentence-transformers/all-MiniLM-L6-v2 > my.yaml
      optimize predict artifacts/minilm-int8/1 "what a lovely film"

    \b
    Exit code: 0 gates passed, 1 unexpected failure, 2 wrong recipe or command line,
    3 a gate failed, 4 inconclusive, 5 this machine cannot do it.
    """
    ctx.obj = {"debug": debug, "json": json_output, "portable_kernels": portable_kernels}
    os.umask(os.umask(0o077) | FORBIDDEN)
    if portable_kernels:
        os.environ.update(ENVIRONMENT)
    atexit.register(gc.freeze)  # else the exit searches a million imported objects, for a second
    _quiet_libraries()
    if sys.stdout.encoding.lower() != "utf-8" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # for characters it lacks


for command in (
    *(
        run,
        plan,
        check,
        schema,
        init,
        search,
        inspect,
        compare,
        predict,
        bench,
        serve,
        load,
        tune_serving,
        shapes,
        deploy,
        web,
        doctor,
        explain,
        drift,
        measure,
        import_profile,
    ),
    *(sign, attest, publish, pull, versions, promote, rollback, prune, step),
    *(seal, unseal, lock, verify_rebuild),
):
    main.add_command(command)
main.add_command(compare, "diff")  # the name that registries use


def _quiet_libraries() -> None:
    """Set the variables of foundation/process/library_settings.py that the user has not set."""
    bars = {library_settings.PROGRESS_BARS: "0" if sys.stderr.isatty() else "1"}
    for name, value in {**library_settings.ENVIRONMENT, **bars}.items():
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    main()
