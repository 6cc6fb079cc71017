"""The decoder of engines, on a stand-in for the GPU: the cache stays on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.harness.contract import Contract
from optimizer.harness.errors import BundleError, InputError
from optimizer.harness.runtimes.trt.cuda import Cuda
from optimizer.harness.runtimes.trt.decoder import TrtDecoder
from optimizer.harness.runtimes.trt.run import TrtRunner
from tests.harness import small_model
from tests.harness import standin_gpu as standin

SPEC = small_model.GENERATION
LAYERS, HEADS, WIDTH = SPEC["layers"], SPEC["kv_heads"], SPEC["head_dim"]
CACHED = [f"{i}.{part}" for i in range(int(LAYERS)) for part in ("key", "value")]
LONGEST = 40


def summing() -> standin.Model:
    """A cache of the ids seen so far; a token's logits are the running sum of the ids."""

    def shapes(given: Any) -> dict[str, tuple[int, ...]]:
        rows, new = given["input_ids"]
        total = given[f"past_key_values.{CACHED[0]}"][2] + new
        present = (rows, HEADS, total, WIDTH)
        return {"logits": (rows, new, 3)} | {f"present.{n}": present for n in CACHED}

    def run(arrays: Any) -> dict[str, Any]:
        ids = arrays["input_ids"].astype(np.float32)
        made = {}
        for i, name in enumerate(CACHED):
            past = arrays[f"past_key_values.{name}"]
            new = np.broadcast_to(
                (ids * (i + 1))[:, None, :, None], (len(ids), HEADS, ids.shape[1], WIDTH)
            )
            made[f"present.{name}"] = np.concatenate([past, new.astype(past.dtype)], axis=2)
        before = arrays[f"past_key_values.{CACHED[0]}"][:, 0, :, 0].astype(np.float32).sum(1)
        running = before[:, None] + np.cumsum(ids, axis=1)
        made["logits"] = np.repeat(running[:, :, None], 3, axis=2).astype(np.float16)
        return made

    past = {f"past_key_values.{n}": "HALF" for n in CACHED}
    cached = ((1, HEADS, 0, WIDTH), (1, HEADS, 8, WIDTH), (4, HEADS, LONGEST, WIDTH))
    plain = {"input_ids": ((1, 1), (1, 8), (4, 16)), "attention_mask": ((1, 1), (1, 16), (4, 56))}
    return standin.Model(
        inputs={"input_ids": "INT64", "attention_mask": "INT64", **past},
        outputs={"logits": "HALF", **{f"present.{n}": "HALF" for n in CACHED}},
        profiles=[plain | dict.fromkeys(past, cached)],  # type: ignore[arg-type]
        shapes=shapes,
        run=run,
    )


@pytest.fixture
def gpu() -> standin.Runtime:
    return standin.Runtime()


@pytest.fixture
def runner(gpu: standin.Runtime, tmp_path: Path) -> TrtRunner:
    trt = standin.product(summing(), gpu)
    return TrtRunner(standin.engine_file(tmp_path), product="tensorrt", trt=trt, driver=Cuda(gpu))


def contract(**changes: Any) -> Contract:
    return Contract.from_json(small_model.contract("text-generation", **changes))


def fed(decoder: TrtDecoder, ids: Any) -> Any:
    ids = np.asarray(ids, np.int64)
    mask = np.ones((len(ids), decoder.past + ids.shape[1]), np.int64)
    return decoder.step({"input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize("capacity", [0, 4, 64])
def test_pieces_give_what_the_whole_gives(capacity: int, runner: TrtRunner) -> None:
    ids = np.random.default_rng(0).integers(1, 9, (2, 14))
    whole = fed(runner.decoder(contract()), ids)
    decoder = runner.decoder(contract(), capacity)
    pieces = [fed(decoder, ids[:, a:b]) for a, b in ((0, 5), (5, 6), (6, 7), (7, 14))]
    assert np.array_equal(np.concatenate(pieces, axis=1), whole)
    assert whole.dtype == np.float32
    assert decoder.past == 14


def test_the_cache_is_what_was_written_in_order(runner: TrtRunner) -> None:
    decoder = runner.decoder(contract())
    fed(decoder, [[1, 2, 3]])
    fed(decoder, [[4]])
    held = decoder.cache()
    assert held["present.0.key"][0, 0, :, 0].tolist() == [1, 2, 3, 4]
    assert held["present.1.value"][0, 1, :, 0].tolist() == [4, 8, 12, 16]


def test_a_step_copies_only_its_tokens_in_and_its_logits_out(
    runner: TrtRunner, gpu: standin.Runtime
) -> None:
    decoder = runner.decoder(contract(), capacity=32)
    fed(decoder, [[1, 2, 3]])
    gpu.calls.clear()
    fed(decoder, [[4]])
    assert gpu.calls == ["copy 1", "copy 1", "forward", "copy 2", "wait"]


def test_two_decoders_of_one_engine_do_not_mix(runner: TrtRunner) -> None:
    one, other = runner.decoder(contract()), runner.decoder(contract())
    fed(one, [[1, 2]])
    fed(other, [[7, 7, 7]])
    assert fed(one, [[3]])[0, 0, 0] == 6
    assert fed(other, [[1]])[0, 0, 0] == 22


def test_a_cache_longer_than_the_engine_takes_is_refused_and_nothing_is_lost(
    runner: TrtRunner,
) -> None:
    decoder = runner.decoder(contract())
    for _ in range(3):
        fed(decoder, [[1] * 14])
    with pytest.raises(InputError, match=rf"past_key_values.*axis 2 is 42 .*0 to {LONGEST}"):
        fed(decoder, [[1]])
    assert decoder.past == 42


def test_other_arrays_or_rows_are_refused(runner: TrtRunner) -> None:
    decoder = runner.decoder(contract())
    with pytest.raises(InputError, match="input_ids, attention_mask"):
        decoder.step({"input_ids": np.ones((1, 1), np.int64)})
    fed(decoder, [[1, 2]])
    with pytest.raises(InputError, match="2 rows were given, with 1 rows in the KV cache"):
        fed(decoder, [[1], [1]])


def test_an_engine_of_another_contract_is_refused(runner: TrtRunner) -> None:
    deeper = contract(generation={**SPEC, "layers": 3})
    with pytest.raises(BundleError, match=r"past_key_values\.2"):
        runner.decoder(deeper)


def test_a_product_that_captures_by_itself_is_told_not_to_for_steps_that_never_return(
    gpu: standin.Runtime, tmp_path: Path
) -> None:
    trt = standin.product(summing(), gpu)
    file = standin.engine_file(tmp_path)
    runner = TrtRunner(file, product="tensorrt-rtx", trt=trt, driver=Cuda(gpu))
    fed(runner.decoder(contract()), [[1, 2]])
    assert [c.how.cuda_graph_strategy for c in trt.engine.contexts] == [0]


def test_closing_gives_all_memory_back(runner: TrtRunner, gpu: standin.Runtime) -> None:
    decoder = runner.decoder(contract())
    fed(decoder, [[1, 2]])
    decoder.close()
    runner.close()
    assert gpu.live == {}


def test_a_decoder_that_is_dropped_gives_its_memory_back(
    runner: TrtRunner, gpu: standin.Runtime
) -> None:
    before = set(gpu.live)
    fed(runner.decoder(contract()), [[1, 2]])
    after = set(gpu.live) - before
    assert len(after) <= 1  # what passes between layers is the runner's


def test_a_decoder_outlives_its_runner_harmlessly(runner: TrtRunner, gpu: standin.Runtime) -> None:
    decoder = runner.decoder(contract())
    fed(decoder, [[1, 2]])
    runner.close()
    runner.close()
    del decoder
    assert gpu.live == {}
