"""Version 1 of the compressed state, byte by byte, and a second reader made from the
specification alone. Old states must stay readable: change the version, not this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.compress.methods.weights.rtn import rtn
from optimizer.foundation import state
from optimizer.foundation.qtensor import QTensor, Scheme
from optimizer.foundation.state import CompressedState, Note, Range
from tests.conftest import heavy_tailed

STATE_JSON = (
    '{"activations":"tensor","factors":["a:input"],'
    '"notes":[{"module":"head","what":"float","why":"keep_float: head"}],'
    '"ranges":{"a:input":[-1.0,3.0]},"replaced":["a.bias"],'
    '"schemes":{"a.weight":{"bits":8,"granularity":"channel","group_size":null,"inputs":3,'
    '"symmetric":true},"b.weight":{"bits":4,"granularity":"channel","group_size":null,'
    '"inputs":3,"symmetric":false}},"sparsity":{},"version":1}'
)
HEADER = (
    '{"a.bias":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
    '"a.weight.scale":{"dtype":"F32","shape":[1,1],"data_offsets":[4,8]},'
    '"a:input.factor":{"dtype":"F32","shape":[3],"data_offsets":[8,20]},'
    '"b.weight.scale":{"dtype":"F32","shape":[2,1],"data_offsets":[20,28]},'
    '"a.weight.codes":{"dtype":"I8","shape":[1,3],"data_offsets":[28,31]},'
    '"b.weight.zero_point":{"dtype":"I8","shape":[2,1],"data_offsets":[31,33]},'
    '"b.weight.codes":{"dtype":"U8","shape":[2,2],"data_offsets":[33,37]}}    '
)
DATA = (
    "0000c03f"  # a.bias            1.5
    "0000003f"  # a.weight.scale    0.5
    "0000803f 00000040 0000003f"  # a:input.factor    1, 2, 0.5
    "0000803e 00000040"  # b.weight.scale    0.25, 2
    "81 00 7f"  # a.weight.codes    -127, 0, 127  # prose: ok
    "fe 03"  # b.weight.zero_point    -2, 3
    "f8 07 10 02"  # b.weight.codes    -8, -1 | 7, pad | 0, 1 | 2, pad  # prose: ok
)
TENSORS = bytes.fromhex("e001000000000000") + HEADER.encode() + bytes.fromhex(DATA)


def tiny() -> CompressedState:
    return CompressedState(
        weights={
            "b.weight": QTensor(
                torch.tensor([[-8, -1, 7], [0, 1, 2]], dtype=torch.int8),
                torch.tensor([[0.25], [2.0]]),
                torch.tensor([[-2], [3]], dtype=torch.int8),
                Scheme(4, False),
            ),
            "a.weight": QTensor(
                torch.tensor([[-127, 0, 127]], dtype=torch.int8),
                torch.tensor([[0.5]]),
                None,
                Scheme(8),
            ),
        },
        replaced={"a.bias": torch.tensor([1.5])},
        ranges={"a:input": Range(-1.0, 3.0)},
        factors={"a:input": torch.tensor([1.0, 2.0, 0.5])},
        activations="tensor",
        notes=(Note("head", "float", "keep_float: head"),),
    )


def second_reader(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """{parameter: its float value}, from the byte specification, with numpy only."""
    document = json.loads((folder / "state.json").read_text())
    raw = (folder / "tensors.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    kinds = {"F32": np.float32, "I8": np.int8, "U8": np.uint8}
    entries = {
        name: np.frombuffer(data[slice(*e["data_offsets"])], kinds[e["dtype"]]).reshape(e["shape"])
        for name, e in header.items()
    }
    values = {name: entries[name] for name in document["replaced"]}
    for parameter, scheme in document["schemes"].items():
        codes, scale = entries[f"{parameter}.codes"], entries[f"{parameter}.scale"]
        if scheme["bits"] < 8:
            nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
            codes = np.where(nibbles > 7, nibbles.astype(np.int8) - 16, nibbles)
            codes = codes[:, : scheme["inputs"]]
        rows, groups = len(codes), scale.shape[1]
        zero = 0 if scheme["symmetric"] else entries[f"{parameter}.zero_point"]
        wide = codes.astype(np.float32).reshape(rows, groups, -1)
        zero = np.broadcast_to(np.float32(zero), scale.shape)[..., None]
        values[parameter] = ((wide - zero) * scale[..., None]).reshape(rows, -1)
    return values


def test_the_tiny_state_is_these_bytes(tmp_path: Path) -> None:
    state.write(tiny(), tmp_path)
    assert (tmp_path / "state.json").read_text() == STATE_JSON
    assert (tmp_path / "tensors.safetensors").read_bytes() == TENSORS


def test_these_bytes_are_the_tiny_state(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(STATE_JSON)
    (tmp_path / "tensors.safetensors").write_bytes(TENSORS)
    got = state.read(tmp_path)
    assert got.weights["a.weight"].dequantize().tolist() == [[-63.5, 0.0, 63.5]]
    assert got.weights["b.weight"].dequantize().tolist() == [[-1.5, 0.25, 2.25], [-6.0, -4.0, -2.0]]
    assert got.replaced["a.bias"].tolist() == [1.5]
    assert got.factors["a:input"].tolist() == [1.0, 2.0, 0.5]
    assert got.ranges["a:input"].zero_point == 64
    assert got.ranges["a:input"].scale == 0.0157470703125  # 4 / 255 on the bfloat16 grid


@pytest.mark.parametrize(
    "scheme",
    [Scheme(8), Scheme(8, False, "tensor"), Scheme(4, True, "group", 8), Scheme(3, False)],
    ids=str,
)
def test_a_second_reader_made_from_the_specification_agrees(scheme: Scheme, tmp_path: Path) -> None:
    q = rtn(heavy_tailed((5, 16), 9), scheme)
    state.write(CompressedState({"w": q}, {"b": torch.tensor([0.5])}), tmp_path)
    values = second_reader(tmp_path)
    assert np.array_equal(values["w"], q.dequantize().numpy())
    assert values["b"].tolist() == [0.5]
