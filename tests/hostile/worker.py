"""Runs commands in a forked child of one warm process: python -m tests.hostile.worker.

A job is one JSON line {"argv", "cwd", "stdin": text or null}; the answer is one JSON line
{"exit": code, or -signal, or null when it was stopped, "seconds", "grown": bytes of
memory that the command had at its peak beyond what was there before, "stdout", "stderr"}.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import IO, Any, TextIO

from optimizer.harness.process.collection import delay_collection

SECONDS = 20.0  # of processor time: a busy machine makes no command hang
WAITED = 120.0  # of the clock: what waits for something takes no processor time
UNCAUGHT = 70  # exit code that no command of ours has: it raised something else than SystemExit
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


def serve(jobs: TextIO, answers: TextIO, out: int, err: int) -> None:
    """Run the commands of a child, one after the other, until one ends by something else than an
    exit. Never returns."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        for line in jobs:
            Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
            before = resident(os.getpid())
            code = command(json.loads(line), out, err)
            document = {"exit": UNCAUGHT if code is None else code, "grown": peak() - before}
            answers.write(json.dumps(document) + "\n")
            answers.flush()
            if code is None:
                break
    finally:
        os._exit(UNCAUGHT)


def command(job: dict[str, Any], out: int, err: int) -> int | None:
    """Exit code of one command; None where it raised something else than SystemExit."""
    for stream, file in ((1, out), (2, err)):
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        os.dup2(file, stream)
    with tempfile.TemporaryFile() as stdin:
        stdin.write((job["stdin"] or "").encode("utf-8", "surrogatepass"))
        stdin.seek(0)
        os.dup2(stdin.fileno(), 0)
    sys.stdin = os.fdopen(0, closefd=False)  # what the last command left unread is not this one's
    os.chdir(job["cwd"])
    sys.argv = ["optimize", *job["argv"]]
    from optimizer.cli import main

    code: int | None = 0
    try:
        main(prog_name="optimize")
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = None
    sys.stdout.flush()
    sys.stderr.flush()
    os.chdir("/")
    return code


def peak() -> int:
    """Bytes of memory that this process had at its peak."""
    with open("/proc/self/status") as f:
        (line,) = (line for line in f if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def worked(pid: int) -> float:
    """Seconds of processor time that a child took."""
    with open(f"/proc/{pid}/stat") as f:
        ticks = f.read().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


class Child:
    """A forked process that runs commands one after the other: forking one for each, of 700 MB,
    took a third of the time. The next command has a new one after a command that was stopped,
    killed, or not ended by an exit."""

    def __init__(self, out: IO[bytes], err: IO[bytes]) -> None:
        self.out, self.err = out, err
        theirs, jobs = os.pipe()
        answers, ours = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(jobs)
            os.close(answers)
            serve(os.fdopen(theirs), os.fdopen(ours, "w"), self.out.fileno(), self.err.fileno())
        os.close(theirs)
        os.close(ours)
        self.jobs, self.answers = os.fdopen(jobs, "w"), os.fdopen(answers)
        self.alive = True

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        started, before = time.monotonic(), worked(self.pid)
        self.jobs.write(json.dumps(job) + "\n")
        self.jobs.flush()
        while not select.select([self.answers], [], [], 1.0)[0]:
            seconds = time.monotonic() - started
            if seconds > WAITED or (seconds > SECONDS and worked(self.pid) - before > SECONDS):
                os.kill(self.pid, signal.SIGKILL)
                _, _, usage = self.end()
                answer = {"exit": None, "grown": usage.ru_maxrss * 1024 - resident(os.getpid())}
                break
        else:
            line = self.answers.readline()
            answer = json.loads(line or "{}")
            if not line or answer["exit"] == UNCAUGHT:
                _, status, usage = self.end()
                died = {"grown": usage.ru_maxrss * 1024 - resident(os.getpid())}
                answer = answer or {"exit": os.waitstatus_to_exitcode(status), **died}
        texts = [
            os.pread(file.fileno(), 200_000, 0).decode("utf-8", "replace")
            for file in (self.out, self.err)
        ]
        seconds = round(time.monotonic() - started, 3)
        return {**answer, "seconds": seconds, "stdout": texts[0], "stderr": texts[1]}

    def end(self) -> tuple[int, int, Any]:
        """Close its pipes, at which it ends, and wait for it."""
        self.alive = False
        self.jobs.close()
        self.answers.close()
        return os.wait4(self.pid, 0)


def resident(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def main() -> None:
    with delay_collection():
        warm()
    print("ready", flush=True)
    child: Child | None = None
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        for line in sys.stdin:
            if child is None or not child.alive:
                child = Child(out, err)
            print(json.dumps(child.run(json.loads(line))), flush=True)
        if child is not None and child.alive:
            child.end()


if __name__ == "__main__":
    main()
