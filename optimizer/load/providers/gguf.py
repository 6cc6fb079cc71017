"""A GGUF file taken as a float checkpoint: de-quantized by transformers, tokenizer and all.

What comes out is exact: float32 holds every value of the file's own grids. (So a model that lay
on a 4-bit grid still does, and quantizing it to that same grid again loses nothing: measure on
another one.) Memory is that of the whole model in float32, twice: transformers' reader has no way
to hand out one tensor at a time.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch

from optimizer.foundation.errors import CheckpointError, MachineError
from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.progress import say
from optimizer.foundation.reading import reading
from optimizer.load import faithful
from optimizer.load.config import config_fields
from optimizer.load.generation import GENERATION_CONFIG
from optimizer.load.providers import gguf_file, gguf_header
from optimizer.load.providers.provider import Loaded, Provider
from optimizer.load.tokenizer.tokenizer import FILES
from optimizer.load.weights import Stored, Weights
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import auto_class
from optimizer.recipe.schema import Model

NEEDED = ("gguf", "accelerate")
SIZES = ("embedding_length", "attention.head_count")  # and block_count, of every architecture
LICENCE = "general.license"
TEMPLATE = "chat_template.jinja"
# How llama.cpp splits text before the merges, for those names that transformers does not know and
# reads as GPT-2's; the model saw every digit alone (llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM).
DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell")
AS_GPT2 = ("gpt-2", "default")


def file_of(folder: Path, section: Model) -> Path:
    """The GGUF file, its header checked. Raises CheckpointError when it is not in the folder or its
    header is wrong, MachineError when a package that reads it is missing."""
    name = str(section.gguf_file)
    file = folder / name
    if Path(name).name != name or not file.is_file():
        raise CheckpointError(
            f"there is no file {name!r} in {folder}",
            where="model.gguf_file",
            accepted=", ".join(sorted(p.name for p in folder.glob("*.gguf"))) or "a file name",
            fix="A folder inside the source goes into model.subfolder.",
        )
    missing = [p for p in NEEDED if find_spec(p) is None]
    if missing:
        raise MachineError(
            f"reading a GGUF file needs the package{'s' * (len(missing) > 1)} {', '.join(missing)}",
            where="model.gguf_file",
            fix=f"Run: pip install {' '.join(NEEDED)}",
        )
    gguf_header.check(file)
    return file


def config(folder: Path, section: Model) -> Any:
    """The transformers config that the file's metadata says. Raises as `file_of`, and
    CheckpointError for what transformers does not read."""
    from gguf import GGUFReader

    file = file_of(folder, section)
    with reading(file, fix=gguf_header.FIX):
        opened = GGUFReader(file)
        _check_sizes(opened, file)
        with quiet():
            model_config = gguf_file.config_of(folder, file.name, gguf_file.sizes(opened))
    config_fields.check(model_config.to_dict(), file)
    return model_config


def _check_sizes(opened: Any, file: Path) -> None:
    """Raise CheckpointError for a size that is missing, or that the file's tensors are too few or
    too small for: transformers would build a model of it first."""
    tensors = len(opened.tensors)
    values = sum(int(tensor.n_elements) for tensor in opened.tensors)
    architecture = str(_content(opened, "general.architecture"))
    for name, most in (*((size, values) for size in SIZES), ("block_count", tensors)):
        key = f"{architecture}.{name}"
        value = _content(opened, key)
        sizes = value if isinstance(value, list) and value else [value]
        if not all(type(n) is int and 0 < n <= most for n in sizes):
            raise CheckpointError(
                "it is missing" if value is None else f"{str(value)[:80]} was found",
                where=f"{file}: {key}",
                accepted=f"a whole number from 1 to {most:,}, which is what its tensors can hold",
                fix=gguf_header.FIX,
            )


def _content(opened: Any, key: str) -> Any:
    """The value of a metadata field; None where it is missing."""
    return opened.fields[key].contents() if key in opened.fields else None


def _metadata(opened: Any) -> dict[str, str]:
    """What the file says of its licence and its tokenizer, by the gguf library."""
    keys = (LICENCE, "tokenizer.ggml.pre", "tokenizer.ggml.model")
    return {name: str(_content(opened, name)) for name in keys if name in opened.fields}


def takes(section: Model, folder: Path) -> bool:
    """Where the recipe names a file."""
    del folder
    return section.gguf_file is not None


def read(section: Model, folder: Path, model_config: Any, out: Path) -> Loaded:
    """The model's parameters as transformers de-quantizes them, float32.

    Writes to `out` what a checkpoint has besides them: config.json, generation_config.json and the
    tokenizer with its chat template.
    """
    from gguf import GGUFReader

    file = file_of(folder, section)
    say(f"load: de-quantizing {file.name} to float32")
    with reading(file, fix=gguf_header.FIX), quiet():
        model = auto_class(section.task).from_pretrained(
            folder, config=model_config, dtype=torch.float32, **gguf_file.arguments(file.name)
        )
        opened = GGUFReader(file)
    gguf_file.check_whole(model, gguf_file.sizes(opened), file)
    model_config.architectures, model_config.dtype = [type(model).__name__], "float32"
    model_config.save_pretrained(out)
    if not (folder / GENERATION_CONFIG).is_file():
        model.generation_config.save_pretrained(out)
    metadata = _metadata(opened)
    _tokenizer(folder, section, metadata, out)
    for name in (GENERATION_CONFIG, TEMPLATE):  # beside the file: they say more than it does
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)
    weights: dict[str, Stored] = {name: p.detach() for name, p in model.named_parameters()}
    return Loaded(out, weights, metadata.get(LICENCE, ""))


def verify(section: Model, folder: Path, chosen: Weights, out: Path) -> None:
    """Raises OptimizeError naming the first parameter that differs from what the file, read a
    second time, says. Empties `chosen`: there is memory for one of them."""
    cast(dict[str, Stored], chosen.stored).clear()
    faithful.check(folder, section, open_checkpoint(out).tensors)


def _tokenizer(folder: Path, section: Model, metadata: dict[str, str], out: Path) -> None:
    """The folder's own tokenizer.json when there is one; else the tokenizer in the file."""
    from transformers import AutoTokenizer

    if (folder / "tokenizer.json").is_file():
        for name in FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, out / name)
        return
    with reading(folder / str(section.gguf_file), fix=gguf_header.FIX), quiet():
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=section.gguf_file)
    _split_as_the_file_says(tokenizer.backend_tokenizer, metadata)
    tokenizer.save_pretrained(out)


def _split_as_the_file_says(tokenizer: Any, metadata: dict[str, str]) -> None:
    """Set the pre-tokenizer that transformers' GGUF reader leaves out."""
    from tokenizers import pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or pre in AS_GPT2:
        return
    # what transformers knows it reads as a split by regex and then bytes; the rest, as GPT-2's
    if isinstance(tokenizer.pre_tokenizer, pre_tokenizers.Sequence):
        return
    if pre in DIGITS_ALONE:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        return
    say(
        f"load: how texts are split ({pre}) is not known to transformers' GGUF reader: they are "
        "split as GPT-2's; put the model's own tokenizer.json beside the file to be exact"
    )


GGUF = Provider("gguf", takes, read, verify)
