"""GGUF files that are wrong: a good small one with its fields and bytes changed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.hostile.case import Case

FILE = "model/tiny.gguf"
LOAD = ("run", "recipe.yaml", "--until", "load", "--set", "model.gguf_file=tiny.gguf")
WIDTH, INNER, HEADS, KV_HEADS, BLOCKS, WORDS = 64, 128, 4, 2, 2, 64


def write(
    file: Path, changed: dict[str, Any] | None = None, left_out: tuple[str, ...] = ()
) -> None:
    """A llama of two blocks in float32, with a byte-level tokenizer. changed: metadata fields."""
    from gguf import GGUFWriter

    fields: dict[str, Any] = {
        "llama.block_count": BLOCKS,
        "llama.context_length": 128,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": WORDS,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [chr(33 + i) for i in range(WORDS)],
        "tokenizer.ggml.token_type": [3 if i < 2 else 1 for i in range(WORDS)],
        "tokenizer.ggml.merges": ["# $"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **(changed or {}),
    }
    writer = GGUFWriter(str(file), "llama")
    for name, value in fields.items():
        if name in left_out or value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value) if 0 <= value < 2**32 else writer.add_int64(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    g = np.random.default_rng(0)
    shapes = {"token_embd.weight": (WORDS, WIDTH), "output_norm.weight": (WIDTH,)}
    for i in range(BLOCKS):
        shapes |= {
            f"blk.{i}.attn_q.weight": (WIDTH, WIDTH),
            f"blk.{i}.attn_k.weight": (WIDTH // HEADS * KV_HEADS, WIDTH),
            f"blk.{i}.attn_v.weight": (WIDTH // HEADS * KV_HEADS, WIDTH),
            f"blk.{i}.attn_output.weight": (WIDTH, WIDTH),
            f"blk.{i}.ffn_gate.weight": (INNER, WIDTH),
            f"blk.{i}.ffn_up.weight": (INNER, WIDTH),
            f"blk.{i}.ffn_down.weight": (WIDTH, INNER),
            f"blk.{i}.attn_norm.weight": (WIDTH,),
            f"blk.{i}.ffn_norm.weight": (WIDTH,),
        }
    for name, shape in shapes.items():
        if name not in left_out:
            writer.add_tensor(name, g.standard_normal(shape).astype(np.float32) * 0.05)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


FIELDS: dict[str, dict[str, Any]] = {
    "no heads": {"llama.attention.head_count": 0},
    "no key heads": {"llama.attention.head_count_kv": 0},
    "heads that do not divide": {"llama.attention.head_count": 7},
    "heads that are a word": {"llama.attention.head_count": "four"},
    "no blocks": {"llama.block_count": 0},
    "a billion blocks": {"llama.block_count": 10**9},
    "fewer blocks": {"llama.block_count": 1},
    "more blocks": {"llama.block_count": 3},
    "no width": {"llama.embedding_length": 0},
    "a billion wide": {"llama.embedding_length": 10**9},
    "a width that is a list": {"llama.embedding_length": [64, 64]},
    "a vocabulary of a billion": {"llama.vocab_size": 4 * 10**9},
    "an epsilon of NaN": {"llama.attention.layer_norm_rms_epsilon": float("nan")},
    "a base of zero": {"llama.rope.freq_base": 0.0},
    "no context": {"llama.context_length": 0},
    "no tokens": {"tokenizer.ggml.tokens": None},
    "tokens that are numbers": {"tokenizer.ggml.tokens": list(range(64))},
    "another tokenizer": {"tokenizer.ggml.model": "nonsense"},
    "merges of nothing": {"tokenizer.ggml.merges": ["nonsense"]},
    "an end beyond": {"tokenizer.ggml.eos_token_id": 10**9},
    "another architecture": {"general.architecture": "nonsense"},
}
LEFT_OUT = (
    "llama.block_count",
    "llama.attention.head_count",
    "llama.embedding_length",
    "tokenizer.ggml.model",
    "token_embd.weight",
    "blk.1.ffn_up.weight",
    "output_norm.weight",
)


def field(key: bytes, kind: int, value: bytes) -> bytes:
    """A metadata field. kind: of its value."""
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def array(kind: int, count: int, value: bytes = b"") -> bytes:
    """An array's bytes, which may name more elements than follow."""
    return struct.pack("<IQ", kind, count) + value


def tensor(name: bytes, *axes: int, kind: int = 0, offset: int = 0, count: int = -1) -> bytes:
    """A tensor's description in the header.

    count: number of axes that it claims; negative for the true number
    """
    number = len(axes) if count < 0 else count
    sizes = struct.pack(f"<I{len(axes)}Q", number, *axes)
    return struct.pack("<Q", len(name)) + name + sizes + struct.pack("<IQ", kind, offset)


def header(*fields: bytes, tensors: tuple[bytes, ...] = (), **counts: int) -> bytes:
    """A file of a header and 1 kB of data. counts: of tensors and fields, where not true."""
    named = counts.get("tensors_named", len(tensors)), counts.get("fields_named", len(fields))
    return b"GGUF" + struct.pack("<IQQ", 3, *named) + b"".join((*fields, *tensors)) + b"\0" * 1000


HEADERS: dict[str, Callable[[], bytes]] = {
    "an array of 2**28 strings": lambda: header(field(b"a", 9, array(8, 2**28))),
    "an array of 2**33 bytes": lambda: header(field(b"a", 9, array(0, 2**33))),
    "an array of 2**60 numbers": lambda: header(field(b"a", 9, array(12, 2**60))),
    "an array whose bytes overflow": lambda: header(field(b"a", 9, array(12, 2**61 + 1))),
    "an array of arrays": lambda: header(field(b"a", 9, array(9, 2, array(9, 2)))),
    "an array of an unknown type": lambda: header(field(b"a", 9, array(99, 2))),
    "a value of an unknown type": lambda: header(field(b"a", 99, b"")),
    "a million keys": lambda: header(fields_named=10**6),
    "a million keys that are there": lambda: header(
        *[field(b"%d" % i, 7, b"\1") for i in range(10**6)]
    ),
    "a million tensors": lambda: header(tensors_named=10**6),
    "a million tensors of nothing": lambda: header(tensors=(tensor(b""),) * 10**6),
    "three million elements": lambda: header(
        field(b"a", 9, array(0, 3 * 10**6, b"\0" * 3 * 10**6))
    ),
    "a string of 2**63 bytes": lambda: header(field(b"a", 8, struct.pack("<Q", 2**63))),
    "a key of 1 MB": lambda: header(field(b"k" * 10**6, 7, b"\1")),
    "a tensor of 2**62 numbers": lambda: header(tensors=(tensor(b"t", 2**31, 2**31),)),
    "a tensor whose size overflows": lambda: header(
        tensors=(tensor(b"t", 2**32, 2**32, 2**32, 2**32),)
    ),
    "a tensor of a million axes": lambda: header(tensors=(tensor(b"t", 1, count=10**6),)),
    "a tensor beyond the end": lambda: header(tensors=(tensor(b"t", 8, offset=2**63),)),
    "a tensor of an unknown type": lambda: header(tensors=(tensor(b"t", 8, kind=999),)),
    "a thousand tensors in one place": lambda: header(
        tensors=tuple(tensor(b"t%d" % i, 250) for i in range(1000))
    ),
}
"""Of each the header alone is wrong, and says so before anything is made of it."""


def _at(offset: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:offset] + value + raw[offset + len(value) :]


BYTES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda b: b"",
    "cut in its header": lambda b: b[:100],
    "cut in its tensors": lambda b: b[:-5000],
    "another magic": _at(0, b"GGML"),
    "version 99": _at(4, struct.pack("<I", 99)),
    "a huge tensor count": _at(8, struct.pack("<Q", 2**40)),
    "the most tensors": _at(8, struct.pack("<Q", 2**64 - 1)),
    "a huge field count": _at(16, struct.pack("<Q", 2**40)),
    "a huge name": _at(24, struct.pack("<Q", 2**40)),
    "zeros": lambda b: b"\0" * 4096,
    "twice": lambda b: b + b,
}
HARMLESS = ("an epsilon of NaN", "a base of zero", "twice", "more blocks", "merges of nothing")


def cases() -> list[Case]:
    def fields(changed: dict[str, Any], left_out: tuple[str, ...] = ()) -> Callable[[Path], None]:
        return lambda folder: write(folder / FILE, changed, left_out)

    def raw(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
        def write_changed(folder: Path) -> None:
            write(folder / FILE)
            (folder / FILE).write_bytes(change((folder / FILE).read_bytes()))

        return write_changed

    made = {f"field: {n}": fields(c) for n, c in FIELDS.items()}
    made |= {f"without {n}": fields({}, (n,)) for n in LEFT_OUT}
    made |= {f"bytes: {n}": raw(c) for n, c in BYTES.items()}
    made |= {f"header: {n}": raw(lambda _, b=b: b()) for n, b in HEADERS.items()}
    return [
        Case(
            f"gguf {n}",
            w,
            LOAD,
            ("tiny.gguf",),
            harmless=n.removeprefix("field: ") in HARMLESS or n == "bytes: twice",
        )
        for n, w in made.items()
    ]
