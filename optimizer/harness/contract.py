"""The I/O contract of a model: which arrays go in and come out, and what they mean.

contract.json, version 1:

    {"version": 1, "task": "sentence-embedding",
     "inputs":  [{"name": "input_ids", "dtype": "int64", "axes": ["batch", "sequence"]}, ...],
     "outputs": [{"name": "last_hidden_state", "dtype": "float32",
                  "axes": ["batch", "sequence", 384]}],
     "tokenizer": {"file": "tokenizer.json", "max_length": 256,
                   "pad_id": 0, "pad_token": "[PAD]", "pad_type_id": 0},
     "pooling": "mean" | "cls" | null, "normalize": true | false | null,
     "labels": ["negative", "positive"] | null}

axes: a string names a dynamic axis, a number is a fixed size. pooling and normalize belong to
sentence-embedding and are null elsewhere; labels, in id order, to the classification tasks.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import BundleError

VERSION = 1
TASKS = (
    "sentence-embedding",
    "text-classification",
    "token-classification",
    "feature-extraction",
)
ENCODED = ("input_ids", "attention_mask", "token_type_ids")  # what a tokenizer can supply
DTYPES = ("int64", "int32", "float32", "float16")
OUTPUTS = {
    "sentence-embedding": "last_hidden_state",
    "feature-extraction": "last_hidden_state",
    "text-classification": "logits",
    "token-classification": "logits",
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
class Contract:
    """See the module's docstring. Construction raises BundleError for what cannot be meant."""

    task: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    tokenizer: TokenizerSpec
    pooling: str | None = None
    normalize: bool | None = None
    labels: tuple[str, ...] | None = None
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
        names = [i.name for i in self.inputs]
        _require(
            "input_ids" in names and "attention_mask" in names and set(names) <= set(ENCODED),
            "inputs",
            names,
            "input_ids and attention_mask, and perhaps token_type_ids",
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
