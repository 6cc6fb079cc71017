"""Write the folder that OpenVINO GenAI opens, for a decoder with `genai: true` in its recipe.

    properties = json.loads((folder / "openvino_properties.json").read_text())
    openvino_genai.LLMPipeline(folder, "CPU", **properties)

    openvino_model.xml, .bin       graph and weights of the ONNX file, its KV cache as a state
    openvino_tokenizer.xml, .bin   tokenizer.json as an OpenVINO model, and openvino_detokenizer.xml
    openvino_properties.json       settings of the validated model; OpenVINO's defaults round the KV
                                   cache to 8 bits and compute in bf16 where the processor has it
    config.json, ...               files of the checkpoint, and the chat template

Written with openvino-tokenizers 2026.4. The written model is opened and must give the same logits
as the ONNX file, bit for bit, and the tokenizer the ids of tokenizer.json.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.foundation.errors import LedgerError
from optimizer.harness import contract as contracts
from optimizer.harness.contract import Contract
from optimizer.harness.inputs import kv_cache
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.harness.runtimes.openvino.run import (
    OpenVinoRunner,
    OpenVinoSettings,
    open_string_model,
    write_model,
)
from optimizer.load.tokenizer.tokenizer import open_tokenizer
from optimizer.lower.openvino.build import GENAI_MODEL
from optimizer.targets.record import Packed

TOKENIZER, DETOKENIZER = "openvino_tokenizer.xml", "openvino_detokenizer.xml"
PROPERTIES = "openvino_properties.json"
CHECKPOINT = (  # files copied from the checkpoint
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
TEXTS = (  # encoded with both versions of the tokenizer; the ids must be equal
    "The quick brown fox jumps over the lazy dog.",
    "  Two  spaces, a\ttab,\na line; 3.14 and 1,000,000.",
    "Zürich, naïve café, 東京, 🙂!",
    "def f(x):\n    return x ** 2\n",
)
ASKED = 8  # tokens given to the ONNX and the OpenVINO model, whose logits are compared


def add(part: Packed) -> None:
    """Add to a bundle the files by which OpenVINO GenAI opens it, and compare them with the ONNX
    file.

    Writes nothing if build made no OpenVINO model.

    Raises LedgerError if logits differ from the ONNX model's, or token ids from tokenizer.json's.
    """
    if not (part.built / GENAI_MODEL).is_file():
        return
    model, source = part.bundle / part.entry["model"], part.source
    folder, contract = model.parent, contracts.read(source / "contract.json")
    settings = OpenVinoSettings.from_fit(part.entry["fit"])
    for name in (GENAI_MODEL, Path(GENAI_MODEL).with_suffix(".bin").name):
        shutil.copyfile(part.built / name, folder / name)
    _add_tokenizer(source / "checkpoint", folder, contract)
    for name in CHECKPOINT:
        if (source / "checkpoint" / name).is_file():
            shutil.copyfile(source / "checkpoint" / name, folder / name)
    if contract.decoder.chat_template is not None:
        template = folder / "chat_template.jinja"
        template.write_text(contract.decoder.chat_template, encoding="utf-8")
    text = json.dumps(settings.precision_properties, indent=1, sort_keys=True)
    (folder / PROPERTIES).write_text(text, encoding="utf-8")
    _check_model(model, folder / GENAI_MODEL, settings, contract)


def _add_tokenizer(checkpoint: Path, folder: Path, contract: Contract) -> None:
    from openvino_tokenizers import convert_tokenizer

    theirs = open_tokenizer(checkpoint)
    tokenizer, detokenizer = convert_tokenizer(theirs, with_detokenizer=True)
    write_model(tokenizer, folder / TOKENIZER)
    write_model(detokenizer, folder / DETOKENIZER)
    ours = load_tokenizer(checkpoint, contract)
    encode = open_string_model(folder / TOKENIZER)
    for text in TEXTS:
        ids, expected = encode(text)["input_ids"][0].tolist(), ours.encode(text).ids
        if ids != expected:
            raise LedgerError(
                f"{text[:30]!r} becomes tokens {ids[:8]}, but {expected[:8]} with tokenizer.json",
                where=f"package: {TOKENIZER}",
                accepted="equality",
                fix="openvino-tokenizers cannot convert this tokenizer; set genai: false.",
            )


def _check_model(onnx: Path, written: Path, settings: OpenVinoSettings, contract: Contract) -> None:
    """Compare the OpenVINO model that a bundle ships with the ONNX file: a prefill and one decode
    step, the KV cache as a state. Raises LedgerError where logits differ in a bit.

    onnx, written: paths of the two models
    """
    ids = np.arange(ASKED, dtype=np.int64)[None] % contract.decoder.vocabulary
    answers = []
    for path in (onnx, written):
        in_states = replace(settings, paged=False, cache="float")
        with OpenVinoRunner(path, in_states, threads=1) as runner:
            decoder = runner.decoder(contract)
            pieces = ((0, ASKED - 1), (ASKED - 1, ASKED))
            answers.append([decoder.step(_columns(contract, ids, *piece)) for piece in pieces])
    for first, second in zip(*answers, strict=True):
        if not np.array_equal(first, second):
            raise LedgerError(
                f"{written.name} gives other logits than {onnx.name}",
                where="package: OpenVINO GenAI",
                accepted="equality",
            )


def _columns(contract: Contract, ids: Any, start: int, end: int) -> dict[str, Any]:
    mask = np.ones((1, end), np.int64)
    known = {
        "input_ids": ids[:, start:end],
        "attention_mask": mask,
        "position_ids": kv_cache.position_ids(mask, end - start),
    }
    return {i.name: known[i.name] for i in contract.inputs}
