"""Systems of the encoder comparison, and the quantized files of the peers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measure.models import Lowered
from benchmarks.measure.processes import REFERENCE, System
from benchmarks.measure.worker import read_batches
from optimizer.harness.runtimes.ort.run import SLOW_ON_CPU

WORKER = "benchmarks.encoders.int8_worker"
NO_SKIP = {"disabled_optimizers": SLOW_ON_CPU}  # see harness/runtimes/ort/run.py


def systems(
    lowered: Lowered, graph: Path, checkpoint: Path, made: Path, openvino: Path | None, why: str
) -> list[System]:
    """List ours first, then the float systems, then the other quantizers.

    made: folder that `quantize` filled
    openvino: interpreter of its environment; None with the reason in `why`
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
    with every operator, its default, the mean cosine to float was 0.58 instead of 0.92. Its
    percentile and entropy calibrators refuse texts of different lengths; on texts padded to one
    length they reached 0.93 at best.
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
