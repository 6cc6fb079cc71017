"""Command `optimize step`: `optimize run` as one step of a CI pipeline."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import click

from optimizer.commands.options import with_artifacts, with_lock, with_recipe
from optimizer.commands.release.publish import Access, with_registry
from optimizer.foundation.progress import show
from optimizer.shared_store import Root

if TYPE_CHECKING:
    from optimizer.commands.build.outcome import RunResult
    from optimizer.commands.build.step_outputs import Ended
    from optimizer.harness.errors import ExplainedError

CHANNELS = ("github", "gitlab", "argo", "tekton", "kfp")


@click.command()
@with_recipe
@click.option(
    "--outputs",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder for result.json, run_id, verdict, exit_code, digest, bundle, metrics.json, "
    "metrics.prom, junit.xml, summary.md and report.html.",
)
@click.option(
    "--outputs-to",
    type=click.Choice(CHANNELS),
    help="Also write the outputs where this tool reads them: GITHUB_OUTPUT and "
    "GITHUB_STEP_SUMMARY, or optimize.env.",
)
@click.option(
    "--run-id",
    metavar="ID",
    help="Name of this run, written to run_id and result.json.  [default: random]",
)
@with_artifacts
@with_lock
@click.option(
    "--github-output", type=click.Path(path_type=Path), envvar="GITHUB_OUTPUT", hidden=True
)
@click.option(
    "--github-summary", type=click.Path(path_type=Path), envvar="GITHUB_STEP_SUMMARY", hidden=True
)
@with_registry
@click.pass_obj
def step(
    obj: dict[str, bool],
    recipe: Path,
    overrides: tuple[str, ...],
    store: Root,
    outputs: Path,
    outputs_to: str | None,
    run_id: str | None,
    artifacts: Path,
    lock: Path | None,
    access: Access,
    github_output: Path | None,
    github_summary: Path | None,
) -> None:
    """Run RECIPE as one step of a CI pipeline.

    Exits as `optimize run` does, and writes result files for other tools, also when a gate fails or
    an error ends the run. Files of an earlier run are removed first, so a killed run leaves none. A
    wrong command line removes and writes nothing; decide by the exit code.

    \b
    Examples:
      optimize step recipes/minilm-int8.yaml --outputs out
      optimize step recipes/minilm-int8.yaml --outputs out --outputs-to github
    """
    from optimizer.commands.build import step_outputs
    from optimizer.commands.build.request import RunRequest, carry_out
    from optimizer.harness.errors import ExplainedError

    step_outputs.remove(outputs)
    run_id = run_id or uuid.uuid4().hex
    step_outputs.check_value("--run-id", run_id)

    def finish(ended: Ended) -> None:
        step_outputs.write(ended, outputs, run_id)
        if outputs_to is not None:
            channel = step_outputs.CHANNELS[outputs_to]
            channel(ended, outputs, github_output, github_summary)

    ended: Ended
    try:
        step_outputs.check_value("--artifacts", str(artifacts))
        request = RunRequest(
            *(recipe, overrides, store, artifacts, lock), until="publish", access=access
        )
        ended = _describe_result(carry_out(request))
    except ExplainedError as e:
        finish(_describe_failure(e))
        raise
    except Exception as e:
        document = {"exit_code": 1, "error": type(e).__name__, "found": str(e)}
        finish(step_outputs.Ended(1, "error", document, f"unexpected {type(e).__name__}: {e}"))
        raise
    finish(ended)
    show(json.dumps(ended.document, indent=1) if obj["json"] else ended.text)
    raise SystemExit(ended.exit_code)


def _describe_result(result: RunResult) -> Ended:
    from optimizer.commands.build.step_outputs import Ended

    digest = str(result.document["manifest"]["digest"]) if result.bundle else ""
    return Ended(
        result.exit_code,
        str(result.verdict),
        result.as_dict(),
        result.text,
        result.bundle,
        result.report,
        digest,
    )


def _describe_failure(error: ExplainedError) -> Ended:
    from optimizer.commands.build.step_outputs import Ended
    from optimizer.foundation.errors import error_document, split

    verdicts = {3: "fail", 4: "inconclusive"}
    verdict, text = verdicts.get(error.exit_code, "error"), "\n".join(map(str, split(error)))
    return Ended(error.exit_code, verdict, error_document(error), text)
