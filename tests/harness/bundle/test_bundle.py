"""Opening a bundle: verified before anything is loaded, and candid about what runs."""

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optimizer.harness.__main__ import main
from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.bundle.manifest import list_damaged_files, read_manifest
from optimizer.harness.commands.command_line import parse_arguments
from optimizer.harness.commands.opening import make_opener
from optimizer.harness.errors import BundleError, MachineError, UnopenedError
from optimizer.harness.runtimes.machine import Gpu, Machine, describe_machine
from optimizer.harness.trust.archive import unpack
from tests.package.bundles import small_bundle

TEXTS = ["good film", "a bad, slow and poor one", "never again"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose first target is deferred and whose second runs here. Copied before use."""
    targets = (small_bundle.RTX, small_bundle.ORT)
    from optimizer.harness.runtimes.trt.build import builder

    with pytest.MonkeyPatch.context() as patch:
        row = replace(builder.PRODUCTS["tensorrt-rtx"], module="no_such_tensorrt")
        patch.setitem(builder.PRODUCTS, "tensorrt-rtx", row)
        return small_bundle.make(tmp_path_factory.mktemp("bundle"), targets)


@pytest.mark.parametrize(
    ("recorded", "workers", "each"),
    [(0, 1, 0), (0, 4, 4), (0, 32, 1), (8, 4, 2), (3, 4, 1)],
)
def test_workers_share_the_threads_of_the_recipe_or_the_machine(
    tmp_path: Path, recorded: int, workers: int, each: int
) -> None:
    bundle = small_bundle.make(tmp_path) / "bundle"
    small_bundle.edited(bundle, lambda m: m["engines"][0].update(threads=recorded))
    machine = replace(describe_machine(), cores=16)
    with Bundle(bundle, machine=machine, workers=workers) as opened:
        assert opened.threads == each
    with Bundle(bundle, machine=machine, workers=workers, threads=5) as opened:
        assert opened.threads == 5


def test_a_server_opens_a_bundle_with_the_share_of_its_workers(tmp_path: Path) -> None:
    bundle = small_bundle.make(tmp_path) / "bundle"
    small_bundle.edited(bundle, lambda m: m["engines"][0].update(threads=8))
    small_bundle.edited(bundle, lambda m: m["recipe"].update({"serve": {"workers": 2}}))
    for words, each in ((), 4), (("--workers", "8"), 1):
        args = parse_arguments(["serve", "--bundle", str(bundle), *words])
        with ExitStack() as stack:
            assert make_opener(args, print)(bundle, stack).threads == each


def test_an_engine_that_runs_one_batch_at_a_time_keeps_all_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = small_bundle.make(tmp_path) / "bundle"
    monkeypatch.setattr(Bundle, "reentrant", False)
    with Bundle(bundle, workers=4) as opened:
        assert opened.threads == opened.engine["threads"]


@pytest.fixture(scope="module")
def lean(made: Path) -> Path:
    """The bundle with few sources of the harness: no test that changes a copy runs them."""
    return small_bundle.lean(made / "bundle", made / "lean")


@pytest.fixture
def bundle(lean: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(lean, tmp_path / "bundle"))


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any, str]:
    """Exit code, the JSON document, standard error."""
    code = main([arguments[0], "--json", *arguments[1:]])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def predicted(
    bundle: Path, *arguments: str, capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[Any], str]:
    """Exit code, the JSON object of each line, standard error."""
    code = main(["predict", "--json", "--bundle", str(bundle), *arguments])
    out, err = capsys.readouterr()
    return code, [json.loads(line) for line in out.splitlines()], err


@pytest.mark.parametrize("words", [[], ["predict", "--threads", "x"], ["check", "--nope"], ["no"]])
def test_a_wrong_command_line_is_a_document_too(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == 2
    assert "--help`" in document["fix"]


def typed(data: bytes) -> io.TextIOWrapper:
    """Standard input that holds `data`."""
    return io.TextIOWrapper(io.BytesIO(data))


def test_answers_come_in_order_and_do_not_depend_on_the_batch(bundle: Path) -> None:
    with Bundle(bundle) as opened:
        together = [a["embedding"] for a in opened.predict(TEXTS)]
        alone = [opened.predict([t])[0]["embedding"] for t in TEXTS]
        in_twos = [a["embedding"] for a in opened.predict(TEXTS, batch_size=2)]
    np.testing.assert_allclose(together, alone, atol=1e-6)
    np.testing.assert_allclose(together, in_twos, atol=1e-6)
    assert len({tuple(a) for a in together}) == 3


def test_a_fall_back_is_said_aloud(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, answers, err = predicted(bundle, *TEXTS, capsys=capsys)
    assert code == 0
    assert [a["engine"] for a in answers] == ["onnxruntime-cpu"] * 3
    assert err.startswith("falling back: tensorrt-rtx-cuda: ")


def test_an_asked_runtime_that_does_not_run_here_exits_5(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--runtime", "tensorrt-rtx", "--bundle", str(bundle))
    code, document, _ = run("predict", *asked, "good", capsys=capsys)
    assert code == 5
    assert document["error"] == "MachineError"


def test_nothing_that_runs_here_says_what_to_install(bundle: Path) -> None:
    with pytest.raises(MachineError, match=r'pip install "onnxruntime>=1\.26"'):
        Bundle(bundle, machine=Machine("linux", "x86_64"))


def test_an_engine_is_built_at_first_start_and_one_that_does_not_open_is_passed_over_aloud(
    bundle: Path, tmp_path: Path
) -> None:
    """The machine says that it has a GPU, and has none: the engine builds and does not start."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    machine = Machine(
        "linux",
        "x86_64",
        packages={"tensorrt-rtx": "1.7.1.116", "onnxruntime": "1.31.1", "cuda-bindings": "13"},
        gpu=Gpu("a card", "8.9", "580.65"),
        runners=frozenset({"onnxruntime", "tensorrt-rtx"}),
    )
    said: list[str] = []
    with Bundle(bundle, machine=machine, say=said.append, cache=tmp_path / "cache") as opened:
        assert opened.engine["target"] == "onnxruntime-cpu"
        assert len(opened.predict(TEXTS)) == 3
    assert any(line.startswith("building tensorrt-rtx-cuda for this GPU") for line in said)
    assert said[-1].startswith("falling back: tensorrt-rtx-cuda: tried: ")
    assert list((tmp_path / "cache").glob("*/model.engine"))


def test_an_engine_that_does_not_open_is_built_here_and_then_passed_over(bundle: Path) -> None:
    """Its digest is right: no damage, and no reason to refuse what else the bundle has."""
    fit = {"runtime_version": "1.7.1.116", "compute_capabilities": ["89"]}
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["engines"][0] |= {"deferred": False, "engine": "e"}
    manifest["engines"][0]["fit"] |= fit | {"os": "linux", "architecture": "x86_64"}
    packages = {"tensorrt-rtx": "1.7.1.116", "onnxruntime": "1.31.1", "cuda-bindings": "13"}
    machine = Machine("linux", "x86_64", packages, Gpu("a card", "8.9", "580.65"))
    tried = []

    def open_(engine: dict[str, Any], how: str, threads: int) -> str:
        tried.append((engine["runtime"], how))
        if engine["runtime"] == "tensorrt-rtx":
            raise UnopenedError("it does not open here")
        return "opened"

    opened = object.__new__(Bundle)
    opened.folder, opened.manifest = bundle, manifest
    opened._shop = SimpleNamespace(machine=machine, open=open_)  # type: ignore[assignment]
    opened._choose(frozenset(), None, None, 1, False, {})
    rtx = "tensorrt-rtx"
    assert tried == [(rtx, "load"), (rtx, "build"), ("onnxruntime", "load")]
    assert "tried: it does not open here" in opened.decision.reason


def names(bundle: Path) -> list[str]:
    return sorted(json.loads((bundle / "manifest.json").read_text())["files"])


def test_a_changed_bit_in_any_file_is_found(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in names(bundle):
        path = bundle / name
        good = path.read_bytes()
        path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
        code, document, _ = run("check", "--bundle", str(bundle), capsys=capsys)
        assert (code, document["damaged"]) == (2, [name])
        path.write_bytes(good)
    assert main(["check", "--bundle", str(bundle)]) == 0


@pytest.mark.parametrize("name", ["tokenizer/tokenizer.json", "harness/__main__.py"])
def test_a_damaged_file_that_all_engines_share_stops_everything(name: str, bundle: Path) -> None:
    (bundle / name).write_bytes(b"x")
    with pytest.raises(BundleError, match=name):
        Bundle(bundle)


def test_a_damaged_model_is_never_opened(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bundle / "model" / "onnxruntime-cpu" / "model.onnx"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    monkeypatch.setattr(
        "optimizer.harness.bundle.engines.OrtRunner", lambda *a, **k: pytest.fail("opened")
    )
    with pytest.raises(BundleError, match=r"damaged: model/onnxruntime-cpu/model\.onnx"):
        Bundle(bundle)


def test_weights_outside_the_bundle_are_refused_before_the_model_is_opened(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even when the manifest was written to match."""
    import onnx

    name = "model/onnxruntime-cpu/model.onnx"
    model = onnx.load(bundle / name)
    weight = next(t for t in model.graph.initializer if t.name == "embedding")
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    entry = weight.external_data.add()
    entry.key, entry.value = "location", "../../../outside"
    (bundle / name).write_bytes(model.SerializeToString())
    digest = hashlib.sha256((bundle / name).read_bytes()).hexdigest()
    size = (bundle / name).stat().st_size
    small_bundle.edited(bundle, lambda m: m["files"][name].update(sha256=digest, size=size))
    monkeypatch.setattr(
        "optimizer.harness.bundle.engines.OrtRunner", lambda *a, **k: pytest.fail("opened")
    )
    with pytest.raises(BundleError, match="outside the bundle"):
        Bundle(bundle)


def test_a_link_in_place_of_a_file_counts_as_damage(bundle: Path, tmp_path: Path) -> None:
    path = bundle / "model" / "onnxruntime-cpu" / "model.onnx"
    path.rename(tmp_path / "elsewhere.onnx")
    path.symlink_to(tmp_path / "elsewhere.onnx")
    assert list_damaged_files(bundle, read_manifest(bundle)) == {"model/onnxruntime-cpu/model.onnx"}


def test_a_file_the_manifest_does_not_know_is_reported(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bundle / "model" / "extra.data").write_text("hello")
    code, document, _ = run("check", "--bundle", str(bundle), capsys=capsys)
    assert (code, document["unlisted"]) == (2, ["model/extra.data"])


NOTHING = {"sha256": "0" * 64, "size": 0, "measured": False}
BAD_MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "manifest_version 3": lambda m: m.update(manifest_version=3),
    "manifest_version 1 .* Package the model again": lambda m: m.update(manifest_version=1),
    "tokenizer/other. is used": lambda m: m["contract"]["tokenizer"].update(file="other"),
    "leaves the bundle": lambda m: m["files"].update({"../x": NOTHING}),
    r"files\['LICENSE'\].measured: the field is missing": lambda m: m["files"]["LICENSE"].pop(
        "measured"
    ),
    "'/etc/passwd' leaves": lambda m: m["engines"][1].update(model="/etc/passwd"),
    "'../timing' leaves": lambda m: m["engines"][0].update(timing_cache="../timing"),
    "'timing' is used and is not among": lambda m: m["engines"][0].update(timing_cache="timing"),
    "one of model_files": lambda m: m["engines"][1].update(model="model/other.onnx"),
    "not among the files": lambda m: m["engines"][1]["model_files"].append("model/other.onnx"),
    "is missing": lambda m: m.pop("engines"),
}


@pytest.mark.parametrize("message", BAD_MANIFESTS)
def test_a_manifest_that_cannot_be_trusted_is_refused(message: str, bundle: Path) -> None:
    with pytest.raises(BundleError, match=message):
        read_manifest(small_bundle.edited(bundle, BAD_MANIFESTS[message]))


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    assert main(["check", "--bundle", str(tmp_path)]) == 2


def test_no_text_is_an_error(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", typed(b""))
    code, document, _ = run("predict", "--bundle", str(bundle), capsys=capsys)
    assert (code, document["error"]) == (2, "InputError")


def test_texts_are_read_from_standard_input_one_per_line(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = predicted(bundle, *TEXTS, capsys=capsys)
    monkeypatch.setattr("sys.stdin", typed("\n".join(TEXTS).encode()))
    assert predicted(bundle, capsys=capsys) == wanted


def test_bench_reports_each_cell_by_stage_with_memory_and_size(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ("--batch", "1", "2", "--sequence", "8", "--iterations", "6")
    code, document, _ = run("bench", "--bundle", str(bundle), *grid, capsys=capsys)
    assert code == 0
    assert [(c["batch"], c["sequence"]) for c in document["cells"]] == [(1, 8), (2, 8)]
    for cell in document["cells"]:
        system = cell["systems"]["candidate"]
        assert set(system["stages"]) == {"pre", "forward", "post"}
        assert len(system["end_to_end"]["samples"]) == 6
    assert document["peak_memory"]["candidate"] > 10 << 20
    size = (bundle / "model" / "onnxruntime-cpu" / "model.onnx").stat().st_size
    assert document["size"]["candidate_bytes"] == size


def test_bench_times_the_recipes_grid_beside_the_ratio_recorded_when_built(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = {"p50": 3.0}
    speed = {
        "machine": {"cpu": "The Builder", "cores": 3},
        "threads": 0,
        "cells": [
            {
                "batch": 1,
                "sequence": 8,
                "systems": {"candidate": {"end_to_end": figures}},
                "ratio": {"median": 0.42, "interval": [0.41, None], "to": "onnxruntime-float"},
            }
        ],
    }
    text = json.dumps([{"target": "onnxruntime-cpu", "speed": speed}])
    (bundle / "report.json").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    grid = {"batch": [1, 2], "sequence": [8], "iterations": 5}

    def change(manifest: dict[str, Any]) -> None:
        manifest["recipe"]["validate"]["latency"] |= grid
        manifest["files"]["report.json"] |= {"sha256": digest, "size": len(text)}

    small_bundle.edited(bundle, change)
    assert main(["bench", "--bundle", str(bundle)]) == 0
    out = capsys.readouterr().out
    first, second = out.index("batch 1 x 8"), out.index("batch 2 x 8")
    recorded = "0.42 [0.41, ?] of onnxruntime-float's time (measured when built on The Builder, 3"
    assert recorded in out[first:second]
    assert "this shape was not measured" in out[second:]
    for word in ("p50", "p90", "p95", "p99", "end to end", "pre", "forward", "post", "5 rounds"):
        assert word in out[first:second], word
    assert "peak memory" in out
    (bundle / "report.json").write_text(text.replace("0.42", "0.01"))
    few = ("--batch", "1", "--iterations", "5")
    _, document, _ = run("bench", "--bundle", str(bundle), *few, capsys=capsys)
    assert document["recorded"] == {"missing": "damaged or missing: report.json"}


def test_a_pair_is_read_with_its_text(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = ("--pair", "poor", "--pair", "good")
    texts = ("good film", "never again")
    with Bundle(bundle) as opened:
        wanted = opened.predict(texts, ["poor", "good"])
        alone = opened.predict(texts)
    code, got, _ = predicted(bundle, *texts, *pairs, capsys=capsys)
    assert (code, [a["embedding"] for a in got]) == (0, [a["embedding"] for a in wanted])
    assert wanted != alone
    code, document, _ = run("predict", "--bundle", str(bundle), *texts, *pairs[:2], capsys=capsys)
    assert (code, document["where"]) == (2, "--pair")


def test_bench_refuses_a_sequence_longer_than_the_model_takes(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--sequence", "64")
    code, document, _ = run("bench", "--bundle", str(bundle), *asked, capsys=capsys)
    assert (code, document["accepted"]) == (2, "up to 32")


def test_a_tar_gives_the_same_answers_as_its_folder(
    made: Path, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = predicted(bundle, *TEXTS, capsys=capsys)
    assert predicted(made / "tiny-1.tar", *TEXTS, capsys=capsys) == wanted


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    return made


HOSTILE = {
    "up": member("top/../../x"),
    "absolute": member("/tmp/x"),
    "symbolic link": member("top/x", tarfile.SYMTYPE, "/etc/passwd"),
    "hard link": member("top/x", tarfile.LNKTYPE, "top/y"),
    "device": member("top/x", tarfile.CHRTYPE),
    "fifo": member("top/x", tarfile.FIFOTYPE),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_tar_is_refused_before_anything_is_written(kind: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.addfile(member("top/good"))
        archive.addfile(HOSTILE[kind])
    with pytest.raises(BundleError):
        unpack(tmp_path / "x.tar", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["x.tar"]


def test_a_cut_tar_leaves_nothing_behind(made: Path, tmp_path: Path) -> None:
    data = (made / "tiny-1.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(data[: len(data) // 2])
    with pytest.raises(BundleError, match="not a complete tar"):
        unpack(tmp_path / "cut.tar", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["cut.tar"]


def test_three_lines_have_three_answers_whatever_is_in_them(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = "good\u2028film\r\nbad\u0085film\x0cslow\n\nnever again\n".encode()
    monkeypatch.setattr("sys.stdin", typed(data))
    code, answers, err = predicted(bundle, "--batch-size", "2", capsys=capsys)
    assert code == 2
    assert ["embedding" in a for a in answers] == [True, True, False, True]
    assert (answers[2]["error"], answers[2]["where"]) == ("InputError", "line 3")
    assert "1 of 4 texts failed" in err
    monkeypatch.setattr("sys.stdin", typed(data))
    assert main(["predict", "--bundle", str(bundle)]) == 2
    lines = capsys.readouterr().out.removesuffix("\n").split("\n")
    assert [line.startswith("error: line 3") for line in lines] == [False, False, True, False]


def test_a_text_that_was_cut_says_so(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, answers, err = predicted(bundle, "good film", "good " * 70, capsys=capsys)
    assert code == 0
    assert [(a["truncated"], a["tokens"]) for a in answers] == [(False, 4), (True, 72)]
    assert "1 of 2 texts were truncated to 32 tokens" in err
    assert "text 2, has 72" in err


@pytest.mark.parametrize("data", [b"good\nbad\ncaf\xe9\n", b"good\nbad\n\xed\xa0\x80\n"])
def test_bytes_that_are_not_utf8_end_it_at_their_line(
    data: bytes, bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", typed(data))
    code, answers, _ = predicted(bundle, capsys=capsys)
    assert (code, ["embedding" in a for a in answers]) == (2, [True, True, False])
    assert answers[2]["where"] == "line 3"


@pytest.mark.parametrize("arguments", [("good", "b\udcff"), ("good", "--pair", "\ud800")])
def test_an_argument_that_is_no_text_is_named(
    arguments: tuple[str, ...], bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, (document,), _ = predicted(bundle, *arguments, capsys=capsys)
    assert (code, document["error"]) == (2, "InputError")
    assert "lone surrogate" in document["found"]


def test_a_tokenizer_the_manifest_does_not_list_is_not_read(bundle: Path) -> None:
    shutil.copy(bundle / "tokenizer" / "tokenizer.json", bundle / "tokenizer" / "other.json")
    small_bundle.edited(bundle, lambda m: m["contract"]["tokenizer"].update(file="other.json"))
    with pytest.raises(BundleError, match=r"tokenizer/other\.json' is used and is not among"):
        Bundle(bundle)
