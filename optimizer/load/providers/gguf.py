"""Read a GGUF file as a float checkpoint that transformers de-quantizes, tokenizer included.

Values are exact, because float32 holds every value of the file's grids; so quantizing a 4-bit file
again to the same grid loses nothing and measures nothing. Memory is twice the model in float32,
because transformers cannot read one tensor at a time.
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
from optimizer.harness import tasks
from optimizer.load import faithful
from optimizer.load.config import config_fields
from optimizer.load.generation import GENERATION_CONFIG
from optimizer.load.providers import gguf_file, gguf_header
from optimizer.load.providers.gguf_header import GgufHeader
from optimizer.load.providers.provider import Loaded, Provider
from optimizer.load.tokenizer.tokenizer import FILES
from optimizer.load.weights import SourceWeights, Stored
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import choose_auto_class
from optimizer.recipe.schema import Model

NEEDED = ("gguf", "accelerate")
SIZES = ("embedding_length", "attention.head_count")  # required, with block_count
LICENCE = "general.license"
TEMPLATE = "chat_template.jinja"
# pre-tokenizers of llama.cpp that split every digit and that transformers reads as GPT-2's
# (llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM)
DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell")
AS_GPT2 = ("gpt-2", "default")


def find_file(folder: Path, section: Model) -> tuple[Path, GgufHeader]:
    """The GGUF file and its header, which is checked. Raises CheckpointError for a missing file or
    a wrong header, MachineError for a missing package."""
    name = str(section.gguf_file)
    file = folder / name
    if Path(name).name != name or not file.is_file():
        raise CheckpointError(
            f"{folder} has no file {name!r}",
            where="model.gguf_file",
            accepted=", ".join(sorted(p.name for p in folder.glob("*.gguf"))) or "a file name",
            fix="Give the file's name alone; name a folder inside the source in model.subfolder.",
        )
    missing = [p for p in NEEDED if find_spec(p) is None]
    if missing:
        raise MachineError(
            f"reading a GGUF file needs the package{'s' * (len(missing) > 1)} {', '.join(missing)}",
            where="model.gguf_file",
            fix=f"Run: pip install {' '.join(NEEDED)}",
        )
    return file, gguf_header.read(file)


def config(folder: Path, section: Model) -> Any:
    """Build the transformers config from the metadata of a GGUF file. Raises as find_file, and
    CheckpointError for a file that transformers cannot read."""
    file, header = find_file(folder, section)
    _check_sizes(header, file)
    with reading(file, fix=gguf_header.FIX), quiet():
        model_config = gguf_file.read_config(folder, file.name, header.tensors)
    config_fields.check(model_config.to_dict(), file)
    return model_config


def _check_sizes(header: GgufHeader, file: Path) -> None:
    """Raise CheckpointError for a size in a GGUF header that is missing or larger than the file's
    tensors allow, before transformers builds a model of it."""
    tensors, values = len(header.tensors), sum(header.tensors.values())
    architecture = str(header.fields.get("general.architecture"))
    for name, most in (*((size, values) for size in SIZES), ("block_count", tensors)):
        key = f"{architecture}.{name}"
        value = header.fields.get(key)
        sizes = value if isinstance(value, list) and value else [value]
        if not all(type(n) is int and 0 < n <= most for n in sizes):
            raise CheckpointError(
                "it is missing" if value is None else f"{str(value)[:80]} was found",
                where=f"{file}: {key}",
                accepted=f"a whole number from 1 to {most:,}, the most that its tensors can hold",
                fix=gguf_header.FIX,
            )


def _metadata(header: GgufHeader) -> dict[str, str]:
    """Return {key: value} of the metadata fields of the licence and the tokenizer, where they
    exist."""
    keys = (LICENCE, "tokenizer.ggml.pre", "tokenizer.ggml.model")
    return {name: str(header.fields[name]) for name in keys if name in header.fields}


def takes(section: Model, folder: Path) -> bool:
    """Return True where the recipe names a GGUF file."""
    del folder
    return section.gguf_file is not None


def read(section: Model, folder: Path, model_config: Any, out: Path) -> Loaded:
    """Read the parameters of a GGUF file, de-quantized to float32. Writes the other files of a
    checkpoint to `out`: config.json, generation_config.json, the tokenizer and its chat
    template."""
    file, header = find_file(folder, section)
    say(f"load: de-quantizing {file.name} to float32")
    with reading(file, fix=gguf_header.FIX), quiet():
        model = choose_auto_class(section.task, model_config.model_type).from_pretrained(
            folder, config=model_config, dtype=torch.float32, **gguf_file.make_arguments(file.name)
        )
    gguf_file.check_whole(model, header.tensors, file)
    model_config.architectures, model_config.dtype = [type(model).__name__], "float32"
    model_config.save_pretrained(out)
    generates = tasks.find_task(section.task).generates
    if generates and not (folder / GENERATION_CONFIG).is_file():
        model.generation_config.save_pretrained(out)
    metadata = _metadata(header)
    _write_tokenizer(folder, section, metadata, out)
    for name in (GENERATION_CONFIG, TEMPLATE):  # files next to the GGUF file override it
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)
    weights: dict[str, Stored] = {name: p.detach() for name, p in model.named_parameters()}
    return Loaded(out, weights, metadata.get(LICENCE, ""))


def verify(section: Model, folder: Path, pairing: SourceWeights, out: Path) -> None:
    """Raise OptimizeError naming the first parameter of the loaded checkpoint that differs when the
    GGUF file is read again. Empties `pairing` first, so that memory holds one copy."""
    cast(dict[str, Stored], pairing.stored).clear()
    faithful.check(folder, section, open_checkpoint(out).tensors)


def _write_tokenizer(folder: Path, section: Model, metadata: dict[str, str], out: Path) -> None:
    """Write to the loaded checkpoint the tokenizer of the folder's tokenizer.json if there is one,
    else the GGUF file's."""
    from transformers import AutoTokenizer

    if (folder / "tokenizer.json").is_file():
        for name in FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, out / name)
        return
    with reading(folder / str(section.gguf_file), fix=gguf_header.FIX), quiet():
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=section.gguf_file)
    _set_pre_tokenizer(tokenizer.backend_tokenizer, metadata)
    tokenizer.save_pretrained(out)


def _set_pre_tokenizer(tokenizer: Any, metadata: dict[str, str]) -> None:
    """Split digits in `tokenizer` where transformers' GGUF reader does not; report other names."""
    from tokenizers import pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or pre in AS_GPT2:
        return
    # a sequence (regex, then bytes) for names that transformers knows; GPT-2's for all others
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
        f"load: transformers' GGUF reader does not know the pre-tokenizer {pre!r} and uses "
        "GPT-2's; to be exact, put the model's tokenizer.json next to the file"
    )


GGUF = Provider("gguf", takes, read, verify)
