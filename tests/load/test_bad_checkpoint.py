"""Each way a checkpoint can be bad is refused, saying where it is and what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from optimizer.foundation.errors import CheckpointError, RecipeError
from optimizer.model.checkpoint.checkpoint import MAX_TENSORS
from tests.load.conftest import Load, edit_json, edit_weights

QUERY = "encoder.layer.1.attention.self.query.weight"


def refused(load: Load, source: Path, *words: str, **section: object) -> CheckpointError:
    """The error of loading `source`; every word must be in its message."""
    with pytest.raises(CheckpointError) as caught:
        load(source, **section)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.exit_code == 2
    assert caught.value.fix or caught.value.accepted, "a message says what to do"
    return caught.value


def test_a_folder_without_config_json(load: Load, bert: Path) -> None:
    (bert / "config.json").unlink()
    refused(load, bert, str(bert), "no config.json", "save_pretrained")


def test_a_config_that_is_not_json(load: Load, bert: Path) -> None:
    (bert / "config.json").write_text("{")
    refused(load, bert, "config.json", "not JSON")


def test_a_config_without_model_type(load: Load, bert: Path) -> None:
    edit_json(bert / "config.json", model_type=None)
    refused(load, bert, "config.json", "model_type is missing", "model.model_type", "bert")


def test_a_model_type_of_the_recipe_stands_for_a_missing_one(load: Load, bert: Path) -> None:
    named = load(bert)
    edit_json(bert / "config.json", model_type=None)
    out = load(bert, model_type="bert")
    for name in ("checkpoint/model.safetensors", "checkpoint/tokenizer.json", "contract.json"):
        assert (out / name).read_bytes() == (named / name).read_bytes()
    assert json.loads((out / "checkpoint/config.json").read_text())["model_type"] == "bert"


def test_two_model_types_are_refused(load: Load, bert: Path) -> None:
    with pytest.raises(RecipeError, match="Remove it from the recipe"):
        load(bert, model_type="roberta")


def test_a_folder_without_weights(load: Load, bert: Path) -> None:
    (bert / "model.safetensors").unlink()
    refused(load, bert, str(bert), "no weights", "model.safetensors")


def test_a_corrupt_header(load: Load, bert: Path) -> None:
    file = bert / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[8:12] = b"\xff\xff\xff\xff"
    file.write_bytes(raw)
    refused(load, bert, str(file), "header is corrupt", "again")


@pytest.mark.parametrize("length", [2**63, 0, 3])
def test_a_header_of_an_impossible_length(load: Load, bert: Path, length: int) -> None:
    file = bert / "model.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    refused(load, bert, str(file), "corrupt", "again")


def test_a_header_of_more_tensors_than_a_model_has_is_not_parsed(load: Load, bert: Path) -> None:
    file = bert / "model.safetensors"
    text = b"{" * (MAX_TENSORS + 1)  # no JSON, which a parser would say
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    refused(load, bert, str(file), f"{MAX_TENSORS + 1:,} objects", f"{MAX_TENSORS:,} tensors")


@pytest.mark.parametrize("size", [0, 5, 1000, -4])
def test_a_truncated_file(load: Load, bert: Path, size: int) -> None:
    file = bert / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    refused(load, bert, str(file), "bytes", "the download was cut short")


def test_offsets_that_do_not_fit_the_shape(load: Load, bert: Path) -> None:
    file = bert / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["embeddings.LayerNorm.bias"]["shape"] = [65]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    refused(load, bert, str(file), "embeddings.LayerNorm.bias", "do not hold")


def sharded(folder: Path) -> Path:
    """The folder with its weights in two shards and an index."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        shard = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_shards_load_to_the_bytes_of_one_file(load: Load, bert: Path) -> None:
    whole = (load(bert) / "checkpoint/model.safetensors").read_bytes()
    sharded(bert)
    assert (load(bert) / "checkpoint/model.safetensors").read_bytes() == whole


def test_a_missing_shard(load: Load, bert: Path) -> None:
    sharded(bert)
    (bert / "model-00002-of-00002.safetensors").unlink()
    refused(load, bert, "model.safetensors.index.json", "model-00002-of-00002", "not finished")


def test_a_shard_index_that_leaves_the_folder(load: Load, bert: Path) -> None:
    index = sharded(bert)
    secret = bert.parent / "secret.safetensors"
    shutil.copyfile(bert / "model-00002-of-00002.safetensors", secret)
    index.write_text(index.read_text().replace("model-00002-of-00002", "../secret"))
    refused(load, bert, str(index), "'../secret.safetensors' is a path", "in the same folder")


def test_a_corrupt_shard_index(load: Load, bert: Path) -> None:
    index = sharded(bert)
    index.write_text('{"weight_map": []}')
    refused(load, bert, str(index), "corrupt", "again")


def test_a_link_that_leaves_the_folder(load: Load, bert: Path) -> None:
    outside = bert.parent / "elsewhere.safetensors"
    shutil.move(bert / "model.safetensors", outside)
    (bert / "model.safetensors").symlink_to(outside)
    refused(load, bert, "model.safetensors", f"a link to {outside}", "Copy the file")


def test_a_missing_parameter_is_named_with_the_closest_name(load: Load, bert: Path) -> None:
    edit_weights(bert, lambda t: t.update({QUERY + "s": t.pop(QUERY)}))
    refused(load, bert, f"1 of 37 parameters are missing: {QUERY}", f'did you mean "{QUERY}s"?')


def test_a_parameter_of_another_shape(load: Load, bert: Path) -> None:
    edit_weights(bert, lambda t: t.update({QUERY: t[QUERY][:32].clone()}))
    refused(load, bert, QUERY, "(32, 64)", "(64, 64)", "config.json")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite(load: Load, bert: Path, value: float) -> None:
    edit_weights(bert, lambda t: t[QUERY][0, :3].fill_(value))
    refused(load, bert, "model.safetensors", QUERY, "3 of 4096 values", "another checkpoint")


def test_integer_weights_are_called_quantized(load: Load, bert: Path) -> None:
    edit_weights(bert, lambda t: t.update({QUERY: t[QUERY].to(torch.int8)}))
    refused(load, bert, QUERY, "already quantized", "float checkpoint")


def test_a_quantized_checkpoint(load: Load, bert: Path) -> None:
    edit_json(bert / "config.json", quantization_config={"quant_method": "gptq"})
    refused(load, bert, "quantization_config", "gptq", "no tensor in the files is packed")


def test_a_classification_task_on_a_checkpoint_without_a_head(load: Load, bert: Path) -> None:
    refused(
        load,
        bert,
        "model.task",
        "classifier.weight, classifier.bias missing",
        "feature-extraction",
        task="text-classification",
    )


@pytest.mark.parametrize(
    ("model_type", "word"),
    [("bart", "an encoder-decoder"), ("vit", "another kind than text models")],
)
def test_what_is_no_text_encoder(load: Load, bert: Path, model_type: str, word: str) -> None:
    edit_json(bert / "config.json", model_type=model_type)
    refused(load, bert, "config.json", f"{model_type!r} is not covered", word, "modernbert")


def test_a_detector_whose_queries_are_chosen_by_score(load: Load, bert: Path) -> None:
    (bert / "config.json").write_text('{"model_type": "rt_detr"}')
    words = "'rt_detr' is not covered", "the 300 places", "model.enc_score_head", "TopK"
    refused(load, bert, *words, task="object-detection")


def test_a_detector_without_a_row_is_not_said_to_choose_its_queries(load: Load, bert: Path) -> None:
    (bert / "config.json").write_text('{"model_type": "conditional_detr", "use_timm_backbone": 0}')
    words = "an encoder-decoder that is not listed", "YOLOS."
    refused(load, bert, *words, task="object-detection")


def test_the_task_of_a_head_is_named(load: Load, bert: Path) -> None:
    head = "Mask2FormerForUniversalSegmentation"
    config = {"model_type": "mask2former", "architectures": [head]}
    (bert / "config.json").write_text(json.dumps(config))
    words = f"Its head, {head}, is for model.task: universal-segmentation."
    refused(load, bert, words, task="image-segmentation")


def test_an_encoder_without_one_list_of_blocks(load: Load, bert: Path) -> None:
    config = {"model_type": "xlm", "vocab_size": 100, "emb_dim": 32, "n_layers": 2, "n_heads": 2}
    (bert / "config.json").write_text(json.dumps(config))
    refused(load, bert, "'xlm' is not covered", "equal blocks", "families.py")


def test_an_unknown_model_type(load: Load, bert: Path) -> None:
    edit_json(bert / "config.json", model_type="bertt")
    refused(load, bert, "config.json", "bertt", "model_type")


def test_code_in_the_checkpoint_is_not_run(load: Load, bert: Path) -> None:
    edit_json(bert / "config.json", auto_map={"AutoModel": "mine.Mine"})
    ran = bert / "ran"
    (bert / "mine.py").write_text(f"open({str(ran)!r}, 'w')\n")
    refused(load, bert, "config.json", "AutoModel", "trust_remote_code: true")
    assert not ran.exists()


def test_code_in_another_repository_is_refused_even_when_trusted(load: Load, bert: Path) -> None:
    edit_json(bert / "config.json", auto_map={"AutoModel": "other/repo--mine.Mine"})
    refused(load, bert, "auto_map", "other/repo--mine.Mine", trust_remote_code=True)


def test_a_pickle_is_refused_until_it_is_allowed(load: Load, bert: Path) -> None:
    from safetensors.torch import load_file

    expected = (load(bert) / "checkpoint/model.safetensors").read_bytes()
    torch.save(load_file(bert / "model.safetensors"), bert / "pytorch_model.bin")
    (bert / "model.safetensors").unlink()
    refused(load, bert, str(bert), "pytorch_model.bin", "allow_pickle: true")
    out = load(bert, allow_pickle=True)
    assert (out / "checkpoint/model.safetensors").read_bytes() == expected


class Payload:
    """A pickle that makes a file when it is read without restrictions."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return open, (str(self.file), "w")


def test_an_allowed_pickle_still_runs_no_code(load: Load, bert: Path) -> None:
    torch.save({"x": Payload(bert / "ran")}, bert / "pytorch_model.bin")
    (bert / "model.safetensors").unlink()
    refused(load, bert, "pytorch_model.bin", "cannot be read as data", allow_pickle=True)
    assert not (bert / "ran").exists()


def test_no_tokenizer(load: Load, bert: Path) -> None:
    for name in ("tokenizer.json", "vocab.txt"):
        (bert / name).unlink(missing_ok=True)
    refused(load, bert, str(bert), "no tokenizer", "tokenizer.json")


def test_a_tokenizer_that_is_not_json(load: Load, bert: Path) -> None:
    (bert / "tokenizer.json").write_text("{}")
    refused(load, bert, str(bert), "tokenizer cannot be read", "again")


def test_a_tokenizer_with_ids_beyond_the_embedding(load: Load, bert: Path) -> None:
    edit_json(bert / "config.json", vocab_size=50)
    name = "embeddings.word_embeddings.weight"
    edit_weights(bert, lambda t: t.update({name: t[name][:50].clone()}))
    refused(load, bert, "tokenizer.json", "does not fit", "the embedding has 50 rows")


def test_a_tokenizer_file_that_transformers_reads_otherwise(load: Load, bert: Path) -> None:
    file = bert / "tokenizer.json"
    document = json.loads(file.read_text())
    document["normalizer"]["lowercase"] = False
    file.write_text(json.dumps(document))
    refused(load, bert, "tokenizer.json gives", "transformers (", "save the model's own")


def test_labels_with_a_gap(load: Load, tiny_classifier: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_classifier, tmp_path / "gap"))
    edit_json(folder / "config.json", id2label={"0": "a", "2": "c"}, label2id=None)
    refused(load, folder, "id2label", "[0, 2]", "0 to 1", task="text-classification")


def test_texts_are_lowered_before_a_tokenizer_that_keeps_upper_case(load: Load, bert: Path) -> None:
    edit_json(bert / "sentence_bert_config.json", do_lower_case=True)
    load(bert)
    edit_json(bert / "tokenizer_config.json", do_lower_case=False)
    file = bert / "tokenizer.json"
    document = json.loads(file.read_text())
    document["normalizer"]["lowercase"] = False
    file.write_text(json.dumps(document))
    written = json.loads((load(bert) / "checkpoint/tokenizer.json").read_text())
    assert written["normalizer"]["normalizers"] == [{"type": "Lowercase"}, document["normalizer"]]


def test_a_tokenizer_without_padding(load: Load, bert: Path) -> None:
    (bert / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    refused(load, bert, "tokenizer_config.json", "no padding token", '"pad_token"')


def test_more_tokens_than_positions(load: Load, bert: Path) -> None:
    with pytest.raises(RecipeError, match=r"model.max_length: 65 .* 64 positions"):
        load(bert, max_length=65)


def modules(folder: Path, *kinds: str, **pooling: bool) -> None:
    """Make the folder a sentence-transformers one."""
    prefix = "sentence_transformers.models."
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {
                    "idx": i,
                    "name": str(i),
                    "path": "" if k == "Transformer" else f"{i}_{k}",
                    "type": prefix + k,
                }
                for i, k in enumerate(kinds)
            ]
        )
    )
    (folder / "1_Pooling").mkdir(exist_ok=True)
    edit_json(folder / "1_Pooling/config.json", **pooling)


@pytest.mark.parametrize("kind", ["CNN", "Pooling"])
def test_a_sentence_model_with_a_further_layer(load: Load, bert: Path, kind: str) -> None:
    modules(bert, "Transformer", "Pooling", kind, pooling_mode_cls_token=True)
    refused(load, bert, "modules.json", kind, "not covered", "Dense", "feature-extraction")


def test_a_pooling_that_is_not_covered(load: Load, bert: Path) -> None:
    modules(bert, "Transformer", "Pooling")
    edit_json(bert / "1_Pooling/config.json", pooling_mode="median")
    refused(load, bert, "1_Pooling/config.json: pooling_mode", "median", "lasttoken")


def test_a_default_prompt_that_no_prompt_has(load: Load, bert: Path) -> None:
    modules(bert, "Transformer", "Pooling")
    edit_json(bert / "config_sentence_transformers.json", default_prompt_name="passage")
    refused(load, bert, "default_prompt_name", "'passage' was found", "query, document")


@pytest.mark.parametrize("label", [None, ["a"], {"x": 1}])
def test_a_label_without_a_name(
    load: Load, tiny_classifier: Path, tmp_path: Path, label: object
) -> None:
    folder = Path(shutil.copytree(tiny_classifier, tmp_path / "classifier"))
    edit_json(folder / "config.json", id2label={"0": "a", "1": label}, label2id=None)
    refused(load, folder, "id2label.1", "name of a label", task="text-classification")


def test_fewer_blocks_than_the_files_hold(load: Load, bert: Path) -> None:
    edit_json(bert / "config.json", num_hidden_layers=1)
    refused(load, bert, "encoder.layer.1.", "fewer blocks than the files", "num_hidden_layers")


def test_a_file_of_all_weights_beside_shards_is_two_sets(load: Load, bert: Path) -> None:
    """An older model.safetensors stays where a sharded one is saved over it."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(bert / "model.safetensors")
    shard = "model-00001-of-00001.safetensors"
    save_file(tensors, bert / shard, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)}
    (bert / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(load, bert, "two sets of weights", "model.safetensors", shard, "Remove the older")
    (bert / "model.safetensors").unlink()
    load(bert)


@pytest.mark.parametrize("value", [-5, 1, "x", True, [64]])
def test_a_length_that_is_none(value: object, load: Load, bert: Path) -> None:
    edit_json(bert / "sentence_bert_config.json", max_seq_length=value)
    refused(load, bert, "sentence_bert_config.json: max_seq_length", str(value), "2 or more")


def test_a_feed_forward_in_chunks(load: Load, bert: Path) -> None:
    edit_json(bert / "config.json", chunk_size_feed_forward=7)
    refused(load, bert, "config.json: chunk_size_feed_forward", "7 was found", "Accepted: 0")
