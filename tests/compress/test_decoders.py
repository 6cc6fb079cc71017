"""Compressing causal language models: every method on every kind, and what must hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from optimizer import state as states
from optimizer.compress import simulate, stage
from optimizer.compress.apply import lm_head as outside
from optimizer.compress.apply import rounding as rounding_module
from optimizer.compress.apply import scale_tuning
from optimizer.compress.selection import select
from optimizer.compress.simulate import QuantLinear, simulated
from optimizer.compress.walk.model_source import ModelSource
from optimizer.errors import CheckpointError, DataError, RecipeError
from optimizer.harness.contract import read
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.load import datasets
from optimizer.load.architecture import family
from optimizer.load.checkpoint import open_checkpoint
from optimizer.load.model import skeleton, torch_model
from optimizer.recipe.schema import Calibrate, Compress, Compression, DataSpec, Quantize
from tests.compress.checkpoints import contents, load
from tests.conftest import sentences, write_rows
from tests.decoders import write_tiny_decoder

GROUPS = {"bits": 4, "granularity": "group", "group_size": 32}
TASK = "text-generation"
LENGTH = 32
HELD_OUT = 3  # windows that only judge what scale_tuning does


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    return loaded(tiny_llama, tmp_path_factory.mktemp("llama") / "load")


def loaded(model: Path, out: Path) -> Path:
    """The load stage's folder, with enough calibration text beside it to fill 40 windows."""
    source = load(model, out, TASK)
    write_rows(out.with_suffix(".jsonl"), 120, seed=1)
    return source


@pytest.fixture(scope="module")
def rounding(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The error of round to nearest, which calibrated methods must be below."""
    out = tmp_path_factory.mktemp("rtn") / "out"
    return error(llama, compress(llama, out, methods=["rtn"]))


def section(source: Path, memory_gb: float = 4.0, **quantize: Any) -> Compression:
    rows = DataSpec(source="json", files=(str(source.with_suffix(".jsonl")),))
    return Compression(
        calibrate=Calibrate(data=rows, samples=40, sequence_length=LENGTH, batch_size=4),
        quantize=Quantize.model_validate_json(json.dumps({"weights": GROUPS, **quantize})),
        task=TASK,
        compress=Compress(memory_gb=memory_gb),
    )


def compress(source: Path, out: Path, **quantize: Any) -> states.CompressedState:
    out.mkdir()
    stage.run(section(source, **quantize), source, out=out)
    return states.read(out)


def logits(source: Path, state: states.CompressedState | None) -> torch.Tensor:
    model = torch_model(open_checkpoint(source), TASK)
    if state is not None:
        model = simulated(model, state)
    tokenizer = Tokenizer.from_file(str(source / "checkpoint" / "tokenizer.json"))
    tokens = tokenizer.encode(" ".join(sentences(40, seed=9))).ids
    ids = torch.tensor(tokens[: 8 * LENGTH]).reshape(8, LENGTH)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def error(source: Path, state: states.CompressedState) -> float:
    exact = logits(source, None)
    return float((logits(source, state) - exact).norm() / exact.norm())


def first_block_error(source: Path, state: states.CompressedState) -> float:
    """Of what the first block answers on the calibration windows: what learning makes less."""
    model, wanted = torch_model(open_checkpoint(source), TASK), section(source).calibrate
    assert wanted is not None
    made = read(source / "contract.json")
    tokenizer = load_tokenizer(source / "checkpoint", made)
    texts = datasets.samples(wanted.data, None, wanted.seed)
    cut = datasets.windows(texts, tokenizer, made, wanted.sequence_length)[: wanted.samples]
    ids = torch.tensor(np.stack(cut))

    def answer(of: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return of(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[1]

    exact = answer(model)
    return float((answer(simulated(model, state)) - exact).norm() / exact.norm())


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "gpt2", "opt"])
def test_on_every_kind_gptq_after_awq_is_better_than_rounding(kind: str, tmp_path: Path) -> None:
    source = loaded(write_tiny_decoder(tmp_path / kind, kind), tmp_path / "load")
    state = compress(source, tmp_path / "out", methods=["awq", "gptq"])
    assert len(state.weights) == 2 * {"gpt2": 4, "opt": 6}.get(kind, 7)
    rounded = compress(source, tmp_path / "rtn", methods=["rtn"])
    assert 0 < error(source, state) < error(source, rounded)


@pytest.mark.parametrize(
    "methods", [["gptq"], ["awq"], ["rotation"], ["awq", "gptq"], ["rotation", "gptq"]]
)
def test_every_method_is_better_than_rounding(
    llama: Path, rounding: float, tmp_path: Path, methods: list[str]
) -> None:
    state = compress(llama, tmp_path / "out", methods=methods)
    assert 0 < error(llama, state) < rounding


def test_a_rotated_model_is_the_model(llama: Path, tmp_path: Path) -> None:
    state = compress(llama, tmp_path / "out", methods=["rotation"])
    assert error(llama, states.CompressedState({}, state.replaced)) < 1e-4
    assert torch.equal(
        state.replaced["model.norm.weight"], torch.ones_like(state.replaced["model.norm.weight"])
    )


def test_learned_rounding_improves_on_where_it_starts(llama: Path, tmp_path: Path) -> None:
    start = compress(llama, tmp_path / "a", methods=["gptq"])
    learned = compress(
        llama, tmp_path / "b", methods=["gptq", "autoround"], autoround={"steps": 40}
    )
    changed = [
        n
        for n in start.weights
        if not torch.equal(start.weights[n].codes, learned.weights[n].codes)
    ]
    assert changed
    assert first_block_error(llama, learned) < first_block_error(llama, start)
    rows = json.loads((tmp_path / "b" / "modules.json").read_text())
    assert any("learned" in row["note"] for row in rows)


@pytest.mark.parametrize("aims", [True, False])
def test_beside_learned_rounding_gptq_aims_where_the_recipe_says(
    llama: Path, tmp_path: Path, aims: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets: list[Any] = []
    original = rounding_module.statistic

    def listening(*arguments: Any) -> Any:
        targets.append(arguments[4])
        return original(*arguments)

    monkeypatch.setattr(rounding_module, "statistic", listening)
    options = {"gptq": {"float_target": aims}, "autoround": {"steps": 1}}
    compress(llama, tmp_path / "out", methods=["gptq", "autoround"], **options)
    assert {t is not None for t in targets} == {aims}


@pytest.mark.parametrize(("methods", "same"), [(["gptq", "scale_tuning"], True), (["gptq"], False)])
def test_only_distill_keeps_its_last_windows_from_what_chooses_the_codes(
    llama: Path, tmp_path: Path, methods: list[str], same: bool
) -> None:
    made = []
    for name, last in (("one", 5), ("two", 6)):
        ids = torch.stack([torch.arange(LENGTH) * k % 90 + 5 for k in [*range(7, 18), *[last] * 3]])
        batches = [{"input_ids": p, "attention_mask": torch.ones_like(p)} for p in ids.split(5)]
        out = tmp_path / name
        out.mkdir()
        stage.compress(section(llama, methods=methods), llama, lambda given=batches: given, out)
        made.append(states.read(out).weights)
    assert all(torch.equal(q.codes, made[1][n].codes) for n, q in made[0].items()) is same


@pytest.mark.parametrize(("everywhere", "only", "same"), [(4, 0, False), (0, 4, True)])
def test_own_text_for_distill_alone_leaves_the_codes_as_they_are(
    llama: Path,
    tmp_path: Path,
    everywhere: int,
    only: int,
    same: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, tuned_on = [], []
    tune = scale_tuning.tune

    def listening(source: Any, state: Any, windows: Any, section: Any) -> Any:
        tuned_on.append(sum(len(batch["input_ids"]) for batch in windows.train))
        return tune(source, state, windows, section)

    monkeypatch.setattr(scale_tuning, "tune", listening)
    for name, windows, more in (("without", 0, 0), ("with", everywhere, only)):
        asked = section(
            llama, methods=["gptq", "scale_tuning"], scale_tuning={"epochs": 1, "generated": more}
        )
        assert asked.calibrate is not None
        calibrate = asked.calibrate.model_copy(update={"samples": 8, "generated": windows})
        out = tmp_path / name
        out.mkdir()
        stage.run(asked.model_copy(update={"calibrate": calibrate}), llama, out)
        made.append(states.read(out).weights)
    pairs = [(q, made[1][n]) for n, q in made[0].items()]
    assert all(torch.equal(a.codes, b.codes) for a, b in pairs) is same
    assert tuned_on == [8 - HELD_OUT, 8 - HELD_OUT + 4]


def test_text_too_short_for_what_is_held_out_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="40 windows of text, and 40 are to be held out"):
        compress(
            llama, tmp_path / "out", methods=["gptq", "scale_tuning"], scale_tuning={"held_out": 40}
        )


def test_fewer_windows_than_asked_for_are_refused(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    asked = section(llama)
    assert asked.calibrate is not None
    more = asked.calibrate.model_copy(update={"samples": 4000})
    wanting = asked.model_copy(update={"calibrate": more})
    with pytest.raises(DataError, match=r"fills \d+ of 4000 windows"):
        stage.run(wanting, llama, tmp_path / "out")


def test_spilling_activations_changes_no_byte(llama: Path, tmp_path: Path) -> None:
    compress(llama, tmp_path / "a", methods=["gptq"])
    (tmp_path / "b").mkdir()
    stage.run(section(llama, memory_gb=1e-9, methods=["gptq"]), llama, out=tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("methods", [["gptq"], ["awq", "gptq"]])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_wide_layer_is_rounded_alone_and_used_as_codes_and_gets_the_same(
    tmp_path: Path, methods: list[str], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = loaded(write_tiny_decoder(tmp_path / "qwen2", "qwen2"), tmp_path / "load")
    plain = section(source, methods=methods)
    asked = plain.model_copy(
        update={"compress": plain.compress.model_copy(update={"precision": precision})}
    )
    made, used = [], []
    forward = QuantLinear.forward

    def listening(self: QuantLinear, x: torch.Tensor) -> torch.Tensor:
        used.append(self.codes is not None)
        return forward(self, x)

    monkeypatch.setattr(QuantLinear, "forward", listening)
    for name in ("narrow", "wide"):
        (tmp_path / name).mkdir()
        used.clear()
        stage.run(asked, source, tmp_path / name)
        made.append(states.read(tmp_path / name))
        assert set(used) == {name == "wide"}
        monkeypatch.setattr(rounding_module, "HELD", 0)
        monkeypatch.setattr(rounding_module, "ALONE", 0)
        monkeypatch.setattr(simulate, "AT_ONCE", 7 * 64)
    narrow, wide = made
    for name, q in narrow.weights.items():
        if ".0." in name:  # sums in another order add up block after block
            same = (q.codes == wide.weights[name].codes).float().mean()
            assert float(same) > 0.95, name
    assert error(source, wide) == pytest.approx(error(source, narrow), rel=0.1)


def test_a_tied_head_gets_codes_of_its_own(llama: Path, tmp_path: Path) -> None:
    head = {"bits": 8, "granularity": "channel"}
    state = compress(llama, tmp_path / "out", methods=["rtn"], head=head)
    embedding = open_checkpoint(llama).tensors["model.embed_tokens.weight"]
    coded = state.weights["lm_head.weight"].dequantize()
    assert float((coded - embedding).norm() / embedding.norm()) < 0.02
    assert "model.embed_tokens.weight" not in state.weights


def test_an_embedding_beside_a_tied_float_head_is_refused(llama: Path, tmp_path: Path) -> None:
    table = {"bits": 8, "granularity": "channel"}
    with pytest.raises(RecipeError, match=r"quantize\.embedding: lm_head is tied to model\.embed"):
        compress(llama, tmp_path / "tied", methods=["rtn"], embedding=table)
    untied = compress(llama, tmp_path / "untied", methods=["rotation"], embedding=table)
    assert "model.embed_tokens.weight" in untied.weights


def test_a_head_in_four_bits_is_rounded_by_what_reaches_it(llama: Path, tmp_path: Path) -> None:
    made = {}
    for method in ("rtn", "gptq"):
        state = compress(llama, tmp_path / method, methods=[method], head=GROUPS)
        alone = {"lm_head.weight": state.weights["lm_head.weight"]}
        made[method] = error(llama, states.CompressedState(alone))
    assert made["gptq"] < 0.9 * made["rtn"]


def test_a_head_whose_inputs_are_not_the_last_block_s_is_refused(tmp_path: Path) -> None:
    """OPT-350m projects between the two."""
    folder = write_tiny_decoder(tmp_path / "opt", "opt", embedded=32)
    source = loaded(folder, tmp_path / "load")
    with pytest.raises(CheckpointError, match="reads 32 features and the last block gives 64"):
        compress(source, tmp_path / "out", methods=["gptq"], head={**GROUPS, "group_size": 32})


def test_a_head_rounded_some_rows_at_a_time_is_the_same(llama: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(llama)
    facts = family(checkpoint.config)
    quantize = section(llama, methods=["gptq"], head=GROUPS).quantize
    model = skeleton(checkpoint, TASK)
    source = ModelSource(model, checkpoint.tensors, facts, facts.prefix(TASK))
    chosen = select(source, quantize)
    features = checkpoint.tensors["model.embed_tokens.weight"].shape[1]
    x = torch.randn(200, features, generator=torch.Generator().manual_seed(0))
    save_file({"moments": x.T @ x}, tmp_path / "m.safetensors")
    one, two = (
        outside.compress(source, quantize, chosen, tmp_path / "m.safetensors", at_once=rows)[
            0
        ].weights["lm_head.weight"]
        for rows in (7, 10**6)
    )
    assert one.codes.shape == two.codes.shape
    assert torch.allclose(one.dequantize(), two.dequantize(), atol=float(two.scale.max()))
    assert float((one.codes == two.codes).float().mean()) > 0.99


def test_a_head_is_weight_only_beside_coded_activations(llama: Path, tmp_path: Path) -> None:
    channel = {"bits": 8, "granularity": "channel"}
    state = compress(
        llama,
        tmp_path / "out",
        weights=channel,
        head=channel,
        activations={"granularity": "token"},
    )
    assert state.activations_of("lm_head") is None
    assert state.activations_of("model.layers.0.mlp.down_proj") == "token"


def test_a_rule_gives_some_modules_other_weights(llama: Path, tmp_path: Path) -> None:
    rule = {"modules": ["*.down_proj"], "weights": {"bits": 8, "granularity": "channel"}}
    state = compress(llama, tmp_path / "out", method="rtn", layers=[rule])
    bits = {n: q.scheme.bits for n, q in state.weights.items()}
    assert {b for n, b in bits.items() if "down_proj" in n} == {8}
    assert {b for n, b in bits.items() if "down_proj" not in n} == {4}


def test_a_rule_that_matches_nothing_is_an_error(llama: Path, tmp_path: Path) -> None:
    rule = {"modules": ["*.dwon_proj"], "weights": GROUPS}
    with pytest.raises(RecipeError, match="matches no module") as e:
        compress(llama, tmp_path / "out", method="rtn", layers=[rule])
    assert e.value.where == "quantize.layers.0.modules.0"


def test_a_layer_norm_is_not_rotated_through(tmp_path: Path) -> None:
    source = load(write_tiny_decoder(tmp_path / "opt", "opt"), tmp_path / "load", TASK)
    with pytest.raises(RecipeError, match="LayerNorm"):
        compress(source, tmp_path / "out", methods=["rotation"])
