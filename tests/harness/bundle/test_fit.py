"""The truth table of engines and machines, against rules written a second time."""

from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import pytest

from optimizer.harness.bundle import fit
from optimizer.harness.bundle.fit import Decision, FallBack, Fit, Rebuild, Refuse, judge_engines
from optimizer.harness.bundle.fit_columns import REQUIRED
from optimizer.harness.runtimes.machine import Gpu, Machine

ORT = {
    "target": "onnxruntime-cpu",
    "runtime": "onnxruntime",
    "device": "cpu",
    "threads": 0,
    "model": "model/ort/model.onnx",
    "model_files": ["model/ort/model.onnx"],
    "engine": None,
    "deferred": False,
    "fit": {"runtime_minimum": "1.26"},
}
RTX = {
    "target": "tensorrt-rtx-cuda",
    "runtime": "tensorrt-rtx",
    "device": "cuda",
    "threads": 0,
    "model": "model/rtx/model.onnx",
    "model_files": ["model/rtx/model.onnx"],
    "engine": "engines/rtx/model.engine",
    "deferred": False,
    "fit": {
        "runtime_minimum": "1.7",
        "runtime_version": "1.7.1.116",
        "driver_minimum": "580",
        "os": "linux",
        "architecture": "x86_64",
        "compute_capabilities": ["80", "86", "89", "120"],
        "shapes": {"batch": [1, 8, 32], "sequence": [16, 128, 256]},
    },
}
DEFERRED_FIT = {
    k: v
    for k, v in RTX["fit"].items()  # type: ignore[attr-defined]
    if k not in ("runtime_version", "compute_capabilities")
}
DEFERRED = {**RTX, "engine": None, "deferred": True, "fit": DEFERRED_FIT}
BOTH = frozenset({"onnxruntime", "tensorrt-rtx"})
CUDA = {"cuda-bindings": "13.0.3"}


def decide(manifest: dict[str, Any], machine: Machine, **options: Any) -> Decision:
    rows = judge_engines(manifest, machine, **options)
    return fit.decide(manifest, rows, options.get("runtime"))


@dataclass(frozen=True)
class Row:
    """One combination of everything the decision depends on."""

    order: str  # which engines, in which order
    deferred: bool
    runners: frozenset[str]
    ort: str | None
    rtx: str | None
    gpu: str | None
    driver: str
    system: tuple[str, str]
    damaged: frozenset[str]

    @property
    def engines(self) -> list[dict[str, Any]]:
        rtx = DEFERRED if self.deferred else RTX
        return [{"rtx": rtx, "ort": ORT}[name] for name in self.order.split("+")]

    def decide(self) -> Any:
        given = (("onnxruntime", self.ort), ("tensorrt-rtx", self.rtx))
        packages = {**CUDA, **{n: v for n, v in given if v}}
        gpu = Gpu("a card", self.gpu, self.driver) if self.gpu else None
        machine = Machine(*self.system, packages=packages, gpu=gpu, runners=self.runners)
        manifest = {"engines": self.engines}
        return decide(manifest, machine, damaged=self.damaged)


ROWS = [
    Row(*values)
    for values in product(
        ("rtx+ort", "ort+rtx", "ort", "rtx"),
        (False, True),
        (BOTH, frozenset({"onnxruntime"})),
        (None, "1.9.0", "1.26.0"),
        (None, "1.6.0.1", "1.7.1.116", "1.8.0.2"),
        (None, "8.9", "9.0", "12.1"),
        ("579.99", "580.65.06"),
        (("linux", "x86_64"), ("windows", "amd64")),
        (
            frozenset[str](),
            frozenset({"engines/rtx/model.engine"}),
            frozenset({"model/rtx/model.onnx"}),
            frozenset({"model/ort/model.onnx"}),
        ),
    )
]


def how(engine: dict[str, Any], row: Row) -> str | None:
    """The rules again, as one expression per outcome."""
    if engine["runtime"] == "onnxruntime":
        good = row.ort == "1.26.0" and engine["model"] not in row.damaged
        return "load" if good else None
    usable = (
        "tensorrt-rtx" in row.runners
        and row.rtx in ("1.7.1.116", "1.8.0.2")
        and row.gpu is not None
        and row.driver == "580.65.06"
    )
    if (
        usable
        and not engine["deferred"]
        and row.rtx == "1.7.1.116"
        and row.gpu == "8.9"
        and row.system == ("linux", "x86_64")
        and engine["engine"] not in row.damaged
    ):
        return "load"
    buildable = row.gpu in ("8.9", "12.1") and engine["model"] not in row.damaged
    return "build" if usable and buildable else None


def expected(row: Row) -> tuple[str, int | None, str | None]:
    for i, engine in enumerate(row.engines):
        found = how(engine, row)
        if found:
            return ("first" if i == 0 else "later", i, found)
    return ("none", None, None)


def test_every_row_of_the_table() -> None:
    seen = set()
    for row in ROWS:
        made = row.decide()
        kinds = {Fit: ("first", "load"), Rebuild: ("first", "build")}
        if isinstance(made, Refuse):
            got: tuple[Any, ...] = ("none", None, None)
        elif isinstance(made, FallBack):
            got = ("later", made.index, made.how)
        else:
            place, way = kinds[type(made)]
            got = (place, made.index, way)
        assert got == expected(row), row
        assert made.reason, row
        seen.add(got)
    assert len(seen) == 5  # load and build, first and later, and none: all reached


def test_an_engine_of_another_gpu_or_version_is_never_loaded() -> None:
    loads = 0
    for row in ROWS:
        made = row.decide()
        way = "load" if isinstance(made, Fit) else getattr(made, "how", None)
        if way == "load" and row.engines[made.index]["engine"]:
            loads += 1
            assert row.rtx == "1.7.1.116"
            assert row.gpu == "8.9"
            assert row.system == ("linux", "x86_64")
            assert not row.damaged & {"engines/rtx/model.engine"}
    assert loads


def machine(**changes: Any) -> Machine:
    given: dict[str, Any] = {
        "os": "linux",
        "architecture": "x86_64",
        "packages": {"onnxruntime": "1.31.1", "tensorrt-rtx": "1.7.1.116", **CUDA},
        "gpu": Gpu("a card", "8.9", "580.65.06"),
        "runners": BOTH,
    }
    return Machine(**{**given, **changes})


def test_a_fall_back_names_every_engine_passed_over_and_why() -> None:
    made = decide({"engines": [RTX, ORT]}, machine(gpu=None))
    assert isinstance(made, FallBack)
    assert "tensorrt-rtx-cuda: gpu: no GPU was found" in made.reason


@pytest.mark.parametrize(
    ("changes", "install"),
    [
        ({"packages": {}}, 'pip install "onnxruntime>=1.26"'),
        ({"packages": {"onnxruntime": "1.20.0"}}, 'pip install "onnxruntime>=1.26"'),
    ],
)
def test_a_refusal_says_what_to_install(changes: dict[str, Any], install: str) -> None:
    made = decide({"engines": [ORT]}, machine(**changes))
    assert isinstance(made, Refuse)
    assert made.install == install


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu": None}, "with an NVIDIA GPU and its driver"),
        ({"gpu": Gpu("a card", "8.9", "570.1")}, "a newer driver"),
        ({"gpu": Gpu("a card", "9.0", "580.65.06")}, "with a target that runs here"),
    ],
)
def test_a_refusal_that_no_package_mends_says_what_to_do(
    changes: dict[str, Any], words: str
) -> None:
    made = decide({"engines": [RTX]}, machine(**changes))
    assert isinstance(made, Refuse)
    assert made.install == ""
    assert words in made.advice


def test_the_gpu_build_of_onnx_runtime_serves_the_cpu_but_not_the_reverse() -> None:
    gpu_build = machine(packages={"onnxruntime-gpu": "1.31.1"})
    cuda = {**ORT, "target": "onnxruntime-cuda", "device": "cuda"}
    assert isinstance(decide({"engines": [ORT]}, gpu_build), Fit)
    assert isinstance(decide({"engines": [cuda]}, gpu_build), Fit)
    assert isinstance(decide({"engines": [cuda]}, machine()), Refuse)


def test_a_deferred_model_without_engine_files_is_loaded_where_its_device_is() -> None:
    deferred = {**ORT, "target": "onnxruntime-cuda", "device": "cuda", "deferred": True}
    here = machine(packages={"onnxruntime-gpu": "1.31.1"})
    assert isinstance(decide({"engines": [deferred]}, here), Fit)
    assert isinstance(decide({"engines": [deferred]}, machine(gpu=None)), Refuse)
    damaged = decide({"engines": [deferred]}, here, damaged={ORT["model"]})
    assert isinstance(damaged, Refuse)


def test_no_package_is_suggested_for_a_runtime_the_harness_does_not_run() -> None:
    alone = machine(packages={}, runners=frozenset({"onnxruntime"}))
    made = decide({"engines": [RTX]}, alone)
    assert isinstance(made, Refuse)
    assert "does not run tensorrt-rtx engines yet" in made.reason
    assert made.install == ""


def test_an_asked_runtime_is_not_replaced_by_another() -> None:
    manifest = {"engines": [RTX, ORT]}
    assert isinstance(decide(manifest, machine(gpu=None), runtime="tensorrt-rtx"), Refuse)
    made = decide(manifest, machine(), runtime="onnxruntime")
    assert isinstance(made, Fit)
    assert made.index == 1
    assert isinstance(decide(manifest, machine(), runtime="openvino"), Refuse)


def test_versions_compare_as_numbers() -> None:
    made = decide({"engines": [ORT]}, machine(packages={"onnxruntime": "1.100.0"}))
    assert isinstance(made, Fit)


def test_an_engine_without_weights_is_not_loaded_beside_a_damaged_model() -> None:
    stripped = {**RTX, "fit": {**RTX["fit"], "strip_weights": True}}  # type: ignore[dict-item]
    model = frozenset({"model/rtx/model.onnx"})
    assert isinstance(decide({"engines": [RTX]}, machine(), damaged=model), Fit)
    assert isinstance(decide({"engines": [stripped]}, machine()), Fit)
    assert isinstance(decide({"engines": [stripped]}, machine(), damaged=model), Refuse)


@pytest.mark.parametrize(("runtime", "provider"), REQUIRED)
def test_a_provider_runs_where_one_package_of_every_group_and_its_device_are(
    runtime: str, provider: str
) -> None:
    groups = REQUIRED[runtime, provider]
    engine = {
        **ORT,
        "runtime": runtime,
        "device": "cuda" if provider.startswith("tensorrt") else provider,
        "provider": provider if provider.startswith("tensorrt") else None,
        "deferred": True,
        "fit": {},
    }
    versions = {
        "onnxruntime": "1.31.1",
        "openvino": "2026.4.1",
        "tensorrt": "11.4.1",
        "tensorrt-rtx": "1.7.1.116",
    }
    names = sorted({name for group in groups for name in group})
    runners = frozenset({runtime})
    for count in range(len(names) + 1):
        for present in combinations(names, count):
            packages = dict.fromkeys(present, versions[runtime])
            for gpu in (None, Gpu("a card", "8.9", "580.65")):
                here = machine(packages=packages, gpu=gpu, runners=runners)
                made = decide({"engines": [engine]}, here)
                enough = all(set(group) & set(present) for group in groups)
                others = runtime == "openvino"  # it finds its own devices, when it is opened
                runs = enough and (provider == "cpu" or others or gpu is not None)
                assert isinstance(made, Fit | Rebuild) == runs, (present, gpu)


@pytest.mark.parametrize(
    ("needs", "features", "why"),
    [
        ({"float": "bf16"}, ("avx2", "avx512f"), "it computes in bf16"),
        ({"float": "bf16"}, ("avx512_bf16", "avx512f"), ""),
        ({"float": "bf16"}, (), ""),  # nothing is known of the processor: the runtime decides
        ({"float": "fp32"}, ("avx2",), ""),
        ({"float": "fp16"}, ("avx2", "avx512_bf16"), "it computes in fp16"),
        ({"float": "fp16"}, ("avx512_fp16",), ""),
        ({"integer_products": True}, ("avx2", "avx512f"), "it multiplies int8 by int8"),
        ({"integer_products": True}, ("avx2", "avx_vnni"), ""),
        ({"integer_products": False}, ("avx2",), ""),
    ],
)
def test_an_engine_needs_a_processor_that_computes_as_it_does(
    needs: dict[str, Any], features: tuple[str, ...], why: str
) -> None:
    engine = {**ORT, "runtime": "openvino", "fit": needs}
    here = machine(
        packages={"openvino": "2026.4.1"},
        runners=frozenset({"openvino"}),
        cpu_features=features,
    )
    decision = decide({"engines": [engine]}, here)
    assert isinstance(decision, Refuse if why else Fit)
    assert not why or decision.reason.startswith(f"onnxruntime-cpu: processor: {why}")
