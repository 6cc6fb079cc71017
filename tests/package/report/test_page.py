"""The report says everything its document holds, and lets nothing out of it become markup."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from jinja2 import UndefinedError

from optimizer.package.report import comparison
from optimizer.package.report.page import render
from optimizer.package.report.summary import summarize
from optimizer.package.report.templating import environment
from tests.package.report.documents import document

VOID = {"meta", "br", "col"}
INJECTION = "\"><script>alert('1')</script><img src=x onerror=y>&amp;"


class Reader(HTMLParser):
    """Collects what a browser would see, and whether every element is closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.misnested: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.misnested.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def without(path: str) -> dict[str, Any]:
    """The document with one value of its first report taken away."""
    made = document()
    at: Any = made["reports"][0]
    *parents, last = path.split(".")
    for key in parents:
        at = at[int(key)] if isinstance(at, list) else at[key]
    at.pop(last)
    return made


def replaced(value: Any, key: str, by: Any) -> Any:
    """A deep copy with every value under `key` replaced."""
    if isinstance(value, dict):
        return {k: by if k == key else replaced(v, key, by) for k, v in value.items()}
    return [replaced(v, key, by) for v in value] if isinstance(value, list) else value


def strings_replaced(value: Any) -> Any:
    """A deep copy in which every string, keys that are data included, carries an injection."""
    if isinstance(value, dict):
        return {k: strings_replaced(v) for k, v in value.items()}
    if isinstance(value, list):
        return [strings_replaced(v) for v in value]
    return f"{value}{INJECTION}" if isinstance(value, str) else value


def test_every_element_is_closed_in_order() -> None:
    reader = Reader(render(document()))
    assert reader.misnested == []
    assert reader.open == []


def test_the_change_of_a_time_is_explained_beside_its_column() -> None:
    for shown in (Reader(render(document())).text, " ".join(summarize(document()).split())):
        assert comparison.PAIRED in shown


def test_a_further_evaluation_set_has_a_card_and_a_row_of_its_own() -> None:
    made = document()
    section = copy.deepcopy(made["reports"][0]["quality"])
    made["reports"][0]["also"] = {"novels": {**section, "report_only": True}}
    page = Reader(render(made)).text
    assert "as good as float on novels?" in page
    assert "no gate follows from it" in page
    assert ", novels" in summarize(made)


def test_an_adapter_has_a_card_and_a_row_of_its_own() -> None:
    made = document()
    section = copy.deepcopy(made["reports"][0]["quality"])
    made["reports"][0]["adapters"] = {"sql": {**section, "data": "model.adapters.sources.sql.data"}}
    page = Reader(render(made)).text
    assert "as good as float with adapter sql?" in page
    assert "Judged on the rows of model.adapters.sources.sql.data." in page
    assert ", adapter sql" in summarize(made)


def test_the_page_asks_nothing_of_the_network() -> None:
    page = render(document())
    for tag, attributes in Reader(page).elements:
        assert tag not in {"script", "link", "img", "iframe", "object", "use", "image"}
        assert (attributes.get("href") or "#").startswith("#")
        assert "src" not in attributes
    assert "url(" not in page
    assert "@import" not in page


def test_every_gate_hop_and_module_is_named() -> None:
    shown = Reader(render(document())).text
    for report in document()["reports"]:
        names = [g["name"] for g in report["gates"]] + [h["hop"] for h in report["ledger"]]
        names += [m["module"] for m in report["modules"]] + report["fallbacks"]
        assert [n for n in names if n not in shown] == []


def test_modules_that_differ_between_targets_are_shown_for_each() -> None:
    made = document()
    made["reports"][1]["modules"][3]["module"] = "only.in.the.second"
    assert "only.in.the.second" in Reader(render(made)).text


def test_failing_gates_are_named_before_everything_else() -> None:
    shown = Reader(render(document())).text
    start = shown.index("tensorrt-rtx-cuda")
    assert shown.index("ledger.lowered ONNX", start) < shown.index("quality.probe_accuracy", start)
    assert shown.index("ledger.lowered ONNX") < shown.index("Float against")
    text = summarize(document())
    assert text.index("fail: ledger") < text.index("inconclusive: q")


def test_no_string_of_the_document_becomes_markup() -> None:
    made = strings_replaced(document())
    made["source"]["files"] = {INJECTION: {"sha256": INJECTION, "size": 1}}
    made["manifest"]["packages"] = {INJECTION: INJECTION}
    cell = made["reports"][0]["speed"]["cells"][0]
    cell["systems"][INJECTION] = cell["systems"]["candidate"]
    cell["systems"]["candidate"]["stages"][INJECTION] = {"p50": 1.0}
    reader = Reader(render(made))
    known = {e for e, _ in Reader(render(document())).elements}
    assert {e for e, _ in reader.elements} == known
    assert not any(a.startswith("on") for _, attributes in reader.elements for a in attributes)
    assert reader.misnested == []
    assert INJECTION in reader.text


@pytest.mark.parametrize("path", ["name", "source.source", "reports.0.quality.note"])
def test_a_script_in_a_name_is_shown_as_text(path: str) -> None:
    made = document()
    *parents, last = path.split(".")
    holder: Any = made
    for key in parents:
        holder = holder[int(key)] if isinstance(holder, list) else holder[key]
    holder[last] = "<script>alert(1)</script>"
    page = render(made)
    assert "<script" not in page
    assert "<script>alert(1)</script>" in Reader(page).text


def test_a_name_that_a_template_misspells_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        environment().from_string("{{ page.nam }}").render(page={"name": "x"})


def test_characters_that_hide_text_are_made_visible() -> None:
    made = document()
    made["name"] = "a\u202eb\x00c\ud800d"
    page = render(made)
    page.encode("utf-8")
    assert "a\ufffdb\ufffdc" in page


def test_the_same_document_gives_the_same_bytes() -> None:
    assert render(document()) == render(copy.deepcopy(document()))


GEOMETRY = {"x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height"}


def drawn_numbers(page: str) -> list[str]:
    return [
        str(value)
        for tag, attributes in Reader(page).elements
        if tag in {"svg", "rect", "line", "circle", "text"}
        for key, value in attributes.items()
        if key in GEOMETRY
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1e300, 0, None, "x"])
@pytest.mark.parametrize(
    "key",
    ["p50", "p99", "samples", "output_error", "relative_l2", "tolerance", "value", "margin",
     "interval", "median", "saturation", "candidate_bytes", "measured", "examples"],
)  # fmt: skip
def test_plots_hold_finite_numbers_only(key: str, value: Any) -> None:
    page = render(replaced(document(), key, value))
    odd = [n for n in drawn_numbers(page) if not re.fullmatch(r"-?\d+(\.\d+)?%?", n)]
    assert odd == []
    assert not [n for n in drawn_numbers(page) if n.startswith("-")]
    assert summarize(replaced(document(), key, value))


@pytest.mark.parametrize("key", ["p50", "output_error", "relative_l2", "value", "candidate_bytes"])
def test_a_nan_is_called_not_a_number_and_flagged(key: str) -> None:
    page = render(replaced(document(), key, float("nan")))
    assert '<strong class="bad">not a number</strong>' in page
    assert "nan" not in re.findall(r"\b\w+\b", Reader(page).text.lower())


@pytest.mark.parametrize(
    "path", ["speed", "quality", "ledger", "modules", "fallbacks", "gates", "speed.size",
             "speed.peak_memory", "speed.cells", "speed.cells.0.systems.candidate.stages"],
)  # fmt: skip
def test_what_is_missing_is_said_with_its_reason(path: str) -> None:
    made = without(path)
    section = next(p for p in reversed(path.split(".")) if not p.isdigit())
    section = "speed" if section == "cells" else section
    made["reports"][0]["not_measured"] = {section: "the battery ran out"}
    if section == "stages":
        assert "Not drawn, no usable figure: INT8 pre" in Reader(render(made)).text
        return
    shown = Reader(render(made)).text
    assert "not measured" in shown
    assert "the battery ran out" in shown


def test_a_missing_part_without_a_reason_says_so() -> None:
    assert "the report gives no reason" in Reader(render(without("quality"))).text


def test_a_deferred_engine_is_the_reason_that_speed_is_missing() -> None:
    made = without("speed")
    made["reports"][0]["engine"] = {"deferred": True, "why": "no GPU in this room"}
    assert "no GPU in this room" in Reader(render(made)).text
    assert "no GPU in this room" in summarize(made)


@pytest.mark.parametrize("empty", [{}, {"name": "x"}, {"name": "x", "reports": [{}]}])
def test_an_empty_document_still_gives_a_page_and_a_summarize(empty: dict[str, Any]) -> None:
    assert Reader(render(empty)).misnested == []
    assert "judged" in Reader(render(empty)).text
    assert "judged" in summarize(empty)


def test_every_chart_has_a_title_and_a_description() -> None:
    page = render(document())
    charts = re.findall(r'<svg[^>]*role="img".*?</svg>', page, flags=re.S)
    assert len(charts) >= 8
    assert all(re.search(r"<title>.+?</title><desc>.+?</desc>", c, flags=re.S) for c in charts)


def test_the_summary_fits_100_columns_and_has_the_figures() -> None:
    made = document()
    made["reports"][1]["gates"][2]["message"] = "a long reason that continues " * 12
    text = summarize(made)
    assert max(map(len, text.splitlines())) <= 100
    for wanted in ("PASS", "FAIL", "88.2 %", "p99, batch 8 × 128", "0.42×", "90.8 MB", "INT8"):
        assert wanted in text


def test_the_float_system_of_the_targets_own_runtime_is_the_baseline() -> None:
    made = document()
    systems = made["reports"][0]["speed"]["cells"][0]["systems"]
    made["reports"][0]["speed"]["cells"][0]["systems"] = dict(reversed(systems.items()))
    assert summarize(made) == summarize(document())


def test_an_end_of_an_interval_that_is_unknown_is_said_so() -> None:
    made = document()
    for system in made["reports"][0]["speed"]["cells"][0]["systems"].values():
        system["end_to_end"]["p99_interval"] = [19.0, None]
    assert "at least 19.0 ms" in Reader(render(made)).text
    assert "at least 19.0 ms" in summarize(made)


def test_a_hop_that_was_not_run_here_is_no_failure_and_says_why() -> None:
    made = document()
    made["reports"][0]["ledger"].append(
        {"hop": "engine", "from": "lowered ONNX", "tolerance": None, "measured": None, "ok": None,
         "why": "opens only on its GPU", "problems": []}
    )  # fmt: skip
    made["reports"] = made["reports"][:1]
    shown = Reader(render(made)).text
    assert "engine not run here: opens only on its GPU" in shown
    assert "beyond its limit" not in shown


def test_a_failed_hop_shows_its_problems_and_a_distance_that_was_not_finite() -> None:
    made = document()
    hop = made["reports"][0]["ledger"][1]
    hop |= {"ok": False, "problems": ["encoder.layer.3 first"]}
    hop["measured"] = {"relative_l2": None, "max_abs": None, "cosine": -1.0, "worst_example": None}
    shown = Reader(render(made)).text
    assert "float ONNX: encoder.layer.3 first" in shown
    assert "not a number" in shown
    assert "Not drawn, no usable figure: float ONNX" in shown


def test_the_worst_example_is_what_the_tolerance_is_held_against() -> None:
    made = document()
    made["reports"][0]["ledger"][0]["measured"]["worst_example"] = 0.1234
    assert "0.12 ≤ 0.20" in Reader(render(made)).text


def test_a_hop_whose_limit_is_of_all_examples_says_why_a_worse_one_passes() -> None:
    made = document()
    hop = made["reports"][0]["ledger"][0]
    hop["hop"] = "compress"
    hop["measured"] |= {"relative_l2": 0.073, "worst_example": 0.1275, "max_abs": 0.6086}
    shown = Reader(render(made)).text
    assert "0.073 ≤ 0.20" in shown
    assert "all examples togetherworst example 0.13, no limit" in shown
    assert "Largest difference (of one number, in the output's own unit)" in shown


def test_a_fallback_names_its_module_and_the_reason() -> None:
    made = document()
    made["reports"][0]["fallbacks"] = [{"module": "a.b", "what": "wider", "why": "no kernel"}]
    assert "a.b (wider): no kernel" in Reader(render(made)).text


def test_a_note_on_the_quality_figures_is_shown() -> None:
    made = document()
    made["reports"][0]["quality"]["note"] = "another runtime answered"
    assert "another runtime answered" in Reader(render(made)).text


def test_a_gate_that_was_not_measured_is_counted_apart_from_those_that_passed() -> None:
    report = {
        "target": "x",
        "verdict": "pass",
        "gates": [
            {"name": "a", "verdict": "pass", "message": ""},
            {"name": "b", "verdict": "not measured", "message": "no GPU"},
        ],
    }
    text = summarize({"name": "x", "reports": [report]})
    assert "1 gates passed, 1 not measured here" in text
    assert "no GPU" in text
    assert "all" not in text.splitlines()[0]


def test_codes_that_were_kept_are_called_by_no_number_of_bits() -> None:
    assert comparison.name_candidate(
        {"quantize": {"method": "pass_through", "weights": {"bits": 8}}}
    ) == ("original integers")
    assert comparison.name_candidate({"quantize": {"weights": {"bits": 4}}}) == "INT4 weights"
    float8 = {"weights": {"type": "float8", "bits": 8}, "activations": {"type": "float8"}}
    assert comparison.name_candidate({"quantize": float8}) == "FP8"


def test_what_was_learned_is_drawn_with_what_was_kept() -> None:
    page = Reader(render(document()))
    assert "Recovery of the smaller model" in page.text
    assert "from 0.38 to 0.118 at step 240 of 320" in page.text
    assert "Stopped early: no better held-out loss" in page.text


def test_the_sizes_that_were_timed_are_listed_with_the_one_that_was_kept() -> None:
    kept, tried = ({"blocks": 4, "ffn": ffn, "heads": 0} for ffn in (1024, 1152))
    known = document()
    known["reports"][0]["reduced"] = {
        "sizes": {"blocks": [6, 4], "ffn": [1536, 1024], "heads": [0, 0]},
        "weights": {"all": [22_000_000, 15_000_000]},
        "compared": [{"sizes": kept, "distance": 0.1234}, {"sizes": tried, "distance": 0.2}],
    }
    text = " ".join(Reader(render(known)).text.split())
    assert "Speed of smaller models" in text
    assert "1,024 1.60× 1.57 to 1.63 1.61× 0.1234 kept" in text
    assert "1,152 1.43× 1.41 to 1.45 1.61× 0.2 tried" in text


def test_the_gain_stands_beside_the_whole_model_in_the_same_quantization() -> None:
    text = " ".join(summarize(document()).split())
    assert "Gain, batch 1 × 128 8.00 ms 5.00 ms 1.60× as fast" in text
    assert "(whole, quantized) (1.54 to 1.67; goal 1.6)" in text


def test_a_warning_about_data_or_the_float_model_stands_beside_the_verdict() -> None:
    made = document()
    of_data = {"images": {"calibrate": {"warnings": ["calibrate data: one colour"]}}}
    made["reports"][0]["sense"] = {**of_data, "reference": {"warnings": ["labels swapped"]}}
    for shown in (Reader(render(made)).text, summarize(made)):
        assert "warning: labels swapped" in shown
        assert "warning: calibrate data: one colour" in shown
