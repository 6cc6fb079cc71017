"""The I/O contract of a model: which arrays go in and come out, and what they mean.

contract.json, version 1:

    {"version": 1, "task": "sentence-embedding",
     "inputs":  [{"name": "input_ids", "dtype": "int64", "axes": ["batch", "sequence"]}, ...],
     "outputs": [{"name": "last_hidden_state", "dtype": "float32",
                  "axes": ["batch", "sequence", 384]}],
     "tokenizer": {"file": "tokenizer.json", "max_length": 256,
                   "pad_id": 0, "pad_token": "[PAD]", "pad_type_id": 0},
     "pooling": "mean" | "cls" | null, "normalize": true | false | null,
     "labels": ["negative", "positive"] | null,
     "generation": {"layers": 30, "kv_heads": 3, "head_dim": 64, "vocabulary": 49152,
                    "context": 8192, "eos_ids": [2], "bos_id": 1 | null,
                    "chat_template": "{% for m in messages %}..." | null,
                    "defaults": {"do_sample": true, "temperature": 0.2, "top_p": 0.9}} | null}

axes: a string names a dynamic axis, a number is a fixed size. pooling and normalize belong to
sentence-embedding and are null elsewhere; labels, in id order, to the classification tasks;
generation to text-generation.

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

from .errors import BundleError

VERSION = 1
TASKS = (
    "sentence-embedding",
    "text-classification",
    "token-classification",
    "feature-extraction",
    "text-generation",
)
ENCODED = ("input_ids", "attention_mask", "token_type_ids")  # what a tokenizer can supply
GENERATED = ("input_ids", "attention_mask", "position_ids")  # what a decoder can take
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
DTYPES = ("int64", "int32", "float32", "float16")
OUTPUTS = {
    "sentence-embedding": "last_hidden_state",
    "feature-extraction": "last_hidden_state",
    "text-classification": "logits",
    "token-classification": "logits",
    "text-generation": "logits",
}


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
            _require(_whole(value) and value > 0, f"generation.{name}", value, "1 or more")
        known = f"ids below {self.vocabulary}"
        ids = [*self.eos_ids, *([] if self.bos_id is None else [self.bos_id])]
        _require(bool(self.eos_ids), "generation.eos_ids", self.eos_ids, "one id or more")
        _require(
            all(_whole(i) and 0 <= i < self.vocabulary for i in ids),
            "generation.eos_ids, bos_id",
            ids,
            known,
        )
        template = self.chat_template
        _require(
            template is None or isinstance(template, str),
            "generation.chat_template",
            template,
            "Jinja text, or null",
        )
        unknown = sorted(set(self.defaults) - set(SAMPLING))
        _require(not unknown, "generation.defaults", unknown, ", ".join(SAMPLING))
        for name, value in self.defaults.items():
            fits = isinstance(value, bool) == (name == "do_sample")
            _require(
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
    tokenizer: TokenizerSpec
    pooling: str | None = None
    normalize: bool | None = None
    labels: tuple[str, ...] | None = None
    generation: Generation | None = None
    version: int = VERSION

    def __post_init__(self) -> None:
        _require(
            self.version == VERSION,
            "version",
            self.version,
            str(VERSION),
            "Use the harness that came with this bundle, or package the model again.",
        )
        _require(self.task in TASKS, "task", self.task, ", ".join(TASKS))
        generates = self.task == "text-generation"
        names = [i.name for i in self.inputs]
        known = GENERATED if generates else ENCODED
        _require(
            "input_ids" in names and "attention_mask" in names and set(names) <= set(known),
            "inputs",
            names,
            f"input_ids and attention_mask, and perhaps {known[2]}",
        )
        _require(len(set(names)) == len(names), "inputs", names, "each name once")
        for tensor in (*self.inputs, *self.outputs):
            _require(tensor.dtype in DTYPES, tensor.name, tensor.dtype, ", ".join(DTYPES))
        wanted = OUTPUTS[self.task]
        found = [o.name for o in self.outputs]
        _require(wanted in found, "outputs", found, f"one called {wanted} for {self.task}")
        embeds = self.task == "sentence-embedding"
        poolings = ("mean", "cls") if embeds else (None,)
        _require(self.pooling in poolings, "pooling", self.pooling, f"one of {poolings}")
        _require((self.normalize is not None) == embeds, "normalize", self.normalize, "see task")
        classifies = self.task.endswith("classification")
        _require(bool(self.labels) == classifies, "labels", self.labels, "labels, to classify")
        _require(
            (self.generation is not None) == generates,
            "generation",
            self.generation,
            "given for text-generation, null for other tasks",
        )
        t = self.tokenizer
        _require(t.max_length >= 2, "tokenizer.max_length", t.max_length, "2 or more")
        _require(
            bool(t.file) and Path(t.file).name == t.file and t.file != "..",
            "tokenizer.file",
            t.file,
            "a file name without a folder",
        )

    @property
    def output(self) -> str:
        """The name of the output the task reads."""
        return OUTPUTS[self.task]

    def to_json(self) -> dict[str, Any]:
        """The document of the docstring; `Contract.from_json` is its inverse."""
        return dict(json.loads(json.dumps(asdict(self))))

    @classmethod
    def from_json(cls, document: Any, where: str = "contract.json") -> Contract:
        """Raises BundleError naming `where` and the key that is missing, unknown or wrong."""
        try:
            fields = dict(document)
            for key in ("inputs", "outputs"):
                fields[key] = tuple(
                    TensorSpec(t["name"], t["dtype"], tuple(t["axes"])) for t in fields[key]
                )
            fields["tokenizer"] = TokenizerSpec(**fields["tokenizer"])
            if fields.get("labels") is not None:
                fields["labels"] = tuple(map(str, fields["labels"]))
            if fields.get("generation") is not None:
                said = fields["generation"]
                fields["generation"] = Generation(**{**said, "eos_ids": tuple(said["eos_ids"])})
            return cls(**fields)
        except BundleError as e:
            raise BundleError(e.found, where=f"{where}: {e.where}", accepted=e.accepted) from None
        except (KeyError, TypeError, ValueError) as e:
            raise BundleError(f"not a contract ({e!r})", where=where) from None


def read(path: Path) -> Contract:
    """The contract in a file. Raises BundleError when it is missing or not a valid contract."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise BundleError(f"cannot be read ({e})", where=str(path)) from None
    return Contract.from_json(document, str(path))


def load_tokenizer(folder: Path, contract: Contract) -> Any:
    """The tokenizer of the contract as a `tokenizers.Tokenizer`.

    What the file says about padding and truncation is dropped: many published files pad every
    text to 128 tokens. The contract decides, and `tasks.encode` does it. Raises BundleError when
    the file is missing, not a tokenizer, or does not know the contract's padding token.
    """
    from tokenizers import Tokenizer

    path = folder / contract.tokenizer.file
    if not path.is_file():
        raise BundleError("the tokenizer is missing", where=str(path))
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises bare Exception
        raise BundleError(f"not a tokenizer ({e})", where=str(path)) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    spec = contract.tokenizer
    known = tokenizer.token_to_id(spec.pad_token)
    if known != spec.pad_id:
        raise BundleError(
            f"padding token {spec.pad_token!r} has id {known}, the contract says {spec.pad_id}",
            where=str(path),
            fix="The tokenizer does not belong to this model; package it again.",
        )
    return tokenizer


def _require(good: bool, where: str, found: Any, accepted: str, fix: str = "") -> None:
    if not good:
        raise BundleError(f"{found!r} was found", where=where, accepted=accepted, fix=fix)
