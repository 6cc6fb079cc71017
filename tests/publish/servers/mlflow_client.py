"""Run commands where MLflow is installed: python -m tests.publish.servers.mlflow_client, one per
line.

A line is {"arguments": [...], "kill_at": number or null}; the answer is {"exit": code, "stdout":
text}. Each runs in a forked child, which is killed before its `kill_at`-th call of http.client.
"""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import mlflow

from optimizer.cli import main
from optimizer.publish.registries.places import make_place
from tests import killing


def run(arguments: list[str], ended: Path) -> None:
    """Write how it ended to the file."""
    code: object = 0
    shown = ended.with_name("stdout")
    with shown.open("w", encoding="utf-8") as stdout, redirect_stdout(stdout):
        try:
            main(arguments)
        except SystemExit as e:
            code = e.code
    ended.write_text(json.dumps({"exit": code or 0, "stdout": shown.read_text()}))


def serve() -> None:
    assert mlflow.MlflowClient
    assert make_place
    with TemporaryDirectory() as folder:
        ended = Path(folder) / "ended"
        for line in sys.stdin:
            job = json.loads(line)
            ended.write_text(json.dumps({"exit": -9, "stdout": ""}))
            pid = killing.start(
                lambda job=job: run(job["arguments"], ended),
                job["kill_at"],
                watched=("http.client.",),
            )
            assert killing.wait(pid) in (0, -9)
            print(ended.read_text(), flush=True)


if __name__ == "__main__":
    serve()
