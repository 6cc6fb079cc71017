"""Binding by ctypes of llama.cpp's library, prebuilt in npm's @node-llama-cpp/linux-x64 3.22.1.

    npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xzf node-llama-cpp-linux-x64-3.22.1.tgz

`folder` is then package/bins/linux-x64. Structures follow llama.h of llama.cpp v0.5.0 up to the
fields that are needed here; the bytes after them are for the library alone. The module imports only
numpy, so that it runs in any environment.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Q4_0, Q4_K_M, Q8_0 = 2, 15, 7  # llama_ftype


class _Importance(ctypes.Structure):  # llama_model_imatrix_data
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.POINTER(ctypes.c_float)),
        ("size", ctypes.c_size_t),
    )


class _Quantization(ctypes.Structure):  # llama_model_quantize_params
    _fields_ = (
        ("nthread", ctypes.c_int32),
        ("ftype", ctypes.c_int),
        ("output_tensor_type", ctypes.c_int),
        ("token_embedding_type", ctypes.c_int),
        *((name, ctypes.c_bool) for name in ("allow_requantize", "quantize_output_tensor")),
        *((name, ctypes.c_bool) for name in ("only_copy", "pure", "keep_split", "dry_run")),
        ("imatrix", ctypes.POINTER(_Importance)),
        *((name, ctypes.c_void_p) for name in ("kv_overrides", "tt_overrides", "prune_layers")),
        ("max_buf_size", ctypes.c_size_t),
        ("later", ctypes.c_byte * 64),  # for a version with more fields
    )


class _Model(ctypes.Structure):  # llama_model_params, its defaults handed back as they are
    _fields_ = (("all", ctypes.c_byte * 512),)


class _Context(ctypes.Structure):  # llama_context_params
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max")),
        ("later", ctypes.c_byte * 512),
    )


class _Batch(ctypes.Structure):  # llama_batch
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("n_seq_id", ctypes.c_void_p),
        ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def load_library(folder: Path) -> ctypes.CDLL:
    """Load the library, with the kernels for this processor."""
    (base,) = folder.glob("libggml-base*.so")
    ctypes.CDLL(str(base), ctypes.RTLD_GLOBAL)
    (ggml,) = folder.glob("libggml.v*.so")
    backends = ctypes.CDLL(str(ggml), ctypes.RTLD_GLOBAL)
    backends.ggml_backend_load_all_from_path(ctypes.c_char_p(str(folder).encode()))
    (file,) = folder.glob("libllama.v*.so")
    llama = ctypes.CDLL(str(file))
    llama.llama_model_quantize_default_params.restype = _Quantization
    llama.llama_model_default_params.restype = _Model
    llama.llama_context_default_params.restype = _Context
    llama.llama_batch_get_one.restype = _Batch
    for name in ("model_load_from_file", "init_from_model", "model_get_vocab", "get_memory"):
        getattr(llama, f"llama_{name}").restype = ctypes.c_void_p
    llama.llama_get_logits.restype = ctypes.POINTER(ctypes.c_float)
    return llama


def quantize(
    folder: Path,
    source: Path,
    out: Path,
    ftype: int,
    importance: Mapping[str, Any] | None = None,
    requantize: bool = False,
) -> None:
    """Write the file that llama_model_quantize makes of `source`.

    importance: {tensor: float32 array}
    requantize: True where `source` is quantized itself

    Raises RuntimeError where the library refuses.
    """
    llama = load_library(folder)
    parameters = llama.llama_model_quantize_default_params()
    parameters.nthread, parameters.ftype, parameters.allow_requantize = 2, ftype, requantize
    weighted = importance or {}
    entries = (_Importance * (len(weighted) + 1))()
    for entry, (name, values) in zip(entries, weighted.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    if weighted:
        parameters.imatrix = entries
    names = (str(source).encode(), str(out).encode())
    code = llama.llama_model_quantize(*map(ctypes.c_char_p, names), ctypes.byref(parameters))
    if code:
        raise RuntimeError(f"llama_model_quantize ended with {code} for {out.name}")


class Text:
    """Generation of one text at a time, with the default KV cache (fp16)."""

    def __init__(self, folder: Path, model: Path, threads: int, tokens: int = 1024) -> None:
        self.library = llama = load_library(folder)
        path = ctypes.c_char_p(str(model).encode())
        opened_model = llama.llama_model_load_from_file(path, llama.llama_model_default_params())
        if not opened_model:
            raise RuntimeError(f"llama.cpp cannot open {model}")
        settings = llama.llama_context_default_params()
        settings.n_ctx = tokens
        self.model = ctypes.c_void_p(opened_model)
        self.context = ctypes.c_void_p(llama.llama_init_from_model(self.model, settings))
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context for {model}")
        llama.llama_set_n_threads(self.context, threads, threads)
        vocabulary = ctypes.c_void_p(llama.llama_model_get_vocab(self.model))
        self.vocabulary = int(llama.llama_vocab_n_tokens(vocabulary))

    def clear(self) -> None:
        """Empty the KV cache, for another text."""
        memory = ctypes.c_void_p(self.library.llama_get_memory(self.context))
        self.library.llama_memory_clear(memory, True)

    def step(self, ids: list[int], every: bool = False) -> Any:
        """Compute logits (vocabulary,) of the last token; with `every`, (tokens, vocabulary).

        Returns a view that the next step overwrites.
        """
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        batch = self.library.llama_batch_get_one(tokens, len(ids))
        wanted = (ctypes.c_int8 * len(ids))(*[1] * len(ids))
        if every:
            batch.logits = wanted
        code = self.library.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode ended with {code}")
        logits = self.library.llama_get_logits(self.context)
        shape = (len(ids) if every else 1, self.vocabulary)
        rows = np.ctypeslib.as_array(logits, shape=shape)
        return rows if every else rows[0]
