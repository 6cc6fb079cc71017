"""`optimize drift`: its test, and a server beside its bundle's rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

from optimizer.cli import main
from optimizer.foundation.errors import DataError, InputError
from optimizer.traffic import drift, places, two_samples
from optimizer.traffic.exposition import Exposition
from optimizer.traffic.requests import LENGTHS
from tests.harness.server import serving
from tests.package.bundles import small_bundle

SETTINGS = {"alpha": 0.05, "least": 0.1}


def test_p_is_that_of_fishers_exact_test_where_there_are_two_bins() -> None:
    one = two_samples.compare({"a": 12, "b": 8}, {"a": 5, "b": 17}, ordered=False, **SETTINGS)
    table = [[12, 8], [5, 17]]
    # of equal distance, not of equal probability: the two tails of the hypergeometric distribution
    n, row, column = 42, 20, 17
    expected = sum(
        stats.hypergeom.pmf(k, n, column, row)
        for k in range(18)
        if abs(k / 20 - (17 - k) / 22) >= abs(table[0][0] / 20 - table[1][0] / 22) - 1e-12
    )
    assert one.p == pytest.approx(expected, abs=4 * np.sqrt(expected / two_samples.DIVISIONS))


def test_a_drift_is_reported_in_one_of_twenty_comparisons_without_one() -> None:
    random, shares = np.random.default_rng(1), [0.4, 0.3, 0.2, 0.1]
    reported = 0
    for seed in range(200):
        sides = [dict(enumerate(random.multinomial(n, shares).tolist())) for n in (80, 60)]
        one = two_samples.compare(*sides, ordered=True, alpha=0.05, least=1e-9, seed=seed)
        reported += one.verdict == "fail"
    assert reported <= stats.binom.ppf(0.999, 200, 0.05)


@pytest.mark.parametrize(
    ("served", "verdict"),
    [
        ({8: 4000, 16: 4000}, "pass"),  # as the bundle's rows
        ({8: 4300, 16: 3700}, "pass"),  # surely another share, and a small difference
        ({8: 6000, 16: 2000}, "fail"),
        ({8: 7, 16: 5}, "inconclusive"),
    ],
)
def test_a_drift_is_significant_and_not_small(served: dict[int, int], verdict: str) -> None:
    one = two_samples.compare(served, {8: 2000, 16: 2000}, ordered=True, **SETTINGS)
    assert one.verdict == verdict
    assert (one.needed or 0) > 12 if verdict == "inconclusive" else True


def test_few_equal_rows_do_not_show_that_nothing_drifted() -> None:
    few, enough = two_samples.fewest(**SETTINGS) - 1, two_samples.fewest(**SETTINGS)
    sides = ({8: few}, {8: 500}), ({8: enough}, {8: 500}), ({8: 500}, {8: few})
    found = [two_samples.compare(*both, ordered=True, **SETTINGS) for both in sides]
    assert [one.verdict for one in found] == ["inconclusive", "pass", "inconclusive"]
    assert [one.needed for one in found] == [enough, enough, None]
    assert stats.binom.pmf(0, enough, 0.1) <= 0.05 < stats.binom.pmf(0, few, 0.1)


def page(model: str, *counts: object) -> str:
    bounds = zip(("4", "8", "+Inf"), counts, strict=True)
    labels = f'model="tiny",version="1",{model}'
    lines = (f'optimize_row_tokens_bucket{{{labels}le="{le}"}} {count}' for le, count in bounds)
    return "".join(f"{line}\n" for line in lines)


def row_counts(text: str) -> dict[float, int]:
    metrics = Exposition.parse(text, "metrics")
    return metrics.counts(LENGTHS, metrics.of_model(LENGTHS))


def test_the_rows_of_several_servers_are_added() -> None:
    text = page('instance="a",', 5, 6, 6) + page('instance="b",', 1, 4, 4)
    assert row_counts(text) == {4: 6, 8: 4}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (page("", 5, 6, 6) * 2, "an earlier line has"),
        (page("", 5, 4, 6), "smaller bound"),
        (page("", 5, "NaN", 6), "is nan"),
        (page("", 5, 6, 7), "above its last bound"),
    ],
)
def test_counts_that_no_server_writes_are_refused(text: str, found: str) -> None:
    with pytest.raises(DataError, match=found):
        row_counts(text)


def test_a_confidence_beyond_the_number_of_divisions_is_refused() -> None:
    report = {"sense": {"texts": {"calibrate": {"lengths": {"4": 500}}}}}
    metrics = Exposition.parse(page("", 0, 500, 500), "metrics")
    manifest = {"name": "tiny", "version": "1"}
    assert drift.build_document(manifest, report, metrics, 0.999, 0.1)["verdict"] == "fail"
    with pytest.raises(InputError, match="random divisions"):
        drift.build_document(manifest, report, metrics, 0.99999, 0.1)


def test_a_server_that_reads_longer_texts_than_the_bundle_has_drifted(tmp_path: Path) -> None:
    bundle = small_bundle.make(tmp_path / "made") / "bundle"
    (report,) = json.loads((bundle / "report.json").read_text())
    rows = report["sense"]["texts"]["validate.data"]["lengths"]
    file = tmp_path / "metrics.txt"

    async def test(client: serving.Client) -> None:
        for _ in range(3):
            assert (await client.infer(["good film"] * 40)).status == 200
        file.write_bytes((await client.ask("GET", "/metrics")).body)

    serving.on_server(bundle, test)
    done = CliRunner().invoke(main, ["drift", str(bundle), "--metrics", str(file), "--json"])
    assert done.exit_code == 3, done.output
    (compared,) = json.loads(done.stdout)["compared"]
    share = sum(n for bound, n in rows.items() if int(bound) <= 4) / sum(rows.values())
    assert compared["distance"] == pytest.approx(1 - share)
    assert compared["rows"] == {"server": 120, "bundle": sum(rows.values())}


def test_a_missing_file_of_metrics_is_refused_with_the_command_that_saves_it() -> None:
    with pytest.raises(DataError, match=r"(?s)no such file.*curl -o"):
        places.read("nowhere.txt")
