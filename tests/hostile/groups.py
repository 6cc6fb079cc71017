"""The groups of cases, and the good folders that they are changed from."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.hostile import oddities
from tests.hostile.case import Case, Worker, described, run
from tests.hostile.written import checkpoints, data, gguf_files, recipes


def encoder_folder(folder: Path) -> Path:
    """recipe.yaml, its data and model/: a classifier."""
    from tests.conftest import write_tiny_bert, write_tiny_recipe

    write_tiny_recipe(folder, Path("model"), "text-classification")
    write_tiny_bert(folder / "model", labels=("negative", "positive"))
    return folder


def decoder_folder(folder: Path) -> Path:
    """As encoder_folder: a causal language model."""
    from tests.conftest import write_tiny_recipe
    from tests.decoders import write_tiny_decoder

    write_tiny_recipe(folder, Path("model"), "text-generation")
    recipe = folder / "recipe.yaml"
    perplexity = "metric: perplexity\n  sequence_length: 16"
    recipe.write_text(recipe.read_text().replace("metric: cosine", perplexity))
    write_tiny_decoder(folder / "model")
    return folder


TIMED = "    data: {source: json, files: [time.jsonl]}\n"


def untimed(good: Path) -> Path:
    """A copy whose recipe times no texts: in cases of the model's files, a command reads the other
    data alone, which takes it a fifth less."""
    folder = good.with_name(f"{good.name}-untimed")
    if not folder.exists():
        shutil.copytree(good, folder)
        recipe = folder / "recipe.yaml"
        assert TIMED in recipe.read_text()
        recipe.write_text(recipe.read_text().replace(TIMED, ""))
    return folder


def groups(encoder: Path, decoder: Path) -> dict[str, tuple[Path, list[Case]]]:
    return {
        "recipes": (encoder, recipes.cases(encoder)),
        "encoders": (untimed(encoder), checkpoints.encoder(encoder)),
        "decoders": (untimed(decoder), checkpoints.decoder(decoder)),
        "data": (encoder, data.cases()),
        "oddities": (untimed(encoder), oddities.cases(encoder)),
        "gguf": (untimed(decoder), gguf_files.cases()),
    }


def main() -> None:
    """python -m tests.hostile.groups EVERY [WORD ...]: each EVERY-th case with the words."""
    every, words = int(sys.argv[1]), sys.argv[2:]
    worker = Worker()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        folders = encoder_folder(scratch / "encoder"), decoder_folder(scratch / "decoder")
        for name, (good, cases) in groups(*folders).items():
            chosen = [c for c in cases if all(w in c.name for w in words)][::every]
            started = time.monotonic()
            failures = run(worker, chosen, good, scratch)
            seconds = time.monotonic() - started
            print(f"{name}: {len(failures)} of {len(chosen)} ({seconds:.0f} s)", flush=True)
            print(described(failures), flush=True)
    worker.close()


if __name__ == "__main__":
    main()
