"""Model folders that are wrong: every value of every JSON file, the weights, the tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.case import Case

LOAD = ("run", "recipe.yaml", "--until", "load")
MODEL = "model"
WRONG: dict[str, Any] = {
    "null": None,
    "word": "nonsense",
    "empty": "",
    "negative": -1,
    "zero": 0,
    "one": 1,
    "half": 0.5,
    "huge": 10**9,
    "huger": 2**70,
    "list": [1, "a"],
    "mapping": {"a": 1},
    "true": True,
    "infinite": float("inf"),
    "nan": float("nan"),
    "deep": json.loads("[" * 200 + "]" * 200),
}
NAMED = ("word", "empty", "negative", "half", "huge", "huger", "list", "mapping")
# Fields of config.json that say what the model is: a wrong one must be named.
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "type_vocab_size",
    "head_dim",
)


def _set(file: str, at: tuple[Any, ...], value: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / MODEL / file
        document = json.loads(path.read_text()) if path.exists() else {}
        inner = document
        for key in at[:-1]:
            inner = inner[key]
        inner[at[-1]] = value
        path.write_text(json.dumps(document))

    return write


def _raw(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / MODEL / file
        path.write_bytes(change(path.read_bytes() if path.exists() else b""))

    return write


def _instead(file: str, make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / MODEL / file
        path.unlink(missing_ok=True)
        make(path)

    return write


def values(good: Path, *more: str) -> list[Case]:
    """Every value of config.json, and of fields that it may have, replaced by every wrong one."""
    config = json.loads((good / MODEL / "config.json").read_text())
    fields = [*config, *(f for f in more if f not in config)]
    cases = [
        Case(
            f"config.json: {field} = {name}",
            _set("config.json", (field,), value),
            LOAD,
            ("config.json", field)
            if field in SIZES and name not in ("null", "one", "zero")
            else (),
            harmless=True,
        )
        for field in fields
        for name, value in WRONG.items()
    ]
    for file in ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json"):
        path = good / MODEL / file
        if not path.is_file():
            continue
        for field in json.loads(path.read_text()):
            for name, value in WRONG.items():
                cases.append(
                    Case(f"{file}: {field} = {name}", _set(file, (field,), value), LOAD, (), True)
                )
    return cases


CONFIG: dict[str, tuple[tuple[Any, ...], Any]] = {
    "an unknown activation": (("hidden_act",), "gelu_of_mine"),
    "a feed-forward in chunks": (("chunk_size_feed_forward",), 7),
    "a chunk that is a word": (("chunk_size_feed_forward",), "x"),
    "an activation that is a number": (("hidden_act",), 3),
    "id2label a list": (("id2label",), ["a", "b"]),
    "id2label of words": (("id2label",), {"a": "b"}),
    "id2label with a gap": (("id2label",), {"0": "a", "7": "b"}),
    "num_labels of a billion": (("num_labels",), 10**9),
    "no layers": (("num_hidden_layers",), 0),
    "minus one layer": (("num_hidden_layers",), -1),
    "one layer of two": (("num_hidden_layers",), 1),
    "heads that do not divide": (("num_attention_heads",), 7),
    "a rope of nothing": (("rope_scaling",), {"rope_type": "nonsense"}),
    "a rope without a factor": (("rope_scaling",), {"rope_type": "linear"}),
    "a rope that is a word": (("rope_parameters",), "yes"),
    "a theta of zero": (("rope_theta",), 0),
    "a yarn of zero": (("rope_scaling",), {"rope_type": "yarn", "factor": 0}),
    "a yarn the wrong way": (("rope_scaling",), {"rope_type": "yarn", "beta_slow": 64}),
    "model_type a list": (("model_type",), ["bert"]),
    "model_type unknown": (("model_type",), "mine"),
    "model_type of vision": (("model_type",), "vit"),
    "auto_map a word": (("auto_map",), "x"),
    "auto_map a list": (("auto_map",), ["x"]),
    "quantization_config a word": (("quantization_config",), "gptq"),
    "quantization_config a list": (("quantization_config",), [1]),
    "quantization_config of nothing": (("quantization_config",), {"a": 1}),
    "quantization_config gptq alone": (("quantization_config",), {"quant_method": "gptq"}),
    "architectures a word": (("architectures",), "BertModel"),
    "architectures of numbers": (("architectures",), [1]),
    "torch_dtype a number": (("torch_dtype",), 16),
    "dtype of nothing": (("dtype",), "float7"),
    "pad_token_id beyond": (("pad_token_id",), 10**9),
    "an epsilon of NaN": (("layer_norm_eps",), float("nan")),
    "a dropout of two": (("hidden_dropout_prob",), 2),
}


def config() -> list[Case]:
    harmless = ("torch_dtype", "dtype", "architectures", "dropout", "a rope", "theta")
    return [
        Case(
            f"config.json: {name}",
            _set("config.json", at, value),
            LOAD,
            ("config.json",),
            harmless=any(word in name for word in harmless),
        )
        for name, (at, value) in CONFIG.items()
    ]


DEEP = b"[" * 50_000 + b"]" * 50_000
CONTENT: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda b: b"",
    "cut": lambda b: b[: len(b) // 2],
    "a list": lambda b: b"[1, 2]",
    "a number": lambda b: b"3",
    "null": lambda b: b"null",
    "an empty object": lambda b: b"{}",
    "deep": lambda b: b'{"a": ' + DEEP + b"}",
    "not UTF-8": lambda b: b'{"a": "\xff\xfe"}',
    "UTF-16": lambda b: b.decode("utf-8", "replace").encode("utf-16"),
    "a BOM": lambda b: b"\xef\xbb\xbf" + b,
    "twice": lambda b: b + b,
    "zeros": lambda b: b"\0" * 1000,
    "an integer of 5000 digits": lambda b: b'{"vocab_size": ' + b"9" * 5000 + b"}",
}
JSON_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
FILES = (*JSON_FILES, "model.safetensors", "vocab.txt", "README.md", "chat_template.jinja")


def files(good: Path) -> list[Case]:
    """Every file that is read, with every wrong content, or something else in its place."""
    cases = []
    for file in FILES:
        exists = (good / MODEL / file).exists()
        unimportant = file in ("README.md", "vocab.txt", "special_tokens_map.json")
        for name, change in CONTENT.items():
            harmless = unimportant or name in ("an empty object", "a BOM") or not file.endswith("s")
            cases.append(
                Case(
                    f"{file}: {name}",
                    _raw(file, change),
                    LOAD,
                    (MODEL,),
                    harmless=harmless or file == "tokenizer_config.json" or not exists,
                )
            )
        things: dict[str, Callable[[Path], Any]] = {
            "a directory": Path.mkdir,
            "a FIFO": os.mkfifo,
            "a link to itself": lambda p: p.symlink_to(p.name),
            "a link to nothing": lambda p: p.symlink_to("nowhere"),
            "a link outside": lambda p: p.symlink_to("/etc/hostname"),
            "endless": lambda p: p.symlink_to("/dev/zero"),
        }
        for name, make in things.items():
            cases.append(
                Case(
                    f"{file}: {name}",
                    _instead(file, make),
                    LOAD,
                    (file,),
                    harmless=unimportant or not exists,
                )
            )
    return cases


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def write(raw: bytes) -> bytes:
        length = int.from_bytes(raw[:8], "little")
        document = json.loads(raw[8 : 8 + length])
        text = change(document)
        text = json.dumps(document).encode() if text is None else text
        return len(text).to_bytes(8, "little") + text + raw[8 + length :]

    return _raw("model.safetensors", write)


def _first(value: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def change(document: dict[str, Any]) -> None:
        name = next(n for n in document if n != "__metadata__")
        value(document[name])

    return _header(change)


HEADERS: dict[str, Callable[[Path], None]] = {
    "offsets that are floats": _first(lambda e: e.update(data_offsets=[0.5, 1.5])),
    "offsets that are words": _first(lambda e: e.update(data_offsets=["0", "x"])),
    "offsets that are true": _first(lambda e: e.update(data_offsets=[True, True])),
    "three offsets": _first(lambda e: e.update(data_offsets=[0, 1, 2])),
    "offsets the wrong way": _first(lambda e: e.update(data_offsets=[8, 0])),
    "negative offsets": _first(lambda e: e.update(data_offsets=[-4, 0])),
    "huge offsets": _first(lambda e: e.update(data_offsets=[2**63, 2**63 + 4])),
    "infinite offsets": _first(lambda e: e.update(data_offsets=[0, float("inf")])),
    "a shape of floats": _first(lambda e: e.update(shape=[64.0, 64.5])),
    "a shape of words": _first(lambda e: e.update(shape="64")),
    "a negative shape": _first(lambda e: e.update(shape=[-64, -64])),
    "a huge shape": _first(lambda e: e.update(shape=[2**40, 2**40])),
    "a shape of zero": _first(lambda e: e.update(shape=[0])),
    "a shape of 5000 axes": _first(lambda e: e.update(shape=[1] * 5000)),
    "no shape": _first(lambda e: e.pop("shape")),
    "an unknown dtype": _first(lambda e: e.update(dtype="F7")),
    "dtype a list": _first(lambda e: e.update(dtype=["F32"])),
    "an entry that is a list": _header(lambda d: d.update(x=[1])),
    "metadata a number": _header(lambda d: d.update(__metadata__=7)),
    "metadata of numbers": _header(lambda d: d.update(__metadata__={"a": 1})),
    "two tensors of one place": _header(lambda d: d.update(x=dict(next(iter(d.values()))))),
    "deep": _header(lambda d: b'{"a": ' + DEEP + b"}"),
    "a list": _header(lambda d: b"[]"),
    "nothing": _header(lambda d: b"{}"),
    "a million tensors": _header(
        lambda d: json.dumps(
            {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(10**6)}
        ).encode()
    ),
    "a name of 1 MB": _header(lambda d: d.update({"x" * 1_000_000: next(iter(d.values()))})),
}


def headers() -> list[Case]:
    harmless = (
        "metadata a number",
        "metadata of numbers",
        "two tensors of one place",
        "a name of 1 MB",
    )
    return [
        Case(
            f"model.safetensors: {name}",
            write,
            LOAD,
            ("model.safetensors",),
            harmless=name in harmless,
        )
        for name, write in HEADERS.items()
    ]


def _tokenizer(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        file = folder / MODEL / "tokenizer.json"
        document = json.loads(file.read_text())
        change(document)
        file.write_text(json.dumps(document))

    return write


def _in_tokenizer(key: str, value: Any) -> Callable[[Path], None]:
    return _tokenizer(lambda d: d.update({key: value}))


def _in_model(key: str, value: Any) -> Callable[[Path], None]:
    return _tokenizer(lambda d: d["model"].update({key: value}))


BAD_CHARSMAP = {"type": "Precompiled", "precompiled_charsmap": "AAAAAAECAwQFBgcICQ=="}
TOKENIZERS: dict[str, Callable[[Path], None]] = {
    "without its unknown token": _tokenizer(lambda d: d["model"]["vocab"].pop("[UNK]", None)),
    "an unknown token of nothing": _in_model("unk_token", "[NOTHING]"),
    "no vocabulary": _in_model("vocab", {}),
    "a vocabulary that is a list": _in_model("vocab", ["a", "b"]),
    "ids that are negative": _in_model("vocab", {"[UNK]": -1, "a": 0}),
    "ids that are huge": _in_model("vocab", {"[UNK]": 0, "a": 2**32 - 1}),
    "ids that are words": _in_model("vocab", {"[UNK]": "x"}),
    "two tokens of one id": _in_model("vocab", {"[UNK]": 0, "a": 0, "b": 0}),
    "a model of another type": _in_model("type", "Nonsense"),
    "merges of nothing": _in_model("merges", ["a b c", ["x"]]),
    "a bad charsmap": _in_tokenizer("normalizer", BAD_CHARSMAP),
    "an empty charsmap": _in_tokenizer(
        "normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}
    ),
    "a bad regex": _in_tokenizer(
        "normalizer", {"type": "Replace", "pattern": {"Regex": "(("}, "content": ""}
    ),
    "a regex that backtracks": _in_tokenizer(
        "pre_tokenizer",
        {
            "type": "Split",
            "pattern": {"Regex": "(a+)+$|(x+x+)+y"},
            "behavior": "Isolated",
            "invert": False,
        },
    ),
    "a post-processor of unknown ids": _in_tokenizer(
        "post_processor",
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        },
    ),
    "no post-processor": _in_tokenizer("post_processor", None),
    "a truncation of zero": _in_tokenizer(
        "truncation",
        {"max_length": 0, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
    ),
    "a stride beyond the length": _in_tokenizer(
        "truncation",
        {"max_length": 4, "strategy": "LongestFirst", "stride": 9, "direction": "Right"},
    ),
    "added tokens a word": _in_tokenizer("added_tokens", "x"),
    "an added token of a huge id": _in_tokenizer(
        "added_tokens",
        [
            {
                "id": 2**31,
                "content": "[CLS]",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
    ),
    "a letter that becomes a million": _in_tokenizer(
        "normalizer", {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 10**6}
    ),
    "thirty steps that double": _in_tokenizer(
        "normalizer",
        {
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 30,
        },
    ),
    "a text repeated": _tokenizer(
        lambda d: d["post_processor"].update(
            single=[{"Sequence": {"id": "A", "type_id": 0}}] * 9999
        )
    ),
    "no version": _tokenizer(lambda d: d.pop("version")),
    "no decoder": _in_tokenizer("decoder", None),
    "a decoder of nothing": _in_tokenizer("decoder", {"type": "Nonsense"}),
}


def tokenizers() -> list[Case]:
    return [
        Case(f"tokenizer.json: {name}", write, LOAD, (MODEL,), harmless=True)
        for name, write in TOKENIZERS.items()
    ]


MODULES: dict[str, Any] = {
    "a path above": [{"idx": 0, "type": "x.Transformer", "path": "../x"}],
    "an absolute path": [{"idx": 0, "type": "x.Transformer", "path": "/etc"}],
    "a pooling path above": [
        {"idx": 0, "type": "x.Transformer", "path": ""},
        {"idx": 1, "type": "x.Pooling", "path": "../x"},
    ],
    "an absolute pooling path": [
        {"idx": 0, "type": "x.Transformer", "path": ""},
        {"idx": 1, "type": "x.Pooling", "path": "/etc"},
    ],
    "a pooling without a path": [
        {"idx": 0, "type": "x.Transformer", "path": ""},
        {"idx": 1, "type": "x.Pooling"},
    ],
    "numbers": [1, 2],
    "words as indices": [{"idx": "a", "type": "x.Transformer", "path": ""}],
    "a path that is a list": [{"idx": 0, "type": "x.Transformer", "path": ["a"]}],
    "a path with a NUL": [{"idx": 0, "type": "x.Transformer", "path": "a\0b"}],
    "a type that is a number": [{"idx": 0, "type": 7, "path": ""}],
    "a mapping": {"0": {}},
}


def modules() -> list[Case]:
    def write(document: Any) -> Callable[[Path], None]:
        return lambda folder: (
            (folder / MODEL / "modules.json").write_text(json.dumps(document)) and None
        )

    harmless = ("a type that is a number", "a pooling without a path")
    return [
        Case(f"modules.json: {n}", write(d), LOAD, ("modules.json",), harmless=n in harmless)
        for n, d in MODULES.items()
    ]


LENGTHS: dict[str, Any] = {
    "a negative number": -5,
    "a word": "x",
    "a digit in quotes": "64",
    "one": 1,
    "true": True,
    "NaN": float("nan"),
    "a list": [64],
}


def lengths() -> list[Case]:
    return [
        Case(f"{file}: {key} is {name}", _set(file, (key,), value), LOAD, (file, key))
        for file, key in (
            ("sentence_bert_config.json", "max_seq_length"),
            ("tokenizer_config.json", "model_max_length"),
        )
        for name, value in LENGTHS.items()
    ]


GENERATION: dict[str, tuple[str, Any]] = {
    "a top_p of seven": ("top_p", 7),
    "a temperature of -1": ("temperature", -1),
    "a temperature that is a word": ("temperature", "hot"),
    "an end that is a word": ("eos_token_id", "stop"),
    "an end of words": ("eos_token_id", ["a"]),
    "an end beyond": ("eos_token_id", 10**9),
    "a top_k of a half": ("top_k", 0.5),
    "a sampling that is a word": ("do_sample", "yes"),
    "a penalty of zero": ("repetition_penalty", 0),
}


def generation() -> list[Case]:
    return [
        Case(
            f"generation_config.json: {name}",
            _set("generation_config.json", (key,), value),
            LOAD,
            ("generation_config.json", key),
        )
        for name, (key, value) in GENERATION.items()
    ] + [
        Case(
            f"chat_template.jinja: {name}",
            _raw("chat_template.jinja", lambda b, text=text: text),
            LOAD,
            ("chat_template",),
        )
        for name, text in {
            "not Jinja": b"{% for m in messages %}{{",
            "an unknown tag": b"{% nonsense %}",
            "not UTF-8": b"\xff\xfe{{ messages }}",
            "a huge number": b"{{ 10**(10**8) }}",
            "a huge text": b"{{ 'a'*10**10 }}{{ 'x'|center(10**10) }}",
            "loops in loops": b"{% for a in range(99999) %}" * 3 + b"{% endfor %}" * 3,
            "a slow method": b"{{ ('ab'*10**7).rfind('b'*10**6+'a'+'b'*10**6) }}" * 1000,
            "a method that makes much": b"{{ ('a'*10**6).translate({97: 'b'*1000}) }}",
            "a macro without end": b"{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        }.items()
    ]


CODE = """\
import sys
from transformers import BertConfig, BertForSequenceClassification, BertModel

class MyConfig(BertConfig):
    model_type = "mine"

class MyModel(BertForSequenceClassification):
    config_class = MyConfig
    def __init__(self, config):
        super().__init__(config)
        {}

{}
"""


def remote_code() -> list[Case]:
    """A model's own code, trusted by the recipe, that ends the program."""

    def write(inner: str, outer: str) -> Callable[[Path], None]:
        def write_files(folder: Path) -> None:
            model = folder / MODEL
            (model / "mine.py").write_text(CODE.format(inner, outer))
            document = json.loads((model / "config.json").read_text())
            auto = {"AutoConfig": "mine.MyConfig"}
            auto["AutoModelForSequenceClassification"] = "mine.MyModel"
            document.update(model_type="mine", auto_map=auto)
            (model / "config.json").write_text(json.dumps(document))

        return write_files

    trusted = (*LOAD, "--set", "model.trust_remote_code=true")
    return [
        Case("remote code: exits when read", write("pass", "sys.exit(0)"), trusted, ("mine.py",)),
        Case("remote code: exits when built", write("sys.exit(0)", ""), trusted, ("mine.py",)),
        Case(
            "remote code: interrupts",
            write("pass", "raise KeyboardInterrupt"),
            trusted,
            ("mine.py", "KeyboardInterrupt"),
        ),
        Case(
            "remote code: a generator's end",
            write("raise GeneratorExit", ""),
            trusted,
            ("mine.py",),
        ),
        Case("remote code: not trusted", write("pass", "sys.exit(0)"), LOAD, ("config.json",)),
        Case("remote code: no Python", write("pass", "def ("), trusted, ("config.json",)),
    ]


def encoder(good: Path) -> list[Case]:
    return [
        *values(good, "rope_scaling", "num_labels", "problem_type", "tie_word_embeddings"),
        *config(),
        *files(good),
        *headers(),
        *tokenizers(),
        *modules(),
        *lengths(),
        *remote_code(),
    ]


def decoder(good: Path) -> list[Case]:
    return [
        *values(good, "sliding_window", "layer_types"),
        *files(good),
        *generation(),
    ]
