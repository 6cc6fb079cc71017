"""Every fault is caught at the hop where it was planted, and at none before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.foundation.state import Range
from optimizer.harness import tasks
from optimizer.validate.ledger import hops, ledger
from optimizer.validate.ledger.entry import LedgerEntry
from optimizer.validate.materials import Materials
from tests.validate.ledger.faults import mutations as m
from tests.validate.ledger.faults.mutations import KEY, NORM, OUTPUT, QUERY
from tests.validate.runs import Run, damage

EMBEDDINGS = "embeddings.word_embeddings.weight"
POSITIONS = "embeddings.position_embeddings.weight"

# fault: (scheme, hop it is planted at, edit)
MUTANTS: dict[str, tuple[str, str, m.Edit]] = {
    "a weight scale doubled in one channel": (
        "static", "compress", m.weight(QUERY, m.one_channel_doubled)),
    "a square weight transposed in the state": (
        "static", "compress", m.weight(QUERY, m.transposed)),
    "an activation range four times too wide": (
        "static", "compress", m.site(OUTPUT, lambda r: Range(4 * r.low, 4 * r.high))),
    "an activation range four times too narrow": (
        "static", "compress", m.site(OUTPUT, lambda r: Range(r.low / 4, r.high / 4))),
    "an activation range with its ends exchanged": (
        "static", "compress", m.site(OUTPUT, lambda r: Range(-r.high, -r.low))),
    "a weight scale halved in one group": (
        "w4", "compress", m.weight(OUTPUT, m.one_group_halved)),
    "nibbles swapped": ("w4", "compress", m.weight(OUTPUT, m.nibbles_swapped)),
    "group order shifted": ("w4", "compress", m.weight(OUTPUT, m.groups_shifted)),
    "corrections with the wrong sign": ("smooth", "compress", m.corrections_negated),
    "a corrected bias with the wrong sign": (
        "smooth", "fold", m.replaced("intermediate.dense.bias", lambda b: -b)),
    "a smoothing factor doubled for one feature": (
        "smooth", "compress", m.factor(lambda f: torch.cat([2 * f[:1], f[1:]]))),
    "a smoothed weight whose partner was not": (
        "smooth", "fold", m.replaced("value.weight", lambda w: 2 * w)),
    "a folded bias dropped in one row": (
        "smooth", "fold", m.replaced("value.weight", lambda w: torch.cat([0 * w[:1], w[1:]]))),
    "a bias dropped": ("static", "export", m.values("graph", f"{QUERY}.bias", lambda b: 0 * b)),
    "a square weight transposed": (
        "static", "export", m.values("graph", f"{QUERY}.weight", lambda w: w.T)),
    "another LayerNorm epsilon": ("static", "export", m.epsilon("graph", 1e-5)),
    "query and key swapped": (
        "static", "export", m.swapped("graph", f"{QUERY}.weight", f"{KEY}.weight")),
    "two LayerNorm gains swapped": (
        "static", "export", m.swapped("graph", f"{NORM}.weight", "embeddings.LayerNorm.weight")),
    "a stale embedding row that no text uses": (
        "static", "export", m.values("graph", EMBEDDINGS, m.row(4))),
    "another padding row": ("static", "export", m.values("graph", EMBEDDINGS, m.row(0))),
    "positions off by one": (
        "static", "export", m.values("graph", POSITIONS, lambda t: np.roll(t, 1, 0))),
    "a parameter that went through float16": (
        "static", "export",
        m.values("graph", f"{NORM}.weight", lambda w: w.astype(np.float16).astype(np.float32))),
    "the attention mask ignored": ("static", "export", m.mask_ignored("graph")),
    "GELU by tanh": ("static", "export", m.edit_onnx("graph", m.approximate_gelu)),
    "zero point off by one": ("static", "lower", m.coding(2, lambda z: z - 1)),
    "an activation scale doubled": ("static", "lower", m.coding(1, lambda s: 2 * s)),
    "a lowered scale doubled in one channel": (
        "static", "lower",
        m.values("model", f"{OUTPUT}.weight_scale", lambda s: s * (1 + (np.arange(s.size) == 5)))),
    "one integer off by one": (
        "static", "lower",
        m.values("model", f"{OUTPUT}.weight_codes", m.first_integer_moved)),
    "a module left in float silently": ("static", "lower", m.left_in_float(QUERY)),
    "a weight-only module left in float silently": ("w4", "lower", m.left_in_float(OUTPUT)),
    "a module missing from the lowering": (
        "static", "lower", m.edit_json("model", "lowering.json", lambda d: d["modules"].pop(KEY))),
    "integers of query and key swapped": (
        "static", "lower", m.swapped("model", f"{QUERY}.weight_codes", f"{KEY}.weight_codes")),
    "lowered groups shifted": (
        "w4", "lower",
        m.values("model", f"{OUTPUT}.weight_scale", lambda s: np.roll(s, 1, 0))),
    "lowered groups shifted, beside quantized inputs": (
        "w4a8", "lower",
        m.values("model", f"{OUTPUT}.weight_scale", lambda s: np.roll(s, 1, 0))),
    "lowered nibbles swapped, beside quantized inputs": (
        "w4a8", "lower", m.values("model", f"{OUTPUT}.weight_codes", m.neighbours_swapped)),
    "a module in groups that reads its input in float": (
        "w4a8", "lower", m.input_left_in_float(OUTPUT)),
    "the lowered epsilon": ("static", "lower", m.epsilon("model", 1e-5)),
    "a stale embedding row in the lowered graph": (
        "static", "lower", m.values("model", EMBEDDINGS, m.row(4))),
    "a per-token column scale doubled": (
        "token", "lower",
        m.values("model", f"{OUTPUT}.weight_scale", lambda s: s * (1 + (np.arange(s.size) == 5)))),
    "an engine that runs a module wider": (
        "static", "engine",
        m.edit_json("engine", "engine.json", lambda d: d["inspected"]["wider"].append(QUERY))),
    "an engine that lost a module": (
        "static", "engine",
        m.edit_json("engine", "engine.json", lambda d: d["inspected"].update(eligible=11))),
}  # fmt: skip


def assert_caught(materials: Any, planted: str, first: str = "load") -> LedgerEntry:
    """The hops from `first` to the planted one hold, and it does not."""
    names = [hop.__name__ for hop in ledger.HOPS]
    for hop in ledger.HOPS[names.index(first) :]:
        entry = ledger.run_hop(hop, materials)
        if hop.__name__ == planted:
            assert entry.ok is False
            assert entry.problems
            return entry
        assert entry.ok is True, (entry.hop, entry.problems)
    raise AssertionError(planted)


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_planted_fault_is_caught_at_its_hop(
    loaded: Callable[[str], Materials],
    proven: Callable[[str], Materials],
    tmp_path: Path,
    fault: str,
) -> None:
    scheme, planted, edit = MUTANTS[fault]
    clean = (loaded if planted in ("fold", "compress") else proven)(scheme)
    made, first = damage(clean, tmp_path, edit)
    assert_caught(made, planted, first)


def labels_swapped(document: dict[str, Any]) -> None:
    document["labels"].reverse()


def case_kept(document: dict[str, Any]) -> None:
    document["normalizer"]["lowercase"] = False


def no_special_tokens(document: dict[str, Any]) -> None:
    document["post_processor"] = None


CONTRACT_MUTANTS: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "pooling by the first token": ("contract.json", lambda d: d.update(pooling="cls")),
    "normalization missing": ("contract.json", lambda d: d.update(normalize=False)),
    "a shorter maximal length": ("contract.json", lambda d: d["tokenizer"].update(max_length=16)),
    "another padding token": (
        "contract.json", lambda d: d["tokenizer"].update(pad_id=1, pad_token="[UNK]")),
    "another padding type": ("contract.json", lambda d: d["tokenizer"].update(pad_type_id=1)),
    "case kept by the tokenizer": ("tokenizer.json", case_kept),
    "no special tokens": ("tokenizer.json", no_special_tokens),
}  # fmt: skip


@pytest.mark.parametrize("fault", CONTRACT_MUTANTS)
def test_a_fault_in_what_the_harness_reads_is_caught_there(
    runs: dict[str, Run], tmp_path: Path, fault: str
) -> None:
    name, change = CONTRACT_MUTANTS[fault]
    run = runs["static"]
    bundle = m.bundle_of(run, tmp_path / "bundle")
    assert ledger.run_hop(hops.harness, run.materials(bundle)).ok is True
    m.edit_bundle(name, change)(bundle)
    assert ledger.run_hop(hops.harness, run.materials(bundle)).ok is False


def test_swapped_labels_are_caught_at_the_harness(classifier_run: Run, tmp_path: Path) -> None:
    bundle = m.bundle_of(classifier_run, tmp_path / "bundle")
    m.edit_bundle("contract.json", labels_swapped)(bundle)
    entry = ledger.run_hop(hops.harness, classifier_run.materials(bundle))
    assert entry.ok is False
    assert "negative" in entry.problems[0]


def test_padding_pooled_by_the_harness_is_caught(
    runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = tasks.decode

    def careless(contract: Any, outputs: Any, inputs: Any) -> Any:
        full = np.ones_like(inputs["attention_mask"])
        return decode(contract, outputs, {**inputs, "attention_mask": full})

    monkeypatch.setattr(tasks, "decode", careless)
    assert_caught(runs["static"].materials(), "harness")


def test_padding_on_the_left_is_caught_at_the_harness(
    runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    materials = runs["static"].materials()
    assert materials.batches  # made before the fault
    encode = tasks.encode

    def left(*args: Any, **kwargs: Any) -> Any:
        batch = encode(*args, **kwargs)
        for name, array in batch.items():
            rows = [
                np.roll(r, len(r) - n)
                for r, n in zip(array, [len(e.ids) for e in batch.encodings], strict=True)
            ]
            batch[name] = np.stack(rows)
        return batch

    monkeypatch.setattr(tasks, "encode", left)
    assert ledger.run_hop(hops.harness, materials).ok is False


def test_a_wrong_epsilon_in_our_own_loader_is_caught_at_load(runs: dict[str, Run]) -> None:
    materials = runs["static"].materials()
    for module in materials.float_model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-3
    assert_caught(materials, "load")


def test_a_stale_parameter_in_our_own_loader_is_caught_at_load(runs: dict[str, Run]) -> None:
    materials = runs["static"].materials()
    with torch.no_grad():
        materials.float_model.get_parameter(EMBEDDINGS)[4] += 1  # no text has this token
    assert_caught(materials, "load")
