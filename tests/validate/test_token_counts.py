"""Data are counted twice: reading less text than in the recipe, or other text, is an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.compress.data import calibration
from optimizer.compress.stage import STAGE as COMPRESS
from optimizer.compress.walk import consumed
from optimizer.data import datasets
from optimizer.load.stage import STAGE as LOAD
from optimizer.recipe.schema import Quantize, Recipe
from optimizer.validate.ledger import hops
from optimizer.validate.materials import Materials
from optimizer.validate.quality import generation_quality, perplexity
from tests.validate.decoder_runs import SCHEMES, decoder_recipe
from tests.validate.runs import recipe


@dataclass(frozen=True)
class Loaded:
    """A recipe, and what its load step wrote."""

    recipe: Recipe
    source: Path

    def compressed(self, out: Path, **calibrate: Any) -> Materials:
        """The state, compressed with other options of the recipe's `calibrate`."""
        assert self.recipe.calibrate is not None
        own = self.recipe.calibrate.model_copy(update=calibrate)
        made = self.recipe.model_copy(update={"calibrate": own})
        out.mkdir()
        COMPRESS.run(made.compression, self.source, out=out)
        section = made.validation(made.targets[0])
        return Materials(section, self.source, out, out, out, out, texts=[])


def loaded(made: Recipe, root: Path) -> Loaded:
    (root / "source").mkdir()
    LOAD.run(made.model, out=root / "source")
    return Loaded(made, root / "source")


@pytest.fixture(scope="module")
def encoder(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    root = tmp_path_factory.mktemp("counted")
    static = {"activations": {"range": "minmax"}}
    return loaded(recipe(str(tiny_bert), root, static, "sentence-embedding"), root)


@pytest.fixture(scope="module")
def decoder(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    root = tmp_path_factory.mktemp("counted")
    return loaded(decoder_recipe(str(tiny_llama), root, SCHEMES["token"]), root)


@pytest.mark.parametrize(
    "calibrate", [{}, {"samples": 3, "batch_size": 2}, {"sequence_length": 6}, {"seed": 5}]
)
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_a_calibration_reads_what_the_recipe_says(
    request: pytest.FixtureRequest, kind: str, calibrate: dict[str, Any], tmp_path: Path
) -> None:
    made: Loaded = request.getfixturevalue(kind)
    run = made.compressed(tmp_path / "state", **calibrate)
    read, expected = run.calibration_counts
    assert read == expected
    assert read is not None
    assert read.rows == calibrate.get("samples", 16)
    if kind == "decoder":
        assert read.tokens == read.rows * calibrate.get("sequence_length", 32)


def test_a_recipe_that_reads_no_activations_expects_no_calibration(
    decoder: Loaded, tmp_path: Path
) -> None:
    recipe = decoder.recipe.model_copy(update={"quantize": Quantize(method="rtn")})
    run = Loaded(recipe, decoder.source).compressed(tmp_path / "state")
    assert run.calibration_counts == (None, None)
    assert hops._read_otherwise(run) == []


def test_text_that_the_model_writes_is_not_counted_as_the_recipes(
    decoder: Loaded, tmp_path: Path
) -> None:
    run = decoder.compressed(tmp_path / "state", generated=2)
    read, expected = run.calibration_counts
    assert read == expected


def test_tokens_are_counted_where_they_reach_the_first_block() -> None:
    """Not where the batch was made."""
    batch = {"input_ids": torch.arange(20).reshape(2, 10)}
    seen = consumed.count_batch(batch, torch.zeros(2, 4, 8), torch.ones(2, 10, dtype=torch.bool))
    assert (seen.rows, seen.tokens) == (2, 8)


Fault = Callable[[pytest.MonkeyPatch], None]


def twelve_tokens_of_each_text(patch: pytest.MonkeyPatch) -> None:
    """In the helper that calibration and ledger share."""
    made = datasets.encode_batches

    def shorter(rows: Any, contract: Any, encoder: Any, size: int, length: int) -> Any:
        return made(rows, contract, encoder, size, min(length, 5))

    patch.setattr(datasets, "encode_batches", shorter)


def windows_of_twelve_tokens(patch: pytest.MonkeyPatch) -> None:
    made = datasets.cut_windows
    patch.setattr(datasets, "cut_windows", lambda *given: [w[:12] for w in made(*given)])


def half_of_the_rows(patch: pytest.MonkeyPatch) -> None:
    made = calibration.make_batches
    patch.setattr(calibration, "make_batches", lambda *given: made(*given)[:1])


def one_text_again_and_again(patch: pytest.MonkeyPatch) -> None:
    """Equal numbers of rows and tokens, and another digest."""
    made = calibration.make_batches

    def same(*given: Any) -> Any:
        return [
            {name: tensor[:1].expand_as(tensor).contiguous() for name, tensor in batch.items()}
            for batch in made(*given)
        ]

    patch.setattr(calibration, "make_batches", same)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("encoder", twelve_tokens_of_each_text),
        ("encoder", half_of_the_rows),
        ("encoder", one_text_again_and_again),
        ("decoder", windows_of_twelve_tokens),
        ("decoder", half_of_the_rows),
        ("decoder", one_text_again_and_again),
    ],
)
def test_a_calibration_that_reads_less_is_caught_at_compress_with_both_counts(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    fault: Fault,
    tmp_path: Path,
) -> None:
    made: Loaded = request.getfixturevalue(kind)
    fault(monkeypatch)
    run = made.compressed(tmp_path / "state", batch_size=8)
    (problem,) = hops._read_otherwise(run)
    assert problem.startswith("calibration read ")
    assert all(str(counts) in problem for counts in run.calibration_counts)


def judged(decoder: Loaded) -> list[Any]:
    """The gates of counts, of a perplexity of a model that says nothing."""
    section = decoder.recipe.validation(decoder.recipe.targets[0])
    m = Materials(section, *[decoder.source] * 5, texts=[])
    rows = datasets.read_samples(section.validate_.data)
    cut = datasets.cut_windows(rows, m.encoder, m.contract, section.validate_.sequence_length)
    flat = np.zeros((section.validate_.sequence_length, m.contract.decoder.vocabulary), np.float32)
    scores = perplexity.score(cut, lambda _: flat, lambda _: flat)
    return generation_quality._counted(m, rows, scores)


def test_a_perplexity_takes_every_token_but_the_first_of_each_window(decoder: Loaded) -> None:
    assert judged(decoder) == []


def eight_tokens_of_each_window(patch: pytest.MonkeyPatch) -> None:
    whole = perplexity._window
    patch.setattr(perplexity, "_window", lambda a, b, ids: whole(a[:8], b[:8], ids[:8]))


def every_window_twice_and_half_of_them(patch: pytest.MonkeyPatch) -> None:
    cut = datasets.cut_windows

    def repeated(*given: Any) -> Any:
        windows = cut(*given)
        return [windows[i // 2] for i in range(len(windows))]

    patch.setattr(datasets, "cut_windows", repeated)


@pytest.mark.parametrize(
    "fault",
    [eight_tokens_of_each_window, windows_of_twelve_tokens, every_window_twice_and_half_of_them],
)
def test_a_perplexity_of_less_fails_with_both_counts(
    decoder: Loaded, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    fault(monkeypatch)
    (gate,) = judged(decoder)
    assert (gate.name, gate.verdict) == ("quality.counted", "fail")
    assert gate.message.count("tokens (sha256") == 2
