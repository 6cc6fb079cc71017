"""Stage `qat`: train the compressed model on the reference's outputs.

Quantization-aware training (Jacob et al. 2017, arXiv 1712.05877) with learned scales (LSQ, Esser et
al. 2020, arXiv 1902.08153). The float reference is the teacher unless only labels have a weight.
The trained model computes in the arithmetic of the compressed state
(compress/methods/weights/straight_through.py), so the lowering gets the model that was measured.

out/checkpoint/, contract.json, source.json   in the layout of load: values of the integers for
                                              quantized linears, else the trained values
out/state.json, tensors.safetensors           the trained state, with no replaced parameter
out/modules.json                              rows of compress, with the trained ranges
out/corrections.safetensors                   empty: the trained biases include the corrections
out/trained.json                              as recover's recovered.json
out/reduced.json                              as reduce wrote it, where the model was made smaller

While it runs, out/progress/ holds a checkpoint of the training, as in recover.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from optimizer.compress import module_rows
from optimizer.compress.apply.weights import bias_correction
from optimizer.compress.methods.weights.rtn import measure_relative_error
from optimizer.compress.module_rows import ModuleRow, round_significant
from optimizer.foundation import state
from optimizer.foundation.process.launch import Processes
from optimizer.foundation.process.torch_device import CPU
from optimizer.foundation.state import CompressedState, weight_name
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.recipe.schema import QuantizationAware
from optimizer.reduce.learn.distill import Distilled, distill
from optimizer.reduce.learn.estimate import estimate_training
from optimizer.reduce.learn.pair import TeacherAndStudent, open_pair
from optimizer.reduce.learn.processes import choose_device, count_of, launch
from optimizer.reduce.learn.recover import (
    FINISHED,
    PROGRESS,
    build_document,
    draw_learned_texts,
    read_kept,
)
from optimizer.reduce.learn.rewrite import rewrite
from optimizer.reduce.learn.trained_linear import Trained, make_trainable
from optimizer.reduce.structure.write import REDUCED
from optimizer.store import Shapes, Stage

VERSION = 2
TRAINED = "trained.json"
REMARK = "trained with the whole model"


def run(
    section: QuantizationAware, reference: Path, base: Path, compressed: Path, out: Path
) -> None:
    """Train the compressed model and write it to `out`.

    reference: folder of load
    base: folder of the checkpoint that was compressed
    compressed: folder of compress

    Raises DataError when there is too little text, CheckpointError for losses that are not finite,
    RecipeError for a state without trainable weights.
    """
    if (out / FINISHED).exists():  # a run was killed after it had written everything
        shutil.rmtree(out / FINISHED)
        return
    progress = out / PROGRESS
    progress.mkdir(exist_ok=True)
    count, device = count_of(section.qat), choose_device(section.qat)
    if count > 1:
        draw_learned_texts(section.qat, section.data, reference, progress)  # generate text once
        launch(learn, section.qat, progress, section, reference, base, compressed, progress)
    # of several processes this reads the result from the checkpoint that they left
    distilled, model = learn(
        Processes(device=device), section, reference, base, compressed, progress
    )
    rewrite(base, model.values, out)
    state.write(model.state, out)
    bias_correction.write({}, out)
    module_rows.write(_rows(model, base, compressed), out)
    if (base / REDUCED).is_file():
        shutil.copyfile(base / REDUCED, out / REDUCED)
    text = json.dumps({**build_document(distilled), "trained": sorted(model.values)}, indent=1)
    (out / TRAINED).write_text(text + "\n", encoding="utf-8")
    progress.rename(out / FINISHED)
    shutil.rmtree(out / FINISHED)


def learn(
    processes: Processes,
    section: QuantizationAware,
    reference: Path,
    base: Path,
    compressed: Path,
    progress: Path,
) -> tuple[Distilled, Trained]:
    """Train the compressed model by qat, alone or as one of several processes; returns the result
    and the trained model."""
    split = draw_learned_texts(section.qat, section.data, reference, progress)
    pair, model = opened(section, reference, base, state.read(compressed), processes.device)
    return distill(pair, section.qat, split, progress, processes=processes), model


def opened(
    section: QuantizationAware,
    reference: Path,
    base: Path,
    start: CompressedState,
    device: torch.device = CPU,
) -> tuple[TeacherAndStudent, Trained]:
    """Open the float reference and a trainable model of `base` with the compressed state `start`;
    return (pair of both, trainable model)."""
    pair = open_pair(reference, base, read_kept(base), section.qat.losses).to(device)
    model = make_trainable(pair.student, start.to(device), pair.embeddings)
    logarithms = [n for n in model.parameters if n.endswith((".log_scale", ".log_range"))]
    step, highest = model.step
    if section.qat.scale_rate is None:
        shares, rates = dict.fromkeys(logarithms, 1 / (step * highest)), {}
    else:
        shares, rates = {}, dict.fromkeys(logarithms, section.qat.scale_rate)
    pair = replace(
        pair,
        student=model.model,
        parameters=model.parameters,
        rates=rates,
        shares=shares,
        reach=step / 2,
    )
    return pair, model


def _rows(model: Trained, base: Path, compressed: Path) -> list[ModuleRow]:
    """Return the rows of modules.json after qat: from compress, without its measurements of modules
    that were trained."""
    tensors = open_checkpoint(base).tensors
    values, rows = model.values, []
    for row in module_rows.read(compressed):
        linear = model.linears.get(row.module)
        if linear is None:
            rows.append(row)
            continue
        covered = linear.covered
        name = weight_name(row.module)
        error = measure_relative_error(tensors[name], values[name])
        changed = replace(
            row,
            weight_error=round_significant(error),
            output_error=None,
            saturation=None,
            range=[covered.low, covered.high] if covered else None,
        )
        rows.append(changed.explained(REMARK))
    return rows


def files(section: QuantizationAware) -> Mapping[str, str]:
    """Return {name: digest} of the data that stage qat reads besides its inputs."""
    from optimizer.data.datasets import digest_rows

    return {"qat.data": digest_rows(section.data)}


def shapes(
    _section: QuantizationAware, _reference: Shapes, base: Shapes, _compressed: Shapes
) -> Shapes:
    """Return the shapes of the tensors that qat writes, which are those of `base`."""
    return base


STAGE = Stage(
    "qat",
    VERSION,
    run,
    packages=("torch", "transformers", "tokenizers"),
    files=files,
    estimate=estimate_training,
    shapes=shapes,
    resumable=True,
)
