"""Write the commented recipe of `optimize init MODEL`; `# DECIDE:` marks what is left to decide."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from optimizer.commands.build.initial.model import ModelFacts
from optimizer.commands.build.initial.rows import DataFacts
from optimizer.foundation.errors import RecipeError, suggest
from optimizer.harness import tasks
from optimizer.harness.bundle.fit_columns import VNNI
from optimizer.harness.inputs.image import IMAGE
from optimizer.harness.inputs.tensors import TENSORS
from optimizer.harness.runtimes.machine import Machine
from optimizer.load import source

MARK = "# DECIDE:"
PLAIN = re.compile(r"[A-Za-z_./~][\w./:~-]*", re.ASCII)  # strings that YAML reads as they are
WORDS = ("true", "false", "yes", "no", "on", "off", "null", "y", "n", "~")

MODEL = """\
# A recipe for `optimize`. Every key: `optimize schema`. Check it: `optimize check THIS_FILE`.
name: {name}

model:
{decisions}  source: {model}     # hub id | folder | python-package:<name>
{settings}  # revision: <commit>          # resolved and pinned in the bundle when absent
  task: {task}

calibrate:                      # {calibrated_on}
{to_bring}  data:                         # or the path of a spec file: calibration/mine.yaml
    source: {source}                 # csv | json | parquet | text | folder | hub id
    files: [{file}]      # relative to this file{rows}
    columns: {columns}     # our field: your column
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
  samples: SAMPLES
  sequence_length: SEQUENCE

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
  method: rtn                   # the method for convolutions and ONNX files
  weights: {bits: 8, granularity: channel}
  activations: {bits: 8, granularity: tensor, range: minmax}
  # keep_float: ["*.shortcut.convolution"]   # module patterns to leave in float
"""

DETECTIONS = (
    "detections: {labels: [object], box: cxcywh, units: pixels, activation: none, nms: 0.7}"
)
CANDIDATES = (
    "detections: the names of all labels in the order of their ids, and what the outputs hold; "
    "image: how the exporter prepares an image (docs/onnx.md, Detectors)"
)
UNKNOWN = FILTERS.replace(
    "# the method for convolutions and ONNX files\n",
    "# for every model; smoothquant is better without convolutions\n",
)

OF_IMAGES = """\

targets:
  - {runtime: onnxruntime, device: cpu}
  # - runtime: tensorrt-rtx
  #   shapes: {batch: [1, 8, 32]}      # [min, usual, max]; an image has one size
  #   float: FLOAT
"""

DECODER = """\
  samples: 32                   # windows of sequence_length tokens
  sequence_length: SEQUENCE

quantize:
  methods: [gptq]               # rtn | gptq | awq | rotation | autoround | ...: `optimize schema`
  weights: {bits: 4, granularity: group, group_size: 32}
  head: {bits: 8, granularity: group, group_size: 32}
  # embedding: {bits: 8, granularity: group, group_size: 32}   # ONNX Runtime, OpenVINO, GGUF
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
    source: {source}
    files: [{file}]{rows}
    columns: {columns}
{labels}  metric: {metric}
"""

ENCODER_MARGIN = """\
  max_drop: 0.01                # the margin: losing more than this fails (exit 3)
  confidence: 0.95
  latency:
TIME    batch: [1]
    sequence: [SEQUENCE]
BEAT"""

TEXTS = f"""
texts:                             # the side of texts, a bundle in the bundle's folder texts
  validate:
    {MARK} bring texts like those that images will be searched by
    data: {{source: csv, files: [captions.csv], columns: {{text: text}}}}
    metric: cosine
"""
IMAGE_MARGIN = """\
  max_drop: 0.01                # the margin: losing more than this fails (exit 3)
  confidence: 0.95
  latency:
TIME    batch: [1]
BEAT"""

DECODER_MARGIN = """\
  sequence_length: WINDOW
  max_drop: 0.1                 # the margin, nats per token: losing more than this fails (exit 3)
  max_kl: 0.2
  confidence: 0.95
  latency:
TIME    batch: [1]
    sequence: [PROMPT]
    new_tokens: 32
    must_beat_float: true
"""


BEAT = "    must_beat_float: true\n"
EQUAL = """\
    must_beat_float: false        # true: fails where it is not faster than float
"""


def warn_slow_integers(machine: Machine, task: tasks.Task) -> str:
    """Warn at `optimize init` of a machine whose processor has no instructions for sums of 8-bit
    products; "" for others, for weight-only recipes, and where its features are not known."""
    if task.generates or not machine.cpu_features or VNNI & set(machine.cpu_features):
        return ""
    return (
        f"this processor ({machine.cpu or 'unknown'}) has no instructions for 8-bit products "
        "(VNNI): INT8 takes about as long as float on it, so the gate must_beat_float is off. "
        "Times are still measured and reported. Set it to true where only a faster model may ship, "
        "and run where the model will be served"
    )


def check_names(model: str, task: str | None, gguf_file: str | None) -> None:
    """Raise RecipeError for an unknown task, and for a name that a recipe cannot contain."""
    for name, where in ((model, "MODEL"), (gguf_file, "--gguf-file")):
        if name is not None and not (name.strip() and name.isprintable()):
            raise RecipeError(
                f"{name!r:.200} was given",
                where=where,
                accepted="a hub id (owner/name), a folder, a file, or python-package:<name>",
            )
    known = tasks.list_names()
    if task is not None and task not in known:
        raise RecipeError(
            f"{task!r} is not a task{suggest(task, known)}",
            where="--task",
            accepted=", ".join(known),
        )


def starter_recipe(
    model: ModelFacts, data: DataFacts, folder: Path, name: str = "", slow: str = ""
) -> str:
    """Write the text of the commented recipe of `optimize init`.

    folder: folder of the recipe, where its relative paths start
    name: file name of the recipe without its ending; "": named after the model and its bits
    slow: result of `warn_slow_integers`; must_beat_float is off with one
    """
    task, generates = model.task, model.task.generates
    base = model.name.split(":")[-1].rstrip("/").split("/")[-1].removesuffix(".onnx")
    named = _make_name(name) or f"{_make_name(base) or 'model'}-{'int4' if generates else 'int8'}"
    settings = [f"gguf_file: {quote(model.gguf_file)}"] if model.gguf_file else []
    if model.adapter is not None:
        settings.append(f"adapters: [{quote(_source(model.adapter, folder))}]")
    decisions = model.decisions
    if "detections" in task.optional:
        settings.append(DETECTIONS)
        decisions = (*decisions, CANDIDATES)
    known = ("text", "text_pair", "image", "keypoints", "messages", "arrays")
    inputs = [field for field in data.columns if field in known]
    head = MODEL.format(
        name=named,
        model=quote(_source(model.name, folder)),
        decisions=_mark_decisions(decisions),
        settings="".join(f"  {line}\n" for line in (*settings, *model.settings, *data.settings)),
        task=task.name,
        calibrated_on="texts like those that the model will read and write"
        if generates
        else f"{task.inputs.name}s for measuring activation ranges",
        to_bring=_mark_decisions(data.decisions),
        columns=_flow(data, inputs),
        **_part(data, "calibrate"),
    )
    sections, margin = (DECODER, DECODER_MARGIN) if generates else (ENCODER, ENCODER_MARGIN)
    if task.inputs.name in (IMAGE.name, TENSORS.name):
        quantize = {True: FILTERS, False: QUANTIZE, None: UNKNOWN}[model.convolves]
        targets = OF_IMAGES.replace("FLOAT", "fp32" if task.of_file else "fp16")
        sections, margin = f"  samples: SAMPLES\n\n{quantize}{targets}", IMAGE_MARGIN
    labels = f"    labels: [{', '.join(map(quote, data.labels))}]\n" if data.labels else ""
    proof = PROOF.format(
        columns=_flow(data, list(data.columns)),
        labels=labels,
        metric=data.metric,
        **_part(data, "evaluate"),
    )
    time = ""
    if "time" in data.files:
        time = f"{{source: {data.source}, files: [{quote(data.files['time'][0])}], "
        time = f"    data: {time}columns: {_flow(data, inputs)}}}\n"
    samples = str(min(256, data.files["calibrate"][1] or 256))
    margin += TEXTS if task.reads_texts else ""
    text = "".join(
        (head, sections.replace("SAMPLES", samples), proof, margin.replace("TIME", time))
    ).replace("BEAT", f"{_mark_decisions([slow], '    ')}{EQUAL}" if slow else BEAT)
    return _fit_lengths(text, model.positions, generates)


def _make_name(text: str) -> str:
    """Turn a text into the name of a new recipe; "" where no character of it is accepted."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:100]


def _source(model: str, folder: Path) -> str:
    """Return a model as a new recipe in `folder` names it: a relative path, or a hub's name
    unchanged.

    model: path or name as typed in the current folder
    """
    named = model.startswith((source.PACKAGE, "~")) or os.path.isabs(model)
    if named or not source.is_local(model):
        return model
    path = os.path.relpath(model, folder.resolve())
    return path if path.startswith("..") else f"./{path}"


def _fit_lengths(text: str, positions: int | None, generates: bool) -> str:
    """Put into a new recipe lengths that the model has positions for."""
    most = positions or 1 << 30
    lengths = {
        "SEQUENCE": min(512 if generates else 128, most),
        "WINDOW": min(256, most),
        "PROMPT": max(min(128, most - 32), 2),
    }
    for word, length in lengths.items():
        text = text.replace(word, str(length))
    return text


def _part(data: DataFacts, part: str) -> dict[str, str]:
    file, rows = data.files[part]
    counted = f"; {rows:,} rows" if part == "calibrate" else f"     # {rows:,} rows"
    return {"source": data.source, "file": quote(file), "rows": counted if rows else ""}


def _flow(data: DataFacts, fields: Sequence[str]) -> str:
    """Write {field: column} as YAML in one line of a new recipe."""
    return "{" + ", ".join(f"{f}: {quote(data.columns[f])}" for f in fields) + "}"


def _mark_decisions(sentences: Sequence[str], indent: str = "  ") -> str:
    lines = (textwrap.wrap(f"{MARK} {s}", 95, subsequent_indent="#   ") for s in sentences)
    return "".join(f"{indent}{line}\n" for wrapped in lines for line in wrapped)


def quote(text: str) -> str:
    """Write a string of a new recipe as YAML, in quotes where it needs them."""
    plain = PLAIN.fullmatch(text) and text.lower() not in WORDS and not text.endswith(":")
    return text if plain else json.dumps(text, ensure_ascii=False)
