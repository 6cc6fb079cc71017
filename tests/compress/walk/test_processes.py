"""Several processes compress to the bytes of one, also where one of them is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from optimizer.compress import processes, stage
from optimizer.compress.walk.deal import Deal
from optimizer.foundation.errors import MachineError
from optimizer.foundation.process import launch as launches
from optimizer.foundation.process.launch import ALONE, EndedError, Group, Processes
from optimizer.foundation.rounding.tolerance import UNIT
from optimizer.foundation.state import CompressedState
from optimizer.recipe.schema import Activations, Compress, Compression
from optimizer.store import digest_json
from tests import killing
from tests.compress import checkpoints, decoders
from tests.compress.checkpoints import contents

SUMS = 3
INT4 = {"methods": ["awq", "gptq"], "head": {**decoders.GROUPS, "bits": 8}}
INT8 = {"method": "smoothquant", "bias_correction": True, "activations": Activations()}


def fork(function: Callable[..., object], group: Group, folder: Path, *arguments: Any) -> None:
    """`launch`, with forks of this process, which has imported everything."""
    (folder / launches.MEETING).unlink(missing_ok=True)
    what = launches._ProcessStart(function, arguments, group, 1, folder, os.getpid())
    ranks = range(group.count)
    children = [killing.start(partial(launches._process, rank, what)) for rank in ranks]
    codes = [killing.wait(child) for child in children]
    if -signal.SIGKILL in codes:
        raise EndedError("killed", where=group.where)
    assert codes == [0] * group.count


def compress(section: Compression, source: Path, out: Path, count: int, sums: int = SUMS) -> Path:
    """Compress with `count` processes; returns `out`."""
    out.mkdir(exist_ok=True)
    chosen = Compress(partial_sums=sums, processes=count)
    stage.run(section.model_copy(update={"compress": chosen}), source, out)
    return out


@pytest.fixture(scope="module")
def decoder(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "out"
    return compress(decoders.section(llama, **INT4), llama, out, 1)


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "launch", fork)


def test_two_processes_compress_a_decoder_to_the_bytes_of_one(
    llama: Path, decoder: Path, tmp_path: Path
) -> None:
    two = compress(decoders.section(llama, **INT4), llama, tmp_path / "two", 2)
    assert contents(two) == contents(decoder)


def test_three_processes_compress_an_encoder_to_the_bytes_of_one(
    loaded: Path, tmp_path: Path
) -> None:
    section = checkpoints.section(loaded, **INT8)
    one, three = (compress(section, loaded, tmp_path / str(n), n) for n in (1, 3))
    assert contents(three) == contents(one)


@pytest.mark.parametrize("times", [1, 2])
def test_after_one_was_killed_all_start_again_to_the_same_bytes(
    times: int, llama: Path, decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section, out, write = decoders.section(llama, **INT4), tmp_path / "out", stage._write_segment

    def kill_some(*arguments: Any) -> None:
        second = arguments[0].name == "0001" and arguments[-1].rank == 1
        if second and len([*tmp_path.glob("killed*")]) < times:
            (tmp_path / f"killed {os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        write(*arguments)

    monkeypatch.setattr(stage, "_write_segment", kill_some)
    with pytest.raises(EndedError) if times == 2 else nullcontext():
        compress(section, llama, out, 2)
    if times == 2:  # no block was finished in between
        compress(section, llama, out, 1)
    assert len([*tmp_path.glob("killed*")]) == times
    assert contents(out) == contents(decoder)


def test_partial_sums_are_the_whole_sums_but_for_rounding(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section, add = decoders.section(llama, **INT4), Deal.sum
    hessians: dict[int, Tensor] = {}

    def first_hessian(deal: Deal, *arguments: Any) -> Mapping[str, Any]:
        sums = add(deal, *arguments)
        for each in sums.values():
            if hasattr(each, "H"):
                hessians.setdefault(len(deal.sizes), each.H.double().clone())
        return sums

    monkeypatch.setattr(Deal, "sum", first_hessian)
    whole = compress(section, llama, tmp_path / "whole", 1, sums=1)
    parts = compress(section, llama, tmp_path / "parts", 1, sums=SUMS)
    assert contents(whole) != contents(parts)  # else the order of the sums changes nothing
    # the error of a sum of n products: n roundoffs of the sum of their sizes, which is at most
    # sqrt(H_ii H_jj) (Cauchy-Schwarz)
    norms = hessians[1].diag().sqrt()
    tokens = section.calibrate.samples * section.calibrate.sequence_length
    bound = 2 * tokens * UNIT["fp32"] * torch.outer(norms, norms)
    assert ((hessians[SUMS] - hessians[1]).abs() <= bound).all()


def test_every_batch_is_in_one_share_and_the_shares_are_in_order() -> None:
    deals = [Deal.of(11, 4, Processes(rank, 3)) for rank in range(3)]
    assert [i for deal in deals for i in deal.own] == [*range(11)]
    assert [len(part) for deal in deals for part in deal.parts] == [2, 3, 3, 3]


def test_a_block_that_differs_between_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [CompressedState({}, {"bias": torch.tensor([value])}) for value in (1.0, 1.5)]
    digests = [processes._digest(part) for part in parts]
    monkeypatch.setattr(Processes, "gather", lambda *_: digests)
    with pytest.raises(MachineError, match=r"compressed block\.0 to different values"):
        processes.check_same(parts[0], "block.0", ALONE)


def test_the_number_of_processes_is_not_part_of_a_key(loaded: Path) -> None:
    sections = [Compress(partial_sums=4, processes=n) for n in (1, 4)]
    assert len({digest_json(s.model_dump(mode="json")) for s in sections}) == 1
    assert Compress(partial_sums=4).model_dump() != Compress().model_dump()


def test_more_processes_than_partial_sums_are_refused() -> None:
    with pytest.raises(ValidationError, match="give partial_sums: 4, or fewer processes"):
        Compress(processes=4)


def test_what_cannot_be_shared_stays_in_one_process_and_the_plan_says_so(loaded: Path) -> None:
    chosen = {"compress": Compress(partial_sums=2, processes=2)}
    learned = checkpoints.section(loaded, methods=("autoround",)).model_copy(update=chosen)
    assert processes.count_of(learned) == 1
    assert "in one process: autoround learns" in stage.remark(learned)
    shared = checkpoints.section(loaded, **INT8).model_copy(update=chosen)
    assert stage.remark(shared) == "in 2 processes"
