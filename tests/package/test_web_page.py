"""The page's own code in node and in Chromium, with the packages that are fetched: answers equal to
the harness's, and refusals where they would not be."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.measure import chromium
from optimizer.foundation.errors import MachineError, OptimizeError
from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.commands.web import PageServer, find_pages
from optimizer.lower.web import npm
from optimizer.lower.web.build import FOLDERS
from optimizer.package import web_page
from optimizer.package.stage import write_requirements
from tests.harness import small_model
from tests.package.bundles import small_bundle, web_bundle

REGISTRY = "https://registry.npmjs.org"
ASK = Path(__file__).parent / "web_ask.mjs"
TEXTS = [
    "the film was good, and the staff were not",
    "ΟΔΟΣ ΣΑΣ İstanbul Crème brûlée ß",
    "東京 서울 हिन्दी a\tb\n\nc  d\u200be 👩\u200d🔬",
    "[SEP] in a text [CLS]",
    " ".join(["the film was good"] * 40),
]
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


@pytest.fixture(scope="session")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packages that build fetches from the registry."""
    folder = tmp_path_factory.mktemp("npm")
    try:
        for name, package in FOLDERS.items():
            npm.write(package, REGISTRY, folder / "web" / name)
    except MachineError as e:
        pytest.skip(f"no npm registry: {e}")
    return folder


@pytest.fixture(scope="module")
def made(fetched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with the small model. Read-only."""
    return web_bundle.make(tmp_path_factory.mktemp("made"), fetched)


def asked(bundle: Path, texts: list[str], which: str = "quantized") -> list[dict[str, Any]]:
    """Output of node: {answer} or {error} per text; one {refused} where it does not open."""
    shutil.copyfile(ASK, bundle / "ask.mjs")
    command = ["node", str(bundle / "ask.mjs"), which]
    done = subprocess.run(
        command, input=json.dumps(texts), capture_output=True, text=True, check=True, timeout=300
    )
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def numbers(answer: Any) -> list[float]:
    """Every number of an answer, in order."""
    if isinstance(answer, dict):
        return [x for value in answer.values() for x in numbers(value)]
    if isinstance(answer, list):
        return [x for value in answer for x in numbers(value)]
    return [] if isinstance(answer, str) else [answer]


def assert_equal(answers: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Within the limit that the page itself keeps, of the length of an answer."""
    for one, other in zip(answers, expected, strict=True):
        assert list(one["answer"]) == list(other)
        ours, theirs = np.array(numbers(one["answer"])), np.array(numbers(other))
        assert ours.shape == theirs.shape
        limit = web_bundle.LIMIT * np.linalg.norm(theirs)
        assert np.linalg.norm(ours - theirs) <= limit
        assert one["answer"].get("label") == other.get("label")


def predicted(bundle: Path, texts: list[str]) -> list[dict[str, Any]]:
    with Bundle(bundle, threads=1) as opened:
        return opened.predict(texts, batch_size=1)


CONTRACTS: dict[str, dict[str, Any]] = {
    "mean": {},
    "cls": {"pooling": "cls"},
    "not normalized": {"normalize": False},
    "feature-extraction": {"task": "feature-extraction"},
}


@needs_node
@pytest.mark.slow
@pytest.mark.parametrize("name", CONTRACTS)
def test_node_answers_as_the_harness_does(fetched: Path, tmp_path: Path, name: str) -> None:
    bundle = web_bundle.make(tmp_path, fetched, **CONTRACTS[name])
    expected = predicted(bundle, TEXTS)
    assert_equal(asked(bundle, TEXTS), expected)


@needs_node
@pytest.mark.slow
@pytest.mark.parametrize("labels", [None, ["score"]])
def test_labels_are_those_of_the_harness(
    fetched: Path, tmp_path: Path, labels: list[str] | None
) -> None:
    changes = {"labels": labels or [f"label {i}" for i in range(small_model.WIDTH)]}
    bundle = web_bundle.make(tmp_path, fetched, task="text-classification", **changes)
    assert_equal(asked(bundle, TEXTS), predicted(bundle, TEXTS))


@needs_node
@pytest.mark.slow
def test_the_float_model_answers_beside_it(made: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(made, tmp_path / "bundle"))
    quantized, unquantized = asked(bundle, TEXTS[:1]), asked(bundle, TEXTS[:1], "float")
    ours, theirs = (np.array(numbers(a[0]["answer"])) for a in (quantized, unquantized))
    assert web_bundle.LIMIT < np.linalg.norm(ours - theirs) < 0.1


@needs_node
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no token"),
        ("\ud800", "surrogate"),
        ("x" * (1 << 20) + "y", "Accepted: up to"),
        ("the \U00020000 film", "U+20000 makes other tokens"),
    ],
)
def test_a_text_that_would_be_answered_otherwise_is_refused(
    made: Path, tmp_path: Path, text: str, why: str
) -> None:
    bundle = Path(shutil.copytree(made, tmp_path / "bundle"))
    (result,) = asked(bundle, [text])
    assert why in result["error"]


def _output(document: dict[str, Any]) -> None:
    output = document["models"]["quantized"]["outputs"][0]
    values = np.frombuffer(base64.b64decode(output["data"]), "<f4").copy()
    values[7] += 0.1
    output["data"] = base64.b64encode(values.tobytes()).decode()


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "output": (_output, "correct runs lie within"),
    "no limit": (lambda d: d["models"]["quantized"].pop("limit"), "TypeError"),
    "token": (lambda d: d["check"][0]["ids"].append(3), "tokens are not the harness's"),
    "cut": (lambda d: d["contract"]["tokenizer"].update(max_length=31), "tokens are not"),
    "pooling": (lambda d: d["contract"].update(pooling="cls"), "another answer"),
    "normalize": (lambda d: d["contract"].update(normalize=False), "another answer"),
    "digest": (lambda d: [f.update(sha256="0" * 64) for f in d["files"].values()], "damaged"),
    "task": (lambda d: d["contract"].update(task="token-classification"), "not answered here"),
}


@needs_node
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_answered_where_the_recorded_answers_are_others(
    made: Path, tmp_path: Path, fault: str
) -> None:
    bundle = Path(shutil.copytree(made, tmp_path / "bundle"))
    change, why = FAULTS[fault]
    document = json.loads((bundle / "web" / "bundle.json").read_text())
    change(document)
    (bundle / "web" / "bundle.json").write_text(json.dumps(document))
    (result,) = asked(bundle, TEXTS[:1])
    assert why in result["refused"]


@needs_node
@pytest.mark.slow
def test_no_character_makes_other_tokens_unnoticed(made: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(made, tmp_path / "bundle"))
    points = [c for c in range(0x20, 0x2FFFF) if not 0xD800 <= c < 0xE000]
    texts = [" ".join(f"a{chr(c)}b {chr(c)}" for c in points[i : i + 1]) for i in points[::7]]
    (bundle / "texts.json").write_text(json.dumps(texts))
    results = asked(bundle, [], "tokens")
    with Bundle(bundle, threads=1) as opened:
        encode = opened.encoder.cut_at(opened.max_length).encode
        expected = [encode(text).ids for text in texts]
    others = [t for t, r, e in zip(texts, results, expected, strict=True) if r not in (None, e)]
    assert others == []
    assert sum(r is not None for r in results) > len(texts) // 2


@needs_node
@pytest.mark.slow
def test_a_final_sigma_is_lowercased_letter_by_letter(made: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(made, tmp_path / "bundle"))
    path = bundle / "tokenizer" / "tokenizer.json"
    document = json.loads(path.read_text())
    vocabulary = document["model"]["vocab"]
    for piece in ("ο", "##δ", "##ο", "##σ", "##ς"):
        vocabulary[piece] = len(vocabulary)
    path.write_text(json.dumps(document))
    (bundle / "texts.json").write_text(json.dumps(["ΟΔΟΣ"]))
    ids = [vocabulary[p] for p in ("[CLS]", "ο", "##δ", "##ο", "##σ", "[SEP]")]
    assert Tokenizer.from_file(str(path)).encode("ΟΔΟΣ").ids[: len(ids)] == ids
    assert asked(bundle, [], "tokens") == [ids]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Chromium]:
    if chromium.program() is None:
        pytest.skip("chromium is not installed")
    opened = chromium.Chromium(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_chromium_answers_as_the_harness_does(
    made: Path, page: chromium.Chromium, threads: int
) -> None:
    expected = predicted(made, TEXTS)
    with PageServer(find_pages(made)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.open(f"{server.address}?threads={threads}")
        page.evaluate("page.complete")
        asked = f"(async () => {{ const all = []; for (const t of {json.dumps(TEXTS)}) "
        asked += "all.push(await page.ask(t)); return all; })()"
        results = page.evaluate(asked)
        text = page.evaluate("document.body.innerText")
        isolated = page.evaluate("crossOriginIsolated")
        server.shutdown()
    assert isolated
    assert "Ready" in text
    assert all(set(r) == {"quantized", "float"} for r in results)
    assert_equal([r["quantized"] for r in results], expected)


@pytest.mark.slow
def test_the_page_shows_answer_times_and_the_float_beside(
    made: Path, page: chromium.Chromium
) -> None:
    with PageServer(find_pages(made)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.open(server.address)
        page.evaluate("page.complete")
        page.evaluate("document.getElementById('text').value = 'the film <b>was</b> good'")
        page.evaluate("document.getElementById('form').requestSubmit()")
        page.evaluate("new Promise((done) => setTimeout(done, 500))")
        rows = page.evaluate("document.getElementById('times').innerText")
        answer = page.evaluate("document.getElementById('answer').innerText")
        server.shutdown()
    assert "32 numbers" in answer
    assert "quantized" in rows
    assert "float" in rows
    assert "×" in rows


@pytest.mark.slow
def test_a_page_whose_check_fails_says_so_and_stays_shut(
    made: Path, tmp_path: Path, page: chromium.Chromium
) -> None:
    bundle = Path(shutil.copytree(made, tmp_path / "bundle"))
    document = json.loads((bundle / "web" / "bundle.json").read_text())
    _output(document)
    (bundle / "web" / "bundle.json").write_text(json.dumps(document))
    files = {p.relative_to(bundle).as_posix(): p for p in bundle.rglob("*") if p.is_file()}
    with PageServer(files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.open(server.address)
        state = page.evaluate("document.documentElement.dataset.state")
        shut = page.evaluate("document.querySelector('button').disabled")
        server.shutdown()
    assert (state, shut) == ("refused", True)


@pytest.fixture(scope="module")
def without_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose onnxruntime-web and tokenizer are empty files. Read-only."""
    return web_bundle.make(tmp_path_factory.mktemp("without"), include_float=False)


def test_the_page_has_the_harness_s_tokens_answers_and_the_digests(without_packages: Path) -> None:
    bundle = without_packages
    document = json.loads((bundle / "web" / "bundle.json").read_text())
    manifest = json.loads((bundle / "manifest.json").read_text())
    texts = [row["text"] for row in document["check"]]
    model = document["models"]["quantized"]
    assert model["answers"][:-1] == predicted(bundle, texts[:-1])
    assert len(document["check"][-1]["ids"]) == document["contract"]["tokenizer"]["max_length"]
    assert model["limit"] == web_bundle.LIMIT
    for name, entry in document["files"].items():
        assert {k: manifest["files"][name][k] for k in entry} == entry
    assert model["model"] in document["files"]


def test_the_float_model_is_there_only_where_the_recipe_wants_it(without_packages: Path) -> None:
    document = json.loads((without_packages / "web" / "bundle.json").read_text())
    assert list(document["models"]) == ["quantized"]
    assert not (without_packages / "web" / "float").exists()


def test_without_a_limit_of_the_ledger_no_page_is_made() -> None:
    entry = {"hop": "engine", "spread": {"outputs": {"logits": {"limit": 0.5}}}}
    assert web_page.limit_of({"ledger": [entry]}, "engine", "logits") == 0.5
    for ledger in ([], [{"hop": "engine", "spread": None}], [{**entry, "hop": "lower"}]):
        with pytest.raises(OptimizeError, match="hop engine of the ledger has no measured limit"):
            web_page.limit_of({"ledger": ledger}, "engine", "logits")


def test_a_page_needs_no_runtime_of_python(tmp_path: Path) -> None:
    asked = small_bundle.recipe(tmp_path, (web_bundle.WEB,))
    lines = write_requirements(asked.targets, asked.model.task).splitlines()
    assert [line.partition("==")[0] for line in lines] == ["numpy", "tokenizers"]
