"""The estimate of validate follows from the model's shapes, the texts and the recipe."""

from __future__ import annotations

import math
from typing import Any

from optimizer.foundation.rounding.tolerance import RUNS
from optimizer.store import Estimate
from optimizer.validate.estimate import (
    ARITHMETICS,
    COPIES,
    LIBRARIES,
    MOVED,
    REPORT,
    estimate,
)
from optimizer.validate.ledger.decoder_batches import count_extreme_positions, count_positions
from optimizer.validate.ledger.depth import LARGE
from optimizer.validate.ledger.inputs import ROWS
from tests.validate.runs import Run
from tests.validate.test_stage import changed, further

WIDTH, TABLE = 512, 20_000


def predicted(run: Run, layers: int, width: int = WIDTH, **validate: Any) -> Estimate:
    shapes = {f"layer.{i}.weight": (width, 4 * width) for i in range(layers)}
    shapes["embeddings.weight"] = (TABLE, width)
    return estimate(changed(run, **validate).section, shapes)


def test_memory_is_the_libraries_and_grows_by_several_times_the_weights(
    runs: dict[str, Run],
) -> None:
    few, many = (predicted(runs["w8"], n).memory for n in (4, 8))
    block = 4 * 4 * WIDTH * 4 * WIDTH
    assert 4 * block < many - few < 8 * block
    assert predicted(runs["w8"], 0, width=1).memory < 1.01 * LIBRARIES


def test_weights_of_a_graph_with_external_data_are_on_disk(runs: dict[str, Run]) -> None:
    few, many = (predicted(runs["w8"], n, width=2048) for n in (8, 16))
    block = 4 * 4 * 2048 * 2048
    assert many.memory - few.memory < 2 * 8 * block  # one copy, and activations
    assert many.disk - few.disk >= 2 * 8 * block


def test_folded_parameters_are_held_beside_the_float_ones(runs: dict[str, Run]) -> None:
    plain, folded = (predicted(runs[n], 4).memory for n in ("static", "smooth"))
    assert folded - plain == 4 * 4 * WIDTH * 4 * WIDTH


def test_a_further_set_takes_time_and_no_memory(runs: dict[str, Run], tmp_path: Any) -> None:
    one = predicted(runs["w8"], 4)
    two = predicted(runs["w8"], 4, also={"more": further(tmp_path, 5)})
    assert two.seconds > one.seconds
    assert two.memory == one.memory


def test_an_encoder_s_openings_are_named(runs: dict[str, Run]) -> None:
    assert "openings of each model, at least" in predicted(runs["w8"], 4).comment


def test_a_decoder_takes_longer_for_more_held_out_text(runs: dict[str, Run], tmp_path: Any) -> None:
    shapes = {"layer.0.weight": (WIDTH, WIDTH), "embeddings.weight": (TABLE, WIDTH)}
    one = changed(runs["w8"], metric="perplexity").section
    two = changed(runs["w8"], metric="perplexity", also={"more": further(tmp_path, 50)}).section
    assert estimate(two, shapes).seconds > estimate(one, shapes).seconds


def test_each_adapter_takes_time_that_is_told_and_more_of_it_for_more_texts(
    runs: dict[str, Run], tmp_path: Any
) -> None:
    shapes = {"layer.0.weight": (8 * WIDTH, 8 * WIDTH), "embeddings.weight": (TABLE, WIDTH)}
    plain = changed(runs["w8"], metric="perplexity").section
    section = plain.model_copy(update={"adapters": {"sql": None, "law": None}})
    own = further(tmp_path, 50).data.model_copy(update={"samples": 1})
    fewer = plain.model_copy(update={"adapters": {"sql": None, "law": own}})
    without, two, less = (estimate(s, shapes) for s in (plain, section, fewer))
    timed = without.comment
    assert two.seconds > less.seconds > without.seconds
    minutes = (two.seconds - without.seconds) / 60
    assert two.comment == f"{timed}; of which {minutes:.1f} min for 2 adapters"


def test_the_memory_of_a_timed_float_decoder_is_named_where_it_is_timed(
    runs: dict[str, Run],
) -> None:
    shapes = {f"layer.{i}.weight": (WIDTH, WIDTH) for i in range(400)}  # beyond 256 MB in float
    shapes["embeddings.weight"] = (TABLE, 2 * WIDTH)
    timed = changed(runs["w8"], metric="perplexity", sequence_length=16).section
    latency = timed.validate_.latency.model_copy(update={"time_float": False})
    alone = changed(runs["w8"], metric="perplexity", sequence_length=16, latency=latency).section
    held = 4 * sum(map(math.prod, shapes.values()))  # the head, tied, instead of the embedding
    assert f"the float model has {held / 1e9:.1f} (" in estimate(timed, shapes).comment
    assert estimate(alone, shapes).comment == ""
    assert estimate(timed, shapes).memory >= LIBRARIES + held


def test_a_large_decoder_s_largest_weight_is_converted_in_each_thread(
    runs: dict[str, Run],
) -> None:
    untimed = runs["w8"].section.validate_.latency.model_copy(update={"time_float": False})
    section = changed(runs["w8"], metric="perplexity", ledger="end_to_end", latency=untimed).section
    shapes = {"layer.0.weight": (25_000, LARGE // 25_000)}
    small, large = (estimate(section, shapes | more) for more in ({}, {"norm.weight": (1,)}))
    converted = 3 * 4 * LARGE  # the stage's thread, and two runs at once
    assert converted <= large.memory - small.memory < converted + 1024


def test_correct_runs_of_a_decoder_are_on_disk_and_two_are_held_at_once(
    runs: dict[str, Run],
) -> None:
    """They are the inputs of the compared linear modules, and the logits of all kinds."""
    section = runs["w8"].section
    settings = section.validate_.model_copy(update={"metric": "perplexity"})
    shapes = {"layer.0.weight": (WIDTH, WIDTH), "embeddings.weight": (TABLE, WIDTH)}
    generating = section.model_copy(update={"validate_": settings})
    per_token = 4 * (2 * WIDTH + TABLE + WIDTH)  # of the block's matrix and the head
    sampled, whole = count_positions(per_token)
    longest, many = count_extreme_positions(per_token, ROWS)
    elements = sum(map(math.prod, shapes.values()))
    weights = 4 * (elements + WIDTH**2 + COPIES * (elements + TABLE * WIDTH))  # the head is tied
    answer = TABLE + 2 * WIDTH  # the logits, and the cache of one block
    traces = 2 * (per_token * sampled + 4 * answer * (whole + longest + many))
    compared = 2 * 4 * (sampled * (2 * WIDTH + answer) + longest * answer)
    compared += MOVED * 4 * TABLE * max(longest, many)
    predicted = estimate(generating, shapes)
    assert predicted.memory == LIBRARIES + weights + traces + compared
    written = RUNS * sampled * 4 * (2 * WIDTH + (1 + ARITHMETICS) * answer)
    written += RUNS * longest * 4 * ARITHMETICS * answer
    assert predicted.disk == written + REPORT
