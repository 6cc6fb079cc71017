"""The systems that are compared, and the quantized files of those that need one."""

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

import numpy as np

from optimizer.harness.runtimes.ort.run import SLOW_ON_CPU

WORKER = "benchmarks.measure.worker"  # run from the root of the repository
NO_SKIP = {"disabled_optimizers": SLOW_ON_CPU}  # see harness/runtimes/ort/run.py
REFERENCE = "onnxruntime-float"


@dataclass(frozen=True)
class System:
    """One row. model: a file or folder; why: the reason there is none. answers_of: the system
    whose quality this one shares, being the same model run another way."""

    name: str
    title: str
    kind: str
    model: Path | None
    options: Mapping[str, Any] = field(default_factory=dict)
    python: Path = Path(sys.executable)
    answers_of: str | None = None
    why: str = ""


@dataclass(frozen=True)
class Lowered:
    """Our INT8 files of one compressed state, by the runtime that each is for. attention: for
    OpenVINO, of a state whose attention multiplies integers too."""

    onnxruntime: Path
    openvino: Path
    attention: Path


def systems(
    lowered: Lowered, graph: Path, checkpoint: Path, made: Path, openvino: Path | None, why: str
) -> list[System]:
    """Ours first, then the float systems, then the other quantizers.

    made: the folder of `quantize`. openvino: the interpreter of its environment, or None with the
    reason in `why`.
    """
    ort, no_skip = "ONNX Runtime", "same session settings as ours"
    ov_float = graph if openvino else None
    ov_int8 = made / "nncf.xml" if openvino else None
    python = openvino or Path(sys.executable)

    def ov(name: str, title: str, model: Path | None, **more: Any) -> System:
        return System(name, title, "openvino", model, python=python, why=why, **more)

    return [
        System("ours", "**ours, INT8**", "ours", lowered.onnxruntime),
        System("ours-openvino", "**ours, INT8, target openvino**", "served", lowered.openvino),
        System(
            "ours-openvino-bf16", "**ours, INT8, target openvino in bf16**", "served",
            lowered.openvino, {"precision": "bf16"},
        ),
        System("ours-openvino-fixed", "ours, INT8, OpenVINO compiled per shape", "openvino",
               lowered.openvino, {"fixed": True}, answers_of="ours-openvino"),
        System("ours-openvino-fixed-bf16", "ours, INT8, OpenVINO in bf16, compiled per shape",
               "openvino", lowered.openvino, {"fixed": True, "precision": "bf16"},
               answers_of="ours-openvino-bf16"),
        System("ours-attention", "**ours, INT8 with attention, target openvino**", "served",
               lowered.attention),
        System("ours-attention-fixed", "ours, INT8 with attention, OpenVINO compiled per shape",
               "openvino", lowered.attention, {"fixed": True}, answers_of="ours-attention"),
        System("ours-attention-fixed-bf16",
               "ours, INT8 with attention, OpenVINO in bf16, compiled per shape",
               "openvino", lowered.attention, {"fixed": True, "precision": "bf16"}),
        System("openvino-bf16", "OpenVINO float in bf16", "served", graph, {"precision": "bf16"}),
        System(REFERENCE, f"{ort} float", "onnxruntime", graph),
        System(
            "onnxruntime-float-tuned", f"{ort} float, {no_skip}", "ours", graph,
            answers_of=REFERENCE,
        ),
        System("torch-eager", "PyTorch eager", "torch", checkpoint),
        System(
            "torch-compile", "torch.compile", "torch", checkpoint,
            {"compile": "default"}, answers_of="torch-eager",
        ),
        System(
            "torch-compile-tuned", "torch.compile, max-autotune, frozen", "torch", checkpoint,
            {"compile": "max-autotune", "freeze": True}, answers_of="torch-eager",
        ),
        System("ort-dynamic", f"{ort} quantize_dynamic", "onnxruntime", made / "dynamic.onnx"),
        System(
            "ort-dynamic-tuned", f"{ort} quantize_dynamic, {no_skip}", "onnxruntime",
            made / "dynamic.onnx", NO_SKIP, answers_of="ort-dynamic",
        ),
        System("ort-static", f"{ort} quantize_static", "onnxruntime", made / "static.onnx"),
        System(
            "ort-static-tuned", f"{ort} quantize_static, {no_skip}", "onnxruntime",
            made / "static.onnx", NO_SKIP, answers_of="ort-static",
        ),
        ov("openvino-float", "OpenVINO float", ov_float),
        ov("openvino-int8", "OpenVINO + NNCF INT8", ov_int8),
        ov(
            "openvino-int8-fixed", "OpenVINO + NNCF INT8, compiled per shape", ov_int8,
            options={"fixed": True}, answers_of="openvino-int8",
        ),
        ov(
            "openvino-int8-fixed-bf16", "OpenVINO + NNCF INT8 in bf16, compiled per shape",
            ov_int8, options={"fixed": True, "precision": "bf16"},
        ),
    ]  # fmt: skip


def quantize(graph: Path, calibration: Path, made: Path, openvino: Path | None) -> None:
    """Write the peers' quantized models into `made`.

    All see the same calibration texts, one per batch and so without padding. Weights are per
    channel wherever the quantizer can. quantize_static takes the MatMuls alone and minmax ranges:
    with every operator, its default, the mean cosine to float was 0.58 instead of 0.92; its
    percentile and entropy calibrators refuse texts of different lengths, and on texts padded to
    one length came to 0.93 at best.
    """
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(graph, made / "dynamic.onnx", per_channel=True)
    _quantize_static(graph, calibration, made / "static.onnx")
    if openvino:
        out = str(made / "nncf.xml")
        config = {"kind": "nncf", "model": str(graph), "calibration": str(calibration), "out": out}
        command: list[str | Path] = [openvino, "-m", WORKER, json.dumps(config)]
        subprocess.run(command, check=True, stdout=sys.stderr)


def _quantize_static(graph: Path, calibration: Path, out: Path) -> None:
    from onnxruntime.quantization import (
        CalibrationDataReader,
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_static,
    )
    from onnxruntime.quantization.shape_inference import quant_pre_process

    sys.path.insert(0, str(WORKER.parent))
    from benchmarks.measure.worker import read_batches

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = iter(read_batches(str(calibration)).values())

        def get_next(self) -> Any:
            return next(self.left, None)

    ready = out.with_suffix(".ready.onnx")
    quant_pre_process(graph, ready, skip_symbolic_shape=True)
    quantize_static(
        ready,
        out,
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        op_types_to_quantize=["MatMul"],
        calibrate_method=CalibrationMethod.MinMax,
        extra_options={"MatMulConstBOnly": True},
    )


class Worker:
    """A system's process. It is stopped (SIGSTOP) whenever it is not answering, so that threads
    which spin or clean up cannot disturb the system that is being timed."""

    def __init__(self, system: System, threads: int, script: str = WORKER, **more: Any) -> None:
        """script: its module. more: what else it is told, as JSON takes it."""
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
            [system.python, "-m", script, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Raises RuntimeError with the end of its log when the process ended instead."""
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


def write_batches(batches: Mapping[int, Mapping[str, Any]], path: Path) -> Path:
    """Array file of worker.py's format."""
    np.savez(path, **{f"{k}.{n}": a for k, b in batches.items() for n, a in b.items()})
    return path


def openvino_python(folder: Path, requirements: Sequence[str]) -> Path:
    """The interpreter of an environment with OpenVINO and NNCF (see environment_python)."""
    return environment_python(folder, requirements, "openvino, nncf")


def environment_python(folder: Path, requirements: Sequence[str], modules: str) -> Path:
    """The interpreter of an environment that has these modules, made when it is not there. It is
    apart from the project's, whose packages theirs would move."""
    python = folder / "bin" / "python"
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    if subprocess.run([python, "-c", f"import {modules}"], capture_output=True).returncode:
        pip: list[str | Path] = [
            python,
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "-q",
        ]
        subprocess.run([*pip, *requirements], check=True)
    return python
