"""Compare our reading of a sentence-transformers folder with `SentenceTransformer(folder).encode`,
and all weights of a sparse embedding with `SparseEncoder(folder).encode`.

compared   vectors of texts made of the tokenizer's own words, with the default prompt and with each
           named one, and of a text beyond max_length: the written checkpoint in torch, through the
           harness, beside the library in float32
limit      tolerance bound of the distance between two runs in float32: twice the distance of ours,
           alone and padded, from float64. Runs rounded at random lie far apart where a decision
           of the model flips, as DeBERTa's buckets of positions do, and would let every fault pass
caught     a module, a setting or a prompt that is read otherwise:
           tests/load/sentence/test_vector_comparison.py

Instead of a comparison where the library is not run (library.py), each key that is not read and not
at its default is refused by name (keys.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.progress import say
from optimizer.foundation.reading import quote_error
from optimizer.foundation.rounding.tolerance import UNIT, lengths, upper_bound
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.load import source
from optimizer.load.preparation import Described
from optimizer.load.sentence import folder, library
from optimizer.load.sentence.folder import FolderSettings
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.recipe.schema import Model

IMPORTS = 270_000_000  # bytes resident after importing the library beside transformers; measured
TEXTS, PROMPTED = 32, 2  # texts compared; run per named prompt
PROMPTS = 8  # maximum named prompts

Vectors = NDArray[np.float32]
Question = tuple[str | None, list[str]]
"""(name of a prompt, None for the default one; texts)."""


def compare(d: Described, out: Path) -> None:
    """Check at load our reading of a sentence-transformers folder: raise CheckpointError where it
    answers a text otherwise than the library, or where it cannot be compared and a key is not read.

    out: folder that load wrote
    """
    if "embedding" not in d.task.optional or not (
        d.task.weighs or folder.is_sentence_folder(d.root)
    ):
        return
    reading = folder.read(d.root, d.section, int(d.config.hidden_size))
    why = library.explain_not_run(d)
    if why:
        _refuse_unread(d, reading, why)
        return
    contract = contracts.read(out / "contract.json")
    if not d.task.weighs:  # the recipe may change these two; the folder's own are compared
        contract = replace(contract, pooling=reading.pooling, normalize=reading.normalize)
        if reading.pooling is None:
            return  # the library cannot run it, and the recipe gives the pooling
    encoder = d.task.inputs.open(out / "checkpoint", contract)
    questions = _questions(d.section, contract, encoder, library.limit_texts(TEXTS, d))
    ours, limit = _ours(contract, encoder, out, questions)
    try:
        theirs = _theirs(d, questions)
    except Exception as e:  # whatever the library or the model's code raises
        _refuse_unread(d, reading, f"the library does not answer ({quote_error(e)[:200]})")
        return
    worst = 0.0
    for (prompt, texts), mine, other in zip(questions, ours, theirs, strict=True):
        apart = lengths(list(zip(mine, other, strict=True)))
        at = int(np.argmax(apart))
        worst = max(worst, apart[at])
        if not apart[at] <= limit:
            _refuse(d, reading, prompt, texts[at], mine[at], other[at], limit)
    count = sum(len(texts) for _, texts in questions)
    say(
        f"load: {count} texts have the vectors of sentence-transformers' encode (apart by at most "
        f"{worst:.2g} of their length; rounding alone may do {limit:.2g})"
    )


def is_compared(section: Model) -> bool:
    """Return True where load compares a model of this section with sentence-transformers, as far as
    is known before it is fetched."""
    if "embedding" not in tasks.find_task(section.task).optional or section.gguf_file is not None:
        return False
    if not source.is_local(section.source, section.base):
        return library.is_installed()
    weighs = tasks.find_task(section.task).weighs
    folder_of_library = weighs or folder.is_sentence_folder(source.resolve(section).folder)
    return folder_of_library and library.is_installed()


def _refuse_unread(d: Described, reading: FolderSettings, why: str) -> None:
    if reading.unread:
        raise CheckpointError(
            f"{len(reading.unread)} settings are not read here: {'; '.join(reading.unread[:3])}",
            where=str(d.root),
            accepted="the library's defaults",
            fix=f"Remove what does not change the vectors. ({why[:1].upper()}{why[1:]}.)",
        )
    say(f"load: {why}; all settings of the folder are read")


def _questions(section: Model, contract: Contract, encoder: Any, count: int) -> list[Question]:
    """Make the texts of load's comparison with sentence-transformers, `count` and a long one.
    encoder: the harness's tokenizer"""
    own = library.draw_words(encoder, 50 * TEXTS)
    texts = []
    for i in range(count):
        some = [own[(7 * i + j) % len(own)] for j in range(1 + i % 12)]
        texts.append(" ".join(some if i % 4 else [word.title() for word in some]))
    longest = contract.text.max_length
    if section.max_length is None and longest <= library.LONGEST:
        texts.append(" ".join(own[i % len(own)] for i in range(longest + 8)))
    short = longest // 2  # a text that is cut is compared once
    kept = [t for t in texts[:-1] if len(encoder.encode(t).ids) <= short] + texts[-1:]
    prompts = [n for n, text in contract.vectors.prompts.items() if text]
    return [(None, kept), *((name, kept[:PROMPTED]) for name in prompts[:PROMPTS])]


def _ours(
    contract: Contract, encoder: Any, out: Path, questions: Sequence[Question]
) -> tuple[list[Vectors], float]:
    """Compute for load's comparison with sentence-transformers the harness's vectors of each
    question, and the limit of their distance to the library's."""
    model = load_torch_model(open_checkpoint(out), contract.task)
    ours = [
        np.concatenate(
            [_vectors(contract.with_prompt(name), encoder, model, [text]) for text in texts]
        )
        for name, texts in questions
    ]
    name, texts = questions[0]
    chosen = contract.with_prompt(name)
    # padded together, as the library runs them; the last is long
    together = _vectors(chosen, encoder, model, texts[:-1]) if len(texts) > 1 else ours[0][:0]
    exact = model.double()
    errors = []
    for i, text in enumerate(texts):
        (reference,) = _vectors(chosen, encoder, exact, [text])
        runs = [ours[0][i], *together[i : i + 1]]
        errors += [2 * length for length in lengths([(run, reference) for run in runs])]
    looks = sum(len(texts) for _, texts in questions)
    return ours, upper_bound(errors, len(errors), looks, UNIT["fp32"])


def _vectors(contract: Contract, encoder: Any, model: nn.Module, texts: Sequence[str]) -> Vectors:
    """Compute for load's comparison the harness's vectors of texts, of one batch through the torch
    model."""
    batch = tasks.encode(contract, encoder, texts)
    arrays = {name: torch.from_numpy(array) for name, array in batch.items()}
    with torch.no_grad():
        output = model(**arrays)
    name = tasks.look_up(contract).output
    return np.asarray(tasks.decode(contract, {name: getattr(output, name).numpy()}, batch))


def _theirs(d: Described, questions: Sequence[Question]) -> list[Vectors]:
    """Compute for load's comparison sentence-transformers' vectors of each question, in float32."""
    with quiet():
        import sentence_transformers

        model: Any = getattr(sentence_transformers, _library_class(d))(
            str(d.root),
            device="cpu",
            local_files_only=True,
            trust_remote_code=d.section.trust_remote_code,
        ).float()

        rows = library.choose_batch_size(model.tokenizer)

        options: dict[str, Any] = {"batch_size": rows, "show_progress_bar": False}
        if d.task.weighs:
            model.max_active_dims = None  # all weights are compared
            options["convert_to_sparse_tensor"] = False

        def encode(texts: list[str], name: str | None) -> Vectors:
            vectors = model.encode(texts, prompt_name=name, **options)
            return np.stack([np.asarray(vector) for vector in vectors])

        # the last text is long, and the library would pad all others of its batch to it
        return [
            np.concatenate([encode(part, n) for part in (texts[:-1], texts[-1:]) if part])
            for n, texts in questions
        ]


def _refuse(
    d: Described,
    reading: FolderSettings,
    prompt: str | None,
    text: str,
    mine: Vectors,
    other: Vectors,
    limit: float,
) -> None:
    """Raise CheckpointError at load for a text whose vector by the harness differs from
    sentence-transformers'."""
    if mine.shape != other.shape:
        how = f"our reading gives {mine.size} numbers, and encode {other.size}"
    else:
        norms = float(np.linalg.norm(mine)), float(np.linalg.norm(other))
        cosine = float(mine @ other) / max(norms[0] * norms[1], 1e-30)
        how = f"cosine {cosine:.4f}; lengths {norms[0]:.4g} and {norms[1]:.4g}"
    under = "" if prompt is None else f" with prompt {prompt!r}"
    unread = "".join(f"; {sentence} and is not read" for sentence in reading.unread[:3])
    raise CheckpointError(
        f"text {text[:40]!r}{under} gets another vector than from {_library_class(d)}.encode "
        f"({how}; more than {limit:.2g} of the length, which rounding may do){unread}",
        where=str(d.root),
        accepted="a folder that is read as sentence-transformers reads it",
        fix="Save the model with plain settings, or pool yourself: task: feature-extraction.",
    )


def _library_class(d: Described) -> str:
    """Name of the class of sentence-transformers that opens the checkpoint's folder."""
    return "SparseEncoder" if d.task.weighs else "SentenceTransformer"
