"""Embedding bundle that measures the similarity of questions, for the semantic cache."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from ...errors import InputError
from ..model import RequestLimits, ServedModel
from ..refusals import RequestError
from .false_hits import Vectors

if TYPE_CHECKING:
    from ...bundle.bundle import Bundle

FIELD = "embedding"
WAITING = 64  # maximum texts in the encoder's queue; beyond it the cache is skipped


class QuestionEncoder:
    """Embedding bundle of a server's semantic cache, in its own thread.

    Raises InputError for a bundle of another task.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._model = ServedModel(bundle, RequestLimits(1))
        fields = self._model.task.tensors(self._model.contract)
        if FIELD not in fields or self._model.contract.input_kind != "text":
            raise InputError(
                f"{self._model.name} does {self._model.task.name}",
                where="--semantic-encoder",
                accepted="a bundle that computes embeddings of texts",
            )
        self._thread = ThreadPoolExecutor(1, "encoder")
        self._waiting = 0

    async def vector(self, text: str) -> Vectors | None:
        """Embed a question for the semantic cache in the encoder's thread, as `embed`; None also
        while its queue is full."""
        if self._waiting >= WAITING:
            return None
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self.embed, text)
        finally:
            self._waiting -= 1

    def embed(self, text: str) -> Vectors | None:
        """Return, for the semantic cache, the normalized embedding of a question; None if it is too
        long or the model fails."""
        try:
            (row,) = self._model.encode([text], None)
        except RequestError:
            return None
        (answer,) = [None] if row.cut else self._model.run([row])
        if answer is None or isinstance(answer, Exception):
            return None
        vector = np.asarray(answer[FIELD], np.float64)
        length = float(np.linalg.norm(vector))
        return (vector / length).astype(np.float32) if length else None

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
