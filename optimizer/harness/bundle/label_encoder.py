"""Encode the sentences about labels of a request with a bundle's second model.

Folder `texts` of a bundle whose contract has `label_texts`: the contract of a sentence embedding,
its tokenizer, and its float ONNX file, which ONNX Runtime runs on the CPU for any engine of images.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from .. import tasks
from ..contract import read
from ..process.closing import Closing
from ..runtimes.ort.onnx_external import check_inside
from ..runtimes.ort.run import OrtRunner
from ..tasks import Array

FOLDER, CONTRACT, MODEL = "texts", "contract.json", "model.onnx"
REMEMBERED = 10_000  # maximum vectors that are kept
ROWS = 64  # maximum sentences of a run


class LabelEncoder(Closing):
    """Encoder of the sentences of labels, the bundle's second model, which is opened at the first
    sentence.

    bundle: folder of the bundle
    files: names of the files that its manifest lists
    threads: threads of a run; 0: one per processor

    Raises BundleError for a contract or a tokenizer that cannot be read, and the errors of
    OrtRunner.
    """

    def __init__(self, bundle: Path, files: Collection[str], threads: int) -> None:
        self.folder = bundle / FOLDER
        self.contract = read(self.folder / CONTRACT)
        task = tasks.check(self.contract, str(self.folder / CONTRACT))
        self.tokenizer = task.inputs.open(self.folder, self.contract)
        check_inside(self.folder / MODEL, bundle, set(files))
        self._threads = threads
        self._vectors: dict[str, Array] = {}

    @cached_property
    def _runner(self) -> OrtRunner:
        return OrtRunner(self.folder / MODEL, threads=self._threads)

    def problem(self, texts: Sequence[str]) -> str:
        """Return why a label's sentence would be read differently than by transformers' pipeline,
        or ""."""
        most = self.contract.text.max_length
        encoded = tasks.encode_each(self.contract, self.tokenizer, texts)
        for text, one in zip(texts, encoded, strict=True):
            if one.problem or one.cut:
                cut = f"the sentence of a label has more than {most} tokens"
                return f"{one.problem or cut}: {text[:60]!r}"
            both = zip(one.encoding.ids, one.encoding.special_tokens_mask, strict=True)
            if self._around.intersection(i for i, special in both if not special):
                return f"a label holds a special token of the model: {text[:60]!r}"
        return ""

    def vectors(self, texts: Sequence[str]) -> Array:
        """Return the vectors of labels' sentences, scaled to unit length, (texts, width)
        float32."""
        kept = self._vectors
        known = {text: kept[text] for text in texts if text in kept}
        missing = [text for text in dict.fromkeys(texts) if text not in known]
        for start in range(0, len(missing), ROWS):
            some = missing[start : start + ROWS]
            batch = tasks.encode(self.contract, self.tokenizer, some)
            values = tasks.decode(self.contract, self._runner.infer(batch), batch)
            known |= dict(zip(some, values, strict=True))
        added = {text: known[text] for text in missing}
        self._vectors = added if len(kept) + len(added) > REMEMBERED else kept | added
        return np.stack([known[text] for text in texts])

    @cached_property
    def _around(self) -> frozenset[int]:
        """Ids of the special tokens that the tokenizer puts around a label's text."""
        one = self.tokenizer.encode("a")
        both = zip(one.ids, one.special_tokens_mask, strict=True)
        return frozenset(number for number, special in both if special)

    def close(self) -> None:
        if "_runner" in self.__dict__:
            self._runner.close()
