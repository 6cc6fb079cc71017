"""Write genai_config.json, with which onnxruntime-genai runs a decoder's ONNX model.

    onnxruntime_genai.Model("<bundle>/model/onnxruntime-cpu")

Format: https://onnxruntime.ai/docs/genai/reference/config.html, read by onnxruntime-genai 0.18. It
reads tokenizer.json, tokenizer_config.json and the chat template from the same folder. Numbers of
query heads and widths are not needed for a decoder whose KV cache is bound by name.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.kv_cache import PARTS, past_name, present_name
from optimizer.harness.runtimes.ort.decoder import SHARED
from optimizer.harness.runtimes.ort.exact_integers import EXACT
from optimizer.harness.runtimes.ort.onnx_external import read_metadata
from optimizer.lower.onnx.lookup import IDS
from optimizer.targets.record import Packed

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
NAME = "genai_config.json"
DECODER = "llama"  # the name for any decoder with one key and one value cache per layer
NUMBER = "%d"  # index of a layer, in patterns of names
SEARCHED = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def build_document(
    contract: Contract, model: str, *, shared: bool, integer_products: bool = False
) -> dict[str, Any]:
    """Return the content of a bundle's genai_config.json for a text-generation contract. Sampling
    follows the checkpoint's generation config, default greedy, as in our generation loop.

    model: name of the ONNX file in the same folder
    shared: True where the graph updates the KV cache in place, so that past and present are one
            buffer of the full context
    integer_products: True where activations are quantized; products must then be exact on every
                      processor
    """
    spec = contract.decoder
    settings = (EXACT,) if integer_products else ()
    inputs = {i.name: i.name for i in contract.inputs}
    inputs |= {f"past_{part}_names": past_name(NUMBER, part) for part in PARTS}
    search: dict[str, Any] = {"do_sample": False, "max_length": spec.context, "min_length": 0}
    search |= {n: v for n, v in spec.defaults.items() if n in SEARCHED}
    return {
        "model": {
            "type": DECODER,
            "vocab_size": spec.vocabulary,
            "context_length": spec.context,
            "bos_token_id": spec.eos_ids[0] if spec.bos_id is None else spec.bos_id,
            "eos_token_id": list(spec.eos_ids),
            "pad_token_id": contract.text.pad_id,
            "decoder": {
                "filename": model,
                "head_size": spec.head_dim,
                "num_hidden_layers": spec.layers,
                "num_key_value_heads": spec.kv_heads,
                "session_options": {**dict(settings), "provider_options": []},
                "inputs": inputs,
                "outputs": {
                    "logits": tasks.look_up(contract).output,
                    **{f"present_{part}_names": present_name(NUMBER, part) for part in PARTS},
                },
            },
        },
        "search": {**search, "num_beams": 1, "past_present_share_buffer": shared},
    }


def add(part: Packed) -> None:
    """Add to a bundle genai_config.json, the tokenizer's files and the chat template beside the
    ONNX file.

    Writes nothing for a task that does not generate text. part: the target's files in the bundle
    """
    model, source = part.bundle / part.entry["model"], part.source
    contract = Contract.from_json(json.loads((source / "contract.json").read_text("utf-8")))
    if not tasks.look_up(contract).generates:
        return
    shared = read_metadata(model).get(SHARED[0]) == SHARED[1]
    modules = json.loads((part.lowered / "lowering.json").read_text("utf-8"))["modules"]
    integers = any(m["activation"] not in (None, IDS) for m in modules.values())
    config = build_document(contract, model.name, shared=shared, integer_products=integers)
    text = json.dumps(config, indent=1, sort_keys=True)
    (model.parent / NAME).write_text(text, encoding="utf-8")
    for name in TOKENIZER_FILES:
        if (source / "checkpoint" / name).is_file():
            shutil.copyfile(source / "checkpoint" / name, model.parent / name)
    if contract.decoder.chat_template is not None:
        template = model.parent / "chat_template.jinja"
        template.write_text(contract.decoder.chat_template, encoding="utf-8")
