"""`optimize measure`: a table of a bundle, its signature, energy and cost; `shapes --times`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from optimizer.cli import main
from optimizer.foundation.errors import DataError
from optimizer.harness.errors import BundleError
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.measure import module_times, table
from optimizer.measure.energy import Meter
from optimizer.measure.roofline import MachineRates
from optimizer.traffic import buckets
from tests.measure.products import write_products
from tests.package.bundles import small_bundle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, its signature, and the public keys of the signer and of another."""
    folder = tmp_path_factory.mktemp("measured")
    bundle = small_bundle.make(folder) / "bundle"
    for name in ("signer", "other"):
        key = ec.generate_private_key(ec.SECP256R1())
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        (folder / f"{name}.pem").write_bytes(private)
        (folder / f"{name}.pem").chmod(0o600)
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (folder / f"{name}.public.pem").write_bytes(public)
    options = ["--seconds", "0.2", "--price-per-hour", "3.6", "--key", folder / "signer.pem"]
    words = ["measure", bundle, "--out", folder / "table.json", *options]
    done = CliRunner().invoke(main, [*map(str, words)])
    assert done.exit_code == 0, done.output
    assert "Time by module" in done.stdout
    return folder


def test_a_table_has_the_cells_the_bundle_and_a_cost(folder: Path) -> None:
    document = table.read(folder / "table.json", folder / "signer.public.pem")
    first = document["cells"][0]
    assert first["cost_per_million"]["answers"] == pytest.approx(1e3 / first["answers_per_second"])
    longest = document["modules"]["sequence"]
    assert [c["sequence"] for c in document["cells"]] == table.lengths(longest)
    assert document["bundle"]["name"] == "tiny"


def test_kernels_are_those_of_the_modules_after_which_their_nodes_are_named(tmp_path: Path) -> None:
    """layer.0 has two products of (64, 256) and (256, 256) floats, layer.1 the only other kernel
    with a module; by the rates below they take at least 16.8 and 1.3 ms."""
    write_products(tmp_path / "model.onnx")
    with OrtRunner(tmp_path / "model.onnx", threads=1) as runner:
        rates = MachineRates(float32=1e9, int8=1e12, bandwidth={1 << 16: 1e12, 1 << 20: 1e8})
        times = module_times.measure(runner, {"x": np.ones((64, 256), np.float32)}, rates)
    assert {one["module"] for one in times["modules"]} == {"layer.0.dense", "layer.1", ""}
    shares = [one["share"] for one in times["modules"]]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1)
    least = {one["module"]: one["ms"] * one["attained"] for one in times["modules"]}
    product = max(2 * 64 * 256 * 256 / 1e9, 4 * (64 * 256 * 2 + 256 * 256) / 1e8)
    assert least["layer.0.dense"] == pytest.approx(1e3 * 2 * product)
    assert least["layer.1"] == pytest.approx(1e3 * 4 * 2 * 64 * 256 / 1e8)


def test_a_table_of_another_key_or_that_was_changed_is_refused(folder: Path) -> None:
    with pytest.raises(BundleError, match="not of the required"):
        table.read(folder / "table.json", folder / "other.public.pem")
    changed = folder / "changed" / "table.json"
    changed.parent.mkdir()
    changed.write_text((folder / "table.json").read_text().replace("3.6", "3.7"))
    (changed.parent / "table.json.sig").write_bytes((folder / "table.json.sig").read_bytes())
    with pytest.raises(BundleError, match="not the one that was signed"):
        table.read(changed, folder / "signer.public.pem")


@pytest.mark.parametrize(
    ("field", "value"),
    [("p50", float("nan")), ("p50", 0), ("p50", -1), ("forward_p50", float("inf")), ("batch", 1.5)],
)
def test_a_table_with_a_time_that_cannot_be_one_is_refused(
    folder: Path, tmp_path: Path, field: str, value: float
) -> None:
    document = json.loads((folder / "table.json").read_text())
    document["cells"][1][field] = value
    (tmp_path / "table.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match=rf"cells\[1\].{field} is"):
        table.read(tmp_path / "table.json")


def test_energy_is_that_of_all_packages_also_where_a_counter_begins_again(tmp_path: Path) -> None:
    """intel-rapl-mmio counts the energy of package-0 too."""

    def write(zone: str, **files: object) -> None:
        (tmp_path / zone).mkdir(exist_ok=True)
        for name, value in files.items():
            (tmp_path / zone / name).write_text(f"{value}\n")

    write("intel-rapl:0", name="package-0", max_energy_range_uj=10_000_000, energy_uj=9_000_000)
    write("intel-rapl:1", name="package-1", max_energy_range_uj=10_000_000, energy_uj=1_000_000)
    write("intel-rapl:0:0", name="core", max_energy_range_uj=10_000_000, energy_uj=5)
    mmio = {"name": "package-0", "max_energy_range_uj": 10_000_000}
    write("intel-rapl-mmio:0", energy_uj=9_000_000, **mmio)
    meter = Meter(tmp_path)
    write("intel-rapl-mmio:0", energy_uj=2_000_000)
    write("intel-rapl:0", energy_uj=2_000_000)
    write("intel-rapl:1", energy_uj=1_500_000)
    write("intel-rapl:0:0", energy_uj=9_000_000)
    assert (meter.joules(), meter.missing) == (pytest.approx(3.5), "")
    assert Meter(tmp_path / "none").joules() is None
    assert "can be read" in Meter(tmp_path / "none").missing


def test_the_energy_of_one_gpu_is_read_and_that_of_several_is_not(tmp_path: Path) -> None:
    """NVML counts millijoules."""

    class Nvml:
        count, millijoules = 1, 1000

        def nvmlInit(self) -> None: ...

        def nvmlDeviceGetCount(self) -> int:
            return self.count

        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            return index

        def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
            return self.millijoules

    nvml = Nvml()
    meter = Meter(tmp_path, gpu=True, nvml=nvml)
    nvml.millijoules = 3500
    assert (meter.joules(), meter.devices) == (pytest.approx(2.5), ["gpu"])
    assert "package can be read" in meter.missing
    nvml.count = 2
    several = Meter(tmp_path, gpu=True, nvml=nvml)
    assert several.joules() is None
    assert "2 GPUs" in several.missing


def test_a_row_costs_its_share_of_the_largest_measured_batch_up_to_the_traffics() -> None:
    def cell(batch: int, sequence: int, p50: float) -> dict[str, Any]:
        return {"batch": batch, "sequence": sequence, "p50": p50}

    cells = [cell(1, 8, 2.0), cell(4, 8, 4.0), cell(4, 24, 12.0), cell(16, 8, 1.0)]
    cost = buckets.interpolate_times(cells, 9, "table.json")
    assert (cost(4), cost(8), cost(16), cost(24)) == (1.0, 1.0, 2.0, 3.0)
    with pytest.raises(DataError, match="up to 24 tokens at batch 4"):
        cost(25)


def test_shapes_by_the_times_of_a_table_say_so(folder: Path) -> None:
    trace = folder / "trace.jsonl"
    trace.write_text('{"lengths": [4, 4, 4, 20], "model": "other"}\n' * 5)
    words = ["shapes", trace, "--times", folder / "table.json", "--json"]
    done = CliRunner().invoke(main, [*map(str, words)])
    assert done.exit_code == 0, done.output
    assert "has the times of tiny, and the requests are to other" in done.stderr
    assert json.loads(done.stdout)["costs"] == f"the times of {folder / 'table.json'}"


def test_a_place_that_cannot_be_written_to_is_refused_before_the_timing(folder: Path) -> None:
    out = folder / "table.json" / "of" / "it.json"
    done = CliRunner().invoke(main, ["measure", str(folder), "--out", str(out)])
    assert "point --out at a folder" in done.output
    assert "measure: " not in done.output
