"""The dialect of device: cuda, on the CPU provider, whose operators compute the same functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from optimizer.export import onnx_file
from optimizer.export.stage import check_half_precision
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.state import CompressedState
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.contract import POOLINGS, Contract
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.harness.runtimes.fitted import FittedRunner
from optimizer.harness.runtimes.ort import bound
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.lower.ort import answer
from optimizer.recipe.schema import OnnxRuntimeTarget
from optimizer.validate.ledger.pieces.roundoff import UNIT
from optimizer.validate.timing.float_baselines import write_float_file
from tests.decoders import write_tiny_decoder
from tests.export.folders import Exported, exported, loaded_decoder
from tests.lower.decoder_graphs import answers, text
from tests.lower.running import difference, lowered, session, tokens

CUDA16 = OnnxRuntimeTarget(runtime="onnxruntime", device="cuda")
CUDA32 = OnnxRuntimeTarget(runtime="onnxruntime", device="cuda", float="fp32")
PRECISIONS: tuple[Literal["fp32", "fp16"], ...] = ("fp32", "fp16")
WIDTH, TOKENS = 5, 7


def contract_of(made: Exported) -> Contract:
    return contracts.read(made.source / "contract.json")


@pytest.fixture(scope="module")
def fp32(tiny: Exported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lowered(tiny, CompressedState({}), CUDA32, tmp_path_factory.mktemp("cuda32"))


def test_every_masked_attention_becomes_one_operator_with_the_same_values(
    tiny: Exported, fp32: Path
) -> None:
    operators = Counter(n.op_type for n in onnx.load(fp32 / "model.onnx").graph.node)
    before = Counter(n.op_type for n in onnx.load(tiny.graph / "model.onnx").graph.node)
    assert operators["MultiHeadAttention"] == before["Softmax"] > 0
    assert not operators["Softmax"]
    inputs = tokens()
    plain, fused = (
        session(folder / "model.onnx").run(["last_hidden_state"], inputs)[0]
        for folder in (tiny.graph, fp32)
    )
    real = inputs["attention_mask"].astype(bool)
    np.testing.assert_allclose(fused[real], plain[real], rtol=0, atol=64 * UNIT["fp32"])


def pooled(contract: Contract, hidden: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The output that answer.add computes for hidden states."""
    inputs = [
        ir.val("hidden", ir.DataType.FLOAT, ir.Shape(["batch", "sequence", WIDTH])),
        ir.val("attention_mask", ir.DataType.INT64, ir.Shape(["batch", "sequence"])),
    ]
    node = ir.node("Identity", [inputs[0]])
    (out,) = node.outputs
    out.name, out.type, out.shape = "last_hidden_state", inputs[0].type, inputs[0].shape
    graph = ir.Graph(inputs, [out], nodes=[node], opset_imports={"": 21})
    model = ir.Model(graph, ir_version=10)
    assert answer.add(model, contract) == ""
    opened = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    feed = {"hidden": hidden, "attention_mask": mask}
    result: np.ndarray = opened.run(["sentence_embedding"], feed)[0]
    return result


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("pooling", [*POOLINGS, ("mean", "max")])
def test_an_embedding_in_the_graph_is_the_harness_s(
    tiny: Exported, pooling: str | Sequence[str], normalize: bool
) -> None:
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((4, TOKENS, WIDTH)).astype(np.float32)
    mask = (np.arange(TOKENS) < np.array([7, 4, 1, 2])[:, None]).astype(np.int64)
    mask[1] = mask[1, ::-1]  # padded on the left
    hidden[~mask.astype(bool)] = 1e30
    (output,) = contract_of(tiny).outputs
    output = replace(output, axes=("batch", "sequence", WIDTH))
    contract = replace(contract_of(tiny), pooling=pooling, normalize=normalize, outputs=(output,))
    expected = tasks.look_up(contract).decode(contract, hidden, mask)
    found = pooled(contract, hidden, mask)
    np.testing.assert_allclose(found, expected, rtol=TOKENS * UNIT["fp32"], atol=UNIT["fp32"])


def test_texts_padded_to_the_sizes_of_graphs_have_the_answers_of_unpadded_ones(
    tiny: Exported, fp32: Path
) -> None:
    contract = contract_of(tiny)
    tokenizer = load_tokenizer(tiny.source / "checkpoint", contract)
    texts = ["good film", "a bad, slow and poor one", "good"]
    batch = tasks.encode(contract, tokenizer, texts)
    model, name = fp32 / "model.onnx", tasks.look_up(contract).answer_output
    with (
        OrtRunner(model, threads=1) as plain,
        OrtRunner(model, threads=1, bound=True, answer=name) as alone,
    ):
        padded = FittedRunner(alone, contract, bound.list_profiles(contract.text.max_length))
        outputs = padded.infer(batch)
        assert list(outputs) == [name]
        hidden = {"last_hidden_state": plain.infer(batch)["last_hidden_state"]}
        found, expected = (tasks.decode(contract, o, batch) for o in (outputs, hidden))
    np.testing.assert_allclose(found, expected, rtol=0, atol=64 * UNIT["fp32"])


@pytest.mark.parametrize("longest", [1, 7, 16, 100, 512])
def test_padding_to_the_sizes_of_graphs_at_most_doubles_a_text_beyond_the_shortest(
    longest: int,
) -> None:
    sizes = sorted({p["sequence"][0] for p in bound.list_profiles(longest)})
    assert sizes[-1] == longest
    for count in range(1, longest + 1):
        padded = next(size for size in sizes if size >= count)
        assert padded < 2 * count or padded == sizes[0]


def test_half_precision_is_the_default_on_a_gpu(tiny16: Exported, tmp_path: Path) -> None:
    assert CUDA16.export.float == "fp16"
    folder = lowered(tiny16, CompressedState({}), CUDA16, tmp_path)
    operators = Counter(n.op_type for n in onnx.load(folder / "model.onnx").graph.node)
    assert operators["MultiHeadAttention"]
    _hidden, vectors = session(folder / "model.onnx").run(None, tokens())
    assert vectors.dtype == np.float32
    assert np.isfinite(vectors).all()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[[OnnxRuntimeTarget], ir.Model]:
    """A small llama lowered for a target."""
    folder = tmp_path_factory.mktemp("llama")
    source = loaded_decoder(write_tiny_decoder(folder / "model", "llama"), folder / "load")
    graphs = {p: exported(source, folder / p, precision=p) for p in PRECISIONS}

    def lower(target: OnnxRuntimeTarget) -> ir.Model:
        out = tmp_path_factory.mktemp("lowered")
        made = lowered(graphs[target.export.float], CompressedState({}), target, out)
        return onnx_file.load(made / "model.onnx")

    return lower


def test_a_decoder_in_half_precision_has_at_most_twelve_operators_a_layer(
    llama: Callable[[OnnxRuntimeTarget], ir.Model],
) -> None:
    nodes = [n for n in llama(CUDA16).graph if str(n.name).startswith("model.layers.1.")]
    operators = Counter(n.op_type for n in nodes)
    assert operators["GroupQueryAttention"] == 1
    assert operators["SkipSimplifiedLayerNormalization"] == 2
    unpacked = 2  # of float weights, which are not packed: three products of queries, keys, values
    assert len(nodes) <= 12 + unpacked, operators


def test_fusing_a_decoder_in_half_precision_costs_no_more_than_half_precision(
    llama: Callable[[OnnxRuntimeTarget], ir.Model],
) -> None:
    """Distances from float32 of the fused graph, and of plain operators."""
    plain = CUDA16.model_copy(update={"fuse_attention": False})
    single = CUDA32.model_copy(update={"fuse_attention": False})
    given, pieces = text(12, (0, 4, 9)), (10, 1, 1)
    exact, one, other = (answers(llama(t), given, pieces) for t in (single, CUDA16, plain))
    assert 0 < difference(one, exact) < 2 * difference(other, exact)


def test_the_float_baseline_on_a_gpu_is_lowered_as_the_candidate_is(
    tiny: Exported, tmp_path: Path
) -> None:
    m: Any = SimpleNamespace(reference=tiny.source, reference_graph=tiny.graph)
    cpu = CUDA32.model_copy(update={"device": "cpu"})
    assert write_float_file(m, cpu, tmp_path / "cpu") == tiny.graph / "model.onnx"
    graph = onnx.load(write_float_file(m, CUDA32, tmp_path / "cuda")).graph
    assert "MultiHeadAttention" in {n.op_type for n in graph.node}


def test_layers_that_share_a_module_are_fused_under_names_of_their_own(
    albert: Exported, tmp_path: Path
) -> None:
    folder = lowered(albert, CompressedState({}), CUDA32, tmp_path)
    graph = onnx.load(folder / "model.onnx").graph
    names = [n.name for n in graph.node if n.op_type == "MultiHeadAttention"]
    assert len(set(names)) == len(names) == 2


def test_a_text_that_ends_at_its_last_token_is_padded_with_the_models_own_padding(
    tiny: Exported,
) -> None:
    """A decoder's classifier reads the last token whose id is not that of padding."""
    contract = contract_of(tiny)
    assert contract.tokenizer is not None
    contract = replace(contract, tokenizer=replace(contract.tokenizer, pad_id=9, pad_type_id=3))
    seen: dict[str, np.ndarray] = {}

    class Engine:
        outputs = ("last_hidden_state",)

        def infer(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            seen.update(arrays)
            return {"last_hidden_state": np.zeros((*arrays["input_ids"].shape, 1))}

    names = ("input_ids", "attention_mask", "token_type_ids")
    engine: Any = Engine()
    FittedRunner(engine, contract, bound.list_profiles(16)).infer(
        {n: np.ones((1, 3), int) for n in names}
    )
    assert {n: set(seen[n][0, 3:]) for n in names} == {
        "input_ids": {9},
        "attention_mask": {0},
        "token_type_ids": {3},
    }


@pytest.mark.parametrize("rows", [1, 33, 64, 65, 200])
def test_a_batch_is_padded_to_less_than_twice_its_rows(tiny: Exported, rows: int) -> None:
    sizes: list[int] = []

    class Engine:
        outputs = ("last_hidden_state",)

        def infer(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            sizes.append(len(arrays["input_ids"]))
            return {"last_hidden_state": np.zeros((*arrays["input_ids"].shape, 1))}

    engine: Any = Engine()
    arrays = {n: np.ones((rows, 16), int) for n in ("input_ids", "attention_mask")}
    outputs = FittedRunner(engine, contract_of(tiny), bound.list_profiles(16)).infer(arrays)
    assert len(outputs["last_hidden_state"]) == rows
    assert sum(sizes) < 2 * rows


def test_a_model_with_modules_kept_in_float32_is_refused_in_half_precision() -> None:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=20, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(RecipeError, match="keeps wo of T5EncoderModel in float32"):
        check_half_precision(T5EncoderModel(config))
