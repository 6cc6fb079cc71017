"""A server that asks itself once: what make demo-serve shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.generate import Options
from optimizer.harness.shown import escape_lines


def asked(bundle: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
    command = [sys.executable, "-B", "-m", "harness", "serve", "--port", "0", "--ask", text]
    return subprocess.run(
        [*command, *arguments], cwd=bundle, env=environment, capture_output=True, text=True
    )


def test_an_answer_is_streamed_and_metrics_shown(decoder_bundle: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    done = asked(decoder_bundle, "hi", "--token-file", str(token))
    assert done.returncode == 0, done.stderr
    with Bundle(decoder_bundle) as bundle:
        conversation = [{"role": "user", "content": "hi"}]
        expected = bundle.generate([conversation], Options(max_new_tokens=96))[0]
    text, _, metrics = done.stdout.partition("\n\nnv_inference_count")
    assert text == escape_lines(expected.text)
    assert "generation_tokens_total" in metrics
    assert json.loads(done.stderr.splitlines()[-1])["event"] == "ended"


def test_a_model_of_embeddings_answers_too(made: Path) -> None:
    done = asked(made, "good")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[0])["embedding"]) == 32
