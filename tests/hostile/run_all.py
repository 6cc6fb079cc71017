"""Every case, or those whose name contains a word: python -m tests.hostile.run_all EVERY [WORD ...]."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.hostile import checkpoints, data, gguf_files, recipes
from tests.hostile.case import Case, Worker, described, run


def folders(scratch: Path) -> tuple[Path, Path]:
    """A good encoder's and a good decoder's: recipe.yaml, data, model/."""
    from tests.conftest import write_tiny_bert, write_tiny_recipe
    from tests.decoders import write_tiny_decoder

    encoder, decoder = scratch / "encoder", scratch / "decoder"
    write_tiny_recipe(encoder, Path("model"), "text-classification")
    write_tiny_bert(encoder / "model", labels=("negative", "positive"))
    write_tiny_recipe(decoder, Path("model"), "text-generation")
    recipe = (decoder / "recipe.yaml").read_text()
    recipe = recipe.replace("metric: cosine", "metric: perplexity\n  sequence_length: 16")
    (decoder / "recipe.yaml").write_text(recipe)
    write_tiny_decoder(decoder / "model")
    return encoder, decoder


def groups(encoder: Path, decoder: Path) -> list[tuple[Path, list[Case]]]:
    return [
        (encoder, recipes.cases(encoder)),
        (encoder, checkpoints.encoder(encoder)),
        (decoder, checkpoints.decoder(decoder)),
        (encoder, data.cases()),
        (decoder, gguf_files.cases()),
    ]


def main() -> None:
    every = int(sys.argv[1])
    words = sys.argv[2:]
    worker = Worker()
    with tempfile.TemporaryDirectory() as scratch:
        for good, cases in groups(*folders(Path(scratch))):
            chosen = [c for c in cases if all(w in c.name for w in words)][::every]
            started = time.monotonic()
            failures = run(worker, chosen, good, Path(scratch))
            print(
                f"{len(failures)} of {len(chosen)} ({time.monotonic() - started:.0f} s)", flush=True
            )
            print(described(failures), flush=True)
    worker.close()


if __name__ == "__main__":
    main()
