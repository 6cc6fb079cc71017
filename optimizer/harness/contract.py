"""I/O contract of a model: its input and output arrays, and the settings to encode and decode them.

Written by load, checked by tasks.check, and read by every later stage and by the harness.
contract.json, version 3:

    {"version": 3, "task": "sentence-embedding", "input_kind": "text",
     "inputs":  [{"name": "input_ids", "dtype": "int64", "axes": ["batch", "sequence"]}, ...],
     "outputs": [{"name": "last_hidden_state", "dtype": "float32",
                  "axes": ["batch", "sequence", 384]}],
     "tokenizer": {"file": "tokenizer.json", "max_length": 256,
                   "pad_id": 0, "pad_token": "[PAD]", "pad_type_id": 0,
                   "mask_id": 103, "mask_token": "[MASK]"} | null,
     "pooling": "mean" | ["mean", "max"] | null, "normalize": true | false | null,
     "embedding": {"prompts": {"query": "query: "}, "prompt": "query" | null,
                   "include_prompt": true, "layers": [...], "file": "..." | null,
                   "dimensions": 256 | null, "similarity": "cosine" | null} | null,
     "image": {"channels": 3, "height": 224, "width": 224, "resize": {"shortest_edge": 256} | null,
               "resample": "bicubic", "crop": [224, 224] | null, "rescale": 0.00392 | null,
               "offset": 0.0, "mean": [0.5, 0.5, 0.5] | null, "std": [0.5, 0.5, 0.5] | null,
               "divide": null, "letterbox": {"fill": 114, "place": "centre"}, "bgr": true} | null,
     "labels": ["negative", "positive"] | null, "activation": "sigmoid" | "identity" | null,
     "thresholds": [0.5, 0.3] | null,
     "sparse": {"pooling": "max", "activation": "relu", "max_active_dims": 128 | null} | null,
     "aggregation": "simple" | null,
     "template": ["Query: ", " Document: ", " Relevant:"] | null,
     "zero_shot": {"candidate_labels": ["sport", "politics"], "hypothesis_template": "About {}.",
                   "multi_label": false, "entailment": 2} | null,
     "label_texts": {"hypothesis_template": "A photo of {}.", "scale": 100.0, "bias": 0.0} | null,
     "detections": {"layout": "scores", "box": "cxcywh", "units": "pixels", "activation": "none",
                    "nms": 0.7 | null, "threshold": 0.25, "most": 300} | null,
     "answers": {"doc_stride": 128, "max_answer_len": 15, "handle_impossible_answer": false,
                 "top_k": 1} | null,
     "generation": {"layers": 30, "kv_heads": 3, "head_dim": 64, "vocabulary": 49152,
                    "context": 8192, "eos_ids": [2], "bos_id": 1 | null,
                    "chat_template": "{% for m in messages %}..." | null,
                    "defaults": {"do_sample": true, "temperature": 0.2, "top_p": 0.9},
                    "adapters": ["sql"]} | null}

axes: a string names a dynamic axis, a number is a fixed size.
input_kind: the kind of input that the task takes (inputs/).
tokenizer: tokenizer file and padding, for inputs of kind text. Absent where null are mask_id and
    mask_token, for fill-mask, and padded_to, the length of all texts of a model that reads padding.
image: preprocessing (image_settings.py), for inputs of kind image.
detections: fields of a detector's outputs (detection_settings.py), for task detector.
pooling: pooling method of POOLINGS, or a list of them whose results are joined, for
    sentence-embedding; mean or cls, for image-feature-extraction.
embedding: prompts, layers and width of a sentence embedding (embedding_settings.py).
normalize: true to scale to unit length, for sentence-embedding.
labels: label names in id order, for the classification tasks.
activation: function of the logits that gives the answers of a model with one label, of a
    multi-label model or of SigLIP (sigmoid), and of a regression with several outputs (identity).
    It is absent
    where null, and from contracts of before it; one label is then answered with its logit, and of
    several one is chosen.
thresholds: least probability with which a label is in the answer, per label of a multi-label model;
    absent where null, for 0.5 each.
aggregation: strategy that joins tokens to entities, for token-classification; absent where null,
    for words and their entities.
template: texts before a query, between it and its document, and behind both, for text-ranking;
    absent where null, for pairs as the tokenizer joins them.
sparse: pooling of a sparse embedding (sparse_settings.py); its prompts stand in embedding.
answers: windows and spans of question-answering (span_settings.py).
zero_shot: labels and hypothesis of zero-shot-classification (zero_shot_settings.py).
label_texts: settings of labels that come with a request, of zero-shot-image-classification; null
    for a bundle that answers with the recipe's labels alone.
generation: KV cache, special tokens, sampling defaults, and adapters (absent without any), for
    text-generation.
A section that the task does not use is null; one of OPTIONAL is missing instead. Version 1 had no
input_kind (all inputs were texts), version 2 had no image.

text-generation: inputs are input_ids [batch, sequence], attention_mask [batch, total] (total counts
the cached tokens and the new ones) and, if the family takes them, position_ids [batch, sequence];
the output is logits [batch, sequence, vocabulary]. The KV cache is not listed: it is
past_key_values.{i}.key and .value and present.{i}.key and .value for each layer i, [batch,
kv_heads, past or total, head_dim], of the graph's float type. A tokenizer without a padding token
pads with one of eos_ids, which the mask hides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .detection_settings import DetectionSettings
from .embedding_settings import EmbeddingSettings
from .errors import BundleError, InputError, require
from .fields import CONTRACT
from .image_settings import ImageSettings
from .span_settings import SpanSettings
from .sparse_settings import SparseSettings
from .trust.verify import parse
from .zero_shot_settings import LabelTexts, ZeroShotSettings

VERSION = 3
READABLE = (1, 2, 3)  # versions
POOLINGS = ("mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
ACTIVATIONS = ("identity", "sigmoid")
SECTIONS = ("tokenizer", "image", "pooling", "normalize", "labels", "generation")
OPTIONAL = (
    *("embedding", "answers", "aggregation", "zero_shot", "label_texts", "sparse", "template"),
    "detections",
)
"""Sections that a task of Task.optional may lack."""
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
DTYPES = ("int64", "int32", "float32", "float16")


@dataclass(frozen=True)
class TensorSpec:
    """Name, type and axes of one input or output array in a bundle's contract.

    axes: a name per dynamic axis, a size per fixed axis
    """

    name: str
    dtype: str
    axes: tuple[str | int, ...]


@dataclass(frozen=True)
class TokenizerSpec:
    """Tokenizer file and padding, in a bundle's contract.

    max_length: maximum tokens per text, special tokens included; longer texts are truncated.
    padded_to: tokens of every text of a model that reads padding as other tokens (SigLIP): shorter
        ones are padded to it, and attention_mask is 1 there; None: padding is hidden.
    """

    file: str
    max_length: int
    pad_id: int
    pad_token: str
    pad_type_id: int = 0
    mask_id: int | None = None
    mask_token: str | None = None
    padded_to: int | None = None

    @property
    def mask(self) -> int:
        """Id of the mask token. Raises BundleError without one."""
        require(self.mask_id is not None, "tokenizer.mask_id", None, "the id of the mask token")
        return self.mask_id or 0

    def __post_init__(self) -> None:
        require(self.max_length >= 2, "tokenizer.max_length", self.max_length, "2 or more")
        accepted = f"max_length, {self.max_length}, or null"
        fits = self.padded_to in (None, self.max_length)
        require(fits, "tokenizer.padded_to", self.padded_to, accepted)
        require(
            bool(self.file) and Path(self.file).name == self.file and self.file != "..",
            "tokenizer.file",
            self.file,
            "a file name without a folder",
        )


@dataclass(frozen=True)
class Generation:
    """Section `generation` of a bundle's contract: shape of the model's KV cache, special tokens
    and sampling defaults.

    layers, kv_heads, head_dim: sizes of the KV cache.
    vocabulary: width of the logits.
    context: maximum tokens of a sequence, prompt and answer together.
    eos_ids: token ids that end a generation; the tokenizer's eos_token first, if it is included.
    bos_id: id of the tokenizer's bos_token, null without one. The tokenizer file, not this field,
        decides whether a text starts with bos_token.
    chat_template: Jinja template of messages, add_generation_prompt, bos_token and eos_token (the
        tokens of bos_id and eos_ids[0]).
    defaults: options of SAMPLING that the model's authors recommend, named as in transformers.
    adapters: names of the adapters that a run may choose (runtimes/ort/adapters.py).
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
    adapters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "vocabulary", "context"):
            value = getattr(self, name)
            require(_is_integer(value) and value > 0, f"generation.{name}", value, "1 or more")
        ids = [*self.eos_ids, *([] if self.bos_id is None else [self.bos_id])]
        require(bool(self.eos_ids), "generation.eos_ids", self.eos_ids, "one id or more")
        require(
            all(_is_integer(i) and 0 <= i < self.vocabulary for i in ids),
            "generation.eos_ids, bos_id",
            ids,
            f"ids below {self.vocabulary}",
        )
        template = self.chat_template
        require(
            template is None or isinstance(template, str),
            "generation.chat_template",
            template,
            "a Jinja template, or null",
        )
        unknown = sorted(set(self.defaults) - set(SAMPLING))
        require(not unknown, "generation.defaults", unknown, ", ".join(SAMPLING))
        for name, value in self.defaults.items():
            fits = isinstance(value, bool) == (name == "do_sample")
            require(
                fits and isinstance(value, int | float) and value >= 0,
                f"generation.defaults.{name}",
                value,
                "true or false" if name == "do_sample" else "a number, 0 or more",
            )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Contract:
    """A bundle's contract (contract.json) as plain data; tasks.look_up(contract) is its task.
    Raises BundleError if invalid.

    layer_weights: the array of embedding.file, which `open_layers` reads; not in the document.
    form: (type, dimensions) of a sentence embedding's answers, set by with_form of
        tasks/embeddings/sentence_embedding.py; null: as the model gives them; not in the document.
    texts: contract of the bundle's second model, of a task that reads texts beside other inputs;
        null until a bundle opens it; not in the document.
    """

    task: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    tokenizer: TokenizerSpec | None = None
    pooling: str | tuple[str, ...] | None = None
    normalize: bool | None = None
    labels: tuple[str, ...] | None = None
    generation: Generation | None = None
    input_kind: str = "text"
    image: ImageSettings | None = None
    embedding: EmbeddingSettings | None = None
    activation: str | None = None
    thresholds: tuple[float, ...] | None = None
    answers: SpanSettings | None = None
    aggregation: str | None = None
    template: tuple[str, ...] | None = None
    zero_shot: ZeroShotSettings | None = None
    label_texts: LabelTexts | None = None
    sparse: SparseSettings | None = None
    detections: DetectionSettings | None = None
    version: int = VERSION
    layer_weights: Any = field(default=None, repr=False, compare=False)
    form: tuple[str, int] | None = None
    texts: Contract | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        require(
            self.version == VERSION,
            "version",
            self.version,
            " or ".join(map(str, READABLE)),
            "Use the harness that came with this bundle, or package the model again.",
        )
        names = [i.name for i in self.inputs]
        require(len(set(names)) == len(names), "inputs", names, "each name once")
        for kinds in ("inputs", "outputs"):
            for i, tensor in enumerate(getattr(self, kinds)):
                where = f"{kinds}[{i}].dtype"
                require(tensor.dtype in DTYPES, where, tensor.dtype, ", ".join(DTYPES))
        accepted = POOLINGS if self.input_kind == "text" else ("mean", "cls")
        known = self.pooling is None or (self.poolings and set(self.poolings) <= set(accepted))
        require(bool(known), "pooling", self.pooling, ", ".join(accepted))
        require(
            self.labels is None or bool(self.labels), "labels", self.labels, "one label or more"
        )
        require(
            self.activation is None or bool(self.labels),
            "activation",
            self.activation,
            "null for a model without labels",
        )
        fits = self.multi_label and len(self.thresholds or ()) == len(self.labels or ())
        require(
            self.thresholds is None or fits,
            "thresholds",
            self.thresholds,
            "a number per label of a multi-label model, or null",
        )

    @property
    def multi_label(self) -> bool:
        """Return True if a text may have any number of the contract's labels."""
        several = self.activation == "sigmoid" and len(self.labels or ()) > 1
        return several and self.input_kind == "text"

    @property
    def text(self) -> TokenizerSpec:
        """The contract's tokenizer section. Raises InputError if the model does not take texts."""
        if self.tokenizer is None:
            raise InputError(f"the model takes inputs of kind {self.input_kind}", where=self.task)
        return self.tokenizer

    @property
    def poolings(self) -> tuple[str, ...]:
        """Pooling methods in the contract whose results are joined; () without pooling."""
        return (self.pooling,) if isinstance(self.pooling, str) else tuple(self.pooling or ())

    @property
    def vectors(self) -> EmbeddingSettings:
        """The contract's embedding section; the default settings without one."""
        return self.embedding or EmbeddingSettings()

    @property
    def spans(self) -> SpanSettings:
        """The contract's answers section. Raises BundleError without one."""
        require(self.answers is not None, "answers", None, f"a section, for {self.task}")
        return self.answers  # type: ignore[return-value]

    @property
    def splade(self) -> SparseSettings:
        """The contract's sparse section. Raises BundleError without one."""
        require(self.sparse is not None, "sparse", None, f"a section, for {self.task}")
        return self.sparse  # type: ignore[return-value]

    @property
    def candidates(self) -> DetectionSettings:
        """The contract's detections section. Raises BundleError without one."""
        require(self.detections is not None, "detections", None, f"a section, for {self.task}")
        return self.detections  # type: ignore[return-value]

    @property
    def choice(self) -> ZeroShotSettings:
        """The contract's zero_shot section. Raises BundleError without one."""
        require(self.zero_shot is not None, "zero_shot", None, f"a section, for {self.task}")
        return self.zero_shot  # type: ignore[return-value]

    def with_prompt(self, name: str | None) -> Contract:
        """Return this contract with another prompt before each text.

        name: name of the prompt; None: no change

        Raises InputError for a prompt that the model does not have.
        """
        if name is None:
            return self
        embeds = self.pooling is not None or self.sparse is not None
        names = self.vectors.all_prompts if embeds else {}
        if self.input_kind != "text" or name not in names:
            raise InputError(
                f"the model has no prompt {name[:80]!r}",
                where="prompt",
                accepted=", ".join(names) or "none: the task has no prompts",
            )
        return replace(self, embedding=replace(self.vectors, prompt=name))

    def open_layers(self, folder: Path) -> Contract:
        """Return this contract with the parameters of its layers, read from embedding.file.

        folder: folder of the tokenizer, which holds the file
        """
        if self.vectors.file is None:
            return self
        import numpy as np

        file = folder / self.vectors.file
        try:
            # mapped, a shape beyond the file's size is an error, not an allocation
            values = np.load(file, allow_pickle=False, mmap_mode="r")
        except (OSError, ValueError, EOFError) as e:
            raise BundleError(f"cannot be read ({e})", where=str(file)) from None
        if values.dtype != np.float32 or values.shape != (self.vectors.count,):
            raise BundleError(
                f"it holds {values.dtype} of shape {values.shape}",
                where=str(file),
                accepted=f"float32 of shape ({self.vectors.count},)",
                fix="The file does not belong to this model; package it again.",
            )
        values = np.array(values)
        if not np.isfinite(values).all():
            raise BundleError("it holds NaN or infinity", where=str(file), fix="Package it again.")
        return replace(self, layer_weights=values)

    @property
    def images(self) -> ImageSettings:
        """The contract's image section. Raises InputError if the model does not take images."""
        if self.image is None:
            raise InputError(f"the model takes inputs of kind {self.input_kind}", where=self.task)
        return self.image

    @property
    def decoder(self) -> Generation:
        """The contract's generation section. Raises InputError if the task is not text
        generation."""
        if self.generation is None:
            raise InputError(
                f"the task is {self.task}",
                where="task",
                accepted="a task that generates text",
            )
        return self.generation

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that a request may choose; () for other tasks."""
        return () if self.generation is None else self.generation.adapters

    def to_json(self) -> dict[str, Any]:
        """Return contract.json as a document; `Contract.from_json` is its inverse."""
        document = asdict(replace(self, layer_weights=None, texts=None))
        del document["layer_weights"], document["form"], document["texts"]
        if self.image is not None:
            document["image"] = self.image.to_json()
        if document["embedding"] is not None and document["embedding"]["quantized"] is None:
            del document["embedding"]["quantized"]
        for name in (*OPTIONAL, "activation", "thresholds"):
            if document[name] is None:
                del document[name]
        if document["generation"] is not None and not document["generation"]["adapters"]:
            del document["generation"]["adapters"]
        for name in ("mask_id", "mask_token", "padded_to"):
            if document["tokenizer"] is not None and document["tokenizer"][name] is None:
                del document["tokenizer"][name]
        return dict(json.loads(json.dumps(document)))

    @classmethod
    def from_json(cls, document: Any, where: str = "contract.json") -> Contract:
        """Parse contract.json. Raises BundleError naming `where` and the wrong key."""
        CONTRACT(document, f"{where}: ")
        try:
            fields = dict(document)
            for key in ("inputs", "outputs"):
                fields[key] = tuple(
                    TensorSpec(t["name"], t["dtype"], tuple(t["axes"])) for t in fields[key]
                )
            if fields.get("version") in READABLE:
                fields["version"] = VERSION
            if fields.get("tokenizer") is not None:
                fields["tokenizer"] = TokenizerSpec(**fields["tokenizer"])
            if fields.get("image") is not None:
                fields["image"] = ImageSettings.from_json(fields["image"])
            if isinstance(fields.get("pooling"), list):
                fields["pooling"] = tuple(fields["pooling"])
            if fields.get("embedding") is not None:
                fields["embedding"] = EmbeddingSettings.from_json(fields["embedding"])
            if fields.get("answers") is not None:
                fields["answers"] = SpanSettings(**fields["answers"])
            if fields.get("sparse") is not None:
                fields["sparse"] = SparseSettings(**fields["sparse"])
            if fields.get("detections") is not None:
                fields["detections"] = DetectionSettings(**fields["detections"])
            if fields.get("zero_shot") is not None:
                settings = fields["zero_shot"]
                names = tuple(settings["candidate_labels"])
                fields["zero_shot"] = ZeroShotSettings(**{**settings, "candidate_labels": names})
            if fields.get("label_texts") is not None:
                fields["label_texts"] = LabelTexts(**fields["label_texts"])
            for key in ("labels", "thresholds", "template"):
                if fields.get(key) is not None:
                    fields[key] = tuple(fields[key])
            if fields.get("generation") is not None:
                cache = dict(fields["generation"])
                for key in ("eos_ids", "adapters"):
                    cache[key] = tuple(cache.get(key) or ())
                fields["generation"] = Generation(**cache)
            return cls(**fields)
        except BundleError as e:
            raise BundleError(
                e.problem, where=f"{where}: {e.where}", accepted=e.accepted, fix=e.fix
            ) from None


def adapter_file(name: str) -> str:
    """Return the file name of an adapter, in a bundle and in the folder of load."""
    return f"adapters/{name}.safetensors"


def read(path: Path) -> Contract:
    """Read a bundle's contract file, and the parameters of its layers.

    Raises BundleError if it is missing or invalid.
    """
    try:
        document = parse(path.read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise BundleError(f"cannot be read ({e})", where=str(path)) from None
    contract = Contract.from_json(document, str(path))
    beside = path.parent / "checkpoint"  # folder of the tokenizer, as load writes it
    return contract.open_layers(beside if beside.is_dir() else path.parent)
