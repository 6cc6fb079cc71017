"""Stage `recover`: train the smaller model on the reference's outputs (distillation).

out/checkpoint/, contract.json, source.json   in the layout of load
out/reduced.json                              as reduce wrote it
out/recovered.json                            {precision: type of the products, seconds: {type:
                                              time of a step}, device, processes, learning_rate,
                                              tried: [[rate, loss], ...] of the rate search, steps,
                                              stopped, held_out: [[step, loss], ...], train:
                                              [[step, mean loss], ...], start and end: {loss: value
                                              on held-out data}, trained: [parameter]}

While it runs, out/progress/ holds a checkpoint of the training: a killed run resumes there,
bit-identically on the same processor with the same number of threads and processes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from optimizer.compress.walk.products import ProductSettings
from optimizer.foundation.process.launch import Processes
from optimizer.harness import contract as contracts
from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.recipe.recover import Learning
from optimizer.recipe.schema import DataSpec, Recovery
from optimizer.reduce.learn import step_times
from optimizer.reduce.learn.distill import Distilled, Split, distill, draw_texts
from optimizer.reduce.learn.estimate import estimate_recovery
from optimizer.reduce.learn.pair import Kept, open_pair
from optimizer.reduce.learn.processes import choose_device, count_of, launch
from optimizer.reduce.learn.rewrite import rewrite
from optimizer.reduce.learn.teacher_text import add_teacher_text
from optimizer.reduce.structure.write import REDUCED
from optimizer.reduce.student import is_initialized
from optimizer.store import Shapes, Stage

VERSION = 4
RECOVERED = "recovered.json"
PROGRESS, FINISHED = "progress", "progress.done"


def run(section: Recovery, reference: Path, smaller: Path, out: Path) -> None:
    """Train the smaller model on the reference's outputs and write it to `out`.

    reference: folder of load
    smaller: folder of reduce

    Raises DataError when there is too little text, CheckpointError for losses that are not finite.
    """
    if (out / FINISHED).exists():  # a run was killed after it had written everything
        shutil.rmtree(out / FINISHED)
        return
    progress = out / PROGRESS
    progress.mkdir(exist_ok=True)
    count, device = count_of(section.recover), choose_device(section.recover)
    if count > 1:
        draw_learned_texts(section.recover, section.data, reference, progress)  # generate text once
        launch(learn, section.recover, progress, section, reference, smaller, progress)
    # of several processes this reads the result from the checkpoint that they left
    distilled, multiplied = learn(Processes(device=device), section, reference, smaller, progress)
    rewrite(smaller, distilled.weights, out)
    shutil.copyfile(smaller / REDUCED, out / REDUCED)
    how = asdict(multiplied) | {"device": device.type, "processes": count}
    text = json.dumps(how | build_document(distilled), indent=1)
    (out / RECOVERED).write_text(text + "\n", encoding="utf-8")
    progress.rename(out / FINISHED)
    shutil.rmtree(out / FINISHED)


def learn(
    processes: Processes, section: Recovery, reference: Path, smaller: Path, progress: Path
) -> tuple[Distilled, ProductSettings]:
    """Train the smaller model by distillation, with checkpoints in `progress`; returns the result
    and the chosen type of products."""
    split = draw_learned_texts(section.recover, section.data, reference, progress)
    pair = open_pair(reference, smaller, read_kept(smaller), section.recover.losses)
    pair = replace(pair, from_nothing=is_initialized(smaller)).to(processes.device)
    multiplied = step_times.choose_products(
        section.recover, pair, split.learned, progress, processes
    )
    pair = replace(pair, products=multiplied.dtype)
    return distill(pair, section.recover, split, progress, processes=processes), multiplied


def draw_learned_texts(section: Learning, data: DataSpec, reference: Path, progress: Path) -> Split:
    """Draw the texts of a training: those to train on, to which the reference adds
    section.generated windows, and held-out texts."""
    contract = contracts.read(reference / "contract.json")
    split = draw_texts(section, data, contract, reference / "checkpoint")
    return add_teacher_text(section, split, reference, progress)


def build_document(distilled: Distilled) -> dict[str, Any]:
    """Return the content of recovered.json."""
    return {
        "learning_rate": distilled.learning_rate,
        "tried": distilled.tried,
        "steps": distilled.curve.steps,
        "stopped": distilled.curve.stopped,
        "held_out": distilled.curve.held_out,
        "train": distilled.curve.train,
        "start": dict(distilled.start),
        "end": dict(distilled.end),
        "trained": sorted(distilled.weights),
    }


def read_kept(folder: Path) -> Kept | None:
    """Return the parts of the reference that the model in `folder` keeps; None if the model was not
    cut."""
    if not (folder / REDUCED).is_file():
        return None
    layers = read_json(folder / REDUCED)["layers"]
    blocks = [int(str(layer["of"]).rpartition(".")[2]) for layer in layers]
    return Kept(blocks, [layer.get("heads") for layer in layers]) if blocks else None


def files(section: Recovery) -> Mapping[str, str]:
    """Return {name: digest} of the data that stage recover reads besides its inputs."""
    from optimizer.data.datasets import digest_rows

    return {"reduce.recover.data": digest_rows(section.data)}


def shapes(_section: Recovery, _reference: Shapes, smaller: Shapes) -> Shapes:
    """Return the shapes of the tensors that recover writes, which are those of `smaller`."""
    return smaller


STAGE = Stage(
    "recover",
    VERSION,
    run,
    packages=("torch", "transformers", "tokenizers"),
    files=files,
    estimate=estimate_recovery,
    shapes=shapes,
    resumable=True,
)
