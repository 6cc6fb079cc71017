"""An encoder's graph with positions before texts: the same bits, and fewer copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from optimizer.export import onnx_file
from optimizer.lower.onnx import cut
from optimizer.lower.ort import sequence_first
from tests.conftest import write_tokenizer
from tests.export.folders import Exported, exported, loaded
from tests.export.graphs import graph
from tests.lower.running import ORT, Arrays, lowered, session, tokens
from tests.lower.states import PER_CHANNEL, state_of

SIZES = ((1, 16), (4, 16), (5, 7), (7, 7))
RNG = np.random.default_rng(0)
HELD = {
    "table": RNG.standard_normal((9, 8)).astype(np.float32),
    "wq": RNG.standard_normal((8, 8)).astype(np.float32),
    "wk": RNG.standard_normal((8, 8)).astype(np.float32),
    "wv": RNG.standard_normal((8, 8)).astype(np.float32),
    "each": RNG.standard_normal(8).astype(np.float32),
    "places": RNG.standard_normal((5, 8)).astype(np.float32),
    "split": np.array([0, 0, 2, 4], np.int64),
    "other": np.array([0, 0, 8, 1], np.int64),
    "flat": np.array([3, 5, 2, 4], np.int64),
    "merge": np.array([0, 0, 8], np.int64),
    "half": np.array(0.5, np.float32),
}
BLOCK = {
    "read": "x = Gather(table, ids)",
    "queries": "q0 = MatMul(x, wq) q1 = Reshape(q0, split) q = Transpose<perm = [0, 2, 1, 3]>(q1)",
    "keys": "k0 = MatMul(x, wk) k1 = Reshape(k0, split) k = Transpose<perm = [0, 2, 3, 1]>(k1)",
    "values": "v0 = MatMul(x, wv) v1 = Reshape(v0, split) v = Transpose<perm = [0, 2, 1, 3]>(v1)",
    "scores": "s0 = MatMul(q, k) s1 = Mul(s0, half) s = Add(s1, mask) p = Softmax<axis = -1>(s)",
    "mixed": "o0 = MatMul(p, v) o1 = Transpose<perm = [0, 2, 1, 3]>(o0) o = Reshape(o1, merge)",
    "after": "r = Add(o, x) y = Mul(r, each)",
}
TAKES_PART = {
    "as transformers writes it": {},
    "scores that nothing is added to": {"scores": "s0 = MatMul(q, k) p = Softmax<axis = -1>(s0)"},
    "embeddings by place": {"read": "x0 = Gather(table, ids) x = Add(x0, places)"},
    "read by an operator that mixes texts": {
        "after": "r = Add(o, x) c = CumSum(r, zero) y = Mul(c, each)"
    },
    "an output on the way": {"after": "y = Identity(o) z = Mul(y, each)"},
}
LEFT = {
    "probabilities of queries": {"scores": "s0 = MatMul(q, k) p = Softmax<axis = 2>(s0)"},
    "sizes that are fixed": {
        "queries": BLOCK["queries"].replace("split", "flat"),
    },
    "queries read elsewhere": {
        "after": "t0 = Transpose<perm = [0, 2, 1, 3]>(q) t = Reshape(t0, merge) y = Add(o, t)"
    },
    "no copy saved": {
        "after": "a = CumSum(q0, zero) b = CumSum(k0, zero) c = CumSum(v0, zero)"
        " d = Add(a, b) e = Add(c, d) y = Add(e, o)"
    },
}


def attention(**parts: str) -> ir.Model:
    """One block of two heads of 4, with these parts in place of BLOCK's."""
    words = " ".join({**BLOCK, **parts}.values())
    held = {**HELD, "zero": np.array(0, np.int64)}
    text = f"g (int64[b, n] ids, float[b, 1, 1, n] mask) => (float[b, n, 8] y) {{ {words} }}"
    return graph(
        text, **{name: a for name, a in held.items() if f"{name})" in words or f"{name}," in words}
    )


def answers(model: ir.Model, inputs: Arrays) -> list[np.ndarray]:
    run = session(ir.to_proto(model).SerializeToString())
    wanted = {i.name: inputs[i.name] for i in run.get_inputs()}
    return [np.asarray(a) for a in run.run(None, wanted)]


def ids(batch: int = 3, sequence: int = 5) -> Arrays:
    mask = np.where(RNG.random((batch, 1, 1, sequence)) < 0.3, -1e9, 0)
    return {"ids": RNG.integers(0, 9, (batch, sequence)), "mask": mask.astype(np.float32)}


@pytest.mark.parametrize("case", TAKES_PART)
def test_the_order_of_axes_changes_no_bit(case: str) -> None:
    model, inputs = attention(**TAKES_PART[case]), ids()
    before = answers(model, inputs)
    assert len(sequence_first.rearrange(model)) == 1
    after = answers(model, inputs)
    assert all(np.array_equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("case", LEFT)
def test_what_is_of_another_form_is_left_as_it_is(case: str) -> None:
    model = attention(**LEFT[case])
    before = ir.to_proto(model).SerializeToString()
    assert sequence_first.rearrange(model) == ()
    assert ir.to_proto(model).SerializeToString() == before


SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 128, "max_position_embeddings": 70, "pad_token_id": 0}
DISTIL = {"dim": 64, "n_layers": 1, "n_heads": 4, "hidden_dim": 128}


def changes_no_bit(made: Exported, layers: int) -> bool:
    """Rearrange the graph: each layer takes part, and the answers have the same bits."""
    model = onnx_file.load(made.graph / "model.onnx")
    before = [answers(model, tokens(*size))[0] for size in SIZES]
    assert len(sequence_first.rearrange(model)) == layers
    after = [answers(model, tokens(*size))[0] for size in SIZES]
    return all(np.array_equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("Roberta", SMALL),
        ("Electra", {**SMALL, "embedding_size": 32}),
        ("DistilBert", DISTIL),
    ],
)
def test_every_encoder_with_plain_attention_takes_part(
    kind: str, config: dict[str, int], tmp_path: Path
) -> None:
    import transformers

    (tmp_path / "model").mkdir()
    vocabulary = write_tokenizer(tmp_path / "model")
    torch.manual_seed(0)
    settings = getattr(transformers, f"{kind}Config")(vocab_size=vocabulary, **config)
    getattr(transformers, f"{kind}Model")(settings).save_pretrained(tmp_path / "model")
    made = exported(loaded(tmp_path / "model", tmp_path / "load"), tmp_path / "export")
    assert changes_no_bit(made, layers=1)


def test_layers_that_share_their_weights_take_part(albert: Exported) -> None:
    assert changes_no_bit(albert, layers=2)


def test_onnxruntime_copies_the_result_of_each_attention_and_nothing_else(
    tiny: Exported, tmp_path: Path
) -> None:
    folder = lowered(tiny, state_of(tiny, PER_CHANNEL, "tensor"), ORT, tmp_path)
    session(folder / "model.onnx", optimized=tmp_path / "optimized.onnx")
    optimized = onnx_file.load(tmp_path / "optimized.onnx")
    floats = [n for n in optimized.graph if n.op_type == "Transpose" and "attention" in str(n.name)]
    assert len(floats) == 2
    assert sum(n.op_type == "FusedMatMul" for n in optimized.graph) == 4


def test_products_say_that_positions_come_first(tiny: Exported, tmp_path: Path) -> None:
    folder = lowered(tiny, state_of(tiny, PER_CHANNEL, "tensor"), ORT, tmp_path)
    edges = cut.list_edges(folder / "model.onnx", tiny.names.modules)
    assert all(e.sequence_first for e in edges)
    before = cut.list_edges(tiny.graph / "model.onnx", tiny.names.modules)
    assert not any(e.sequence_first for e in before)
