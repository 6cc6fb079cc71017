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

from optimizer.errors import CheckpointError, MachineError
from optimizer.load import faithful
from optimizer.load.checkpoint import open_checkpoint
from optimizer.load.generation import GENERATION_CONFIG
from optimizer.load.model import auto_class
from optimizer.load.providers.provider import Loaded, Provider
from optimizer.load.quiet import quiet
from optimizer.load.tokenizer import FILES
from optimizer.load.weights import Stored, Weights
from optimizer.progress import say
from optimizer.recipe.schema import Model

NEEDED = ("gguf", "accelerate")
LICENCE = "general.license"
TEMPLATE = "chat_template.jinja"
# How llama.cpp splits text before the merges, for those names that transformers does not know and
# reads as GPT-2's; the model saw every digit alone (llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM).
DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell")
AS_GPT2 = ("gpt-2", "default")


def file_of(folder: Path, section: Model) -> Path:
    """The GGUF file. Raises CheckpointError when it is not in the folder, MachineError when a
    package that reads it is missing."""
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
    return file


def config(folder: Path, section: Model) -> Any:
    """The transformers config that the file's metadata says. Raises as `file_of`, and
    CheckpointError for what transformers does not read."""
    from transformers import AutoConfig

    file = file_of(folder, section)
    try:
        with quiet():
            model_config = AutoConfig.from_pretrained(folder, gguf_file=section.gguf_file)
    except (ValueError, KeyError, TypeError, OSError) as e:
        raise _unread(file, e) from e
    if hasattr(model_config, "quantization_config"):
        del model_config.quantization_config
    return model_config


def _unread(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"transformers does not read it ({' '.join(str(error).split())[:200]})",
        where=str(file),
        fix="Use the float checkpoint it was made from, or get the file again.",
    )


def _metadata(file: Path) -> dict[str, str]:
    """What the file says of its licence and its tokenizer, by the gguf library."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    keys = (LICENCE, "tokenizer.ggml.pre", "tokenizer.ggml.model")
    return {name: str(fields[name].contents()) for name in keys if name in fields}


def takes(section: Model, folder: Path) -> bool:
    """Where the recipe names a file."""
    del folder
    return section.gguf_file is not None


def read(section: Model, folder: Path, model_config: Any, out: Path) -> Loaded:
    """The model's parameters as transformers de-quantizes them, float32.

    Writes to `out` what a checkpoint has besides them: config.json, generation_config.json and the
    tokenizer with its chat template.
    """
    file = file_of(folder, section)
    say(f"load: de-quantizing {file.name} to float32")
    try:
        with quiet():
            model = auto_class(section.task).from_pretrained(
                folder, gguf_file=section.gguf_file, dtype=torch.float32
            )
    except (ValueError, KeyError, TypeError, OSError, RuntimeError) as e:
        raise _unread(file, e) from e
    model_config.architectures, model_config.dtype = [type(model).__name__], "float32"
    model_config.save_pretrained(out)
    if not (folder / GENERATION_CONFIG).is_file():
        model.generation_config.save_pretrained(out)
    metadata = _metadata(file)
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
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=section.gguf_file)
    except Exception as e:  # tokenizers raises bare Exception
        raise _unread(folder / str(section.gguf_file), e) from e
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
