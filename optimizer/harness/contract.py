"""The I/O contract of a model: which arrays go in and come out, and what they mean.

contract.json, version 3:

    {"version": 3, "task": "sentence-embedding", "input_kind": "text",
     "inputs":  [{"name": "input_ids", "dtype": "int64", "axes": ["batch", "sequence"]}, ...],
     "outputs": [{"name": "last_hidden_state", "dtype": "float32",
                  "axes": ["batch", "sequence", 384]}],
     "tokenizer": {"file": "tokenizer.json", "max_length": 256,
                   "pad_id": 0, "pad_token": "[PAD]", "pad_type_id": 0} | null,
     "pooling": "mean" | "cls" | null, "normalize": true | false | null,
     "image": {"channels": 3, "height": 224, "width": 224, "resize": {"shortest_edge": 256} | null,
               "resample": "bicubic", "crop": [224, 224] | null, "rescale": 0.00392 | null,
               "offset": 0.0, "mean": [0.5, 0.5, 0.5] | null, "std": [0.5, 0.5, 0.5] | null,
               "divide": null} | null,
     "labels": ["negative", "positive"] | null,
     "generation": {"layers": 30, "kv_heads": 3, "head_dim": 64, "vocabulary": 49152,
                    "context": 8192, "eos_ids": [2], "bos_id": 1 | null,
                    "chat_template": "{% for m in messages %}..." | null,
                    "defaults": {"do_sample": true, "temperature": 0.2, "top_p": 0.9}} | null}

axes: a string names a dynamic axis, a number is a fixed size. input_kind: the task's, of inputs/.
tokenizer belongs to inputs of kind text and is null elsewhere, image to those of kind image (see
image_settings.py); pooling to sentence-embedding and image-feature-extraction, normalize to
the first; labels, in id order, to the classification tasks; generation to text-generation.
Version 1 had no input_kind: all inputs were texts. Version 2 had no image.

text-generation: inputs are input_ids [batch, sequence], attention_mask [batch, total] (total is
the cached tokens and the new ones) and, where the family takes them, position_ids [batch,
sequence]; the output is logits [batch, sequence, vocabulary]. The key/value cache is not listed:
past_key_values.{i}.key and .value, present.{i}.key and .value for i below generation.layers,
[batch, kv_heads, past or total, head_dim], of the float type the graph says. A tokenizer without
a padding token pads with one of eos_ids: the mask hides it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .errors import BundleError, InputError, require
from .fields import CONTRACT
from .image_settings import ImageSettings
from .trust.verify import parse

VERSION = 3
READ = (1, 2, 3)  # versions that can be read
POOLINGS = ("mean", "cls")
SECTIONS = ("tokenizer", "image", "pooling", "normalize", "labels", "generation")
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
DTYPES = ("int64", "int32", "float32", "float16")


@dataclass(frozen=True)
class TensorSpec:
    """One named array. axes: a name for a dynamic axis, a number for a fixed one."""

    name: str
    dtype: str
    axes: tuple[str | int, ...]


@dataclass(frozen=True)
class TokenizerSpec:
    """max_length counts tokens, special tokens included; longer texts are cut there."""

    file: str
    max_length: int
    pad_id: int
    pad_token: str
    pad_type_id: int = 0

    def __post_init__(self) -> None:
        require(self.max_length >= 2, "tokenizer.max_length", self.max_length, "2 or more")
        require(
            bool(self.file) and Path(self.file).name == self.file and self.file != "..",
            "tokenizer.file",
            self.file,
            "a file name without a folder",
        )


@dataclass(frozen=True)
class Generation:
    """What a decoder's cache is made of, and where its texts begin and end.

    layers, kv_heads and head_dim: of the cache. vocabulary: width of the logits. context: the
    longest sequence in tokens, prompt and answer together. eos_ids: any of these ends a text; the
    tokenizer's own comes first where it is one of them. bos_id: of the tokenizer's bos_token,
    null when it has none; it is not put before texts: the tokenizer file says whether it is.
    chat_template: Jinja, given messages, add_generation_prompt, and bos_token and eos_token (the
    tokens of bos_id and of eos_ids[0]). defaults: those of SAMPLING that the model's makers advise,
    named as transformers names them.
    """

    layers: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    eos_ids: tuple[int, ...]
    bos_id: int | None = None
    chat_template: str | None = None
    defaults: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "vocabulary", "context"):
            value = getattr(self, name)
            require(_whole(value) and value > 0, f"generation.{name}", value, "1 or more")
        known = f"ids below {self.vocabulary}"
        ids = [*self.eos_ids, *([] if self.bos_id is None else [self.bos_id])]
        require(bool(self.eos_ids), "generation.eos_ids", self.eos_ids, "one id or more")
        require(
            all(_whole(i) and 0 <= i < self.vocabulary for i in ids),
            "generation.eos_ids, bos_id",
            ids,
            known,
        )
        template = self.chat_template
        require(
            template is None or isinstance(template, str),
            "generation.chat_template",
            template,
            "Jinja text, or null",
        )
        unknown = sorted(set(self.defaults) - set(SAMPLING))
        require(not unknown, "generation.defaults", unknown, ", ".join(SAMPLING))
        for name, value in self.defaults.items():
            fits = isinstance(value, bool) == (name == "do_sample")
            require(
                fits and isinstance(value, int | float) and value >= 0,
                f"generation.defaults.{name}",
                value,
                "true or false" if name == "do_sample" else "a number from 0",
            )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Contract:
    """See the module's docstring. Construction raises BundleError for what cannot be meant."""

    task: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    tokenizer: TokenizerSpec | None = None
    pooling: str | None = None
    normalize: bool | None = None
    labels: tuple[str, ...] | None = None
    generation: Generation | None = None
    input_kind: str = "text"
    image: ImageSettings | None = None
    version: int = VERSION

    def __post_init__(self) -> None:
        require(
            self.version == VERSION,
            "version",
            self.version,
            " or ".join(map(str, READ)),
            "Use the harness that came with this bundle, or package the model again.",
        )
        names = [i.name for i in self.inputs]
        require(len(set(names)) == len(names), "inputs", names, "each name once")
        for kinds in ("inputs", "outputs"):
            for i, tensor in enumerate(getattr(self, kinds)):
                where = f"{kinds}[{i}].dtype"
                require(tensor.dtype in DTYPES, where, tensor.dtype, ", ".join(DTYPES))
        require(self.pooling in (None, *POOLINGS), "pooling", self.pooling, ", ".join(POOLINGS))
        require(self.labels is None or bool(self.labels), "labels", self.labels, "one or more")

    @property
    def text(self) -> TokenizerSpec:
        """The tokenizer. Raises InputError for a model that takes no texts."""
        if self.tokenizer is None:
            raise InputError(f"the model takes inputs of kind {self.input_kind}", where=self.task)
        return self.tokenizer

    @property
    def images(self) -> ImageSettings:
        """What is done to images. Raises InputError for a model that takes none."""
        if self.image is None:
            raise InputError(f"the model takes inputs of kind {self.input_kind}", where=self.task)
        return self.image

    @property
    def decoder(self) -> Generation:
        """The cache. Raises InputError for a model that does not continue texts."""
        if self.generation is None:
            raise InputError(
                f"the model does {self.task}",
                where="task",
                accepted="a task that generates text",
            )
        return self.generation

    def to_json(self) -> dict[str, Any]:
        """The document of the docstring; `Contract.from_json` is its inverse."""
        return dict(json.loads(json.dumps(asdict(self))))

    @classmethod
    def from_json(cls, document: Any, where: str = "contract.json") -> Contract:
        """Raises BundleError naming `where` and the key that is missing, unknown or wrong."""
        CONTRACT(document, f"{where}: ")
        try:
            fields = dict(document)
            for key in ("inputs", "outputs"):
                fields[key] = tuple(
                    TensorSpec(t["name"], t["dtype"], tuple(t["axes"])) for t in fields[key]
                )
            if fields.get("version") in READ:
                fields["version"] = VERSION
            if fields.get("tokenizer") is not None:
                fields["tokenizer"] = TokenizerSpec(**fields["tokenizer"])
            if fields.get("image") is not None:
                fields["image"] = ImageSettings.of(fields["image"])
            if fields.get("labels") is not None:
                fields["labels"] = tuple(fields["labels"])
            if fields.get("generation") is not None:
                cache = fields["generation"]
                fields["generation"] = Generation(**{**cache, "eos_ids": tuple(cache["eos_ids"])})
            return cls(**fields)
        except BundleError as e:
            raise BundleError(
                e.problem, where=f"{where}: {e.where}", accepted=e.accepted, fix=e.fix
            ) from None


def read(path: Path) -> Contract:
    """The contract in a file. Raises BundleError when it is missing or not a valid contract."""
    try:
        document = parse(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise BundleError(f"cannot be read ({e})", where=str(path)) from None
    return Contract.from_json(document, str(path))
