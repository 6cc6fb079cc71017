"""Runs commands in forked children of one warm process: python -m tests.hostile.worker.

A job is one JSON line {"argv", "cwd", "stdin": text or null}; the answer is one JSON line
{"exit": code, or -signal, or null when it was stopped, "seconds", "grown": bytes of
memory that the child had at its peak beyond the parent's, "stdout", "stderr"}.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import tempfile
import time
from importlib import import_module
from pkgutil import walk_packages
from typing import Any

SECONDS = 20.0  # of processor time: a busy machine makes no command hang
WAITED = 120.0  # of the clock: what waits for something takes no processor time
MEMORY = 4_000_000_000  # a child that wants more gets MemoryError, and this machine stays usable


STAGES = ("load.stage", "compress.stage", "export.stage", "lower.stage", "lower.build")
STAGES += ("validate.stage", "validate.timing.stage", "package.stage", "reduce.stage")
STAGES += ("publish.stage",)
MODULES = (
    "datasets",
    "gguf",
    "scipy.io",
    "optimizer.checks.ordered",
    "optimizer.checks.lengths",
    "optimizer.checks.loadable",
    "optimizer.checks.model_files",
    "optimizer.load_test.stage",
    "optimizer.package.lock",
    "optimizer.package.rebuilt",
    "optimizer.recipe.file",
    "optimizer.cli",
    "optimizer.reduce.learn.qat",
    "optimizer.reduce.learn.recover",
)


def warm() -> None:
    """Import what the commands import, digest the sources of stages and measure the machine, so
    that a child costs only its own work."""
    import transformers.models.bert.modeling_bert
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers import AutoModel, AutoTokenizer  # noqa: F401

    import optimizer.commands
    from optimizer.foundation.process import machine_speed
    from optimizer.foundation.source_digest import digest_sources

    for name in MODULES:
        import_module(name)
    for module in walk_packages(optimizer.commands.__path__, "optimizer.commands."):
        import_module(module.name)
    for stage in STAGES:
        import_module(f"optimizer.{stage}")
        digest_sources(f"optimizer.{stage}")
    machine_speed.measure()
    gc.freeze()  # a child's collections do not copy the parent's pages


def child(job: dict[str, Any], out: int, err: int) -> None:
    """Never returns."""
    code = 70  # what no command of ours exits with
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        with tempfile.TemporaryFile() as stdin:
            stdin.write((job["stdin"] or "").encode("utf-8", "surrogatepass"))
            stdin.seek(0)
            os.dup2(stdin.fileno(), 0)
        os.chdir(job["cwd"])
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["optimize", *job["argv"]]
        from optimizer.cli import main

        try:
            main(prog_name="optimize")
            code = 0
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def stuck(pid: int, started: float) -> bool:
    """Return True if a child took more time than any command may."""
    if time.monotonic() - started < SECONDS:
        return False
    with open(f"/proc/{pid}/stat") as f:
        ticks = f.read().rpartition(")")[2].split()[11:13]
    worked = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return worked > SECONDS or time.monotonic() - started > WAITED


def run(job: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        before, started = resident(os.getpid()), time.monotonic()
        pid = os.fork()
        if pid == 0:
            child(job, out.fileno(), err.fileno())
        done, exit_code = 0, None
        while not done and not stuck(pid, started):
            done, status, usage = os.wait4(pid, os.WNOHANG)
            time.sleep(0.002)
        if done:
            exit_code = os.waitstatus_to_exitcode(status)
        else:
            os.kill(pid, signal.SIGKILL)
            _, _, usage = os.wait4(pid, 0)
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read(200_000).decode("utf-8", "replace"))
        return {
            "exit": exit_code,
            "seconds": round(time.monotonic() - started, 3),
            "grown": max(0, usage.ru_maxrss * 1024 - before),
            "stdout": texts[0],
            "stderr": texts[1],
        }


def main() -> None:
    warm()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
