"""The number of positions of a decoder's ledger inputs is known before they are made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from optimizer.harness.contract import read
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.load.stage import STAGE as LOAD
from optimizer.validate.ledger import decoder_batches
from tests.conftest import WORDS
from tests.decoders import write_tiny_decoder
from tests.validate.decoder_runs import INT4, decoder_recipe

LONG, SHORT = " ".join(WORDS * 3), " ".join(WORDS[:4])


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """(contract of a decoder with room for every piece, its tokenizer)."""
    root = tmp_path_factory.mktemp("decoder")
    model = write_tiny_decoder(root / "checkpoint", layers=1)
    out = root / "source"
    out.mkdir()
    LOAD.run(decoder_recipe(str(model), root, {"method": "rtn", "weights": INT4}).model, out=out)
    contract = read(out / "contract.json")
    tokenizer = load_tokenizer(out / "checkpoint", contract)
    roomy = replace(
        contract,
        tokenizer=replace(contract.text, max_length=128),
        generation=replace(contract.decoder, context=128),
    )
    return roomy, tokenizer


@pytest.mark.parametrize("bytes_per_token", [1e5, 1.22e6, 3e6, 1e9])
def test_positions_are_those_of_texts_as_long_as_their_pieces(
    reader: tuple[Any, Any], bytes_per_token: float
) -> None:
    batches = decoder_batches.make([LONG] * 400, *reader, bytes_per_token)
    sizes = [b.real.size for b in batches]
    sampled = {0, 1, len(sizes) // 2}  # as Materials.sampled
    assert decoder_batches.count_positions(bytes_per_token) == (
        sum(sizes[i] for i in sampled),
        sum(sizes),
    )


@pytest.mark.parametrize("bytes_per_token", [1.22e6, 1e9])
def test_shorter_texts_take_no_more(reader: tuple[Any, Any], bytes_per_token: float) -> None:
    batches = decoder_batches.make([SHORT] * 400, *reader, bytes_per_token)
    assert sum(b.real.size for b in batches) <= decoder_batches.count_positions(bytes_per_token)[1]


@pytest.mark.parametrize("bytes_per_token", [3e6, 1e9])
def test_the_extremes_take_the_positions_that_are_predicted(
    reader: tuple[Any, Any], bytes_per_token: float
) -> None:
    tokens = decoder_batches.count_longest(bytes_per_token)
    many, longest = decoder_batches.make_extremes([LONG] * 3, *reader, tokens, 32)
    sizes = (longest.real.size, many.real.size)
    assert sizes == decoder_batches.count_extreme_positions(bytes_per_token, 32)
    assert len(set(many.real.sum(1))) > 5
