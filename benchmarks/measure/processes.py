"""Systems under comparison, each in a worker process, and Python environments of peers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS, REFERENCE = "ours", "onnxruntime-float"  # systems that may not fail
OPENVINO = ("openvino==2026.4.1", "nncf==3.4.0", "numpy")


@dataclass(frozen=True)
class System:
    """One row of a comparison.

    model: file or folder; None with the reason in `why`
    options: settings of its kind
    python: interpreter of its environment
    answers_of: another system with the same model, whose quality this one shares
    """

    name: str
    title: str
    kind: str
    model: Path | None
    options: Mapping[str, Any] = field(default_factory=dict)
    python: Path = Path(sys.executable)
    answers_of: str | None = None
    why: str = ""


class Worker:
    """Process of one system, stopped (SIGSTOP) between requests.

    Its idle threads then take no processor time from the system that is timed.
    """

    def __init__(self, system: System, threads: int, module: str, **more: Any) -> None:
        """module: worker module to run. more: further entries of its JSON configuration."""
        config = {
            "kind": system.kind,
            "model": str(system.model),
            "threads": threads,
            "options": dict(system.options),
            **more,
        }
        self.name = system.name
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [system.python, "-m", module, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises RuntimeError with the end of the log where the process has ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGCONT)
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.process.wait()
            self.log.seek(0)
            raise RuntimeError(f"{self.name} ended: {self.log.read().strip()[-400:]}")
        self.process.send_signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()


def openvino_python(folder: Path) -> Path:
    """Find the interpreter of an environment with OpenVINO and NNCF; make it if needed."""
    return environment_python(folder, OPENVINO, "openvino, nncf")


def environment_python(folder: Path, requirements: Sequence[str], modules: str) -> Path:
    """Find the interpreter of an environment with these modules; make the environment if needed.

    It is separate from the project's environment, whose package versions these would change.
    """
    python = folder / "bin" / "python"
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    if subprocess.run([python, "-c", f"import {modules}"], capture_output=True).returncode:
        pip = ["-m", "pip", "install", "--disable-pip-version-check", "-q"]
        subprocess.run([python, *pip, *requirements], check=True)
    return python


def openvino_versions(wanted: Sequence[System]) -> dict[str, str]:
    """Read the versions of OpenVINO and NNCF in the environment of the systems that use them."""
    own = Path(sys.executable)
    of = (s.python for s in wanted if s.kind == "openvino" and s.model and s.python != own)
    python = next(of, None)
    if python is None:
        return {}
    code = "from importlib.metadata import version as v; print(v('openvino'), v('nncf'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return dict(zip(("openvino", "nncf"), found.stdout.split(), strict=True))
