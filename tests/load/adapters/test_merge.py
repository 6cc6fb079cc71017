"""The written checkpoint of a model with adapters is peft's merged model."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from optimizer.foundation.errors import CheckpointError, MachineError
from optimizer.load.adapters import adapter
from optimizer.load.headers import read_shapes
from optimizer.load.source import Source
from optimizer.load.stage import STAGE
from optimizer.recipe.schema import Model
from tests.load.adapters.saved import save_adapter
from tests.load.conftest import edit_json

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="pip install peft"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
Load = Callable[..., Path]
DECODER, CLASSIFIER = "text-generation", "text-classification"
CLOSE = {"rtol": 1e-3, "atol": 1e-4}  # sums in another order; the adapters move logits by 0.1
IDS = torch.tensor([[5, 6, 7, 8]])


def written(out: Path, prefix: str = "") -> dict[str, Tensor]:
    return load_file(out / "checkpoint/model.safetensors")


OPTIONS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "down_proj"]},
    "rank_stabilized": {"target_modules": ["v_proj"], "use_rslora": True},
    "dora": {"target_modules": ["q_proj", "o_proj"], "use_dora": True},
    "pattern": {"target_modules": ["q_proj", "k_proj"], "rank_pattern": {"k_proj": 2}},
    "saved_module": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_logits_are_those_of_peft(
    options: dict[str, Any], tiny_llama: Path, tmp_path: Path, load: Load
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    before = base(IDS).logits.detach()
    reference = save_adapter(base, tmp_path / "adapter", 1, task_type="CAUSAL_LM", **options)
    out = load(tiny_llama, DECODER, adapters=(str(tmp_path / "adapter"),))
    ours = AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    with torch.no_grad():
        expected, found = reference(IDS).logits, ours(IDS).logits
    torch.testing.assert_close(found, expected, **CLOSE)
    assert (found - before).abs().max() > 100 * (found - expected).abs().max()


UNTRAINED: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "saved module": {"modules_to_save": ["norm"]},
    "alpha": {"lora_alpha": 0, "init_lora_weights": False},
    "all": {"use_dora": True, "modules_to_save": ["norm"], "lora_alpha": 0},
}


@pytest.mark.parametrize("options", UNTRAINED.values(), ids=list(UNTRAINED))
def test_an_adapter_that_changes_nothing_is_refused_and_one_changed_number_is_not(
    options: dict[str, Any], tiny_llama: Path, tmp_path: Path
) -> None:
    import peft

    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    own = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options)
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    one = adapter.Adapter("one", Source(tmp_path, tmp_path, None))
    with pytest.raises(CheckpointError, match="changes nothing"):
        adapter.check_trained(one, "here", own)
    file = tmp_path / adapter.WEIGHTS
    tensors = load_file(file)
    changing = [n for n in tensors if adapter.MAGNITUDE in n or "norm" in n]
    if config.lora_alpha:
        changing.append(next(n for n in tensors if adapter.SIDES[1] in n))
    for name in changing:
        changed = tensors[name].clone()
        changed.view(-1)[0] += 0.01
        save_file({**tensors, name: changed}, file)
        adapter.check_trained(one, "here", own)
    if not changing:
        edit_json(tmp_path / adapter.CONFIG, alpha_pattern={"q_proj": 1})
        adapter.check_trained(one, "here", own)


def test_an_adapter_of_tied_embeddings_is_refused(
    tiny_llama: Path, tmp_path: Path, load: Load
) -> None:
    """peft applies it to one of the two, and merged it would change both."""
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    save_adapter(base, tmp_path / "adapter", 1, target_modules=["embed_tokens"])
    with pytest.raises(CheckpointError, match=r"embed_tokens .* tied to lm_head"):
        load(tiny_llama, DECODER, adapters=(str(tmp_path / "adapter"),))


def test_an_adapter_of_untied_embeddings_is_merged(
    tiny_llama: Path, tmp_path: Path, load: Load
) -> None:
    untied = AutoModelForCausalLM.from_pretrained(tiny_llama, tie_word_embeddings=False)
    torch.nn.init.normal_(untied.lm_head.weight, std=0.1)
    untied.save_pretrained(shutil.copytree(tiny_llama, tmp_path / "untied"))
    reference = save_adapter(untied, tmp_path / "adapter", 1, target_modules=["embed_tokens"])
    out = load(tmp_path / "untied", DECODER, adapters=(str(tmp_path / "adapter"),))
    ours = AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS).logits, reference(IDS).logits, **CLOSE)


def test_two_adapters_are_merged_in_order(tiny_llama: Path, tmp_path: Path, load: Load) -> None:
    import peft

    for number in (1, 2):
        base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
        save_adapter(base, tmp_path / str(number), number, target_modules=["q_proj"])
    both = (str(tmp_path / "1"), str(tmp_path / "2"))
    merged = load(tiny_llama, DECODER, adapters=both)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    for one in both:
        model = peft.PeftModel.from_pretrained(model, one).merge_and_unload()
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(written(merged)[name], model.state_dict()[name])
    source = json.loads((merged / "source.json").read_text())
    assert source["adapters"] == [*both]
    assert f"{both[1]}: {adapter.WEIGHTS}" in source["files"]


def test_an_adapter_beside_the_weights_is_merged(
    tiny_llama: Path, tmp_path: Path, load: Load
) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    save_adapter(base, tmp_path / "adapter", 1, target_modules=["q_proj"])
    for name in (adapter.CONFIG, adapter.WEIGHTS):
        shutil.copy(tmp_path / "adapter" / name, folder / name)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # applies it
    out = load(folder, DECODER)
    ours = AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS).logits, reference(IDS).logits, **CLOSE)
    plain = load(folder, DECODER, adapters=())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(written(plain)[name], load_file(tiny_llama / "model.safetensors")[name])


def test_a_classifier_has_the_labels_of_the_adapters_head(
    tiny_bert: Path, tmp_path: Path, load: Load
) -> None:
    base = AutoModelForSequenceClassification.from_pretrained(tiny_bert, num_labels=5)
    reference = save_adapter(
        base, tmp_path / "adapter", 1, task_type="SEQ_CLS", target_modules=["query"]
    )
    out = load(tiny_bert, CLASSIFIER, adapters=(str(tmp_path / "adapter"),))
    assert len(json.loads((out / "contract.json").read_text())["labels"]) == 5
    ours = AutoModelForSequenceClassification.from_pretrained(out / "checkpoint").eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS).logits, reference(IDS).logits)


def test_a_decoder_ranks_with_the_head_that_an_adapter_brings(
    tiny_llama: Path, tmp_path: Path, load: Load
) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "base"))
    edit_json(folder / "config.json", pad_token_id=1)
    (folder / "chat_template.jinja").unlink()
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    options: dict[str, Any] = {"task_type": "SEQ_CLS", "target_modules": ["q_proj"]}
    reference = save_adapter(base, tmp_path / "adapter", 1, **options)
    out = load(folder, "text-ranking", adapters=(str(tmp_path / "adapter"),))
    ours = AutoModelForSequenceClassification.from_pretrained(out / "checkpoint").eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS).logits, reference(IDS).logits, **CLOSE)


def test_an_adapter_alone_is_refused_with_the_keys_to_set(
    tiny_llama: Path, tmp_path: Path, load: Load
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    save_adapter(base, tmp_path / "adapter", 1, target_modules=["q_proj"])
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "adapter", DECODER)
    assert f"model.source: {tiny_llama} and model.adapters: [{tmp_path / 'adapter'}]" in str(
        error.value
    )


def edit(file: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_%s.weight"
DAMAGED: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "extra": (
        lambda t: t.update({Q.replace("0", "9") % "A": t[Q % "A"] + 1}),
        "no place in the model",
    ),
    "missing": (lambda t: t.pop(Q % "B"), "1 tensors are missing"),
    "shape": (lambda t: t.update({Q % "A": t[Q % "A"][:, :3].clone()}), "peft cannot load"),
    "nan": (lambda t: t.update({Q % "B": t[Q % "B"] * float("nan")}), "NaN"),
}


@pytest.mark.parametrize(("change", "message"), DAMAGED.values(), ids=list(DAMAGED))
def test_an_adapter_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Tensor]], Any],
    message: str,
    tiny_llama: Path,
    tmp_path: Path,
    load: Load,
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    save_adapter(base, tmp_path / "adapter", 1, target_modules=["q_proj"])
    edit(tmp_path / "adapter" / adapter.WEIGHTS, change)
    with pytest.raises(CheckpointError, match=message):
        load(tiny_llama, DECODER, adapters=(str(tmp_path / "adapter"),))


def test_a_type_without_weights_to_merge_is_refused(
    tiny_llama: Path, tmp_path: Path, load: Load
) -> None:
    import peft

    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="PROMPT_TUNING cannot be merged"):
        load(tiny_llama, DECODER, adapters=(str(tmp_path / "adapter"),))


def test_a_pickle_and_a_folder_that_is_not_an_adapter_are_refused(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        adapter.find(
            Model(source=str(tiny_llama), task=DECODER, adapters=(str(tiny_llama),)), tiny_llama
        )
    (tmp_path / adapter.CONFIG).write_text("{}")
    (tmp_path / adapter.PICKLE).write_bytes(b"")
    section = Model(source=str(tiny_llama), task=DECODER, adapters=(str(tmp_path),))
    (found,) = adapter.find(section, tiny_llama)
    with pytest.raises(CheckpointError, match="is a pickle"):
        found.header  # noqa: B018


def test_another_adapter_is_another_step(tiny_llama: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    save_adapter(base, tmp_path / "adapter", 1, target_modules=["q_proj"])
    section = Model(source=str(tiny_llama), task=DECODER, adapters=(str(tmp_path / "adapter"),))
    before = adapter.digest_files(section)
    edit(tmp_path / "adapter" / adapter.WEIGHTS, lambda t: t.update({Q % "B": 2 * t[Q % "B"]}))
    assert before.keys() == adapter.digest_files(section).keys()
    assert before != adapter.digest_files(section)


def test_the_base_is_checked_as_without_adapters(
    tiny_llama: Path, tmp_path: Path, load: Load
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    save_adapter(base, tmp_path / "adapter", 1, target_modules=["q_proj"])
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    edit(folder / "model.safetensors", lambda t: t.update({"qa_outputs.bias": torch.ones(2)}))
    adapters = (str(tmp_path / "adapter"),)
    with pytest.raises(CheckpointError, match=r"no use for 1 .*qa_outputs\.bias"):
        load(folder, DECODER, adapters=adapters)
    load(folder, DECODER, adapters=adapters, ignore_tensors=("qa_outputs.*",))


def test_merging_is_predicted_in_float32_and_written_twice(tiny_llama: Path) -> None:
    plain = Model(source=str(tiny_llama), task=DECODER)
    merged = plain.model_copy(update={"adapters": ("./adapter",)})
    values = sum(math.prod(shape) for shape in read_shapes(plain).values())
    assert STAGE.estimate is not None
    assert STAGE.estimate(merged, read_shapes(plain)).disk == 8 * values


def test_a_missing_folder_is_named_by_the_key_of_adapters(tiny_llama: Path) -> None:
    section = Model(source=str(tiny_llama), task=DECODER, adapters=("./absent",))
    for look in (lambda: adapter.find(section, tiny_llama), lambda: adapter.digest_files(section)):
        with pytest.raises(CheckpointError, match=r"model\.adapters: folder \./absent does not"):
            look()


def test_a_full_disk_is_the_machines_fault_and_not_the_models(
    tiny_llama: Path, tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    save_adapter(base, tmp_path / "adapter", 1, target_modules=["q_proj"])
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(MachineError, match=r"No space left on device.* Set TMPDIR"):
        load(tiny_llama, DECODER, adapters=(str(tmp_path / "adapter"),))
