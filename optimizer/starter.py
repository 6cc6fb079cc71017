"""`optimize init MODEL`: a commented recipe that is valid as it stands but for its data."""

from __future__ import annotations

import re
from pathlib import Path

from optimizer.errors import RecipeError, closest

METRICS = {
    "sentence-embedding": ("cosine", "{text: text}"),
    "feature-extraction": ("cosine", "{text: text}"),
    "text-classification": ("accuracy", "{text: text, label: label}"),
    "token-classification": ("f1", "{text: text, tags: tags}"),
}

TEMPLATE = """\
# A recipe for `optimize`. Every key: `optimize schema`. Check it: `optimize check THIS_FILE`.
name: {name}

model:
  source: {model}     # hub id | folder | python-package:<name>
  # revision: <commit>          # resolved to a commit and pinned in the bundle when absent
  task: {task}

calibrate:                      # the texts on which activation ranges are measured
  data:                         # or the name of a spec file, such as calibration/mine.yaml
    source: csv                 # csv | json | parquet | text | folder | hub id
    files: [calibrate.csv]      # relative to this file
    columns: {{text: text}}       # our field: your column
  samples: 256
  sequence_length: 128

quantize:
  method: smoothquant           # rtn | smoothquant
  weights: {{bits: 8, granularity: channel}}
  activations: {{bits: 8, granularity: tensor, range: minmax}}   # leave out for weight-only
  bias_correction: true
  # keep_float: ["*.intermediate.dense"]   # module patterns to leave in float

targets:
  - {{runtime: onnxruntime, device: cpu}}
  # - runtime: tensorrt-rtx
  #   shapes: {{batch: [1, 8, 32], sequence: [16, 128, 256]}}    # [min, usual, max]
  #   float: fp16

validate:                       # the proof; rows must not appear in the calibration data
  data:
    source: csv
    files: [evaluate.csv]
    columns: {columns}
  metric: {metric}
  max_drop: 0.01                # the margin: losing more than this fails (exit 3)
  confidence: 0.95
  latency: {{batch: [1], sequence: [128], must_beat_float: true}}
"""


def starter_recipe(model: str, task: str | None) -> str:
    """The text of the recipe. Raises RecipeError for an unknown task or one it cannot guess."""
    task = task or _guess(model)
    if task not in METRICS:
        raise RecipeError(
            f"{task!r} is not a task{closest(task, list(METRICS))}",
            where="--task",
            accepted=", ".join(METRICS),
        )
    metric, columns = METRICS[task]
    base = model.split(":")[-1].rstrip("/").split("/")[-1].lower()
    name = re.sub(r"[^a-z0-9._-]+", "-", base).strip("-._") or "model"
    return TEMPLATE.format(
        name=f"{name}-int8", model=model, task=task, metric=metric, columns=columns
    )


def _guess(model: str) -> str:
    """From the checkpoint's files when they are on this machine."""
    from optimizer.load.source import local_folder

    folder = local_folder(model)
    if folder is None:
        raise RecipeError(
            f"cannot guess the task of {model!r}: its files are not on this machine",
            where="optimize init",
            fix=f"Say it: --task {' | '.join(METRICS)}.",
        )
    config = (folder / "config.json").read_text()
    if (Path(folder) / "modules.json").is_file():
        return "sentence-embedding"
    for ending, task in (
        ("ForSequenceClassification", "text-classification"),
        ("ForTokenClassification", "token-classification"),
    ):
        if ending in config:
            return task
    return "feature-extraction"
