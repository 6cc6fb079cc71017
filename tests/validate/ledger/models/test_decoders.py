"""Decoders through the ledger: clean runs raise nothing, and each fault is named where it was
planted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.compress.methods.weights.gptq import gptq
from optimizer.foundation.qtensor import QTensor, Scheme, to_scale_grid
from optimizer.foundation.state import CompressedState
from optimizer.harness.generate import loop, row, sampling
from optimizer.harness.runtimes.openvino import run as openvino
from optimizer.harness.runtimes.ort.decoder import OrtDecoder
from optimizer.harness.runtimes.ort.slots import OrtSlots
from optimizer.harness.tasks import text_generation
from optimizer.validate.estimate import ARITHMETICS
from optimizer.validate.ledger import ledger
from optimizer.validate.ledger.entry import LedgerEntry
from optimizer.validate.ledger.laws import state_laws
from optimizer.validate.ledger.limits.resampled import Suspect
from optimizer.validate.ledger.limits.rounding_limits import Rounding
from optimizer.validate.materials import Materials
from tests.conftest import heavy_tailed
from tests.harness.runtimes.openvino import integer_sums
from tests.validate.decoder_runs import SCHEMES
from tests.validate.ledger.faults import decoder_mutations as d
from tests.validate.ledger.faults import mutations as m
from tests.validate.ledger.faults import subtle_faults as s
from tests.validate.ledger.faults.decoder_mutations import DOWN, KEY, TABLE, VALUE
from tests.validate.runs import Run, for_openvino, lowered_again
from tests.validate.runs import damaged as damage

HOPS = [hop.__name__ for hop in ledger.DECODER_HOPS]


@pytest.fixture(scope="module")
def clean(decoder_runs: dict[str, Run]) -> dict[str, Materials]:
    """Materials whose hops were run, with all attributes kept, so that torch computes them once."""
    made = {scheme: run.materials() for scheme, run in decoder_runs.items()}
    for materials in made.values():
        assert_clean([ledger.run_hop(hop, materials) for hop in ledger.DECODER_HOPS])
    return made


def assert_clean(entries: list[LedgerEntry]) -> None:
    assert [e.hop for e in entries] == HOPS
    assert [(e.hop, e.problems) for e in entries if e.ok is not True] == []


def damaged(clean: Materials, run: Run) -> Materials:
    """As `clean`, with the graphs of `run`, whose earlier folders are the same."""
    made = copy.copy(clean)
    made.graph, made.model = run.folder("graph"), run.folder("model")
    made.drop(["lowered_graph", "lowered_outputs"])
    return made


def caught(materials: Materials, planted: str) -> LedgerEntry:
    """The planted hop fails. Hops before it read other folders, or parts that the fault does not
    reach, except hop cache where the harness's loop is at fault: that one passes."""
    first = "cache" if planted == "harness" else planted
    for hop in ledger.DECODER_HOPS[HOPS.index(first) :]:
        entry = ledger.run_hop(hop, materials)
        if hop.__name__ == planted:
            assert entry.ok is False
            assert entry.problems
            return entry
        assert entry.ok is True, (entry.hop, entry.problems)
    raise AssertionError(planted)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_clean_decoder_raises_nothing(clean: dict[str, Materials], scheme: str) -> None:
    assert scheme in clean


def test_correct_runs_are_kept_of_as_many_arithmetics_as_plan_counts(
    clean: dict[str, Materials],
) -> None:
    """A further arithmetic takes memory that `plan` does not count."""
    kept = {scheme: len(m.correct._cached) for scheme, m in clean.items()}
    assert max(kept.values()) == ARITHMETICS, kept


STATE_FAULTS: dict[str, Any] = {
    "a weight scale doubled in one channel": m.one_channel_doubled,
    "a weight scale doubled in one group": m.one_group_doubled,
    "a weight scale halved in one group": m.one_group_halved,
    "nibbles swapped": m.nibbles_swapped,
    "group order shifted": m.groups_shifted,
}


@pytest.mark.parametrize("scheme", ["rtn", "gptq"])
@pytest.mark.parametrize("fault", STATE_FAULTS)
def test_a_fault_of_the_integers_is_caught_at_compress(
    clean: dict[str, Materials], tmp_path: Path, scheme: str, fault: str
) -> None:
    made = damage(clean[scheme], tmp_path, m.weight(DOWN, STATE_FAULTS[fault]))
    entry = ledger.run_hop(ledger.hops.compress, made)
    assert entry.ok is False
    assert DOWN in entry.problems[0]


HEAD_FAULTS: dict[str, Any] = {
    "scales an eighth too wide": lambda q: replace(q, scale=to_scale_grid(q.scale * 1.125)),
    "low bits lost": lambda q: replace(q, integers=q.integers // 16 * 16),
}


@pytest.mark.parametrize("fault", HEAD_FAULTS)
def test_a_head_pays_for_no_error_but_its_own(
    clean: dict[str, Materials], tmp_path: Path, fault: str
) -> None:
    """Its eight bits are far finer than the errors of the blocks before it."""
    made = damage(clean["gptq"], tmp_path, m.weight("lm_head", HEAD_FAULTS[fault]))
    entry = ledger.run_hop(ledger.hops.compress, made)
    assert entry.ok is False
    assert "lm_head" in entry.problems[0]


def weight_laws(q: QTensor, weight: torch.Tensor) -> tuple[list[str], list[Suspect]]:
    """Problems and suspects of a weight that GPTQ rounded."""
    state = CompressedState({"w.weight": q})
    gptq_may = Rounding(nearest=False, scale=(0.5, 2.0))
    return state_laws.judge_weights(
        state, lambda _: weight, lambda _: weight, {"w.weight"}, lambda _: gptq_may
    )


def test_a_row_below_the_smallest_scale_holds_nothing_and_is_no_fault() -> None:
    weight = heavy_tailed((4, 64), seed=1)
    weight[2] *= 1e-7
    q = gptq(weight, torch.eye(64), Scheme(8, granularity="group", group_size=32)).q
    assert not bool(q.integers[2].any())
    assert weight_laws(q, weight) == ([], [])


def test_a_fault_in_a_later_slice_of_rows_is_named_by_its_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = heavy_tailed((7, 64), seed=1)
    q = gptq(weight, torch.eye(64), Scheme(8, granularity="group", group_size=32)).q
    q.scale[5] = to_scale_grid(q.scale[5] * 8)
    monkeypatch.setattr("optimizer.foundation.qtensor.AT_ONCE", 3 * 64)
    ((problem,), _) = weight_laws(q, weight)
    assert "row 5" in problem


@pytest.mark.parametrize(("bits", "lost"), [(4, 1), (4, 2), (8, 1), (8, 4)])
def test_low_bits_that_are_lost_are_seen_where_a_rounder_leaves_the_weight(
    bits: int, lost: int
) -> None:
    weight, inputs = heavy_tailed((64, 64), seed=1), heavy_tailed((256, 64), seed=2)
    q = gptq(weight, inputs.T @ inputs, Scheme(bits, granularity="group", group_size=32)).q

    assert weight_laws(q, weight) == ([], [])
    assert weight_laws(replace(q, integers=q.integers >> lost << lost), weight) != ([], [])


@pytest.mark.parametrize(("folder", "hop"), [("graph", "export"), ("model", "lower")])
@pytest.mark.parametrize("fault", d.GRAPH_FAULTS)
def test_a_fault_of_a_graph_is_caught_at_its_hop(
    decoder_runs: dict[str, Run],
    clean: dict[str, Materials],
    tmp_path: Path,
    fault: str,
    folder: str,
    hop: str,
) -> None:
    scheme = "token" if folder == "model" else "rtn"  # flipped integers could hide a fault
    run = decoder_runs[scheme].copy(tmp_path)
    m.edit_onnx(folder, d.GRAPH_FAULTS[fault])(run)
    caught(damaged(clean[scheme], run), hop)


@pytest.mark.parametrize("fault", d.FUSED_FAULTS)
def test_a_fault_of_a_fused_attention_is_caught_at_the_lowering(
    decoder_runs: dict[str, Run], clean: dict[str, Materials], tmp_path: Path, fault: str
) -> None:
    run = decoder_runs["fused"].copy(tmp_path)
    m.edit_onnx("model", d.FUSED_FAULTS[fault])(run)
    caught(damaged(clean["fused"], run), "lower")


@pytest.mark.parametrize("fault", d.TABLE_FAULTS)
def test_a_fault_of_a_quantized_embedding_is_caught_at_the_lowering(
    decoder_runs: dict[str, Run], clean: dict[str, Materials], tmp_path: Path, fault: str
) -> None:
    run = decoder_runs["fused"].copy(tmp_path)
    d.TABLE_FAULTS[fault](run)
    caught(damaged(clean["fused"], run), "lower")


def test_a_fault_of_an_embeddings_integers_is_caught_at_compress(
    clean: dict[str, Materials], tmp_path: Path
) -> None:
    made = damage(clean["fused"], tmp_path, m.weight(TABLE, m.groups_shifted))
    entry = ledger.run_hop(ledger.hops.compress, made)
    assert entry.ok is False
    assert TABLE in entry.problems[0]


VALUE_FAULTS: dict[str, tuple[str, m.Edit]] = {
    "another RoPE base": ("export", d.rope_base("graph")),
    "another RoPE base, lowered": ("lower", d.rope_base("model")),
    "the left padding seen": ("export", m.mask_ignored("graph")),
    "the left padding seen, lowered": ("lower", m.mask_ignored("model")),
    "keys and values swapped": ("export", m.swapped("graph", f"{KEY}.weight", f"{VALUE}.weight")),
    "integers of keys and values swapped": (
        "lower", m.swapped("model", f"{KEY}.weight_codes", f"{VALUE}.weight_codes")),
    "lowered groups shifted": (
        "lower", m.values("model", f"{DOWN}.weight_scale", lambda s: np.roll(s, 1, 0))),
    "a transposed scale": ("lower", m.values("model", f"{DOWN}.weight_scale", lambda s: s.T)),
    "lowered nibbles swapped": ("lower", d.integers_by_swapped_nibbles(DOWN)),
}  # fmt: skip


@pytest.mark.parametrize("fault", VALUE_FAULTS)
def test_a_fault_of_the_values_in_a_graph_is_caught_at_its_hop(
    decoder_runs: dict[str, Run], clean: dict[str, Materials], tmp_path: Path, fault: str
) -> None:
    hop, edit = VALUE_FAULTS[fault]
    run = decoder_runs["rtn"].copy(tmp_path)
    edit(run)
    caught(damaged(clean["rtn"], run), hop)


# fault: (the part of the model that must be named, edit, [(scheme, folder)])
FLOAT, LOWERED, FUSED = ("rtn", "graph"), ("rtn", "model"), ("fused", "model")
SUBTLE: dict[str, tuple[str, s.Change, list[tuple[str, str]]]] = {
    "one RMS norm's epsilon": (s.LLAMA_NORM, s.rms_epsilon, [FLOAT, LOWERED, FUSED]),
    "scores scaled by 1/sqrt(d + 1)": (
        s.LLAMA_CONTEXT, s.scores_scaled_for_one_more(f"{s.LLAMA}.self_attn"),
        [FLOAT, LOWERED, FUSED]),
    "one padded column seen": (
        "self_attn.o_proj", s.one_padded_column_seen(left=True), [FLOAT, FUSED]),
    "one frequency": ("inv_freq", s.one_frequency(7), [FLOAT, LOWERED]),
    "one frequency of the tables": ("inv_freq", s.one_angle, [FUSED]),
    "the frequencies of one head": (
        s.LLAMA_CONTEXT, s.frequencies_of_one_head, [FLOAT, LOWERED]),
    "gate and up swapped": (s.LLAMA_DOWN, s.gate_and_up_swapped, [FLOAT, LOWERED, FUSED]),
    "one group's scale": (s.LLAMA_DOWN, s.scale_of_one_group(s.LLAMA_DOWN), [LOWERED, FUSED]),
    "the largest for the largest magnitude": (
        s.LLAMA_DOWN, s.largest_for_largest_magnitude(s.LLAMA_DOWN), [("token", "model")]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "scheme", "folder"),
    [(fault, *where) for fault, (_, _, some) in SUBTLE.items() for where in some],
)
def test_a_subtle_fault_of_a_decoders_graph_is_caught_at_its_hop_and_named(
    decoder_runs: dict[str, Run],
    clean: dict[str, Materials],
    tmp_path: Path,
    fault: str,
    scheme: str,
    folder: str,
) -> None:
    part, change, _ = SUBTLE[fault]
    run = decoder_runs[scheme].copy(tmp_path)
    m.edit_onnx(folder, change)(run)
    entry = caught(damaged(clean[scheme], run), "export" if folder == "graph" else "lower")
    assert part in entry.problems[0]


Arrays = Mapping[str, Any]


def forgets(decoder: OrtDecoder, arrays: Arrays, step: Any) -> Any:
    """Drop a step from the KV cache, but count it."""
    held = dict(decoder._cache)
    logits = step(decoder, arrays)
    if held:
        for name, value in held.items():
            grown = np.array(decoder._cache[name].numpy())
            grown[:, :, : value.shape()[2]] = value.numpy()
            grown[:, :, value.shape()[2] :] = 0
            decoder._cache[name] = decoder._runner.value(grown)
    return logits


def sees_padding(decoder: OrtDecoder, arrays: Arrays, step: Any) -> Any:
    return step(decoder, {**arrays, "attention_mask": np.ones_like(arrays["attention_mask"])})


def repeats_a_position(decoder: OrtDecoder, arrays: Arrays, step: Any) -> Any:
    shift = int(decoder.past > 0)
    return step(decoder, {**arrays, "position_ids": arrays["position_ids"] - shift})


@pytest.mark.parametrize(
    ("scheme", "fault"),
    [
        *((s, f) for s in ("rtn", "token") for f in (forgets, sees_padding, repeats_a_position)),
        ("fused", sees_padding),  # it takes positions from the cache's columns
    ],
)
def test_a_fault_of_the_kv_cache_is_caught_at_the_cache(
    clean: dict[str, Materials], monkeypatch: pytest.MonkeyPatch, fault: Any, scheme: str
) -> None:
    step = OrtDecoder.step
    monkeypatch.setattr(OrtDecoder, "step", lambda self, arrays: fault(self, arrays, step))
    caught(copy.copy(clean[scheme]), "cache")


@pytest.mark.parametrize("fault", [None, forgets, sees_padding, repeats_a_position])
def test_a_large_model_is_run_as_written_by_fewer_laws_that_catch_the_same(
    clean: dict[str, Materials], monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    large = copy.copy(clean["rtn"])
    monkeypatch.setattr(large, "depth", "sampled")
    if fault:
        step, fused = OrtDecoder.step, ledger.cache_laws.LAWS
        monkeypatch.setattr(OrtDecoder, "step", lambda self, arrays: fault(self, arrays, step))
        few = {law: fused[law] for law in fused if law not in ledger.cache_laws.MANY_STEPS}
        monkeypatch.setattr(ledger.cache_laws, "LAWS", few)
        caught(large, "cache")
    else:
        entry = ledger.run_hop(ledger.cache_laws.cache, large)
        assert entry.ok
        assert all(law in entry.unproven for law in ledger.cache_laws.MANY_STEPS)


def test_a_cache_shared_by_two_texts_is_caught(
    clean: dict[str, Materials], monkeypatch: pytest.MonkeyPatch
) -> None:
    last: dict[int, Any] = {}
    step = OrtDecoder.step

    def shared(self: OrtDecoder, arrays: Arrays) -> Any:
        """Return the KV cache of the last text at this length."""
        if self.past:
            self._cache = dict(last[self.past])
        logits = step(self, arrays)
        last[self.past] = dict(self._cache)
        return logits

    monkeypatch.setattr(OrtDecoder, "step", shared)
    entry = ledger.run_hop(ledger.cache_laws.cache, clean["rtn"])
    turns = "two texts continued in turns do not give what each gives by itself"
    assert entry.problems[-1] == turns
    assert all(p.startswith("texts that come and go") for p in entry.problems[:-1])


@pytest.mark.parametrize(
    "fault",
    [
        lambda self, arrays, last: self.step(arrays)[:, -2],
        lambda self, arrays, last: last(self, arrays) * np.float32(1.01),
    ],
    ids=["the token before", "a factor"],
)
def test_a_fault_of_the_newest_tokens_logits_is_caught_at_the_cache(
    clean: dict[str, Materials], monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    last = OrtDecoder.last
    monkeypatch.setattr(OrtDecoder, "last", lambda self, arrays: fault(self, arrays, last))
    (problem,) = ledger.run_hop(ledger.cache_laws.cache, clean["fused"]).problems
    assert problem.startswith("the newest token's logits and those of all tokens: a token is")


def test_texts_that_take_the_length_of_the_longest_are_caught(
    clean: dict[str, Materials], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = OrtSlots._run

    def alike(self: OrtSlots, adapter: str, row: int, ids: Any, mask: Any, positions: Any) -> Any:
        return run(self, adapter, row, ids, np.ones_like(mask), positions)

    monkeypatch.setattr(OrtSlots, "_run", alike)
    (problem,) = ledger.run_hop(ledger.cache_laws.cache, clean["fused"]).problems
    assert problem.startswith("texts that come and go and alone: a token is")


def test_a_position_off_by_one_in_the_loop_is_caught_at_the_harness(
    clean: dict[str, Materials], monkeypatch: pytest.MonkeyPatch
) -> None:
    following = text_generation.build_step_arrays

    def late(*args: Any) -> Any:
        made = following(*args)
        return {**made, "position_ids": made["position_ids"] + 1}

    monkeypatch.setattr(loop, "build_step_arrays", late)
    caught(copy.copy(clean["rtn"]), "harness")


def second_best(scores: Any, *_: Any) -> int:
    return int(np.argsort(scores)[-2])


def test_a_loop_that_draws_another_token_is_caught_at_the_harness(
    clean: dict[str, Materials], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row, "choose", second_best)
    caught(copy.copy(clean["rtn"]), "harness")


def positions_high_beyond_64(patch: pytest.MonkeyPatch) -> None:
    """Count positions too high: only the long prompts of hop harness are longer."""

    def high(made: Any, ids: Any, mask: Any) -> Any:
        arrays = text_generation.build_step_arrays(made, ids, mask)
        return {**arrays, "position_ids": arrays["position_ids"] + (mask.shape[1] > 65)}

    patch.setattr(loop, "build_step_arrays", high)


def positions_high_beyond_200_in_slots(patch: pytest.MonkeyPatch) -> None:
    run = OrtSlots._run

    def high(self: OrtSlots, adapter: str, row: int, ids: Any, mask: Any, positions: Any) -> Any:
        return run(self, adapter, row, ids, mask, positions + (positions > 200))

    patch.setattr(OrtSlots, "_run", high)


def temperature_twice(patch: pytest.MonkeyPatch) -> None:
    once = sampling.shape_scores
    patch.setattr(
        sampling, "shape_scores", lambda s, how: once(s / np.float32(how.temperature), how)
    )


@pytest.mark.parametrize(
    "fault",
    [positions_high_beyond_64, positions_high_beyond_200_in_slots, temperature_twice],
)
def test_a_fault_that_no_short_greedy_text_shows_is_caught_at_the_harness(
    clean: dict[str, Materials], monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], None]
) -> None:
    fault(monkeypatch)
    caught(copy.copy(clean["token"]), "harness")


def no_template(document: dict[str, Any]) -> None:
    document["generation"]["chat_template"] = None


def template_without_the_end(document: dict[str, Any]) -> None:
    template = document["generation"]["chat_template"]
    document["generation"]["chat_template"] = template.replace("<|im_end|>", "")


def another_end(document: dict[str, Any]) -> None:
    document["generation"]["eos_ids"] = [0]


@pytest.mark.parametrize("change", [no_template, template_without_the_end, another_end])
def test_a_fault_in_the_contract_is_caught_at_the_harness(
    decoder_runs: dict[str, Run], clean: dict[str, Materials], tmp_path: Path, change: Any
) -> None:
    made = copy.copy(clean["rtn"])
    made.bundle = m.bundle_of(decoder_runs["rtn"], tmp_path / "bundle")
    m.edit_bundle("contract.json", change)(made.bundle)
    entry = ledger.run_hop(ledger.generation_laws.harness, made)
    assert entry.ok is False


@pytest.fixture(scope="module")
def in_openvino(
    decoder_runs: dict[str, Run],
    clean: dict[str, Materials],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Materials]:
    return cache(
        lambda scheme: lowered_again(
            clean[scheme], for_openvino(decoder_runs[scheme], tmp_path_factory.mktemp(scheme))
        )
    )


@pytest.mark.parametrize("scheme", ["static", "fused"])
def test_a_clean_decoder_holds_in_openvino(
    scheme: str, in_openvino: Callable[[str], Materials]
) -> None:
    entries = [ledger.run_hop(hop, in_openvino(scheme)) for hop in ledger.DECODER_HOPS[4:]]
    assert integer_sums.misjudged(entries, integers=scheme == "static") == []


def test_openvino_keeps_every_module_in_integers_and_every_attention_in_one_kernel(
    in_openvino: Callable[[str], Materials],
) -> None:
    document = in_openvino("fused").inspected
    assert document["fit"]["integer_products"] is False
    assert document["inspected"]["operators"] == {
        "FullyConnected i4": 14,
        "FullyConnected i8": 1,
        "Gather i8": 1,
        "PagedAttention": 2,
    }


def test_a_cache_rounded_to_eight_bits_as_openvino_does_by_itself_is_caught(
    in_openvino: Callable[[str], Materials], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openvino, "CACHES", dict.fromkeys(openvino.CACHES, "u8"))
    entry = ledger.run_hop(ledger.cache_laws.cache, in_openvino("fused"))
    assert entry.ok is False


def test_a_fault_in_a_decoder_is_caught_in_openvinos_kernels(
    in_openvino: Callable[[str], Materials], tmp_path: Path
) -> None:
    edit = m.values("model", f"{DOWN}.weight_codes", m.first_integer_moved)
    entry = ledger.run_hop(ledger.hops.engine, damage(in_openvino("fused"), tmp_path, edit))
    assert entry.ok is False
    assert any(problem.startswith(DOWN) for problem in entry.problems)
