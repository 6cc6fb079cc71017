"""image-text-embedding: one vector of unit length per image or text, similar if they match.

The model encodes images, as the vision model of CLIP does. Its text model is a second bundle, of
task sentence-embedding, in folder `texts` of the bundle, and its contract is Contract.texts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import require
from ...inputs.batch import Array, Batch
from ..images import NOT_IN_BROWSER, image_feature_extraction
from ..task import Task
from .image_or_text import IMAGE_OR_TEXT
from .sentence_embedding import TASK as OF_TEXTS
from .sentence_embedding import convert, line, normalize

if TYPE_CHECKING:
    from ...contract import Contract


def decode(contract: Contract, hidden: Array, real: Array) -> Array:
    """Decode the embeddings (batch, width) of images from hidden (batch, positions, width)."""
    return normalize(image_feature_extraction.decode(contract, hidden, real))


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Return the task's answers, {"embedding": numbers} per image or text, in the contract's
    form."""
    del batch
    if contract.form is not None and contract.texts is not None:
        values = convert(contract.texts, values, *contract.form)
    return [{"embedding": row.tolist()} for row in values]


def tensors(contract: Contract) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {field of an embedding's answer: (dtype, shape per input)} for servers that send
    arrays."""
    (output,) = (o for o in contract.outputs if o.name == TASK.output)
    return {"embedding": ("float32", (int(output.axes[-1]),))}


def check_texts(contract: Contract, texts: Contract, where: str) -> None:
    """Raise BundleError if the vectors of texts cannot be compared with those of images.

    texts: contract of the text model
    where: its file, for messages
    """
    require(texts.task == OF_TEXTS.name, f"{where}: task", texts.task, OF_TEXTS.name)
    require(bool(texts.normalize), f"{where}: normalize", texts.normalize, "true")
    width, own = OF_TEXTS.tensors(texts)["embedding"][1], tensors(contract)["embedding"][1]
    require(width == own, f"{where}: width of vectors", width[0], f"{own[0]}, that of images")


TASK = Task(
    name="image-text-embedding",
    inputs=IMAGE_OR_TEXT,
    output="last_hidden_state",
    axes=("batch", "positions", "width"),
    metrics={
        "cosine": (),
        "recall_at_1": (("text_pair",),),
        "recall_at_5": (("text_pair",),),
    },
    decode=decode,
    answers=answers,
    line=line,
    tensors=tensors,
    sections=(*image_feature_extraction.TASK.sections, "normalize"),
    headless=True,
    reads_texts=True,
    pipeline_tag="image-feature-extraction",
    not_in_browser=NOT_IN_BROWSER,
)
