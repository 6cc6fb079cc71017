"""Peak memory and time of a program and all processes that it starts."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

INTERVAL = 0.02  # seconds between samples
FIELDS = {"RssAnon", "RssFile", "VmHWM"}


@dataclass(frozen=True)
class Used:
    """Needs of a finished program.

    anonymous: highest sum of RssAnon over its processes at one moment, bytes, sampled
    resident: highest VmHWM of one of its processes, bytes; file pages that are mapped count
    seconds, cpu_seconds: wall and processor time
    output: stdout
    """

    exit_code: int
    anonymous: int
    resident: int
    seconds: float
    cpu_seconds: float
    output: str

    def as_dict(self) -> dict[str, object]:
        return {k: v for k, v in asdict(self).items() if k != "output"}


def run(words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Used:
    """Run a program to its end and sample its memory.

    log: file that receives its stderr
    """
    started, before = time.monotonic(), os.times()
    anonymous = resident = 0
    with tempfile.TemporaryFile("w+") as out, log.open("w") as errors:
        process = subprocess.Popen(words, stdout=out, stderr=errors, env=environment)
        while process.poll() is None:
            found = [status(pid) for pid in tree(process.pid)]
            anonymous = max(anonymous, sum(f.get("RssAnon", 0) for f in found))
            resident = max([resident, *(f.get("VmHWM", 0) for f in found)])
            time.sleep(INTERVAL)
        out.seek(0)
        output = out.read()
    after = os.times()
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    seconds = time.monotonic() - started
    return Used(process.returncode, anonymous, resident, seconds, cpu, output)


def tree(pid: int) -> list[int]:
    """List a process and its descendants, those that ended in the meantime left out."""
    found, pending = [], [pid]
    while pending:
        one = pending.pop()
        found.append(one)
        for file in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                pending += map(int, file.read_text().split())
            except OSError:  # it ended
                continue
    return found


def status(pid: int) -> dict[str, int]:
    """Read the FIELDS of a process in bytes; {} where it ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return {name: int(text.split()[0]) * 1024 for name, text in pairs if name in FIELDS}
