"""genai_config.json, and onnxruntime-genai running a bundle's model folder with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.bundle.manifest import read_manifest
from optimizer.harness.errors import MachineError
from optimizer.harness.generate import Options
from optimizer.package import genai_config
from tests.harness import tiny_decoder
from tests.package.bundles import generation_bundle

PROMPTS = ["the film was", "a very good place in the night with the staff of"]


@pytest.fixture(scope="module", params=["new", "shared"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("genai")
    return generation_bundle.make(folder, request.param, defaults={"top_p": 0.9})


def test_the_document_says_what_the_contract_says() -> None:
    contract = tiny_decoder.contract(320, eos_ids=[2, 0], defaults={"temperature": 0.6})
    assert genai_config.build_document(contract, "model.onnx", shared=True) == {
        "model": {
            "type": "llama",
            "vocab_size": 320,
            "context_length": 96,
            "bos_token_id": 0,
            "eos_token_id": [2, 0],
            "pad_token_id": 2,
            "decoder": {
                "filename": "model.onnx",
                "head_size": 16,
                "num_hidden_layers": 2,
                "num_key_value_heads": 2,
                "session_options": {"provider_options": []},
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {
            "do_sample": False,
            "max_length": 96,
            "min_length": 0,
            "temperature": 0.6,
            "num_beams": 1,
            "past_present_share_buffer": True,
        },
    }


def test_integer_products_are_exact_on_the_processors_of_all_readers() -> None:
    contract = tiny_decoder.contract(320)
    config = genai_config.build_document(contract, "m.onnx", shared=True, integer_products=True)
    options = config["model"]["decoder"]["session_options"]
    assert options == {"session.x64quantprecision": "1", "provider_options": []}


def test_a_family_without_position_ids_is_given_none() -> None:
    made = genai_config.build_document(tiny_decoder.contract(320, "opt"), "m.onnx", shared=False)
    assert "position_ids" not in made["model"]["decoder"]["inputs"]


def test_the_model_folder_has_all_that_genai_reads(bundle: Path) -> None:
    folder = bundle / "model" / "onnxruntime-cpu"
    document = json.loads((folder / genai_config.NAME).read_text())
    assert (folder / document["model"]["decoder"]["filename"]).is_file()
    names = {p.name for p in folder.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    listed = read_manifest(bundle)["files"]
    assert f"model/onnxruntime-cpu/{genai_config.NAME}" in listed
    assert "jinja2==" in (bundle / "requirements.txt").read_text()


def test_whether_the_cache_is_shared_is_read_from_the_model(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    for cache, wanted in (("new", False), ("shared", True)):
        folder = generation_bundle.make(tmp_path_factory.mktemp(cache), cache)
        text = (folder / "model" / "onnxruntime-cpu" / genai_config.NAME).read_text()
        assert json.loads(text)["search"]["past_present_share_buffer"] is wanted


def test_asking_for_genai_without_it_says_what_to_install(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime_genai", None)
    with pytest.raises(MachineError, match="pip install onnxruntime-genai"):
        Bundle(bundle, genai=True)


def test_genai_gives_the_plain_loops_tokens(bundle: Path) -> None:
    pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    options = Options(max_new_tokens=30, do_sample=False, ignore_eos=True)
    with Bundle(bundle) as plain, Bundle(bundle, genai=True) as genai:
        assert genai.generate(PROMPTS, options) == plain.generate(PROMPTS, options)


def test_genais_own_loop_gives_the_plain_loops_tokens(bundle: Path) -> None:
    og: Any = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    with Bundle(bundle) as plain:
        options = Options(max_new_tokens=30, do_sample=False, ignore_eos=True)
        wanted = plain.generate(PROMPTS, options)
    model = og.Model(str(bundle / "model" / "onnxruntime-cpu"))
    tokenizer = og.Tokenizer(model)
    for prompt, completion in zip(PROMPTS, wanted, strict=True):
        parameters = og.GeneratorParams(model)
        parameters.set_search_options(max_length=completion.prompt_tokens + 30, do_sample=False)
        generator = og.Generator(model, parameters)
        generator.append_tokens(tokenizer.encode(prompt))
        found = []
        while not generator.is_done():
            generator.generate_next_token()
            found.append(int(generator.get_next_tokens()[0]))
        assert found == list(completion.tokens)[: len(found)]
        assert len(found) == 30 or found[-1] == 2


def test_genais_chat_template_is_the_models(bundle: Path) -> None:
    og: Any = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    tokenizer = og.Tokenizer(og.Model(str(bundle / "model" / "onnxruntime-cpu")))
    chat = json.dumps([{"role": "user", "content": "hi"}])
    made = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert made == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
