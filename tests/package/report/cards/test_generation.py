"""Reports on text-generation, on the page and in the terminal."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from optimizer.package.report import page as report
from optimizer.package.report.summary import summarize
from optimizer.package.report.verdict import write_verdict


def percentiles(p50: float) -> dict[str, Any]:
    made: dict[str, Any] = {f"p{p}": p50 * (1 + p / 1000) for p in (50, 90, 95, 99)}
    return made | {f"p{p}_interval": [p50, p50 * 1.2] for p in (50, 90, 95, 99)}


def timed(first: float, step: float) -> dict[str, Any]:
    return {
        "ttft": {**percentiles(first), "samples": [first, first * 1.1, first * 0.9]},
        "inter_token": percentiles(step),
        "by_context": [],
        "tokens_per_second": 1000 / step,
    }


TARGET = {
    "target": "onnxruntime-cpu",
    "verdict": "pass",
    "gates": [
        {"name": "quality.perplexity", "verdict": "pass", "measured": 0.07, "limit": 0.1,
         "interval": [0.05, 0.09], "message": "fine"},
    ],
    "ledger": [],
    "quality": {
        "metric": "perplexity", "examples": 120, "tokens": 61320, "window_tokens": 512,
        "baseline": {"value": 33.1, "interval": [31.0, 35.5]},
        "candidate": {"value": 35.5, "interval": [33.2, 38.0]},
        "difference": {"value": -0.07, "interval": [-0.09, -0.05]},
        "margin": 0.1, "confidence": 0.95, "needed": None,
        "kl": {"value": 0.1, "interval": [0.09, 0.11]},
        "top1": {"value": 0.82, "interval": [0.81, 0.83]},
        "divergence": {"prompts": 16, "prompt_tokens": 32, "new_tokens": 32, "mean": 11.5,
                       "interval": [8.0, 15.0], "identical": 0.125, "lengths": []},
    },
    "speed": {
        "machine": {}, "threads": 1,
        "cells": [{
            "batch": 1, "prompt": 128, "new_tokens": 32, "runs": 40,
            "systems": {"onnxruntime-float": timed(900.0, 60.0), "candidate": timed(800.0, 20.0)},
            "ratio": {"of": "candidate", "to": "onnxruntime-float",
                      "ttft": {"median": 0.89, "interval": [0.85, 0.93]},
                      "inter_token": {"median": 0.33, "interval": [0.31, 0.35]}},
        }],
        "size": {"float_bytes": 540_000_000, "candidate_bytes": 180_000_000},
        "peak_memory": {"onnxruntime-float": 900_000_000, "candidate": 400_000_000},
    },
    "modules": [], "fallbacks": [], "not_measured": {},
    "engine": {"deferred": False, "why": ""},
}  # fmt: skip
RECIPE = {"quantize": {"weights": {"bits": 4}}}


@pytest.fixture
def document() -> dict[str, Any]:
    return {"name": "smol", "recipe": RECIPE, "reports": [copy.deepcopy(TARGET)]}


def test_the_page_tells_nats_agreement_and_both_latencies(document: dict[str, Any]) -> None:
    page = report.render(document)
    for text in ("Perplexity", "+0.0700 nats/token", "82.0 %", "KL from float", "11.5 tokens"):
        assert text in page
    for text in ("First token p50, 1 × 128", "Next token p99, 1 × 128", "0.33×", "Tokens/s"):
        assert text in page
    assert "Cosine" not in page.split("Ledger")[0]


def test_the_terminal_has_the_same_rows_within_its_width(document: dict[str, Any]) -> None:
    text = summarize(document)
    assert max(map(len, text.splitlines())) <= 110
    for wanted in ("Perplexity", "+0.0500 to +0.0900", "Next token p50", "Same next token"):
        assert wanted in text


def test_the_sentence_says_what_text_costs_and_how_fast_it_is_written(
    document: dict[str, Any],
) -> None:
    said = write_verdict(document["reports"][0], RECIPE)
    assert "from 33.1 to 35.5" in said
    assert "+0.0700 nats/token more" in said
    assert "0.33× the time of float" in said


@pytest.mark.parametrize("lost", [("speed",), ("quality", "divergence"), ("quality", "kl")])
def test_a_part_that_was_not_measured_breaks_nothing(
    document: dict[str, Any], lost: tuple[str, ...]
) -> None:
    holder = document["reports"][0]
    for key in lost[:-1]:
        holder = holder[key]
    holder[lost[-1]] = None
    page = report.render(document) + summarize(document)
    assert "Perplexity" in page
    assert ("Speed was not measured" in page) == (lost == ("speed",))


def test_a_number_that_is_none_stands_out(document: dict[str, Any]) -> None:
    document["reports"][0]["quality"]["difference"]["value"] = math.nan
    assert "not a number" in report.render(document)
