"""Runs recipes in forked children and kills them: python -m tests.killable FOLDER, one JSON line a
job. FOLDER has what is computed once for all tests (traced_once.py, measured_once.py).

The parent imports every heavy package once, and digests the sources, so that a child costs only
its own work. A job is
{"recipe", "store", "artifacts", "kill_in": stage or null, "after": seconds, "keep_seconds": number
or absent, "search": true or absent}: the child is killed `after` seconds into that stage, and
training saves its state every keep_seconds; "search" runs `optimize search`. The answer is
{"exit": code or -9}.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.process.collection import delay_collection
from tests.measured_once import measure_once
from tests.traced_once import trace_once


def work(job: dict[str, Any]) -> int:
    if job.get("search"):
        return search(job)
    from optimizer.commands.build.outcome import finish
    from optimizer.recipe import file as recipe_file
    from optimizer.reduce.learn.distill import distill

    if "keep_seconds" in job and distill.__kwdefaults__ is not None:
        distill.__kwdefaults__["keep_seconds"] = job["keep_seconds"]
    return finish(
        recipe_file.read(Path(job["recipe"])),
        Path(job["store"]),
        Path(job["artifacts"]),
        until="package",
        remeasure=job.get("remeasure", False),
    ).exit_code


def search(job: dict[str, Any]) -> int:
    from optimizer.cli import main

    sys.stdout = sys.stderr  # stdout has the answers to jobs
    words = ["search", job["recipe"], "--store", job["store"]]
    try:
        main([*words, "--artifacts", job["artifacts"]])
    except SystemExit as e:
        return int(e.code or 0)
    return 0


def warm() -> None:
    import datasets  # noqa: F401
    import onnxruntime  # noqa: F401
    import onnxscript.optimizer  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch
    import torch.onnx._internal.exporter._core
    import transformers.models.bert.modeling_bert
    from transformers import AutoModel, AutoTokenizer  # noqa: F401

    from optimizer.compress import stage as _compress  # noqa: F401
    from optimizer.export import stage as _export  # noqa: F401
    from optimizer.foundation.source_digest import digest_sources
    from optimizer.load import stage as _load  # noqa: F401
    from optimizer.lower import build as _build  # noqa: F401
    from optimizer.lower import stage as _lower  # noqa: F401
    from optimizer.package import stage as _package  # noqa: F401
    from optimizer.reduce import stage as _reduce  # noqa: F401
    from optimizer.reduce.learn import qat as _qat  # noqa: F401
    from optimizer.reduce.learn import recover as _recover  # noqa: F401
    from optimizer.store import STAGES
    from optimizer.validate import stage as _validate  # noqa: F401

    modules = [f"optimizer.{stage}.stage" for stage in STAGES]
    modules += ["optimizer.lower.build", "optimizer.validate.timing.stage"]
    modules += ["optimizer.load_test.stage"]
    modules += ["optimizer.reduce.learn.recover", "optimizer.reduce.learn.qat"]
    for module in modules:
        digest_sources(module)  # kept, and so known to the children
    assert transformers
    assert torch
    gc.freeze()  # a child's collections do not copy the parent's pages


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    with delay_collection():
        warm()
    folder, patch = Path(sys.argv[1]), pytest.MonkeyPatch()
    trace_once(patch, folder / "traces")
    measure_once(patch, folder / "measured")
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = work(job)
            except BaseException as e:
                print(repr(e), file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        folder = Path(job["store"]) / str(job["kill_in"])
        print(json.dumps({"exit": wait(pid, folder, job["after"])}), flush=True)


def wait(pid: int, stage: Path, after: float) -> int:
    """The child's exit code, or -9 when it was killed, `after` seconds into `stage`."""
    deadline = None
    while deadline is None or time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if deadline is None and any(stage.glob("*.partial")):
            deadline = time.monotonic() + after
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()
