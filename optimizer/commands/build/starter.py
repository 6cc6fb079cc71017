"""Write the commented recipe of `optimize init MODEL`; only its data files must be filled in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimizer.foundation.errors import RecipeError, closest
from optimizer.harness import tasks
from optimizer.harness.inputs.image import IMAGE
from optimizer.harness.inputs.text import TEXT
from optimizer.harness.tasks import (
    feature_extraction,
    image_feature_extraction,
    sentence_embedding,
)

if TYPE_CHECKING:
    from optimizer.model.architectures.family_record import Family

MODEL = """\
# A recipe for `optimize`. Every key: `optimize schema`. Check it: `optimize check THIS_FILE`.
name: {name}

model:
  source: {model}     # hub id | folder | python-package:<name>
{file}  # revision: <commit>          # resolved to a commit and pinned in the bundle when absent
  task: {task}

calibrate:                      # {calibrated_on}
  data:                         # or the path of a spec file, such as calibration/mine.yaml
    source: csv                 # csv | json | parquet | text | folder | hub id
    files: [calibrate.csv]      # relative to this file
    columns: {{{column}: {column}}}     # our field: your column
"""

QUANTIZE = """\
quantize:
  method: smoothquant           # rtn | smoothquant | gptq | awq | ...: `optimize schema`
  weights: {bits: 8, granularity: channel}
  activations: {bits: 8, granularity: tensor, range: minmax}   # remove for weight-only
  bias_correction: true
  # keep_float: ["*.intermediate.dense"]   # module patterns to leave in float
"""

ENCODER = f"""\
  samples: 256
  sequence_length: 128

{QUANTIZE}
targets:
  - {{runtime: onnxruntime, device: cpu}}
  # - runtime: tensorrt-rtx
  #   shapes: {{batch: [1, 8, 32], sequence: [16, 128, 256]}}    # [min, usual, max]
  #   float: fp16
  # - {{runtime: onnxruntime-web}}         # a page that runs the model in a browser: docs/web.md
"""

FILTERS = """\
quantize:
  method: rtn                   # the method for convolutions
  weights: {bits: 8, granularity: channel}
  activations: {bits: 8, granularity: tensor, range: minmax}
  # keep_float: ["*.shortcut.convolution"]   # module patterns to leave in float
"""

UNKNOWN = FILTERS.replace(
    "# the method for convolutions\n",
    "# for every model; smoothquant is better without convolutions\n",
)

OF_IMAGES = """\

targets:
  - {runtime: onnxruntime, device: cpu}
  # - runtime: tensorrt-rtx
  #   shapes: {batch: [1, 8, 32]}      # [min, usual, max]; an image has one size
  #   float: fp16
"""

DECODER = """\
  samples: 32                   # windows of sequence_length tokens
  sequence_length: 512

quantize:
  methods: [gptq]               # rtn | gptq | awq | rotation | autoround | ...: `optimize schema`
  weights: {bits: 4, granularity: group, group_size: 32}
  head: {bits: 8, granularity: group, group_size: 32}
  # embedding: {bits: 8, granularity: group, group_size: 32}   # ONNX Runtime only
  # activations: {bits: 8, granularity: token}     # with weights of 8 bits per channel

compress: {precision: bf16}     # float type during calibration

targets:
  - {runtime: onnxruntime, device: cpu}
  # - runtime: tensorrt-rtx
  #   shapes: {batch: [1, 1, 4], sequence: [1, 128, 512], past: [0, 256, 1024]}
  # - {runtime: compressed-tensors}      # a folder for transformers, vLLM and SGLang
"""

PROOF = """
validate:                       # the proof; rows must not appear in the calibration data
  data:
    source: csv
    files: [evaluate.csv]
    columns: {columns}
  metric: {metric}
"""

ENCODER_MARGIN = """\
  max_drop: 0.01                # the margin: losing more than this fails (exit 3)
  confidence: 0.95
  latency: {batch: [1], sequence: [128], must_beat_float: true}
"""

IMAGE_MARGIN = """\
  max_drop: 0.01                # the margin: losing more than this fails (exit 3)
  confidence: 0.95
  latency: {batch: [1], must_beat_float: true}
"""

DECODER_MARGIN = """\
  sequence_length: 256
  max_drop: 0.1                 # the margin, nats per token: losing more than this fails (exit 3)
  max_kl: 0.2
  confidence: 0.95
  latency: {batch: [1], sequence: [128], new_tokens: 32, must_beat_float: true}
"""


COLUMNS = {kind.name: kind.columns[0] for kind in (TEXT, IMAGE)}


def starter_recipe(model: str, task: str | None, gguf_file: str | None = None) -> str:
    """Return the text of a commented recipe; a task of None is guessed. Raises RecipeError for an
    unknown task, a failed guess, and a name that a recipe cannot contain."""
    for name, where in ((model, "MODEL"), (gguf_file, "--gguf-file")):
        if name is not None and not (name.strip() and name.isprintable()):
            raise RecipeError(
                f"{name!r:.200} was given",
                where=where,
                accepted="a hub id (owner/name), a folder, a file, or python-package:<name>",
            )
    task = task or _guess(model, gguf_file)
    known = tasks.names()
    if task not in known:
        raise RecipeError(
            f"{task!r} is not a task{closest(task, known)}",
            where="--task",
            accepted=", ".join(known),
        )
    record = tasks.task(task)
    metric, ways = next(iter(record.metrics.items()))
    needs = next(iter(ways), ())
    base = model.split(":")[-1].rstrip("/").split("/")[-1].lower()
    name = re.sub(r"[^a-z0-9._-]+", "-", base).strip("-._") or "model"
    generates, column = record.generates, COLUMNS.get(record.inputs.name, TEXT.columns[0])
    model_and_data = MODEL.format(
        name=f"{name}-{'int4' if generates else 'int8'}",
        model=model,
        file=f"  gguf_file: {gguf_file}\n" if gguf_file else "",
        task=task,
        column=column,
        calibrated_on="texts like those that the model will read and write"
        if generates
        else f"{record.inputs.name}s for measuring activation ranges",
    )
    columns = "{" + ", ".join(f"{c}: {c}" for c in (column, *needs)) + "}"
    sections, margin = (DECODER, DECODER_MARGIN) if generates else (ENCODER, ENCODER_MARGIN)
    if record.inputs is IMAGE:
        quantize = {True: FILTERS, False: QUANTIZE, None: UNKNOWN}[_convolves(model)]
        sections, margin = f"  samples: 256\n\n{quantize}{OF_IMAGES}", IMAGE_MARGIN
    proof = PROOF.format(columns=columns, metric=metric)
    return "".join((model_and_data, sections, proof, margin))


def _guess(model: str, gguf_file: str | None) -> str:
    """Return the task's name by the files of a local checkpoint; RecipeError if it is not local."""
    from optimizer.load.source import local_folder

    if gguf_file is not None:
        return tasks.generating()[0]
    folder = local_folder(model)
    if folder is None:
        raise RecipeError(
            f"the task of {model!r} cannot be guessed: its files are not on this machine",
            where="optimize init",
            fix=f"Give it: --task {' | '.join(tasks.names())}.",
        )
    if (Path(folder) / "modules.json").is_file():
        return sentence_embedding.TASK.name
    config, family = _architecture(folder)
    named = config.get("architectures")
    for architecture in named if isinstance(named, list) else ():
        for task in tasks.TASKS.values():
            if task.heads and str(architecture).endswith(task.heads):
                return task.name
    of_images = family is not None and family.inputs == IMAGE.name
    return image_feature_extraction.TASK.name if of_images else feature_extraction.TASK.name


def _architecture(folder: Path) -> tuple[dict[str, Any], Family | None]:
    """Return (config.json, or the equivalent for timm; row of model/architectures/families.py)."""
    from optimizer.load.providers.timm import is_timm
    from optimizer.load.providers.timm_architectures import architecture
    from optimizer.model.architectures.families import FAMILIES

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    record = architecture(str(config.get("architecture"))) if is_timm(config) else None
    config = config if record is None else dict(record.fields)
    return config, FAMILIES.get(str(config.get("model_type")))


def _convolves(model: str) -> bool | None:
    """Return True for a model with quantized convolutions; None for a model not on this machine."""
    from optimizer.load.source import local_folder

    folder = local_folder(model)
    if folder is None:
        return None
    family = _architecture(Path(folder))[1]
    return family is not None and family.batch_norms is not None
