from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from optimizer.export import check, names, onnx_file, pieces, reference, stage
from optimizer.export.check import check_shapes, draw_inputs, measure_distance
from optimizer.export.weights import Values, fill_buffers, untie
from optimizer.foundation.errors import LedgerError
from optimizer.foundation.state import CompressedState
from optimizer.harness.contract import Contract
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import build_skeleton, load_torch_model
from optimizer.recipe.schema import Export
from tests.decoders import write_tiny_decoder
from tests.export.folders import Exported, exported, loaded_decoder
from tests.export.passes.test_repeat import described
from tests.export.test_stage import interface


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Four blocks, so that the last one is a repetition; tied."""
    folder = tmp_path_factory.mktemp("decoder")
    source = loaded_decoder(write_tiny_decoder(folder / "model", layers=4), folder / "load")
    return exported(source, folder / "export")


def contract(made: Exported) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((made.source / "contract.json").read_text())
    return document


@pytest.mark.parametrize(
    ("kind", "precision"),
    [("mistral", "fp32"), ("qwen2", "fp32"), ("qwen3", "fp16"), ("gpt2", "fp32"), ("opt", "fp16")],
)
def test_every_family_exports(
    tmp_path: Path, kind: str, precision: Literal["fp32", "fp16"]
) -> None:
    model = write_tiny_decoder(tmp_path / "model", kind, layers=1, tied=kind != "qwen2")
    made = exported(loaded_decoder(model, tmp_path / "load"), tmp_path / "out", precision=precision)
    assert made.names.folded == ()
    assert made.names.modules.keys() >= {"lm_head"}
    assert set(made.names.parameters) >= set(made.tensors)


def test_inputs_and_outputs_are_the_contracts_and_the_cache(decoder: Exported) -> None:
    graph = onnx.load(decoder.graph / "model.onnx").graph
    whole, number = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
    layers = [(i, part) for i in range(4) for part in ("key", "value")]
    assert interface(graph.input) == [
        ("input_ids", whole, ["batch", "sequence"]),
        ("attention_mask", whole, ["batch", "total"]),
        ("position_ids", whole, ["batch", "sequence"]),
        *((f"past_key_values.{i}.{p}", number, ["batch", 2, "past", 16]) for i, p in layers),
    ]
    vocabulary = contract(decoder)["generation"]["vocabulary"]
    assert interface(graph.output) == [
        ("logits", number, ["batch", "sequence", vocabulary]),
        *((f"present.{i}.{p}", number, ["batch", 2, "total", 16]) for i, p in layers),
    ]


def test_a_grown_graph_is_the_graph_traced_whole(decoder: Exported) -> None:
    """The grown one is that of the fixture, which the stage traced as it does here."""
    checkpoint, made = open_checkpoint(decoder.source), []
    for blocks_at in (None, "model.layers"):
        model = build_skeleton(checkpoint, "text-generation")
        untie(model, {})
        fill_buffers(model, checkpoint.tensors, {})
        values = Values(model, checkpoint.tensors, {})
        made.append(stage.trace_float_graph(model, values, contract(decoder), Export(), blocks_at))
    assert [grown for _, grown in made] == [False, True]
    whole, grown = (described(graph) for graph, _ in made)
    assert whole == grown


def test_token_by_token_equals_torch_in_one_piece(decoder: Exported) -> None:
    document = contract(decoder)
    model = load_torch_model(open_checkpoint(decoder.source), "text-generation")
    given = draw_inputs(document, {"input_ids": 300, "attention_mask": 2}, 2, 9)
    with torch.no_grad():
        wanted = model(**{k: torch.from_numpy(v.copy()) for k, v in given.items()}).logits.numpy()
    with OrtRunner(decoder.graph / "model.onnx", threads=1) as runner:
        session = runner.decoder(Contract.from_json(document))
        steps = [
            session.step(
                {
                    "input_ids": given["input_ids"][:, i : i + 1],
                    "position_ids": given["position_ids"][:, i : i + 1],
                    "attention_mask": given["attention_mask"][:, : i + 1],
                }
            )
            for i in range(9)
        ]
    assert measure_distance(np.concatenate(steps, 1), wanted, given["attention_mask"]) < 1e-5


def test_a_tied_head_is_one_initializer_that_two_operators_use(decoder: Exported) -> None:
    entry = decoder.names.modules["lm_head"]
    assert (entry.initializer, entry.layout) == ("model.embed_tokens.weight", "NK")
    held = [t.name for t in onnx.load(decoder.graph / "model.onnx").graph.initializer]
    assert "lm_head.weight" not in held
    assert len(held) == len(set(held))


def test_a_head_with_a_value_of_its_own_is_untied(tmp_path: Path) -> None:
    source = loaded_decoder(write_tiny_decoder(tmp_path / "model", layers=1), tmp_path / "load")
    value = torch.arange(64.0).repeat(open_checkpoint(source).config["vocab_size"], 1) / 64
    made = exported(source, tmp_path / "e", CompressedState({}, replaced={"lm_head.weight": value}))
    held = {t.name: t for t in onnx.load(made.graph / "model.onnx").graph.initializer}
    assert np.array_equal(onnx.numpy_helper.to_array(held["lm_head.weight"]), value.numpy().T)
    before = made.tensors["model.embed_tokens.weight"]
    kept = onnx.numpy_helper.to_array(held["model.embed_tokens.weight"])
    assert np.array_equal(kept, before.numpy())  # type: ignore[attr-defined]


def test_the_mask_is_made_once_for_all_blocks(decoder: Exported) -> None:
    graph = onnx.load(decoder.graph / "model.onnx").graph
    assert [n.op_type for n in graph.node].count("LessOrEqual") == 1
    assert [n.op_type for n in graph.node].count("Cos") == 1


def test_root_mean_squares_fuse_in_onnx_runtime(decoder: Exported, tmp_path: Path) -> None:
    OrtRunner(decoder.graph / "model.onnx", threads=1, optimized=tmp_path / "fused.onnx").close()
    kinds = [n.op_type for n in onnx.load(tmp_path / "fused.onnx").graph.node]
    assert kinds.count("SimplifiedLayerNormalization") == 2 * 4 + 1


@pytest.mark.parametrize(
    ("fault", "precision"), [("base", "fp32"), ("order", "fp32"), ("base", "fp16")]
)
def test_a_graph_that_computes_something_else_is_refused(
    decoder: Exported, tmp_path: Path, fault: str, precision: Literal["fp32", "fp16"]
) -> None:
    made = decoder
    if precision == "fp16":  # as in test_every_family_exports, so that it is traced once
        model = write_tiny_decoder(tmp_path / "model", "qwen3", layers=1)
        source = loaded_decoder(model, tmp_path / "load")
        made = exported(source, tmp_path / "half", precision=precision)
    graph = onnx_file.load(made.graph / "model.onnx")
    if fault == "base":
        held = graph.graph.initializers["model.rotary_emb.inv_freq"]
        assert held.const_value is not None
        moved = held.const_value.numpy() * held.const_value.numpy().dtype.type(0.9)
        held.const_value = ir.tensor(moved, name=held.name)
    else:
        key, value = graph.graph.outputs[1], graph.graph.outputs[2]
        graph.graph.outputs[1], graph.graph.outputs[2] = value, key
        key.name, value.name = "present.0.value", "present.0.key"
    onnx_file.save(graph, tmp_path / "model.onnx")
    network = load_torch_model(open_checkpoint(made.source), "text-generation")
    answer = partial(reference.run_torch, network, contract(made))
    limits = {"input_ids": 300, "attention_mask": 2}
    with pytest.raises(LedgerError, match="of the exported graph: an example is"):
        check.check(
            tmp_path / "model.onnx",
            contract(made),
            drawn(contract(made), limits),
            limits,
            precision,
            answer,
            "model.layers",
            network,
        )


def drawn(document: dict[str, Any], limits: dict[str, int]) -> list[dict[str, Any]]:
    """The batches of the check."""
    return [draw_inputs(document, limits, *shape) for shape in check_shapes(document)]


def test_a_checked_batch_is_padded_at_the_start(decoder: Exported) -> None:
    document = contract(decoder)
    for batch, sequence in check_shapes(document):
        made = draw_inputs(document, {"input_ids": 300, "attention_mask": 2}, batch, sequence)
        mask, places = made["attention_mask"], made["position_ids"]
        assert mask[:, -1].all()
        assert batch == 1 or not mask[1:, 0].any()
        assert (places[:, -1] == mask.sum(1) - 1).all()


def test_block_by_block_the_graph_answers_as_torch_does(
    decoder: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = contract(decoder)
    onnx_file.save(onnx_file.load(decoder.graph / "model.onnx"), tmp_path / "model.onnx", limit=0)
    monkeypatch.setattr(check, "LARGE", 0)
    opened: list[int] = []

    class Counting(OrtRunner):
        def __init__(self, model: Path, **rest: Any) -> None:
            opened.append(sum(len(t.raw_data) for t in onnx.load(model).graph.initializer))
            assert model.parent == tmp_path  # the weights stay in the graph's file
            super().__init__(model, **rest)

    monkeypatch.setattr(pieces, "OrtRunner", Counting)
    limits = {"input_ids": 300, "attention_mask": 2}
    model = load_torch_model(open_checkpoint(decoder.source), "text-generation")
    answer = partial(reference.run_torch, model, document)
    batches = drawn(document, limits)
    given = (batches, limits, "fp32")
    check.check(tmp_path / "model.onnx", document, *given, answer, "model.layers", model)
    assert len(opened) == 2 * 5
    opened.clear()
    arguments = (*given, answer, "model.layers", model)
    check.check(tmp_path / "model.onnx", document, *arguments, grown=True)
    assert len(opened) == 3 + 1  # three of four blocks, and the head
    whole = (tmp_path / "model.onnx.data").stat().st_size
    assert max(opened) < whole / 2
    assert {f.name for f in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}

    def wrong(batch: dict[str, Any]) -> dict[str, Any]:
        return answer(
            {**batch, "position_ids": batch["position_ids"] + batch["attention_mask"].sum()}
        )

    with pytest.raises(LedgerError, match="block by block"):
        check.check(tmp_path / "model.onnx", document, *given, wrong, "model.layers", model)


class Watched(Mapping[str, torch.Tensor]):
    """Tensors by name, with the maximum bytes alive at once."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors, self.alive, self.most = tensors, 0, 0

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.tensors[name].clone()
        self.alive += tensor.nbytes
        self.most = max(self.most, self.alive)
        weakref.finalize(tensor.untyped_storage(), self._gone, tensor.nbytes)
        return tensor

    def _gone(self, size: int) -> None:
        self.alive -= size

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def test_weights_pass_one_at_a_time_whatever_their_number(
    decoder: Exported, tmp_path: Path
) -> None:
    document, checkpoint = contract(decoder), open_checkpoint(decoder.source)
    watched = Watched(checkpoint.tensors)
    model = build_skeleton(checkpoint, "text-generation")
    values = Values(model, watched, {})
    graph = stage.trace_float_graph(model, values, document, Export(), "model.layers")[0]
    onnx_file.save(graph, tmp_path / "model.onnx", limit=0)
    written = onnx_file.load(tmp_path / "model.onnx")
    names.pair(written, values, stage.list_linear_modules(model), first=values.first)
    reference.lend(model, values)
    given = draw_inputs(document, {"input_ids": 300, "attention_mask": 2}, 1, 5)
    reference.run_torch(model, document, given)
    largest = max(t.nbytes for t in checkpoint.tensors.values())
    small = sum(t.nbytes for t in checkpoint.tensors.values() if t.ndim == 1)
    assert largest <= watched.most <= largest + small
